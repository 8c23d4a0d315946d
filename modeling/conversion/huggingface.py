"""Hugging Face's folders: read lazily from safetensors or .bin, written as safetensors.

A file of safetensors is 8 bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors end to end, so it
can be written in one pass once shapes and types are known.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from modeling.conversion import torch_files
from modeling.conversion.tensor_files import Entry, FilledFile
from modeling.conversion.torch_files import Stored, stamp
from modeling.conversion.weights import Part, Weights, shapes
from modeling.models import weight_names
from profiles.model import Model, to_config_json

SHARD_BYTES = 5 * 10**9
SINGLE = ("model.safetensors", "pytorch_model.bin", "checkpoint.pt")
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Tensors that are no weights: masks and frequencies that old versions of transformers saved.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def files_of(folder: Path) -> list[Path]:
    """The files that hold a model's weights, safetensors before .bin; none where there are none.

    Raises:
        ValueError: an index that cannot be read or names files elsewhere.
    """
    if folder.is_file():
        return [folder]
    for single in SINGLE:
        index = folder / f"{single}.index.json"
        if index.is_file():
            try:
                held = set(json.loads(index.read_text())["weight_map"].values())
                if any(Path(name).name != name for name in held):
                    raise ValueError("it names a file outside of its folder")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} cannot be used: {error}") from error
            return [folder / name for name in sorted(held)]
        if (folder / single).is_file():
            return [folder / single]
    return []


def read(files: list[Path], model: Model, dtype: torch.dtype | None = None) -> Weights:
    """The weights in these files.

    Raises:
        ValueError: a file that is refused or damaged; what Weights refuses.
    """
    found: dict[str, Stored] = {}
    for path in files:
        stored = _safetensors(path) if path.suffix == ".safetensors" else torch_files.read(path)
        twice = found.keys() & stored.keys()
        if twice:
            raise ValueError(f"{path.name} holds {min(twice)}, which another file holds too")
        found |= stored
    parts: dict[str, list[Part]] = {}
    used = set()
    for name, shape in shapes(model).items():
        place = weight_names.huggingface_tensor(model.architecture, name)
        # The network by itself, without its head, is saved without this prefix.
        theirs = place.name if place.name in found else place.name.partition(".")[2]
        if theirs not in found:
            continue
        used.add(theirs)
        view = _form(place, found[theirs].shape)
        if view != shape:
            raise ValueError(
                f"{theirs} is of shape {found[theirs].shape}, which makes {name} {view}; the model's is {shape}"
            )
        parts[name] = [
            Part((0,) * len(shape), shape, found[theirs].dtype, partial(_ours, place, found[theirs]))
        ]
    left = [name for name in found.keys() - used if not name.endswith(BUFFERS)]
    if model.tie_word_embeddings:  # the same weight under its other name
        left = [name for name in left if name != "lm_head.weight"]
    for name in left:
        parts[name] = [Part((), (), found[name].dtype, found[name].open)]  # which Weights refuses by its name
    return Weights(model, parts, dtype)


def _form(place: weight_names.HuggingFaceTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place.read(torch.empty(shape, device="meta")).shape)


def _ours(place: weight_names.HuggingFaceTensor, stored: Stored) -> Tensor:
    return place.read(stored.open())


def _safetensors(path: Path) -> dict[str, Stored]:
    try:
        opened = _open(path, stamp(path))
        found = {}
        for name in opened.keys():  # noqa: SIM118  it is no mapping
            tensor = opened.get_tensor(name)  # a view of the mapped file
            found[name] = Stored(tuple(tensor.shape), tensor.dtype, partial(_tensor, path, name))
        return found
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except Exception as error:  # SafetensorError is a plain Exception
        raise ValueError(f"{path} is damaged, or no file of safetensors: {error}") from None


@lru_cache(maxsize=torch_files.OPEN_FILES)
def _open(path: Path, _: tuple[int, int, int]):  # noqa: ANN202  safetensors has no name for it
    from safetensors import safe_open

    return safe_open(path, "pt")


def _tensor(path: Path, name: str) -> Tensor:
    return _open(path, stamp(path)).get_tensor(name)


def entries(weights: Weights) -> Iterator[Entry]:
    """Hugging Face's tensors of a model, each made of ours as it is written."""
    architecture = weights.model.architecture
    made: dict[str, list[tuple[str, weight_names.HuggingFaceTensor]]] = {}
    for name in weights.shapes:
        place = weight_names.huggingface_tensor(architecture, name)
        made.setdefault(place.name, []).append((name, place))
    for theirs, held in made.items():
        name, place = held[0]
        shape = place.write(torch.empty(weights.shapes[name], device="meta")).shape
        shape = (*shape[:-1], shape[-1] * place.parts)
        yield Entry(theirs, shape, weights.dtype_of(name), partial(_rows, weights, held))


def _rows(
    weights: Weights, held: list[tuple[str, weight_names.HuggingFaceTensor]], low: int, high: int
) -> Iterator[Tensor]:
    """Rows [low, high) of a tensor of theirs."""
    name, place = held[0]
    if place.parts == 1 and not place.transposed:
        shape = weights.shapes[name]
        yield from weights.blocks(name, (low, *[0] * (len(shape) - 1)), (high - low, *shape[1:]))
        return
    columns = []
    for name, place in held:
        shape = list(weights.shapes[name])
        offsets = [0] * len(shape)
        if place.transposed:
            offsets[1], shape[1] = low, high - low
        columns.append(place.write(weights.read(name, tuple(offsets), tuple(shape))))
    whole = torch.cat(columns, -1)
    yield whole if whole.dim() > 1 else whole[low:high]


def files(weights: Weights) -> list[SafetensorsFile]:
    """The files to write: one, or numbered ones of SHARD_BYTES at most."""
    shards: list[list[Entry]] = [[]]
    for entry in entries(weights):
        size = sum(each.nbytes for each in shards[-1])
        if shards[-1] and size + entry.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        return [SafetensorsFile("model.safetensors", shards[0])]
    count = len(shards)
    return [
        SafetensorsFile(f"model-{i:05}-of-{count:05}.safetensors", shard) for i, shard in enumerate(shards, 1)
    ]


class SafetensorsFile(FilledFile):
    """A file of safetensors."""

    def prepare(self, path: Path) -> Mapping[str, int]:
        header: dict = {"__metadata__": {"format": "pt"}}
        at, starts = 0, {}
        for entry in self.entries:
            starts[entry.name] = at
            offsets = [at, at := at + entry.nbytes]
            header[entry.name] = {
                "dtype": TYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        begin = 8 + len(text)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(begin + at)
        return {name: begin + start for name, start in starts.items()}


def finish(folder: Path, written: list[SafetensorsFile], weights: Weights) -> None:
    """Write what stands beside the weights: config.json, and the index where there are several files."""
    if len(written) > 1:
        index = {entry.name: file.name for file in written for entry in file.entries}
        size = sum(entry.nbytes for file in written for entry in file.entries)
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)
    kinds = [weights.dtype_of(name) for name in weights.shapes]
    dtype = str(max(kinds, key=kinds.count)).removeprefix("torch.")
    config = {**to_config_json(weights.model), "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
