"""Parabolas through losses at equal FLOPs, in the logarithm of a model's size, and their lowest points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEWEST_SIZES = 3  # a parabola goes through any three points


@dataclass(frozen=True)
class Parabola:
    """loss = a + b u + c u^2 with u = ln(x) - centre."""

    centre: float
    a: float
    b: float
    c: float
    low: float  # the smallest and the largest x of the family
    high: float
    num_sizes: int
    rms: float  # of what is left over: 0 with three sizes, one seed each

    def at(self, x: ArrayLike) -> NDArray[np.float64]:
        u = np.log(np.asarray(x, dtype=float)) - self.centre
        return self.a + u * (self.b + u * self.c)

    @property
    def lowest(self) -> float | None:
        """Where the parabola is lowest, if that is inside the family."""
        if self.c <= 0:
            return None
        shift = -self.b / (2 * self.c)
        inside = math.log(self.low) < self.centre + shift < math.log(self.high)
        return math.exp(self.centre + shift) if inside else None

    @property
    def problem(self) -> str | None:
        """Why there is no optimum."""
        if self.lowest is not None:
            return None
        falls = self.at(self.high) < self.at(self.low)
        where = f"{'above' if falls else 'below'} it"
        what = "the curve bends down" if self.c <= 0 else "the curve is lowest outside"
        return f"at the edge of the family: no optimum found ({what}; add sizes {where})"


def fit(x: Sequence[float], losses: Sequence[float]) -> Parabola | None:
    """Least squares over all runs; None with fewer than three sizes."""
    sizes = np.unique(np.asarray(x, dtype=float))
    if len(sizes) < FEWEST_SIZES:
        return None
    logs, values = np.log(np.asarray(x, dtype=float)), np.asarray(losses, dtype=float)
    centre = float(logs.mean())
    c, b, a = (float(value) for value in np.polyfit(logs - centre, values, 2))
    found = Parabola(centre, a, b, c, float(sizes[0]), float(sizes[-1]), len(sizes), 0.0)
    rms = float(np.sqrt(np.mean((found.at(x) - values) ** 2)))
    return Parabola(centre, a, b, c, found.low, found.high, len(sizes), rms)


def between(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """A quantity of the family at `x`: interpolated, linearly in logarithms, between the sizes around it."""
    order = np.argsort(places)
    logs = np.log(np.asarray(places, dtype=float))[order], np.log(np.asarray(values, dtype=float))[order]
    return float(np.exp(np.interp(math.log(x), *logs)))
