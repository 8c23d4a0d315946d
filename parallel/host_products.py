"""Matrix products on CPUs with the faster of torch's two libraries, MKL and oneDNN.

torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel processors only. There it is the faster library: a small
model's step on a Xeon takes 12% less time than with oneDNN. oneDNN, which torch uses for bf16, uses AVX-512 on any processor: on
one AMD EPYC it multiplied float32 matrices at twice MKL's speed, on another (family 25, model 17) 1.1 to 1.2 times as fast. With
AVX2 only, MKL is as fast, and faster for gradients of weights. oneDNN generates a kernel for each shape, in about 0.4 ms, and
caches the last thousand; sizes that vary should therefore be rounded up (`rounded_up`).

Graphs are captured with torch's products; compilation for a CPU replaces them with the operators `product` and `add_product`
(modeling/compilation/product_pass.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.torch_internals import custom_op

MIN_MULTIPLICATIONS = 1 << 22  # multiplications below which a call saves less than 0.05 ms
ROWS = 4096  # of the total that `add_product` updates at a time
_AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
ONEDNN_IS_FASTER = _AVAILABLE and "Intel" not in torch.cpu.get_capabilities().get("cpu_name", "")
if _AVAILABLE:  # builds of torch without oneDNN lack the operator
    from parallel.torch_internals import linear_pointwise
ONEDNN_PRODUCTS = (linear_pointwise,) if _AVAILABLE else ()  # operators


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (m, k) · b (k, n) + bias (n), on any device, without autograd."""
    if uses_onednn(a, b.shape[1]):
        return linear_pointwise(a, b.t(), bias, "none", [], "")
    return a @ b if bias is None else torch.addmm(bias, a, b)


def multiply_to(out: Tensor | None, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`multiply`, into `out` (m, n) if it is given and the library can write there."""
    if out is None or uses_onednn(a, b.shape[1]):
        return multiply(a, b, bias)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a (m, k) · b (k, n) to a total (m, n), on any device, without autograd."""
    if uses_onednn(a, b.shape[1]):  # it cannot accumulate, so add some rows at a time
        for rows, part in zip(total.split(ROWS), a.split(ROWS), strict=True):
            rows += multiply(part, b)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.compiler.is_compiling():  # inductor of torch 2.13 cannot lower the next branch
        torch.ops.trainshed.add_product(total, a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        # Adds in the product's kernel, without rounding the product.
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def uses_onednn(a: Tensor, columns: int) -> bool:
    """Whether `multiply` calls oneDNN for a (m, k) and a b of this number of columns."""
    return suits_onednn(a, columns) and runs_on_host(a)


def runs_on_host(x: Tensor) -> bool:
    """Whether operators on x run one by one on a CPU: they are not compiled, and x is no fake tensor."""
    plain = x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)
    return plain and not torch.compiler.is_compiling()


def suits_onednn(a: Tensor, columns: int) -> bool:
    """Whether oneDNN multiplies a (m, k) by `columns` columns faster than MKL; a may be a fake tensor."""
    return (
        ONEDNN_IS_FASTER
        and a.dtype == torch.float32
        and a.device.type == "cpu"
        and a.numel() * columns >= MIN_MULTIPLICATIONS
    )


custom_op("trainshed::add_product", mutates_args=("total",))(add_product)
_product = custom_op("trainshed::product")(multiply)


@_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def rounded_up(rows: int, others: int) -> int:
    """Round a number of rows up to one of 16 sizes per power of two, so that oneDNN needs few kernels.

    Adds at most a sixteenth of the rows, or 7; nothing for MKL.

    Args:
        others: product of the matrix product's other two sizes; one that is too small for oneDNN keeps its number of rows.
    """
    if not ONEDNN_IS_FASTER or rows * others < MIN_MULTIPLICATIONS:
        return rows
    step = max(8, (1 << rows.bit_length()) // 32)
    return -(-rows // step) * step
