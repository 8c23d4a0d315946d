"""FP8 products: each recipe's accuracy, equality of torch's operator with the emulation, training."""

from functools import cache

import pytest
import torch

from parallel.constraints import FP8_MULTIPLE
from parallel.layers.products import E4M3, Float8, Products, dequantize, quantize, swizzle
from tests.parity.harness import Case, run, train

EXACT = Products()


def factors(dtype=torch.float32):
    """x (m, k), weight (n, k), gradient (m, n); rows of x and gradient span six orders of magnitude."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.logspace(-3, 3, 64)[:, None]
    x, weight, grad = (torch.randn(shape, generator=draw) for shape in ((64, 96), (32, 96), (64, 32)))
    return [value.to(dtype) for value in (x * rows, weight, grad * rows)]


def results(products, x, weight, grad):
    return [
        products.forward(x, weight),
        products.input_gradient(grad, weight),
        products.weight_gradient(grad, x),
    ]


@pytest.mark.parametrize("recipe", FP8_MULTIPLE)
def test_emulated_products_approximate_exact_ones(recipe):
    for found, exact in zip(
        results(Float8(recipe, True), *factors()), results(EXACT, *factors()), strict=True
    ):
        assert (found - exact).norm() < 0.07 * exact.norm()


def test_only_row_scales_preserve_small_rows():
    x, weight, _ = factors()
    exact = EXACT.forward(x, weight)
    for recipe in FP8_MULTIPLE:
        errors = (Float8(recipe, True).forward(x, weight) - exact).norm(dim=1) / exact.norm(dim=1)
        assert (errors.max() < 0.1) == (recipe != "tensorwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torch_operator_equals_the_emulation(recipe):
    """torch has the operator on CPUs too, where it is slow, so this runs the call that GPUs run."""
    inputs = factors(torch.bfloat16)
    for found, emulated in zip(
        results(Float8(recipe), *inputs), results(Float8(recipe, True), *inputs), strict=True
    ):
        assert torch.equal(found, emulated)


@pytest.mark.parametrize("recipe", FP8_MULTIPLE)
def test_scales_follow_the_magnitude_down_to_the_smallest_float32(recipe):
    """Gradients may be of any magnitude; rows of zeros have a scale too."""
    x = factors()[0]
    x[-1] = 0
    factor = 2.0**-100
    (values, scale), (small_values, small_scale) = (quantize(each, recipe, E4M3) for each in (x, x * factor))
    assert torch.equal(small_values.float(), values.float())
    rows = slice(0, max(1, len(scale) - 1))  # without that of zeros
    torch.testing.assert_close(small_scale[rows], scale[rows] * factor, rtol=1e-6, atol=0)
    assert small_scale.min() > 0


def test_mx_scales_are_powers_of_two_per_32_values():
    x = factors()[0]
    values, scale = quantize(x, "mxfp8", E4M3)
    assert scale.shape == (64, 3, 1)
    assert torch.equal(scale.log2(), scale.log2().round())
    largest = (x.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True) / scale).flatten()
    assert largest.ge(256).all()  # uses the format's highest exponent
    assert largest.lt(512).all()
    assert (dequantize(values, scale) - x).abs().max() < 0.07 * x.abs().max()


def test_mx_scales_are_stored_as_tensor_cores_read_them():
    scales = torch.arange(200.0 * 6).view(200, 6)
    stored = swizzle(scales).view(2, 2, 512)  # tiles of 128 x 4
    for row, column in ((0, 0), (31, 3), (37, 2), (127, 4), (199, 5)):
        position = (row % 32) * 16 + row % 128 // 32 * 4 + column % 4
        assert stored[row // 128, column // 4, position] == scales[row, column]
    assert stored.count_nonzero() == scales.count_nonzero()


@pytest.mark.compiles
def test_compiled_mx_products_equal_the_emulation(monkeypatch):
    """Without hardware: a stand-in for the product of a B200 reads the scales where tensor cores do."""

    def scaled_mm(a, b, a_scale, _, b_scale, *orders, output_dtype):
        def unpacked(scale, values):  # the inverse of `swizzle`
            tiles = scale.float().view(-(-len(values) // 128), -1, 32, 4, 4)
            return tiles.permute(0, 3, 2, 1, 4).reshape(-1, tiles.shape[1] * 4)[
                : len(values), : values.shape[1] // 32
            ]

        factors = [
            dequantize(values, unpacked(scale, values)[..., None])
            for values, scale in ((a, a_scale), (b.t(), b_scale))
        ]
        return (factors[0] @ factors[1].t()).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", scaled_mm)
    x, weight, _ = factors(torch.bfloat16)
    compiled = torch.compile(Float8("mxfp8").forward, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), Float8("mxfp8", True).forward(x, weight))


@cache
def losses(precision, recipe="rowwise"):
    """Losses of 200 steps on one process, with one microbatch per step."""
    case = Case(precision=precision, fp8_recipe=recipe, microbatches=1)
    return train(case, steps=range(200)).losses


def test_tensor_parallel_layers_train_in_emulated_fp8(pool):
    """Each KV head is on two ranks; the scales of shards differ from those of full tensors."""
    found = run(Case(tensor=4, precision="fp8", fp8_recipe="tensorwise"), pool).losses
    assert found == pytest.approx(losses("bf16")[: len(found)], rel=3e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_loss_in_emulated_fp8_is_within_a_percent_of_bf16_over_200_steps(recipe):
    runs = losses("fp8", recipe), losses("bf16")
    means, expected = (torch.tensor(each).view(10, 20).mean(1) for each in runs)
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(means, expected, rtol=0.01, atol=0)
