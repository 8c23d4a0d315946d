"""Import a config: run the translations in order and assemble the profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiles.files import yaml_text
from profiles.nxdt import architecture, data, objective, rules, vocabulary
from profiles.nxdt.config import read
from profiles.nxdt.translation import Effect, Line, Translation

# NxD Training's defaults that differ from Trainshed's.
DEFAULTS = {
    "train.clip": None,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.01,
    "train.schedule": "constant",
    "parallel.sequence_parallel": False,
    "checkpoint.resume": "newest",
}
ORDER = (
    *("description", "model", "tokenizer", "data", "init", "objective", "lora"),
    *("parallel", "train", "checkpoint", "evaluate", "cluster"),
)


@dataclass(frozen=True)
class Imported:
    """A profile's values by section, and a line for each key of the config."""

    values: dict[str, Any]
    lines: tuple[Line, ...]

    def of(self, effect: Effect) -> list[Line]:
        """The lines with an effect."""
        return [line for line in self.lines if line.effect is effect]

    def with_values(self, changes: Mapping[str, Any]) -> Imported:
        """A copy with other values of some keys; None: the default."""
        values = {
            name: dict(value) if isinstance(value, dict) else value for name, value in self.values.items()
        }
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if value is None:
                values.get(section, {}).pop(name, None)
            else:
                values.setdefault(section, {})[name] = value
        return replace(self, values=values)

    def text(self) -> str:
        """The profile as YAML; differences and things to do are comments at the top."""
        noted = [*self.of(Effect.DIFFERS), *self.of(Effect.TO_DO)]
        comments = [f"# {line.effect}: {line.subject}: {line.note}\n" for line in noted]
        return "".join([*comments, yaml_text.write(self.values)])


def import_config(path: Path, config: Path | None = None) -> Imported:
    """Translate a config to a profile, which has the name of the file that it is written to.

    Args:
        path: the config.
        config: config.json of the model, instead of the one that the config names.

    Raises:
        ProfileError: the file is invalid, or some keys change the mathematics and have no equivalent, or a reference that
            cannot be resolved.
    """
    translation = Translation(read(path), path.parent)
    model = architecture.translate(translation, config)
    vocabulary.translate(translation, config, model)
    objective.translate(translation)
    kind = objective.kind(translation)
    data.translate(translation, kind)
    rules.apply(translation)
    _cluster(translation)
    translation.report_unresolved()
    order = {key: number for number, key in enumerate(translation.theirs)}
    lines = tuple(sorted(translation.lines.values(), key=lambda line: order.get(line.key, len(order))))
    errors = [line.error for line in lines if line.effect is Effect.ERROR]
    if errors:
        raise errors[0].along_with(errors[1:])
    description = f"Imported from NxD Training's {path.name}"
    if model is not None:
        description += f", with the dimensions of {model.name}"
    if translation.ours.get("init.from") and translation.integer("distributed_strategy.kv_replicator", 1) > 1:
        translation.ours["init.nxd_layout"] = translation.ours["cluster.accelerator"]
    ours = {"description": description, **DEFAULTS, **translation.ours}
    return Imported(_sections(ours), lines)


def _cluster(translation: Translation) -> None:
    """Launcher and accelerator.

    A trn1 node has 32 devices; a trn2 node has 128 cores, by default as 64 logical ones (LNC 2).
    """
    nodes, devices = translation.integer("trainer.num_nodes", 1), translation.integer("trainer.devices", 1)
    lnc = translation.get("trainer.lnc", translation.get("trainer.vnc"))
    accelerator = "trn2" if lnc == 2 or devices >= 64 else "trn1"
    if devices == 128:
        note = "one device per physical core (LNC 1); Trainshed plans 64 logical cores of two: see --hardware trn2"
        translation.translate("trainer.devices", {"cluster.devices_per_node": devices}, note, Effect.TO_DO)
    launcher = "slurm" if nodes > 1 else "local"
    translation.ours |= {
        "cluster.launcher": launcher,
        "cluster.device": "neuron",
        "cluster.accelerator": accelerator,
    }


def _sections(ours: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {name: {} for name in ORDER}
    for key, value in ours.items():
        section, dot, name = key.partition(".")
        if dot:
            result[section][name] = value
        else:
            result[section] = value
    return {name: value for name, value in result.items() if value != {}}
