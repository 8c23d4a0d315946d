"""Layouts, initialization, buckets: all ranks' shards together cover global tensors exactly once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modeling.models.families.llama import Llama
from parallel import Mesh, Normal, ShardedAdamW, initialize, parameter
from parallel.constraints import kv_replicas, valid_tensor_degrees
from parallel.layout import Layout, Section, layout_of
from parallel.optimizer.adamw import AdamW
from parallel.optimizer.arithmetic import square_norm
from parallel.optimizer.buckets import Bucket, Group, split_range
from profiles.sections.model import Model

degrees = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw) -> Layout:
    """One to three sections of the same trailing shape, split by rows, by columns or replicated."""
    degree = draw(degrees)
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    count = draw(st.integers(1, 3))
    if count > 1:
        dim = 0
    else:
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        if dim == 1:
            shape[1] *= degree  # only rows are padded
    rows = [draw(st.integers(1, 12)) for _ in range(count)]
    factors = [factor for factor in (1, 2, 4, 8) if degree % factor == 0]
    sections = tuple(
        Section(
            f"part{i}" if count > 1 else "",
            (row, *shape[1:]),
            dim,
            draw(st.sampled_from(factors)) if dim == 0 else 1,
        )
        for i, row in enumerate(rows)
    )
    return Layout(sections, degree, Normal(1.0))


@settings(max_examples=100)
@given(layouts())
def test_shards_of_all_ranks_cover_each_tensor_once(layout):
    for section in layout.sections:
        name = f"layer.{section.name}.weight" if section.name else "layer.weight"
        seen = torch.zeros(section.shape, dtype=torch.int64)
        copies = torch.zeros(section.shape, dtype=torch.int64)
        for rank in range(layout.degree):
            for box in layout.boxes("layer.weight", rank):
                if box.name == name:
                    assert box.replicas == layout.replicas(section)
                    copies[box.index()] += 1
                    seen[box.index()] += box.replica == 0
        assert (seen == 1).all()
        assert (copies == layout.replicas(section)).all()


@settings(max_examples=50)
@given(layouts(), st.integers(0, 2**31))
def test_initialization_is_equal_at_every_degree(layout, seed):
    full = nn.Module()
    sections = tuple(
        Section(s.name, s.shape, None if s.dim is None else 0 if len(layout.sections) > 1 else s.dim)
        for s in layout.sections
    )
    full.weight = parameter(Layout(sections, 1, layout.initializer))
    initialize(full.named_parameters(), Mesh().tensor, seed)
    expected = {box.name: box.view(full.weight) for box in layout_of(full.weight).boxes("weight", 0)}
    for rank in range(layout.degree):
        part = nn.Module()
        part.weight = parameter(layout)
        initialize(part.named_parameters(), Mesh(tensor=layout.degree, rank=rank).tensor, seed)
        covered = torch.zeros_like(part.weight)
        for box in layout.boxes("weight", rank):
            assert torch.equal(box.view(part.weight), expected[box.name][box.index()])
            box.view(covered).fill_(1)
        assert part.weight[covered == 0].eq(0).all(), "padding is zero"


def test_initialization_depends_on_seed_and_name():
    def draw(name: str, seed: int) -> torch.Tensor:
        module = nn.ParameterDict({name: parameter(Layout((Section("", (8, 8), None),), 1, Normal(1.0)))})
        initialize(module.named_parameters(), Mesh().tensor, seed)
        return module[name].detach()

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))
    assert draw("a", 1).std() == pytest.approx(1, abs=0.3)


def test_rows_of_heads_that_do_not_divide_a_section_are_rejected():
    with pytest.raises(ValueError, match=r"head_rows 4 \+ 2 do not divide the 10 rows of section 'k'"):
        Layout((Section("q", (12, 8), 0), Section("k", (10, 8), 0)), 1, Normal(1.0), head_rows=(4, 2))


def test_block_boundaries_do_not_change_initialization(monkeypatch):
    """A rank draws only the blocks that its shard touches, from any offset within a block."""
    monkeypatch.setattr("parallel.initialization.BLOCK_ELEMENTS", 32)

    def draw(degree: int, rank: int) -> torch.Tensor:
        module = nn.Module()
        module.weight = parameter(Layout((Section("", (24, 6), 0),), degree, Normal(1.0)))
        initialize(module.named_parameters(), Mesh(tensor=degree, rank=rank).tensor, 1)
        return module.weight.detach()

    assert torch.equal(torch.cat([draw(4, rank) for rank in range(4)]), draw(1, 0))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.data())
def test_flat_ranges_split_into_contiguous_boxes(shape, data):
    numbers = torch.arange(math.prod(shape)).view(shape)
    low = data.draw(st.integers(0, numbers.numel()))
    high = data.draw(st.integers(low, numbers.numel()))
    found = []
    for first, offsets, sizes in split_range(tuple(shape), low, high):
        box = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert box.flatten().tolist() == list(range(first, first + box.numel()))
        found += box.flatten().tolist()
    assert found == list(range(low, high))


HEADS = st.sampled_from([(4, 1), (4, 2), (8, 2), (8, 8)])


@settings(max_examples=25)
@given(HEADS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.data())
def test_every_element_is_saved_once_and_counted_once_in_norms(heads, data, context, pipeline, draws):
    """Over all ranks of a mesh, sharded or not, with KV replicas and a padded vocabulary."""
    n, k = heads
    tensor = draws.draw(st.sampled_from([t for t in valid_tensor_degrees(n, k) if t <= 8]))
    model = Model(
        hidden_size=8 * n, intermediate_size=16, num_hidden_layers=2, num_attention_heads=n,
        num_key_value_heads=k, vocab_size=13, max_position_embeddings=8, attention_bias=True,
    )  # fmt: skip
    degree = draws.draw(st.sampled_from([d for d in range(1, 7) if data * context % d == 0]))
    size = data * context * tensor * pipeline
    saved: dict[str, torch.Tensor] = {}
    squares = total = 0.0
    for rank in range(size):
        mesh = Mesh(pipeline, data, context, tensor, kv_replicas(k, tensor), degree, rank=rank)
        stage = mesh.pipeline.rank
        layers = range(2) if pipeline == 1 else range(stage, stage + 1)
        built = Llama(model, mesh, layers)
        initialize(built.named_parameters(), mesh.tensor, 1)
        kinds: dict[bool, list] = {}
        for name, each in built.named_parameters():
            kinds.setdefault(each.dim() > 1, []).append((name, each))
        for named in kinds.values():
            bucket = Bucket(Group(AdamW(), 1.0, 0.1, (), named), mesh, torch.float32)
            squares += square_norm([bucket.master], [bucket.norm_weights]).item()
            for box in bucket.boxes():
                if box.saved:
                    full = saved.setdefault(box.name, torch.full(box.shape, torch.nan))
                    index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                    assert full[index].isnan().all(), f"{box.name} is saved twice"
                    full[index] = box.view(bucket.master)
    one = Llama(model, Mesh())
    initialize(one.named_parameters(), Mesh().tensor, 1)
    for name, each in one.named_parameters():
        for box in layout_of(each).boxes(name, 0):
            assert torch.equal(saved.pop(box.name), box.view(each))
            total += box.view(each).square().sum().item()
    assert not saved
    assert squares == pytest.approx(total, rel=1e-5)


def test_parameter_without_layout_is_rejected():
    with pytest.raises(ValueError, match="has no layout"):
        ShardedAdamW([("weight", nn.Parameter(torch.zeros(2)))], Mesh())
