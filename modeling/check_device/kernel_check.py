"""What a check of a kernel is: its errors on a device, compared with plain formulas in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel import device as devices
from parallel.mesh import Axis

TOKENS = 256  # maximum tokens of products that a CPU computes too
PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {
    "float32": 1e-5,
    "bf16": 2e-2,
    "fp8": 8e-2,  # 3 mantissa bits, 2 in tensorwise gradients; sums over rows of different magnitudes
    "emulated": 2e-2,  # the same quantization, multiplied in float32
}
ONE = Axis("tensor")
Errors = dict[str, float]  # largest relative norm of a difference, by precision


UPDATE_SOFTWARE = "do not train on this device; update its driver and torch, and check again"


@dataclass(frozen=True)
class KernelCheck:
    """A kernel on the shapes of a profile."""

    name: str
    shape: str
    errors: Callable[[torch.device], Errors]
    remedy: str = UPDATE_SOFTWARE  # what to do if it is missing or wrong

    def check(self, device: torch.device) -> tuple[str, bool]:
        """Measured errors, with shape and remedy on failure, and whether they are within the tolerances."""
        try:
            fill_fresh_memory(device)
            errors = self.errors(device)
        except (RuntimeError, ValueError) as error:
            return f"{self.name} of {self.shape}: {error}; {self.remedy}", False
        measured = ", ".join(f"{precision} {error:.1e}" for precision, error in errors.items())
        wrong = [precision for precision, error in errors.items() if not error <= TOLERANCES[precision]]
        if not wrong:
            return f"{self.name}: {measured}", True
        limits = ", ".join(f"{precision} above {TOLERANCES[precision]:.0e}" for precision in wrong)
        return f"{self.name} of {self.shape}: {measured}, {limits}; {self.remedy}", False


def normal(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def errors_of(
    run: Callable[..., list[Tensor]], inputs: list[Tensor], device: torch.device, expected: list[Tensor]
) -> Errors:
    """Errors of a function of the inputs on the device, in each precision.

    In float32, products are exact, whatever the precision that this process trains in.
    """
    kind, deterministic = devices.KINDS[device.type], torch.are_deterministic_algorithms_enabled()
    errors = {}
    for precision, dtype in PRECISIONS.items():
        with kind.chosen_kernels(deterministic, precision):
            given = [x.to(device, dtype) for x in inputs]
            fill_fresh_memory(device)  # also what the previous precision's results have left there
            errors[precision] = largest(run(*given), expected)
    return errors


def fill_fresh_memory(device: torch.device) -> None:
    """Fill memory that the allocator hands out next with NaN, so that elements never written are errors.

    Fresh memory is often zero, which hides them.
    """
    large = 64 << 20
    if device.type == "cuda":
        large = min(torch.cuda.mem_get_info(device)[0] // 4, 8 << 30)
    # All bits of a NaN may be set, in every dtype. Allocators keep requests of up to 1 MiB apart from larger ones.
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in (large, *[1 << 20] * 32)]
    del blocks


def largest(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative norm of a difference; NaN if any is NaN."""
    pairs = zip(actual, expected, strict=True)
    return (
        torch.stack([(x.detach().float().to(y.device) - y).norm() / y.norm() for x, y in pairs]).max().item()
    )
