"""NxD's checkpoints on disk: finding a model's shards in any of their forms, reading and writing them.

    <folder>/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt    converter and training run (there under <folder>/<tag>/)
    <folder>/tp_rank_TT_pp_rank_PP[/checkpoint.pt]        an older form
    <file>.tensors/tensor_N.pt                            tensors of the "xser" form, see torch_files.py

Degrees come from the files' names, the KV multiplier from the tensors' shapes, and which layers a file holds from its keys.
What NxD itself loses without saying so is refused here by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from modeling.conversion import torch_files
from modeling.conversion.huggingface import BUFFERS
from modeling.conversion.nxd_layout import Form, Layout, Split, keys, stage_layers
from modeling.conversion.tensor_files import Entry, FilledFile
from modeling.conversion.torch_files import Stored
from modeling.conversion.weights import Part, Weights
from parallel.layout import Box
from profiles.errors import ProfileError
from profiles.model import Model

RANK = re.compile(r"(?:dp_rank_(\d+)_)?tp_rank_(\d+)_pp_rank_(\d+)(?:\.pt)?")
PADDING = 128  # vocabularies are padded to a multiple of at most this, times the tensor degree
log = logging.getLogger("trainshed")

Shards = dict[tuple[int, int], Path]  # by (tensor rank, pipeline rank)


def find(source: Path) -> Shards:
    """The model's files in a folder; none where there are none.

    Raises:
        ValueError: some of the ranks' files are missing.
    """
    folders = [source, source / "model"]
    newest = source / "newest"
    if newest.is_file():
        tag = newest.read_text().strip()
        if Path(tag).name == tag:
            folders.append(source / tag / "model")
    for folder in folders:
        found = _ranks(folder)
        if found:
            return found
    return {}


def _ranks(folder: Path) -> Shards:
    found: Shards = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = RANK.fullmatch(path.name)
        if not match or int(match[1] or 0):  # every data-parallel rank has the same model
            continue
        file = path / "checkpoint.pt" if path.is_dir() else path
        if file.is_file():
            found[int(match[2]), int(match[3])] = file
    if found:
        tensor, pipeline = (1 + max(ranks) for ranks in zip(*found, strict=True))
        missing = [(t, p) for t in range(tensor) for p in range(pipeline) if (t, p) not in found]
        if missing:
            t, p = missing[0]
            raise ValueError(
                f"{folder}: of {tensor} x {pipeline} ranks' files {len(missing)} are missing, among them that of "
                f"tensor rank {t}, pipeline rank {p}"
            )
    return found


def read(files: Shards, model: Model, layout: Layout | None) -> Weights:
    """The weights in these files.

    Args:
        layout: as the shards were written for; None where nobody said, which is refused where it matters.

    Raises:
        ProfileError: the layout must be said.
        ValueError: a file that is refused or damaged, tensors that are not this model's, a known defect of NxD's.
    """
    if model.architecture != "llama":
        raise ProfileError(
            "--config", model.architecture, "NxD's shards are read for this architecture", ["llama"]
        )
    tensor = 1 + max(t for t, _ in files)
    stored = {ranks: _tensors(path) for ranks, path in files.items()}
    split = _split(stored, model, tensor, layout)
    parts: dict[str, list[Part]] = {}
    for (t, _), held in stored.items():
        for key, value in held.items():
            shape, boxes = split.boxes(key, t)
            if value.shape != shape:
                raise ValueError(
                    f"{files[t, _].name}: {key} is of shape {value.shape}, of this model over {tensor} ranks it is {shape}"
                )
            for box in boxes:
                if box.replica or (box.name == "head.weight" and model.tie_word_embeddings):
                    continue
                box_parts = parts.setdefault(box.name, [])
                box_parts.append(Part(box.offsets, box.sizes, value.dtype, partial(_piece, value, box)))
    return Weights(model, parts)


def _tensors(path: Path) -> dict[str, Stored]:
    return {key: value for key, value in torch_files.read(path).items() if not key.endswith(BUFFERS)}


def _piece(stored: Stored, box: Box) -> Tensor:
    return box.view(stored.open())


def _split(
    stored: Mapping[tuple[int, int], Mapping[str, Stored]], model: Model, tensor: int, layout: Layout | None
) -> Split:
    """How the shards are split; refuses those that lack heads."""
    heads, kv_heads, d = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    split = Split(model, tensor)
    q_rows = kv_rows = vocabulary_rows = None
    for key, value in ((k, v) for held in stored.values() for k, v in held.items()):
        names = [name.split(".", 2)[-1] for name, _ in split.sections(key)]
        if names == ["attention.output.weight"]:
            q_rows = value.shape[1]
        elif names[0] in ("embedding.weight", "head.weight"):
            vocabulary_rows = value.shape[0]
    for key, value in ((k, v) for held in stored.values() for k, v in held.items()):
        letters = "".join(name[-8] for name, _ in split.sections(key) if ".attention.qkv." in name)
        if letters == "q" and value.shape[0] != q_rows:
            raise ValueError(f"{key} has {value.shape[0]} rows, where the output projection takes {q_rows}")
        if letters in ("k", "kv", "qkv"):
            kv_rows = (value.shape[0] - (q_rows or 0) * ("q" in letters)) // len(letters.strip("q"))
    if q_rows is None or kv_rows is None:
        raise ValueError("the shards hold no attention weights: they are not a Llama's")
    multiplier = kv_rows * tensor // (kv_heads * d)
    if multiplier > 1 and kv_heads * multiplier > tensor:
        raise ValueError(
            f"the shards repeat {kv_heads} KV heads {multiplier} times, which is more than their {tensor} tensor ranks: NxD "
            f"drops query heads then (it keeps {q_rows * tensor // d} of {heads}), so they cannot be used"
        )
    if q_rows * tensor != heads * d:
        raise ValueError(
            f"the shards hold {q_rows * tensor / d:g} of the model's {heads} query heads: the rest was lost when they were "
            "written, or they are of another model"
        )
    if kv_rows * tensor != max(kv_heads, tensor) * d:
        raise ValueError(
            f"the shards hold {kv_rows * tensor / d:g} KV heads, replicas included; over {tensor} ranks this model's "
            f"{kv_heads} make {max(kv_heads, tensor)}"
        )
    if (
        vocabulary_rows is not None
        and not 0 <= vocabulary_rows * tensor - model.vocab_size < PADDING * tensor
    ):
        raise ValueError(
            f"the shards hold {vocabulary_rows * tensor} rows of the vocabulary, the model has {model.vocab_size}"
        )
    if multiplier > 1 and layout is None:
        reason = f"is missing: {multiplier} ranks share each KV head, and files cannot show which layout they are in"
        raise ProfileError("--nxd-layout", None, reason, ["trn1", "trn2"])
    log.info(
        "NxD shards of %d tensor ranks, KV multiplier %d, layout %s", tensor, multiplier, layout or "trn1"
    )
    return Split(model, tensor, layout or "trn1", vocabulary_rows)


def files(
    weights: Weights, tensor: int, pipeline: int, layout: Layout | None = None, form: Form | None = None
) -> list[ShardFile]:
    """The files to write, in the trn1 layout.

    Raises:
        ProfileError: a degree that the model cannot have, the trn2 layout where it would be wrong.
    """
    model = weights.model
    if model.architecture != "llama" or model.attention_bias or model.mlp_bias:
        raise ProfileError("--to", "nxd", "NxD's names are for Llamas without biases", ["hf", "trainshed"])
    split = Split(model, tensor)
    if layout == "trn2" and split.multiplier > 1:
        reason = f"with {split.multiplier} ranks to a KV head, NxD's trn2 layout lets ranks hold query heads of another group"
        raise ProfileError("--nxd-layout", layout, reason, ["trn1"])
    form = form or ("coalesced" if model.num_key_value_heads == model.num_attention_heads else "separate")
    if form == "coalesced" and model.num_key_value_heads != model.num_attention_heads:
        raise ProfileError(
            "--nxd-qkv", form, "is of models with a KV head for each query head", ["separate", "fused"]
        )
    log.info(
        "NxD shards for %d tensor ranks, KV multiplier %d, layout trn1, %s Q, K and V",
        tensor,
        split.multiplier,
        form,
    )
    made = []
    for stage, layers in enumerate(stage_layers(model.num_hidden_layers, pipeline)):
        for rank in range(tensor):
            entries = []
            for key in keys(model, layers, form):
                shape, boxes = split.boxes(key, rank)
                if key == "lm_head.weight" and model.tie_word_embeddings:
                    boxes = [_renamed(box) for box in boxes]
                first = split.sections(key)[0][0]
                dtype = weights.dtype_of(first if first in weights.shapes else "embedding.weight")
                entries.append(Entry(key, shape, dtype, partial(_rows, weights, boxes)))
            made.append(ShardFile(f"model/dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt", entries))
    return made


def _renamed(box: Box) -> Box:
    return Box("embedding.weight", box.shape, box.offsets, box.sizes, box.local_offsets)


def _rows(weights: Weights, boxes: list[Box], low: int, high: int) -> Iterator[Tensor]:
    """Rows [low, high) of a rank's tensor, but for padding at its end."""
    for box in boxes:
        top = box.local_offsets[0]
        first, stop = max(low, top), min(high, top + box.sizes[0])
        if first < stop:
            offsets = (box.offsets[0] + first - top, *box.offsets[1:])
            yield from weights.blocks(box.name, offsets, (stop - first, *box.sizes[1:]))


class ShardFile(FilledFile):
    """A rank's file, as torch.save writes it."""

    def prepare(self, path: Path) -> Mapping[str, int]:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Tensors without memory: torch.save leaves room for their bytes, and torch.load says where that is.
        with FakeTensorMode():
            form = {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in self.entries}
        with skip_data(materialize_fake_tensors=True):
            torch.save(form, path)
        with FakeTensorMode():
            made = torch.load(path, weights_only=True)
        return {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in made.items()}
