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
            errors[precision] = largest(run(*(x.to(device, dtype) for x in inputs)), expected)
    return errors


def largest(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative norm of a difference; NaN if any is NaN."""
    pairs = zip(actual, expected, strict=True)
    return (
        torch.stack([(x.detach().float().to(y.device) - y).norm() / y.norm() for x, y in pairs]).max().item()
    )
