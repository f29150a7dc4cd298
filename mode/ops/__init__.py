"""Operators: each a function that runs a compiled kernel on CPUs where there is one, and torch's operators elsewhere.

Which of the two is decided here and nowhere else. They agree in outputs and gradients but for rounding.
"""

from mode.ops.operators import (
    can_use_kernels,
    cross_entropy,
    mix,
    rms_norm,
    rotate_heads,
    route,
    score_and_take,
)
from mode.ops.rows import at_least_float32

__all__ = [
    "at_least_float32",
    "can_use_kernels",
    "cross_entropy",
    "mix",
    "rms_norm",
    "rotate_heads",
    "route",
    "score_and_take",
]
