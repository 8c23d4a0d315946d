"""Checkpoint step: pretrained weights (hub, folder or S3) as the checkpoint that training starts from.

Skipped without init.from: the run starts from scratch, or from a checkpoint of its own or of its parent. The weights are split
for the profile's topology, so each rank reads its own file; any other topology can start from them too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modeling.conversion import formats
from modeling.conversion.weights import NOT_IN_WEIGHTS, STRUCTURE, differences
from modeling.models.build import partition_layers
from parallel.checkpoint import locations
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.huggingface.config import GENERATION_CONFIG, to_config_json
from profiles.schema import Profile
from profiles.sections.base import required
from profiles.sections.model import Model
from tasks import keys
from tasks.reporting.format import format_bytes
from tasks.sources import weights
from tasks.sources.digest_cache import DigestCache
from tasks.sources.shard import SourceChanged
from tasks.step import Context, Step
from tasks.store.artifacts import Artifact

GENERATION = "generation_config"  # key of the artifact's summary
log = logging.getLogger(__name__)


class CheckpointStep(Step):
    """Converts the weights at init.from, resumably.

    The artifact's summary: source, tensors, bytes, generation_config (contents of that file beside the weights, or None).
    """

    kind = "checkpoint"
    name = "checkpoint"

    def title(self, profile: Profile) -> str:
        return f"checkpoint from {profile.init.from_}"

    def skip_reason(self, profile: Profile) -> str | None:
        return "init.from is null" if profile.init.from_ is None else None

    def key(self, context: Context) -> str:
        """From the model and weights (contents or hub commit). Raises ProfileError if init.from has none."""
        return keys.checkpoint(context.profile, required(context.inputs.weights)["digest"])

    def make(self, context: Context, key: str) -> Artifact:
        """Fetch and convert the weights.

        Raises:
            ProfileError: they do not fit the profile's model.
            SourceChanged: they have changed since they were resolved.
        """
        from modeling.conversion.convert import Options, convert
        from modeling.conversion.journal import RECORD

        profile, store = context.profile, context.store
        init, scratch = profile.init, f"{self.kind}-{key}"
        name, pinned = required(init.from_), required(context.inputs.weights)
        work = store.scratch_folder(scratch)
        config, converted = work / "config.json", work / "checkpoint"
        config.write_text(json.dumps(to_config_json(profile.model)))
        cuts = tuple(layers.start for layers in partition_layers(profile)[1:])
        options = Options(
            "trainshed", config, profile.parallel.tensor, cuts=cuts or None, nxd_layout=init.nxd_layout
        )
        digests, revision = DigestCache(store.local_cache), pinned["commit"] or init.revision
        with weights.fetch(name, revision, work / "source", context.token, "init.from") as source:
            found = weights.pin(name, revision, context.token, "init.from", digests)
            if found["digest"] != pinned["digest"]:
                raise SourceChanged(name, pinned=True)
            try:
                _compare_settings(formats.locate(source), profile.model)
                record = convert(source, converted, options, name=name, replace=True)
            except ProfileError as error:  # about an option of `trainshed convert`
                if error.key == "--nxd-layout":
                    raise ProfileError("init.nxd_layout", error.value, error.reason, error.choices) from error
                reason = error.reason if error.key == "SOURCE" else str(error)
                raise ProfileError("init.from", name, reason) from error
            except ValueError as error:
                raise ProfileError("init.from", name, str(error)) from error
            generation = _generation_config(formats.locate(source), name)
        summary = {"source": name, "tensors": record["tensors"], "bytes": record["bytes"]}
        summary[GENERATION] = generation
        with store.artifacts.publish(self.id(key), summary) as staging:
            for path in converted.iterdir():
                if path.name != RECORD:
                    path.rename(staging / path.name)
        store.remove_scratch_folder(scratch)
        return store.artifacts.expect(self.id(key))

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"{format_bytes(summary['bytes'])} of weights, from {summary['source']}"


def _generation_config(source: Path, name: str) -> dict[str, Any] | None:
    """Contents of the weights' generation_config.json, which training leaves alone.

    None if there is none.
    """
    path = (source if state_files.is_dir(source) else source.parent) / GENERATION_CONFIG
    if not state_files.is_file(path):
        return None
    try:
        found = json.loads(state_files.contents(path))
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise ProfileError("init.from", name, f"{GENERATION_CONFIG} cannot be read: {error}") from error
    return found


def _compare_settings(source: Path, model: Model) -> None:
    """Compare the profile's model with the description next to the weights, if they have one.

    Raises ValueError for differences in STRUCTURE; those in NOT_IN_WEIGHTS are warnings.
    """
    from modeling.conversion import native

    if state_files.is_file(source / locations.MARKER):
        (theirs, _), file = native.describe(source), locations.MARKER
    elif state_files.is_file(source / "config.json"):
        theirs, file = formats.read_config(source), "config.json"
    else:
        return

    compared = model, theirs, "here", f"in the weights' {file}"
    if rejected := differences(STRUCTURE, *compared):
        raise ValueError(
            f"holds weights of another model: {'; '.join(rejected)}; set the values of the weights"
        )
    for difference in (changed := differences(NOT_IN_WEIGHTS, *compared)):
        log.warning("%s", difference)
    longest = theirs.max_position_embeddings
    if model.max_position_embeddings > longest and not any("rope" in difference for difference in changed):
        reason = f"is above {longest} in the weights' {file}, with the same RoPE; set model.rope_scaling or model.rope_theta"
        log.warning("model.max_position_embeddings = %d: %s", model.max_position_embeddings, reason)
