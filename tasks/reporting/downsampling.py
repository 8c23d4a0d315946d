"""Series of any length in bounded memory: curves as means of neighbours, random samples for medians."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import fmean, median

LIMIT = 2000  # points of a curve, values of a sample


def downsample(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most `limit` points: means of groups of neighbours, as equal in size as possible."""
    if len(points) <= limit:
        return [*points]
    bounds = (len(points) * index // limit for index in range(limit + 1))
    groups = [points[start:end] for start, end in pairwise(bounds)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


class Curve:
    """A curve that is given point by point, as at most LIMIT points: means of groups of neighbours.

    A curve of at most LIMIT points is kept as it is. Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self.group_size = 1
        self._groups: list[tuple[int, float, float]] = []  # number of points, sum of x, sum of y

    def add(self, x: float, y: float) -> None:
        if not math.isfinite(y):
            return
        groups = self._groups
        if groups and groups[-1][0] < self.group_size:
            count, sum_x, sum_y = groups[-1]
            groups[-1] = count + 1, sum_x + x, sum_y + y
            return
        if len(groups) == LIMIT:
            pairs = zip(groups[::2], groups[1::2], strict=True)
            self._groups = groups = [(m + n, x1 + x2, y1 + y2) for (m, x1, y1), (n, x2, y2) in pairs]
            self.group_size *= 2
        groups.append((1, x, y))

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(sum_x / count, sum_y / count) for count, sum_x, sum_y in self._groups]


class Sample:
    """Reservoir sample: at most LIMIT values, each kept with equal probability; all of them if fewer."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._count = 0
        self._random = Random(0)

    def add(self, value: float) -> None:
        self._count += 1
        if len(self._values) < LIMIT:
            self._values.append(value)
        elif (index := int(self._random.random() * self._count)) < LIMIT:
            self._values[index] = value

    @property
    def median(self) -> float | None:
        """Of more than LIMIT values, an estimate: within 2.2 percentiles of the median in 95% of cases."""
        return median(self._values) if self._values else None
