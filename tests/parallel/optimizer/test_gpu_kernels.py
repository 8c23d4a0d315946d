"""The optimizer's Triton kernels, compared with the formulas in operators of the CPU."""

import pytest
import torch

from parallel.optimizer.adamw import AdamW, adamw, update
from parallel.optimizer.arithmetic import add, assign
from parallel.torch_internals import FakeTensorMode

LENGTH = (1 << 17) + 40  # the last block is incomplete


def normal(seed, length=LENGTH):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.cuda
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_update_equals_the_formula_and_also_writes_the_rounded_weights(gradient_dtype):
    settings = AdamW((0.9, 0.999), 1e-8)
    states = [normal(0), normal(1).to(gradient_dtype), normal(2), normal(3).abs()]
    for skip in (0.0, 1.0):
        scalars = [torch.tensor(value) for value in (3.0, 1.5, skip)]  # step, divisor, skip
        expected = [x.clone() for x in states]
        step, divisor, _ = scalars
        update(*expected, (step, torch.tensor(1e-2), divisor, scalars[2]), settings.constants(0.1, "cpu"))
        actual = [x.cuda() for x in states]
        values = torch.full((LENGTH,), 7.0, dtype=torch.bfloat16, device="cuda")
        given = dict(zip(("step", "divisor", "skip"), (x.cuda() for x in scalars), strict=True))
        constants = settings.constants(0.1, torch.device("cuda"))
        options = {"settings": settings, "weight_decay": 0.1, "constants": constants, "learning_rate": 1e-2}
        assert adamw(*actual, **given, **options, values=values)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-6, atol=1e-7)
        assert values.eq(7.0).all() if skip else values.equal(actual[0].bfloat16())


@pytest.mark.cuda  # only torch's CUDA builds assign to fake tensors of a GPU
def test_traces_take_operators_of_torch():
    with FakeTensorMode():
        target, source = (
            torch.empty(LENGTH, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16)
        )
        for function in (add, assign):
            function(target, source)


@pytest.mark.cuda
def test_gradients_are_assigned_and_added_as_by_torch():
    transposed = normal(0).bfloat16().view(-1, 8).t()  # in another order in memory
    for source in (normal(0).bfloat16(), transposed):
        found, expected = normal(1).view(source.shape).cuda(), normal(1).view(source.shape)
        for function in (add, assign):
            function(found, source.cuda())
            function(expected, source)
            assert found.cpu().equal(expected)
