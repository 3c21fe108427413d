"""Values on a circle, which have no order: where they lie on average, and how to unroll them there."""

from __future__ import annotations

__all__ = ["direction", "rolled", "unrolled"]

import math

import numpy as np
from numpy.typing import NDArray

from ciflows.tables.circular import Circular

Array = NDArray[np.float64]


def direction(x: Array, circle: Circular) -> tuple[Array, Array]:
    """The mean direction of values (*, n) and its standard error, both (*).

        mean = atan2(S, C),   std_error = sqrt(mean of sin²(θ - mean) / n) / R,   R² = S² + C²

    with θ = 2π (x - low) / period, and S and C the means of sin θ and cos θ; both in the column's unit.

    Example:
        >>> hours = Circular(name="hour", dtype="Float64", high=24.0)
        >>> mean, error = direction(np.array([23.0, 1.0, 2.0, 22.0]), hours)
        >>> round(float(mean) % 24, 6) % 24, round(float(error), 3)
        (0.0, 0.83)
    """
    turn = 2 * math.pi / circle.period
    angle = turn * (x - circle.low)
    s, c = np.sin(angle).mean(-1), np.cos(angle).mean(-1)
    mean = np.arctan2(s, c)
    spread = np.square(np.sin(angle - mean[..., None])).mean(-1)
    error = np.sqrt(spread / x.shape[-1]) / np.maximum(np.hypot(s, c), 1e-12)
    return rolled(circle.low + mean / turn, circle), error / turn


def unrolled(x: Array, circle: Circular) -> Array:
    """Values (n,) on a line, whole turns away: within half a turn of their mean direction."""
    centre = direction(x, circle)[0]
    return x + circle.period * np.round((centre - x) / circle.period)


def rolled(x: Array, circle: Circular) -> Array:
    """Values back in [low, high)."""
    turns = np.floor((x - circle.low) / circle.period)
    return np.asarray(x - circle.period * turns, dtype=np.float64)
