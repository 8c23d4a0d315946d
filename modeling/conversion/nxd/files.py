"""Read and write NxD checkpoints: find a model's shards in any form, validate, read and write them.

    <folder>/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt    of the converter, and of a training run in <folder>/<tag>/
    <folder>/tp_rank_TT_pp_rank_PP[/checkpoint.pt]        an older form
    <folder>/model/dp_rank_00_ep_rank_EE_tp_rank_...      with expert-parallel ranks (experts.py)
    <file>.tensors/tensor_N.pt                            tensors of the "xser" form (torch_files.py)

Degrees are read from the file names, the KV multiplier from the tensors' shapes, and a file's layers from its keys. Shards in
which NxD silently dropped weights are rejected.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import skip_data

from modeling.conversion import torch_files
from modeling.conversion.choices import NEWEST, NXD_LAYOUTS, NxDLayout, QKVForm, read_newest
from modeling.conversion.huggingface import BUFFERS
from modeling.conversion.nxd import experts
from modeling.conversion.nxd.layout import TensorSplit, stage_keys, stage_layers, stored_name
from modeling.conversion.tensor_files import PreallocatedFile, TensorEntry
from modeling.conversion.torch_files import LazyTensor
from modeling.conversion.weights import Part, Weights
from parallel.layout import Box
from parallel.torch_internals import FakeTensorMode
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.sections.families import NXD_SHARDS
from profiles.sections.model import Model

RANK = re.compile(r"(?:dp_rank_(\d+)_)?(?:ep_rank_(\d+)_)?tp_rank_(\d+)_pp_rank_(\d+)(?:\.pt)?")
ADAPTER = ".lora_"  # in the names of LoRA's factors (lora.py)
PADDING = 128  # vocabularies are padded to a multiple of at most this times the tensor degree
log = logging.getLogger(__name__)

Ranks = tuple[int, int]  # (tensor rank, pipeline rank)
Tensors = Mapping[str, LazyTensor]  # the tensors of one file, by NxD's names


def find_shards(source: Path) -> dict[Ranks, Path]:
    """The model's files in a folder, by (tensor rank, pipeline rank); empty if there are none.

    Raises:
        ValueError: files of some ranks are missing, or that with the name of the newest checkpoint is corrupted.
    """
    folders = [source, source / "model"]
    file = source / NEWEST
    if state_files.is_file(file):
        tag = read_newest(state_files.contents(file), str(file))
        if Path(tag).name == tag:
            folders.append(source / tag / "model")
    for folder in folders:
        shards = _shards_in(folder)
        if shards:
            return shards
    return {}


def _shards_in(folder: Path) -> dict[Ranks, Path]:
    shards: dict[Ranks, Path] = {}
    for path in sorted(folder.iterdir()) if state_files.is_dir(folder) else ():
        match = RANK.fullmatch(path.name)
        # All data-parallel ranks hold the same model; expert-parallel ranks after the first hold only experts.
        if not match or int(match[1] or 0) or int(match[2] or 0):
            continue
        file = path / "checkpoint.pt" if state_files.is_dir(path) else path
        if state_files.is_file(file):
            shards[int(match[3]), int(match[4])] = file
    if shards:
        tensor, pipeline = (1 + max(ranks) for ranks in zip(*shards, strict=True))
        missing = [(t, p) for t in range(tensor) for p in range(pipeline) if (t, p) not in shards]
        if missing:
            t, p = missing[0]
            raise ValueError(
                f"{folder}: {len(missing)} of the {tensor} x {pipeline} ranks' files are missing, among them that of "
                f"tensor rank {t}, pipeline rank {p}"
            )
    return shards


def read(
    files: Mapping[Ranks, Path], model: Model, layout: NxDLayout | None, adapters: bool = False
) -> Weights:
    """The weights in these files.

    Args:
        adapters: read the weights of shards with LoRA adapters, which are otherwise rejected because the weights alone are not
            the model.
        layout: layout of the shards; None if not specified, which is rejected if it matters.

    Raises:
        ProfileError: the layout is required.
        ValueError: a file is rejected or corrupted, tensors belong to another model, or NxD lost some of them.
    """
    if model.architecture not in NXD_SHARDS:
        reason = "NxD shards of this architecture are not supported"
        raise ProfileError("--config", model.architecture, reason, list(NXD_SHARDS))
    tensor = 1 + max(t for t, _ in files)
    shards = {ranks: _tensors(path) for ranks, path in files.items()}
    if not adapters and any(ADAPTER in key for tensors in shards.values() for key in tensors):
        reason = "the shards hold LoRA adapters; name them with --adapters too, to merge them, or write them with --to peft"
        raise ValueError(f"{next(iter(files.values())).parent}: {reason}")
    parts: dict[str, list[Part]] = {}
    dense: dict[Ranks, Tensors] = {}
    for ranks, tensors in shards.items():
        weights = {
            key.replace(".base_layer.", "."): value for key, value in tensors.items() if ADAPTER not in key
        }
        for name, part in _expert_parts(files[ranks], weights, model, ranks[0], tensor):
            parts.setdefault(name, []).append(part)
        dense[ranks] = {key: value for key, value in weights.items() if not experts.EXPERTS.fullmatch(key)}
    split = _detect_split(dense.values(), model, tensor, layout)
    for ranks, tensors in dense.items():
        for name, part in _dense_parts(files[ranks], tensors, split, ranks[0]):
            parts.setdefault(name, []).append(part)
    keys = {key for tensors in shards.values() for key in tensors}
    return Weights(model, parts, stored_name=partial(stored_name, keys=keys))


def _dense_parts(path: Path, tensors: Tensors, split: TensorSplit, rank: int) -> Iterator[tuple[str, Part]]:
    """Our tensors other than experts in a tensor rank's file, without replicas."""
    for key, stored in tensors.items():
        shape, boxes = split.boxes(key, rank)
        if stored.shape != shape:
            raise ValueError(
                f"{path.name}: {key} has shape {stored.shape}; this model over {split.tensor} ranks has {shape}"
            )
        for box in boxes:
            if box.replica:
                continue
            read = partial(_read_box, stored, box)
            yield box.name, Part(box.offsets, box.sizes, stored.dtype, read, key)


def _expert_parts(
    path: Path, tensors: Tensors, model: Model, rank: int, tensor: int
) -> Iterator[tuple[str, Part]]:
    """Our tensors of a stage's experts on a tensor rank; `tensors`: the first expert rank's file."""
    is_expert = experts.EXPERTS.fullmatch
    others = experts.expert_files(path)[1:]
    ranks = [tensors, *(torch_files.read(other, is_expert) for other in others)]
    for number, found in enumerate(ranks):
        for key, stored in found.items():
            if is_expert(key):
                yield from experts.parts(key, stored, model, rank, tensor, number, len(ranks))


def _tensors(path: Path) -> Tensors:
    return {key: value for key, value in torch_files.read(path).items() if not key.endswith(BUFFERS)}


def _read_box(stored: LazyTensor, box: Box, index: tuple[slice, ...]) -> Tensor:
    return box.view(stored.open())[index]


@dataclass(frozen=True)
class _LocalRows:
    """Numbers of rows in a rank's shards, d rows per head."""

    q: int  # of Q, and columns of the output projection
    kv: int  # of K, and of V
    vocabulary: int | None  # of embedding and head, with padding; None if the shards have neither


def _detect_split(
    shards: Iterable[Tensors], model: Model, tensor: int, layout: NxDLayout | None
) -> TensorSplit:
    """How the shards were split, from the shapes of their tensors.

    Raises:
        ProfileError: ranks share KV heads and `layout` is None.
        ValueError: heads or vocabulary rows are missing, or belong to another model.
    """
    rows = _local_rows(shards, TensorSplit(model, tensor))
    multiplier = rows.kv * tensor // (model.num_key_value_heads * model.head_dim)
    _check_heads(rows, model, tensor, multiplier)
    held = None if rows.vocabulary is None else rows.vocabulary * tensor
    if held is not None and not 0 <= held - model.vocab_size < PADDING * tensor:
        raise ValueError(
            f"the shards hold {held} rows of the vocabulary, the config {model.vocab_size}; check that it belongs to this model"
        )
    if multiplier > 1 and layout is None:
        reason = f"is missing: {multiplier} ranks share each KV head, and the files do not show which layout they are in"
        raise ProfileError("--nxd-layout", None, reason, list(NXD_LAYOUTS))
    layout = layout or "trn1"
    log.info("NxD shards of %d tensor ranks, KV multiplier %d, layout %s", tensor, multiplier, layout)
    return TensorSplit(model, tensor, layout, rows.vocabulary)


def _local_rows(shards: Iterable[Tensors], split: TensorSplit) -> _LocalRows:
    """Measure the shards. Raises ValueError without attention, or if Q and output projection disagree."""
    attention: list[tuple[str, str, int]] = []  # (key, which of q, k and v are stacked, rows)
    q = kv = vocabulary = None
    for key, stored in (item for tensors in shards for item in tensors.items()):
        weights = [section.weight for section in split.sections(key)]
        letters = "".join(re.findall(r"\.attention\.qkv\.([qkv])\.", " ".join(weights)))
        if letters:
            attention.append((key, letters, stored.shape[0]))
        elif weights[0].endswith(".attention.output.weight"):
            q = stored.shape[1]
        elif weights[0] in ("embedding.weight", "head.weight"):
            vocabulary = stored.shape[0]
    for key, letters, rows in attention:
        if letters == "q" and rows != q:
            raise ValueError(f"{key}: {rows} rows, but the output projection has {q} columns")
        if letters in ("k", "kv", "qkv"):
            kv = (rows - (q or 0) * letters.count("q")) // len(letters.strip("q"))
    if q is None or kv is None:
        raise ValueError("the shards have no attention weights; they are not a Llama's, Mixtral's or DBRX's")
    return _LocalRows(q, kv, vocabulary)


def _check_heads(rows: _LocalRows, model: Model, tensor: int, multiplier: int) -> None:
    heads, kv_heads, d = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    if multiplier > 1 and kv_heads * multiplier > tensor:
        raise ValueError(
            f"the shards repeat {kv_heads} KV heads {multiplier} times, more than their {tensor} tensor ranks: NxD then "
            f"drops query heads ({rows.q * tensor // d} of {heads} are left), so they cannot be used"
        )
    if rows.q * tensor != heads * d:
        raise ValueError(
            f"the shards of {tensor} tensor ranks hold {rows.q * tensor / d:g} of the model's {heads} query heads; files of "
            "further ranks are missing, NxD lost the other heads, or the config is another model's"
        )
    if rows.kv * tensor != max(kv_heads, tensor) * d:
        raise ValueError(
            f"the shards hold {rows.kv * tensor / d:g} KV heads with replicas; this model's {kv_heads} over {tensor} ranks "
            f"are {max(kv_heads, tensor)}"
        )


def shard_files(
    weights: Weights, tensor: int, pipeline: int, layout: NxDLayout | None = None, form: QKVForm | None = None
) -> list[ShardFile]:
    """The files to write, in the trn1 layout.

    Raises:
        ProfileError: NxD does not support this model, `form` does not fit it, or the trn2 layout would be wrong.
    """
    model = weights.model
    if model.architecture not in NXD_SHARDS or model.attention_bias or model.mlp_bias:
        reason = "only Llama, Mistral, Mixtral and DBRX without biases can be written as NxD shards"
        raise ProfileError("--to", "nxd", reason, ["hf", "trainshed"])
    split = TensorSplit(model, tensor)
    if layout == "trn2" and split.multiplier > 1:
        reason = f"with {split.multiplier} ranks per KV head, ranks hold query heads of another group in this layout"
        raise ProfileError("--nxd-layout", layout, reason, ["trn1"])
    multi_head = model.num_key_value_heads == model.num_attention_heads
    form = form or ("coalesced" if multi_head else "separate")
    if form == "coalesced" and not multi_head:
        reason = "requires a KV head for each query head"
        raise ProfileError("--nxd-qkv", form, reason, ["separate", "fused"])
    ranks = f"{tensor} tensor ranks" + (f" × {pipeline} pipeline stages" if pipeline > 1 else "")
    facts = f"KV multiplier {split.multiplier}, layout trn1, {form} Q, K and V"
    log.info("NxD shards for %s, %s", ranks, facts)
    return [
        ShardFile(
            f"model/dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt",
            [
                *(_entry(weights, split, key, rank) for key in stage_keys(model, layers, form)),
                *(entry for layer in layers for entry in experts.entries(weights, layer, rank, tensor)),
            ],
        )
        for stage, layers in enumerate(stage_layers(model.num_hidden_layers, pipeline))
        for rank in range(tensor)
    ]


def _entry(weights: Weights, split: TensorSplit, key: str, rank: int) -> TensorEntry:
    """A tensor of a rank's file; a tied head is written from the embedding."""
    shape, boxes = split.boxes(key, rank)
    if key == "lm_head.weight" and weights.model.tie_word_embeddings:
        boxes = [replace(box, name="embedding.weight") for box in boxes]
    weight = split.sections(key)[0].weight
    dtype = weights.dtype_of(weight if weight in weights.shapes else "embedding.weight")
    return TensorEntry(key, shape, dtype, partial(_rows, weights, boxes))


def _rows(weights: Weights, boxes: list[Box], low: int, high: int) -> Iterator[Tensor]:
    """Rows [low, high) of a rank's tensor, without padding at its end."""
    for box in boxes:
        top = box.local_offsets[0]
        first, stop = max(low, top), min(high, top + box.sizes[0])
        if first < stop:
            offsets = (box.offsets[0] + first - top, *box.offsets[1:])
            yield from weights.blocks(box.name, offsets, (stop - first, *box.sizes[1:]))


class ShardFile(PreallocatedFile):
    """A rank's file, in torch.save's format."""

    def prepare(self, path: Path) -> Mapping[str, int]:
        state_files.make_folder(path.parent)
        # For fake tensors, torch.save reserves the space of their elements and torch.load returns its offsets.
        with FakeTensorMode():
            tensors = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in self.entries}
        with skip_data(materialize_fake_tensors=True):
            torch.save(tensors, path)
        with FakeTensorMode():
            loaded = torch.load(path, weights_only=True)
        return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in loaded.items()}
