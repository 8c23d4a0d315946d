"""Calibration: measured accelerator speeds, which the planner uses instead of the published peak.

`python -m modeling.check_device --calibrate` measures them (measure.py) and writes `calibration/<accelerator>.json` in the
working folder, which the planner reads if it exists. On GPUs there are two tables, one for each setting of `train.deterministic`,
because it decides which kernels run: `<accelerator>-deterministic.json` and `<accelerator>-fastest.json`. They contain:

    products    FLOP/s of matrix products and attention by shape; the nearest shape in log space is used
    others      bytes/s of a layer's other operators, such that the total time of a layer is reproduced
    memory      bytes/s that AdamW's update reads and writes
    links       bytes/s that one device sends in collectives, by level (links.py)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from modeling.models.build import device_of
from modeling.planning.operator_costs import Shape
from parallel import device as devices
from profiles.errors import ProfileError
from profiles.files import state_files
from profiles.schema import Profile

FOLDER = Path("calibration")
# Without a measurement: shares of the published peak that layers reach between collectives, except on GPUs (efficiency.py), and
# of the published memory bandwidth.
PEAK_SHARE, MEMORY_SHARE = 0.55, 0.8


@dataclass(frozen=True)
class Calibration:
    """Speeds of one device."""

    accelerator: str
    measured: str  # date
    torch: str  # version
    # precision -> [operation, three sizes, FLOP/s]
    products: Mapping[str, Sequence[tuple[str, int, int, int, float]]]
    others: Mapping[str, float]  # by precision
    memory: float
    links: Mapping[str, float] = field(default_factory=dict)
    deterministic: bool | None = None  # `train.deterministic` of the kernels; None: the device has no others
    path: str = ""  # of the file

    def rate(self, precision: str, shape: Shape) -> float:
        """FLOP/s of a product in a model of this precision: that of the measured one with the nearest sizes."""
        operation, *sizes = shape
        measured = "matmul" if operation in ("fp8", "experts") else operation
        rows = [row for row in self.products[product_precision(precision, shape)] if row[0] == measured]

        def distance(row: Sequence[Any]) -> float:
            return sum(math.log(a / b) ** 2 for a, b in zip(row[1:4], sizes, strict=True))

        return min(rows, key=distance)[4]

    def seconds(self, precision: str, products: Mapping[Shape, float], moved: float) -> float:
        """Seconds of products (FLOPs by shape) and of other operators, which read and write `moved` bytes."""
        work = sum(flops / self.rate(precision, shape) for shape, flops in products.items())
        return work + moved / self.others[precision]

    def save(self, path: Path) -> None:
        state_files.make_folder(path.parent)
        values = asdict(self)
        del values["path"]
        path.write_text(json.dumps(values, indent=1) + "\n")


def product_precision(precision: str, shape: Shape) -> str:
    """Precision of a product in a model of this precision: in FP8 models, most are in bf16."""
    if shape[0] == "fp8":
        return "fp8"
    return "bf16" if precision == "fp8" else precision


def find(profile: Profile) -> Calibration | None:
    """The table of the profile's accelerator and kernels, if it exists and has the profile's precision.

    Raises:
        ProfileError: the file cannot be read.
    """
    device = device_of(profile)
    path = path_of(devices.name_of(device), kernels_of(device, profile.train.deterministic))
    try:
        stamp = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    table = _load(path.resolve(), stamp)
    return table if profile.train.precision in table.products else None


def memory_bandwidth(profile: Profile) -> float | None:
    """Bytes/s that the optimizer reads and writes; None if the device's bandwidth is unknown."""
    if table := find(profile):
        return table.memory
    published = device_of(profile).bandwidth
    return published and published * MEMORY_SHARE


def kernels_of(device: devices.Device, deterministic: bool) -> bool | None:
    """`train.deterministic`, if the device has other kernels for it; else None."""
    return deterministic if device.nondeterministic else None


def path_of(accelerator: str, deterministic: bool | None = None) -> Path:
    """Path of an accelerator's table ("cpu" for CPUs), for kernels as `kernels_of` returns them."""
    suffix = {None: "", True: "-deterministic", False: "-fastest"}[deterministic]
    return FOLDER / f"{accelerator}{suffix}.json"


@lru_cache(maxsize=8)
def _load(path: Path, _: int) -> Calibration:
    try:
        values = json.loads(state_files.contents(path))
        return Calibration(**values, path=str(FOLDER / path.name))
    except (FileNotFoundError, ValueError, TypeError) as error:
        reason = f"is not a calibration table: {error}; write it again with `python -m modeling.check_device --calibrate`"
        raise ProfileError("calibration", str(path), reason) from error
