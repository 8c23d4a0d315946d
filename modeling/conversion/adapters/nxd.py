"""LoRA adapters in NxD shards: each updated layer's factors, split over tensor ranks like the layer.

    model.layers.0.self_attn.qkv_proj.lora_A.weight               (r, i), the same on every rank
    model.layers.0.self_attn.qkv_proj.lora_B.weight_q, _k, _v     rows split like the updated weights, K and V repeated likewise
    model.layers.0.mlp.gate_up_proj.lora_B.weight                 the rank's [gate; up]
    model.layers.0.mlp.down_proj.lora_A.weight                    (r, i/t), columns split like the weight; lora_B is (o, r)
    lora_config                                                   rank and alpha; or in adapter_config.json beside the shards

With `save_lora_base`, the shards also contain the frozen weights, as `<layer>.base_layer.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.conversion import torch_files
from modeling.conversion.adapters.adapters import Adapters, Factors
from modeling.conversion.adapters.peft import (
    CONFIG,
    read_configuration,
    require_known,
    required,
    scale_of,
)
from modeling.conversion.choices import NXD_LAYOUTS, NxDLayout
from modeling.conversion.nxd.layout import Split, TensorSplit
from modeling.conversion.torch_files import LazyTensor
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.sections.model import Model

FACTOR = re.compile(r"(.+)\.lora_([AB])\.(weight\w*)")
PLAIN = {"bias": "none", "lora_bias": "none"}  # the only supported values
# Keys that are read, and keys that change neither the tensors nor what they mean.
KNOWN = (
    *("lora_rank", "lora_alpha", "use_rslora", "lora_dropout", "modules_to_save", "save_lora_base"),
    *("target_modules", "init_lora_weights", "merge_lora", "merge_sharded_lora", "save_lora_config_adapter"),
    *("lora_verbose", "load_lora_from_ckpt", "lora_load_tag", "lora_save_dir"),
)
BY_HEADS = (Split.Q_HEADS, Split.KV_HEADS, Split.Q_COLUMNS)
Ranks = tuple[int, int]  # (tensor rank, pipeline rank)


class NxDAdapters(Adapters):
    """The adapters in the shards of a folder.

    Args:
        files: the shards by (tensor rank, pipeline rank).
        layout: layout of the shards; None if not specified, which is rejected if it matters.

    Raises:
        ProfileError: the layout is required.
        ValueError: there are no adapters, other weights were trained too, or the configuration is missing.
    """

    def __init__(
        self, folder: Path, files: Mapping[Ranks, Path], model: Model, layout: NxDLayout | None
    ) -> None:
        configuration, file = _configuration(folder, next(iter(files.values())))
        self.model, self.rank = model, int(required(configuration, "lora_rank", file))
        self.dropout = float(configuration.get("lora_dropout", 0.0))
        self._scale = scale_of(configuration, self.rank, file)
        require_known(configuration, PLAIN, KNOWN, file)
        if modules := configuration.get("modules_to_save"):
            raise ValueError(
                f"{folder}: fully trained modules (modules_to_save: {modules}) are not supported, because only the "
                "adapters are read; save merged weights in NxD (save_lora_base and merge_lora), and convert those"
            )
        tensor = 1 + max(t for t, _ in files)
        self._shards = {ranks: _factors(path) for ranks, path in files.items()}
        if not any(self._shards.values()):
            raise ValueError(f"{folder}: the shards hold no LoRA adapters")
        self._split = TensorSplit(model, tensor, layout or "trn1")
        if layout is None and tensor > model.num_key_value_heads and self._has_heads():
            reason = f"is missing: {tensor // model.num_key_value_heads} ranks share each KV head, and the files do not show"
            raise ProfileError("--nxd-layout", None, f"{reason} which layout they are in", list(NXD_LAYOUTS))

    def _has_heads(self) -> bool:
        """Whether the adapters update weights whose order depends on the layout."""
        keys = {
            f"{module}.{name}"
            for shard in self._shards.values()
            for module, factors in shard.items()
            for name in factors["B"]
        }
        return any(section.split in BY_HEADS for key in keys for section in self._split.sections(key))

    def __iter__(self) -> Iterator[Factors]:
        stages = sorted({stage for _, stage in self._shards})
        for stage in stages:
            ranks = [self._shards[t, stage] for t in range(self._split.tensor)]
            for module, factors in ranks[0].items():
                for name in sorted(factors["B"]):
                    yield from self._assemble(module, name, ranks)

    def _assemble(self, module: str, name: str, ranks: Sequence[Mapping[str, Any]]) -> Iterator[Factors]:
        """The updates of the weights in one tensor of a layer, from the factors of all tensor ranks."""
        key = f"{module}.{name}"
        sections, (local, _) = self._split.sections(key), self._split.boxes(key, 0)
        columns = sections[0].split.dim == 1
        a = [_open(rank, module, "A", "weight") for rank in ranks]
        b = [_open(rank, module, "B", name) for rank in ranks]
        rows = self._split.shape(sections[0].weight)[0] if columns else local[0]
        for factor, found, wanted in (
            ("lora_A", a, (self.rank, local[1])),
            ("lora_B", b, (rows, self.rank)),
        ):
            if any(tuple(tensor.shape) != wanted for tensor in found):
                raise ValueError(f"{key}: {factor} has shape {tuple(found[0].shape)}, expected {wanted}")
        same, which = (b, "lora_B") if columns else (a, "lora_A")
        if any(not torch.equal(same[0], tensor) for tensor in same[1:]):
            raise ValueError(
                f"{key}: {which} should be the same on all tensor ranks, but differs: the ranks did not sum its gradient, so "
                "no merged weight equals what was trained"
            )
        for number, section in enumerate(sections):
            shape = self._split.shape(section.weight)
            full_a = torch.empty(self.rank, shape[1]) if columns else a[0]
            full_b = b[0] if columns else torch.empty(shape[0], self.rank)
            for t in range(len(ranks)):
                box = self._split.boxes(key, t)[1][number]
                if columns:
                    full_a[:, box.offsets[1] : box.offsets[1] + box.sizes[1]] = a[t]
                else:
                    row = box.local_offsets[0]
                    full_b[box.offsets[0] : box.offsets[0] + box.sizes[0]] = b[t][row : row + box.sizes[0]]
            yield Factors(section.weight, full_a, full_b, self._scale)


def _factors(path: Path) -> dict[str, dict[str, dict[str, LazyTensor]]]:
    """The factors in a file by layer, letter (A or B), and name of the updated weight."""
    found: dict[str, dict[str, dict[str, LazyTensor]]] = {}
    for key, tensor in torch_files.read(path).items():
        if match := FACTOR.fullmatch(key):
            found.setdefault(match[1], {"A": {}, "B": {}})[match[2]][match[3]] = tensor
    return found


def _open(rank: Mapping[str, Any], module: str, letter: str, name: str) -> Tensor:
    try:
        return rank[module][letter][name].open().float()
    except KeyError:
        raise ValueError(f"{module}.lora_{letter}.{name} is missing in a rank's file") from None


def _configuration(folder: Path, file: Path) -> tuple[Mapping[str, Any], Path]:
    """NxD's LoraConfig and its file: the shard, or adapter_config.json in or above the folder."""
    stored = torch_files.read_value(file, "lora_config")
    if isinstance(stored, Mapping):
        return stored, file
    for parent in (folder, *file.parents[:3]):
        if state_files.is_file(path := parent / CONFIG):
            return read_configuration(path), path
    raise ValueError(
        f"{folder}: no lora_config in the shards and no {CONFIG} beside them; rank and alpha are unknown"
    )
