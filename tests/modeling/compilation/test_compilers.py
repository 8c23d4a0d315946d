"""Asynchronous tensor parallelism: torch merges our collectives and products; results are unchanged.

Without a GPU, torch's merged operators run the collective and the product one after the other.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils import cpp_extension

from modeling.compilation.compilers import Inductor
from parallel import ColumnParallelLinear, RowParallelLinear, torch_internals
from tests.pool import mesh

OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def train(layers: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    y = layers(x)
    weights = list(layers.parameters())
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *weights])]


def compare() -> Counter[str]:
    """Train compiled and eager layers. Returns the number of calls of each merged operator."""
    torch.manual_seed(0)
    called: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")

    def on_cpu(name: str) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            called[name] += 1
            return getattr(symmetric_memory, f"_{name}_fallback")(*arguments, **options)

        return run

    with mesh(tensor=2, supports_reduction=True) as m, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: True)  # which torch requires of merged operators
        patch.setattr(symmetric_memory, "_group_name_to_store", {})
        for name in OPERATORS:
            library.impl(name, on_cpu(name), "CPU")
        options = {"sequence_parallel": True, "dtype": torch.float64}
        layers = torch.nn.Sequential(
            ColumnParallelLinear(16, 32, m.tensor, **options),
            torch.nn.SiLU(),
            RowParallelLinear(32, 16, m.tensor, **options),
        )
        for parameter in layers.parameters():
            parameter.data.normal_()
        x = torch.randn(8, 16, dtype=torch.float64)
        backend = Inductor("cpu", async_tensor=True).compile
        found = train(torch.compile(layers, backend=backend, fullgraph=True), x)
        torch.testing.assert_close(found, train(layers, x), rtol=1e-12, atol=1e-12)
    return called


@pytest.mark.compiles
def test_merged_collectives_and_products_give_the_same_numbers(pool):
    for called in pool.run(compare, 2):
        assert called == dict.fromkeys(OPERATORS, 2)  # one of each in forward and in backward


def test_link_to_a_cache_with_a_space_in_its_path_is_shared_and_private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(torch, "__file__", "/torch/__init__.py")  # a path without a space

    def link(name: str = "a cache") -> Path:
        Inductor("cpu").use_cache(tmp_path / name)
        return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])

    first = link()
    assert first.resolve() == tmp_path / "a cache"
    assert " " not in str(first)
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert link() == first  # of another process, for example
    (tmp_path / "a cache").rmdir()
    second = link("another cache")
    assert {*first.parent.iterdir()} == {first, second}
    os.utime(first, (0, 0), follow_symlinks=False)
    third = link("third cache")
    assert {*first.parent.iterdir()} == {second, third}
    first.parent.chmod(0o777)  # another user could redirect its links
    assert link().parent != first.parent
    assert link().resolve() == tmp_path / "a cache"


def test_compiler_finds_torchs_libraries_below_a_path_with_a_space(tmp_path, monkeypatch):
    installed = tmp_path / "a checkout" / "torch"
    (installed / "lib").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(installed / "lib"))
    monkeypatch.setattr(torch, "__file__", str(installed / "__init__.py"))
    Inductor("cpu").use_cache(tmp_path / "cache")
    found = cpp_extension.TORCH_LIB_PATH  # which inductor reads for each of g++'s commands
    assert Path(found).resolve() == installed / "lib"
    assert " " not in found


def test_gpu_graphs_are_found_wherever_weights_are_stored(tmp_path, monkeypatch):
    """Without a GPU, where alone keys have the offsets of static inputs: no input is given as static."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # empty
    compile_inner, static = torch_internals.compile_fx_inner, []

    def spy(graph, inputs, **options):
        static.append(options["static_input_idxs"])
        return compile_inner(graph, inputs, **options)

    monkeypatch.setattr(torch_internals, "compile_fx_inner", spy)
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=Inductor("cuda").compile)(x), layer(x))
    assert static == [()]
