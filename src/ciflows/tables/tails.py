"""Tails and bounds of a column, chosen by how well a Gaussian fits what becomes of its values."""

from __future__ import annotations

__all__ = ["LEAST_GAIN", "choose_tail", "natural_bounds", "spread"]

import numpy as np
from numpy.typing import NDArray

from ciflows.tables.options import Bounds

Array = NDArray[np.float64]
# bounds, and the share of the way to a second one that the data have to go before it is believed
NATURAL_BOUNDS: tuple[tuple[float, float | None, float], ...] = (
    (0.0, None, 0.0),
    (0.0, 1.0, 0.9),
    (0.0, 100.0, 0.99),
    (-1.0, 1.0, 0.99),
)
NARROW = 1e-6  # of the spread of nine tenths: quartiles that agree by chance tell no spread
LEAST_GAIN = 0.01  # nats a row by which a bound or a tail has to help before it is believed
TAILS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)


def spread(values: Array) -> tuple[float, float]:
    """The median, and a spread that outliers do not move: that of a Gaussian with these quartiles."""
    low, quarter, middle, three, high = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
    wide = float(high - low) / 3.29 or float(values.std())
    return float(middle), max(float(three - quarter) / 1.35, NARROW * wide) or 1.0


def choose_tail(u: Array) -> tuple[float, float]:
    """The λ of `Smooth` for a column u of spread 1, and its log-likelihood then.

    That under which arsinh(λu) / λ is best fitted by a Gaussian; 0 where nothing is gained.
    """
    fits = {}
    for tail in TAILS:
        t = np.arcsinh(tail * u) / tail if tail else u
        fits[tail] = gaussian_fit(t, -np.log(np.hypot(1.0, tail * u)))
    best = max(fits, key=lambda tail: fits[tail])
    return (best, fits[best]) if fits[best] > fits[0.0] + LEAST_GAIN else (0.0, fits[0.0])


def gaussian_fit(t: Array, log_slope: Array) -> float:
    """Mean log-likelihood of a Gaussian fitted to t = T(x), as a density of x."""
    return float(-0.5 * np.log(2 * np.pi * np.e * max(t.var(), 1e-300)) + log_slope.mean())


def natural_bounds(values: Array, least: float, most: float) -> Bounds:
    """Bounds such as 0 and 1 under which a Gaussian fits the transformed column clearly better."""
    middle, scale = spread(values)
    best: Bounds = (None, None)
    best_fit = choose_tail((values - middle) / scale)[1] - np.log(scale) + LEAST_GAIN
    for low, high, near in NATURAL_BOUNDS:
        if least < low or not (high is None or low + near * (high - low) <= most <= high):
            continue
        fit = _bounded_fit(values, low, high)
        if fit > best_fit:
            best, best_fit = (low, high), fit + LEAST_GAIN
    return best


def _bounded_fit(values: Array, low: float, high: float | None) -> float:
    inside = values[(values > low) & (values < (np.inf if high is None else high))]
    if len(inside) < 2:
        return -np.inf
    above = np.log(inside - low)
    if high is None:
        middle, scale = spread(above)
        return choose_tail((above - middle) / scale)[1] - float(np.log(scale)) - float(above.mean())
    below = np.log(high - inside)
    y = above - below
    middle, scale = spread(y)
    slope = float(np.log(high - low)) - above.mean() - below.mean()
    return choose_tail((y - middle) / scale)[1] - float(np.log(scale)) + slope
