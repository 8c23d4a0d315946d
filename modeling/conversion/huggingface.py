"""Weights in Hugging Face folders: reads safetensors and .bin lazily, writes safetensors.

The published weights of GPT-OSS, with experts in MXFP4 (mxfp4.py), and of DeepSeek-V3, in float8 with scales (block_scales.py),
are read as bfloat16. Modules for multi-token prediction are stored as layers beyond the last, with copies of the embedding and
the head, which are compared with these and written again; that of Qwen's hybrids under names of its own, without copies.

A safetensors file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors end to end.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.conversion import block_scales, hybrid_names, mxfp4, torch_files
from modeling.conversion.tensor_files import PreallocatedFile, TensorEntry
from modeling.conversion.torch_files import LazyTensor, stamp
from modeling.conversion.weights import (
    COMPARED,
    HEAD,
    Part,
    Weights,
    differing_tensors,
    global_shapes,
    slices,
    summarize,
    without_modules,
)
from modeling.models import families
from modeling.models.weight_names import HuggingFaceTensor
from profiles.files import state_files
from profiles.huggingface.config import GENERATION_CONFIG, TOKEN_IDS, to_config_json
from profiles.sections.model import Model

SHARD_BYTES = 5 * 10**9
SINGLE = ("model.safetensors", "pytorch_model.bin", "checkpoint.pt")
LM_HEAD = "lm_head.weight"  # of every family
PREFIX = r"^(model|transformer|gpt_neox)\."  # of names in a model with a head
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Sources = list[tuple[str, HuggingFaceTensor]]  # the names of our tensors that make up a Hugging Face tensor
# masks and frequencies saved by old versions of transformers, which are not weights
BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    ".rotary_emb.inv_freq",
)

log = logging.getLogger(__name__)


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights, safetensors preferred over .bin; an empty list if there are none.

    Raises:
        ValueError: an index is corrupted, names files outside the folder, or has other weights than the file beside it; or the
            .bin files beside safetensors are of another model.
    """
    if state_files.is_file(folder):
        return [folder]
    formats = {single: files for single in SINGLE if (files := _files_of(folder, single))}
    if not formats:
        return []
    used, *others = formats
    for other in others:
        if other.endswith(".bin"):
            _require_same_model(formats[used], formats[other])
        log.warning("%s: weights are read from %s; those of %s are not read", folder, used, other)
    return formats[used]


def _files_of(folder: Path, single: str) -> list[Path]:
    """The files of a format, whose name is `single` if there is only one."""
    index = folder / f"{single}.index.json"
    if state_files.is_file(index):
        try:
            names = set(json.loads(state_files.contents(index))["weight_map"].values())
            if any(Path(name).name != name or name in ("", "..") for name in names):
                raise ValueError("it names a file outside its folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: corrupted: {error}") from error
        files = [folder / name for name in sorted(names)]
        if single not in names and state_files.is_file(folder / single):
            _require_equal(folder / single, files, index.name)
        return files
    return [folder / single] if state_files.is_file(folder / single) else []


def _require_same_model(used: list[Path], others: list[Path]) -> None:
    """Raise ValueError if other files, which are not read, have weights of other names or shapes."""

    def shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
        """Without what only one format may store: buffers, a tied head, and the prefix of a model with a head."""
        stored = {
            name: tensor.shape for name, tensor in _read_all(files).items() if not name.endswith(BUFFERS)
        }
        return {re.sub(PREFIX, "", name): shape for name, shape in stored.items() if name != LM_HEAD}

    one = shapes(used)
    try:
        other = shapes(others)
    except (ValueError, OSError):  # for example, pointers of Git LFS
        return
    if differing := differing_tensors(one, other):
        reason = f"holds other weights than {others[0].name} beside it ({summarize(differing)}); delete those that are not meant"
        raise ValueError(f"{used[0]} {reason}")


def _require_equal(single: Path, shards: list[Path], index: str) -> None:
    """Raise ValueError unless a file has the tensors of the shards that an index beside it names."""
    one, other = _read_all([single]), _read_all(shards)
    differing = sorted(
        name for name in one.keys() | other.keys() if not _same(one.get(name), other.get(name))
    )
    if differing:
        reason = f"and the files of {index} hold different weights ({summarize(differing)}); delete those that are not meant"
        raise ValueError(f"{single} {reason}")


def _same(one: LazyTensor | None, other: LazyTensor | None) -> bool:
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = (tensor.open().flatten() for tensor in (one, other))
    boxes = slices((0,), (len(a),), a.itemsize, COMPARED) if len(a) else ()
    return all(torch.equal(a[low : low + size], b[low : low + size]) for (low,), (size,) in boxes)


def _read_all(files: list[Path]) -> dict[str, LazyTensor]:
    """All files' tensors by name. Raises ValueError if one is rejected, or two have the same tensor."""
    found: dict[str, LazyTensor] = {}
    for path in files:
        stored = read_safetensors(path) if path.suffix == ".safetensors" else torch_files.read(path)
        if duplicates := found.keys() & stored.keys():
            raise ValueError(f"{path.name}: tensor {min(duplicates)} is in another file too")
        found |= stored
    return found


def read(
    files: list[Path], model: Model, dtype: torch.dtype | None = None, *, described: bool = False
) -> Weights:
    """The files' weights. Raises ValueError if a file is rejected or the tensors do not fit the model.

    Args:
        described: whether the model is that of the config.json beside the files. transformers saves no modules for multi-token
            prediction, but their number, so the model has none if the files have none. Qwen3-Next's config.json has no number,
            so the model has a module if the files have it.
    """
    tensors = hybrid_names.normalized(_read_all(files), model)
    if described and model.prediction_layers and not any(_is_of_module(name, model) for name in tensors):
        log.info("the files have no modules for multi-token prediction, unlike their config.json")
        model = without_modules(model)
    if described and hybrid_names.has_module(tensors, model):
        model = model.model_copy(update={"num_nextn_predict_layers": 1})
    parts: dict[str, list[Part]] = {}
    used: set[str] = set()
    quantized: Counter[str] = Counter()
    shapes = global_shapes(model)
    reader: Callable[[HuggingFaceTensor, tuple[slice, ...]], Tensor]
    for their_name, sources in _sources(model, shapes).items():
        # The tensors of a base model that was saved without its head lack this prefix.
        present = any(their_name + suffix in tensors for suffix in ("", mxfp4.BLOCKS, mxfp4.SCALES))
        key = their_name if present else their_name.partition(".")[2]
        expected = _stored_shape(sources, shapes)
        if packed := mxfp4.find_packed(tensors, key, expected):
            used |= {key + mxfp4.BLOCKS, key + mxfp4.SCALES}
            quantized["MXFP4"] += 1
            stored, reader = torch.bfloat16, packed.read
        elif key in tensors:
            used.add(key)
            if tensors[key].shape != expected:
                raise ValueError(f"{key}: shape {tensors[key].shape}; the model has {expected}")
            stored, reader = tensors[key].dtype, partial(_read_mapped, tensors[key])
            if scaled := block_scales.find_scaled(tensors, key):
                used.add(key + block_scales.SCALES)
                quantized["float8"] += 1
                stored, reader = torch.bfloat16, scaled.read
        else:
            continue
        for name, mapped in sources:
            offsets, shape = (0,) * len(shapes[name]), shapes[name]
            parts[name] = [Part(offsets, shape, stored, partial(reader, mapped), key)]
    for kind, count in quantized.items():
        log.info("%d weights in %s are read as bfloat16, and written as such", count, kind)
    rest = tensors.keys() - used
    if model.tie_word_embeddings and LM_HEAD in rest:  # stored under its second name, too or alone
        tensor = tensors[LM_HEAD]
        parts[HEAD] = [Part((0,) * len(tensor.shape), tensor.shape, tensor.dtype, tensor.read, LM_HEAD)]
        rest -= {LM_HEAD}
    rest -= _compare_copies(tensors, model)
    buffers = {name for name in rest if name.endswith(BUFFERS)}
    modules = {name for name in rest - buffers if _is_of_module(name, model, beyond=True)}
    others = {name for name in rest if hybrid_names.is_left_out(name, model)}
    depth = (
        f"modules for multi-token prediction beyond num_nextn_predict_layers {len(model.prediction_layers)}"
    )
    kinds = (buffers, "not weights of this model"), (modules, depth), (others, hybrid_names.LEFT_OUT)
    for names, reason in kinds:
        if names:
            log.info("%d tensors are not read, as %s: %s", len(names), reason, summarize(sorted(names)))
    for name in rest - buffers - modules - others:
        # unknown tensors, which `Weights` rejects by name
        parts[name] = [Part((), (), tensors[name].dtype, tensors[name].read)]
    return Weights(model, parts, dtype, lambda name: families.huggingface_tensor(model, name).name)


def _compare_copies(tensors: Mapping[str, LazyTensor], model: Model) -> set[str]:
    """Names of the copies of weights that the files have; raises ValueError if one differs."""
    copies = {name: ours for name, ours in families.huggingface_copies(model).items() if name in tensors}
    for name, ours in copies.items():
        theirs = families.huggingface_tensor(model, ours).name
        if not _same(tensors[name], tensors.get(theirs)):
            reason = f"differs from {theirs}, which modules for multi-token prediction share"
            raise ValueError(f"{name}: {reason}; to leave them out, set num_nextn_predict_layers to 0")
    return {*copies}


def _is_of_module(name: str, model: Model, beyond: bool = False) -> bool:
    """Whether a tensor belongs to a module for multi-token prediction.

    Args:
        beyond: to one that the model does not have, not to one that it has.
    """
    if "num_nextn_predict_layers" not in model.family.fields:
        return False
    if model.family.linear_attention != "none":
        return name.startswith(hybrid_names.PREDICTION) and beyond != bool(model.prediction_layers)
    found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    if found is None:
        return False
    return int(found[1]) >= model.num_layers if beyond else int(found[1]) in model.prediction_layers


def _sources(model: Model, names: Iterable[str]) -> dict[str, Sources]:
    """The tensors of ours that make up each Hugging Face tensor."""
    sources: dict[str, Sources] = {}
    for name in names:
        mapped = families.huggingface_tensor(model, name)
        sources.setdefault(mapped.name, []).append((name, mapped))
    return sources


def _stored_shape(sources: Sources, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the Hugging Face tensor that these sources make up."""
    reached = [mapped.stored_shape(shapes[name]) for name, mapped in sources]
    return tuple(map(max, zip(*reached, strict=True)))


def _read_mapped(tensor: LazyTensor, mapped: HuggingFaceTensor, index: tuple[slice, ...]) -> Tensor:
    return mapped.read(tensor.open())[index]


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Every tensor of a file by name. Raises ValueError if it is missing or corrupted."""
    try:
        opened = _open(path, stamp(path))
        tensors = {}
        for name in opened.keys():  # noqa: SIM118  not a mapping
            tensor = opened.get_tensor(name)  # a view of the mapped file
            tensors[name] = LazyTensor(tuple(tensor.shape), tensor.dtype, partial(_tensor, path, name))
        return tensors
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except Exception as error:  # SafetensorError is a plain Exception
        if torch_files.is_failed_read(path, error):
            raise OSError(f"{path}: cannot be read: {error}") from error
        raise ValueError(f"{path}: corrupted, or not a safetensors file: {error}") from None


@lru_cache(maxsize=torch_files.OPEN_FILES)
def _open(path: Path, _: tuple[int, int, int]) -> Any:  # safetensors does not export the type
    from safetensors import safe_open

    return safe_open(path, "pt")


def _tensor(path: Path, name: str) -> Tensor:
    return _open(path, stamp(path)).get_tensor(name)


def entries(weights: Weights) -> Iterator[TensorEntry]:
    """The Hugging Face tensors of a model, each assembled from ours when it is written, and copies."""
    for key, sources in _sources(weights.model, weights.shapes).items():
        shape = _stored_shape(sources, weights.shapes)
        yield TensorEntry(
            key, shape, weights.dtype_of(sources[0][0]), partial(_rows, weights, sources, shape)
        )
    for name, ours in families.huggingface_copies(weights.model).items():
        shape, rows = weights.shapes[ours], partial(_rows, weights, [(ours, HuggingFaceTensor(name))])
        yield TensorEntry(name, shape, weights.dtype_of(ours), partial(rows, shape))


def _rows(
    weights: Weights, sources: Sources, stored: tuple[int, ...], low: int, high: int
) -> Iterator[Tensor]:
    """Rows [low, high) of the Hugging Face tensor of shape `stored` that our tensors make up."""
    name, mapped = sources[0]
    if not mapped.index and not mapped.transposed:
        yield from weights.blocks(name, (low, *[0] * (len(stored) - 1)), (high - low, *stored[1:]))
        return
    result = torch.empty(high - low, *stored[1:], dtype=weights.dtype_of(name))
    for name, mapped in sources:
        offsets, sizes = [0] * len(weights.shapes[name]), [*weights.shapes[name]]
        rows, *columns = mapped.index or (slice(None),)
        if isinstance(rows, int):
            if low <= rows < high:
                block = weights.read(name, tuple(offsets), tuple(sizes))
                result[(rows - low, *columns)] = mapped.write(block)
            continue
        dim = 1 if mapped.transposed else 0  # the dim of our tensor that is its rows
        located = mapped.rows_in(stored[0], sizes[dim])
        start, stop = bisect_left(located, low), bisect_left(located, high)
        if start < stop:
            offsets[dim], sizes[dim] = start, stop - start
            block = weights.read(name, tuple(offsets), tuple(sizes))
            found = located[start:stop]
            at = (
                slice(found[0] - low, found[-1] + 1 - low)
                if isinstance(found, range)
                else [row - low for row in found]
            )
            result[(at, *columns)] = mapped.write(block)
    yield result


def files(weights: Weights) -> list[SafetensorsFile]:
    """The files to write: one, or numbered shards of at most SHARD_BYTES."""
    shards: list[list[TensorEntry]] = [[]]
    for entry in entries(weights):
        size = sum(each.nbytes for each in shards[-1])
        if shards[-1] and size + entry.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        return [SafetensorsFile("model.safetensors", shards[0])]
    count = len(shards)
    names = (f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))
    return [SafetensorsFile(name, shard) for name, shard in zip(names, shards, strict=True)]


class SafetensorsFile(PreallocatedFile):
    """A safetensors file to write."""

    def prepare(self, path: Path) -> Mapping[str, int]:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, starts = 0, {}
        for entry in self.entries:
            starts[entry.name] = at
            offsets = [at, at := at + entry.nbytes]
            dtype, shape = TYPES[entry.dtype], list(entry.shape)
            header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # alignment of the tensors
        begin = 8 + len(text)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(begin + at)
        return {name: begin + start for name, start in starts.items()}


def finish(
    folder: Path, written: list[SafetensorsFile], weights: Weights, source: Path | None = None
) -> None:
    """Write config.json, generation_config.json if the source has one and, for several files, the index.

    Args:
        source: config.json or folder of the Hugging Face model whose special tokens it has; None: they are unknown.
    """
    if len(written) > 1:
        index = {entry.name: file.name for file in written for entry in file.entries}
        size = sum(entry.nbytes for file in written for entry in file.entries)
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)
    dtypes = [weights.dtype_of(name) for name in weights.shapes]
    dtype = str(max(dtypes, key=dtypes.count)).removeprefix("torch.")
    config = {**to_config_json(weights.model), **_token_ids(source), "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if source and state_files.is_file(path := config_files(source)[1]):
        (folder / GENERATION_CONFIG).write_bytes(state_files.contents(path))


def _token_ids(source: Path | None) -> dict[str, Any]:
    """The token ids of the source's config.json; None if they are unknown."""
    if source is None or not state_files.is_file(path := config_files(source)[0]):
        return dict.fromkeys(TOKEN_IDS)  # if omitted, transformers' defaults would apply
    config = json.loads(state_files.contents(path))
    return {name: config[name] for name in TOKEN_IDS if name in config}


def config_files(source: Path) -> tuple[Path, Path]:
    """config.json and generation_config.json (may be missing) of a config.json or of its folder."""
    config = source / "config.json" if state_files.is_dir(source) else source
    return config, config.with_name(GENERATION_CONFIG)
