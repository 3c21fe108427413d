"""Two-dimensional data sets with known distributions.

Each is a distribution p on the plane. For most, p is known exactly, and so is the entropy

    H = -E[log p(x)],   x ~ p.

No model q does better than -H on average over new points: E[log q(x)] = -H - KL(p, q).

The first ten are those of the paper's authors; the others are common in the literature, with our own
definitions. N(0, s^2) in a summary is noise of standard deviation s on each coordinate.
"""

from __future__ import annotations

__all__ = ["SYNTHETIC", "Synthetic", "get_synthetic"]

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from ciflows.core.layer import check_shape
from ciflows.errors import UserError, nearest

Array = NDArray[np.float64]
Draw = Callable[[int, Generator], Array]
OfPoints = Callable[[Tensor], Tensor]
Window = tuple[float, float, float, float]


@dataclass(frozen=True)
class Synthetic:
    """A distribution on the plane, with what is known about it.

    Arguments:
        summary: Its definition in one line.
        window: The window of plots: (x_low, x_high, y_low, y_high).
        draw: Draws n points with a numpy generator, as float64 of shape (n, 2).
        log_density: Exact log-density of points (*, 2), as float64 of shape (*): -inf outside a sharp
            support. None if there is no closed form.
        entropy: Differential entropy in nats; None if the density is unknown.
        contains: Whether points (*, 2) lie in the support, as booleans of shape (*). None if the support
            is the whole plane.

    Example:
        >>> annulus = get_synthetic("annulus")
        >>> x = annulus.sample(1000, seed=0)
        >>> x.shape, bool(annulus.contains(x).all())
        (torch.Size([1000, 2]), True)
        >>> f"{annulus.limit:.4f}, {annulus.log_density(x).mean():.4f}"
        '-2.2433, -2.2433'
    """

    name: str
    summary: str
    window: Window
    draw: Draw
    log_density: OfPoints | None = None
    entropy: float | None = None
    contains: OfPoints | None = None

    @property
    def limit(self) -> float | None:
        """The best possible mean log-likelihood, in nats: -entropy."""
        return None if self.entropy is None else -self.entropy

    def sample(self, n: int, seed: int) -> Tensor:
        """Draw n independent points (n, 2) in float32; the same seed gives the same points."""
        # numpy's generator: a model with the same seed must not draw the same numbers as its data
        return torch.from_numpy(self.draw(n, np.random.default_rng(seed))).float()


def get_synthetic(name: str) -> Synthetic:
    """Look up a synthetic data set by name.

    Example:
        >>> get_synthetic("one-uniform").summary
        'x1, x2 ~ U[-1/2, 1/2]'
    """
    if name not in SYNTHETIC:
        raise UserError(f"There is no synthetic set {name!r}. {nearest(name, SYNTHETIC)}")
    return SYNTHETIC[name]


def _square(reach: float) -> Window:
    return (-reach, reach, -reach, reach)


def _coordinates(x: Tensor) -> tuple[Tensor, Tensor]:
    check_shape(x, (2,), "A synthetic set")
    x1, x2 = x.double().unbind(-1)
    return x1, x2


def _polar(x: Tensor) -> tuple[Tensor, Tensor]:
    x1, x2 = _coordinates(x)
    return torch.hypot(x1, x2), torch.atan2(x2, x1)


def _around(radius: Array | float, angle: Array) -> Array:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)


def _log_normal(x: Tensor, mean: Tensor | float = 0.0, sd: float = 1.0) -> Tensor:
    return -0.5 * ((x - mean) / sd) ** 2 - math.log(sd) - 0.5 * math.log(2 * math.pi)


def _log_mixture(log_parts: Sequence[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(list(log_parts)), dim=0) - math.log(len(log_parts))


def _signs(rng: Generator, n: int) -> Array:
    return rng.choice(np.array([-1.0, 1.0]), size=n)


def _within(rng: Generator, low: Array, high: Array) -> Array:
    # slightly inside, so that rounding to float32 moves no point across a sharp edge
    margin = 2.0**-21
    return rng.uniform(low + margin, high - margin)


def _flat(contains: OfPoints, entropy: float) -> OfPoints:
    """The log-density of a uniform distribution: -entropy inside, -inf outside."""

    def log_density(x: Tensor) -> Tensor:
        inside = contains(x)
        flat = torch.full_like(inside, -entropy, dtype=torch.float64)
        return flat.masked_fill(~inside, -math.inf)

    return log_density


def _boxes(name: str, summary: str, boxes: Sequence[Window], reach: float) -> Synthetic:
    """Uniform on boxes (x_low, x_high, y_low, y_high), disjoint and of the same area."""
    edges = np.array(boxes)
    entropy = math.log(sum((b - a) * (d - c) for a, b, c, d in boxes))

    def draw(n: int, rng: Generator) -> Array:
        a, b, c, d = edges[rng.integers(len(boxes), size=n)].T
        return np.stack([_within(rng, a, b), _within(rng, c, d)], axis=-1)

    def contains(x: Tensor) -> Tensor:
        x1, x2 = _coordinates(x)
        inside = [(a <= x1) & (x1 <= b) & (c <= x2) & (x2 <= d) for a, b, c, d in boxes]
        return torch.stack(inside).any(dim=0)

    log_density = _flat(contains, entropy)
    return Synthetic(name, summary, _square(reach), draw, log_density, entropy, contains)


def _annulus() -> Synthetic:
    """Uniform by area: r^2 is uniform."""
    entropy = math.log(3 * math.pi)

    def draw(n: int, rng: Generator) -> Array:
        squares = _within(rng, np.full(n, 1.0), np.full(n, 4.0))
        return _around(np.sqrt(squares), rng.uniform(0, 2 * math.pi, n))

    def contains(x: Tensor) -> Tensor:
        radius, _ = _polar(x)
        return (radius >= 1) & (radius <= 2)

    summary = "Uniform by area on 1 <= r <= 2"
    log_density = _flat(contains, entropy)
    return Synthetic("annulus", summary, _square(3.0), draw, log_density, entropy, contains)


def _two_marginals() -> Synthetic:
    """p(x1) = 1 on two intervals of length 1/2, and x2 is standard normal."""

    def draw(n: int, rng: Generator) -> Array:
        centre = _signs(rng, n)
        return np.stack([_within(rng, centre - 0.25, centre + 0.25), rng.normal(size=n)], axis=-1)

    def contains(x: Tensor) -> Tensor:
        x1, _ = _coordinates(x)
        return (x1.abs() >= 0.75) & (x1.abs() <= 1.25)

    def log_density(x: Tensor) -> Tensor:
        _, x2 = _coordinates(x)
        return _log_normal(x2).masked_fill(~contains(x), -math.inf)

    summary = "x1 = -1 or 1, + U[-1/4, 1/4]; x2 ~ N(0, 1)"
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    return Synthetic("two-marginals", summary, _square(3.75), draw, log_density, entropy, contains)


def _split_gaussian() -> Synthetic:
    """p(x) = N(x1; 0, 1) N(x2; 2 sign(x1), 1): two halves of a Gaussian, shifted apart."""

    def draw(n: int, rng: Generator) -> Array:
        x1, x2 = rng.normal(size=(2, n))
        return np.stack([x1, x2 + np.where(x1 < 0, -2.0, 2.0)], axis=-1)

    def log_density(x: Tensor) -> Tensor:
        x1, x2 = _coordinates(x)
        return _log_normal(x1) + _log_normal(x2, torch.where(x1 < 0, -2.0, 2.0))

    summary = "x1 ~ N(0, 1); x2 ~ N(2 sign(x1), 1)"
    entropy = math.log(2 * math.pi * math.e)
    return Synthetic("split-gaussian", summary, _square(6.0), draw, log_density, entropy)


def _wheel(
    name: str,
    summary: str,
    arms: int,
    radius: float,
    sds: tuple[float, float],
    twist: float,
    entropy: float,
) -> Synthetic:
    """Equal Gaussians around a circle, with standard deviations `sds` along the radius and across it;
    then every point is rotated about the origin by the angle twist * exp(r / 2).

    The rotation preserves r, and so area: p(x) is the mixture's density at the point rotated back.
    """
    angles = 2 * math.pi * np.arange(arms) / arms

    def draw(n: int, rng: Generator) -> Array:
        along, across = radius + sds[0] * rng.normal(size=n), sds[1] * rng.normal(size=n)
        r = np.hypot(along, across)
        arm = angles[rng.integers(arms, size=n)]
        return _around(r, np.arctan2(across, along) + arm + twist * np.exp(r / 2))

    def log_density(x: Tensor) -> Tensor:
        r, angle = _polar(x)
        turns = [angle - twist * torch.exp(r / 2) - arm for arm in angles.tolist()]
        return _log_mixture(
            [
                _log_normal(r * torch.cos(turn), radius, sds[0])
                + _log_normal(r * torch.sin(turn), 0.0, sds[1])
                for turn in turns
            ]
        )

    return Synthetic(name, summary, _square(4.5), draw, log_density, entropy)


def _rings(
    name: str, summary: str, radii: Sequence[float], sd: float, entropy: float, reach: float
) -> Synthetic:
    """Circles of equal weight with Gaussian noise. For one circle, of radius R:

    p(x) = exp(-(r^2 + R^2) / (2 sd^2)) I0(r R / sd^2) / (2 pi sd^2)
    """

    def draw(n: int, rng: Generator) -> Array:
        circle = _around(rng.choice(radii, size=n), rng.uniform(0, 2 * math.pi, n))
        return circle + sd * rng.normal(size=(n, 2))

    def log_density(x: Tensor) -> Tensor:
        r, _ = _polar(x)
        # i0e(a) = exp(-a) I0(a) does not overflow; the rest of the exponent is a square
        log_parts = [
            -0.5 * ((r - radius) / sd) ** 2 + torch.special.i0e(r * radius / sd**2).log()
            for radius in radii
        ]
        return _log_mixture(log_parts) - math.log(2 * math.pi * sd**2)

    return Synthetic(name, summary, _square(reach), draw, log_density, entropy)


def _two_spirals(n: int, rng: Generator) -> Array:
    angle = 3 * math.pi * np.sqrt(rng.uniform(size=n))
    arm = _around(angle, math.pi - angle) + rng.uniform(0, 0.5, size=(n, 2))
    return _signs(rng, n)[:, None] * arm / 3 + 0.1 * rng.normal(size=(n, 2))


def _swiss_roll(n: int, rng: Generator) -> Array:
    angle = rng.uniform(1.5 * math.pi, 4.5 * math.pi, n)
    return _around(angle / 5, angle) + 0.2 * rng.normal(size=(n, 2))


def _moons(n: int, rng: Generator) -> Array:
    moon: Array = _around(2.0, rng.uniform(0, math.pi, n)) - np.array([1.0, 0.5])
    return _signs(rng, n)[:, None] * moon + 0.2 * rng.normal(size=(n, 2))


# Entropies without a closed form come from quadrature, which the tests repeat.
_SETS = (
    _boxes(
        "two-uniforms",
        "x1 ~ U[-2, -1] or U[1, 2]; x2 ~ U[-1, 1]",
        [(-2.0, -1.0, -1.0, 1.0), (1.0, 2.0, -1.0, 1.0)],
        reach=3.0,
    ),
    _annulus(),
    _boxes(
        "two-lines",
        "x1 = -1 or 1, + U[-0.005, 0.005]; x2 ~ U[-1, 1]",
        [(-1.005, -0.995, -1.0, 1.0), (0.995, 1.005, -1.0, 1.0)],
        reach=1.5,
    ),
    _two_marginals(),
    _boxes("one-uniform", "x1, x2 ~ U[-1/2, 1/2]", [(-0.5, 0.5, -0.5, 0.5)], reach=1.0),
    _split_gaussian(),
    _wheel(
        "eight-gaussians",
        "Eight Gaussians of sd 0.5 / 1.414 on a circle of radius 4 / 1.414, every 45 degrees",
        arms=8,
        radius=4 / 1.414,
        sds=(0.5 / 1.414, 0.5 / 1.414),
        twist=0.0,
        entropy=2.8318804061,
    ),
    _boxes(
        "checkerboard",
        "Uniform on the eight 2 x 2 squares of [-4, 4]^2 with floor(x1 / 2) + floor(x2 / 2) even",
        [(a, a + 2.0, c, c + 2.0) for a in (-4.0, -2.0, 0.0, 2.0) for c in (a % 4 - 4, a % 4)],
        reach=5.0,
    ),
    Synthetic(
        "two-spirals",
        "+-((-t cos t, t sin t) + U[0, 1/2]^2) / 3 + N(0, 0.1^2), with t = 3 pi sqrt(U[0, 1])",
        _square(4.5),
        _two_spirals,
    ),
    _rings(
        "rings",
        "Circles of radii 3, 2.25, 1.5, 0.75, equally likely, + N(0, 0.08^2)",
        radii=(3.0, 2.25, 1.5, 0.75),
        sd=0.08,
        entropy=2.6231827703,
        reach=4.0,
    ),
    _wheel(
        "pinwheel",
        "Five Gaussians at radius 2, sd 0.6 along it and 0.2 across; then rotated by exp(r / 2) / 4",
        arms=5,
        radius=2.0,
        sds=(0.6, 0.2),
        twist=0.25,
        entropy=2.3205884851,
    ),
    Synthetic(
        "swiss-roll",
        "(t cos t, t sin t) / 5 + N(0, 0.2^2), with t ~ U[3 pi / 2, 9 pi / 2]",
        _square(4.0),
        _swiss_roll,
    ),
    _rings(
        "circles",
        "Circles of radii 3 and 1.5, equally likely, + N(0, 0.24^2)",
        radii=(3.0, 1.5),
        sd=0.24,
        entropy=3.2681357117,
        reach=4.5,
    ),
    Synthetic(
        "moons",
        "+-(2 cos t - 1, 2 sin t - 1/2) + N(0, 0.2^2), with t ~ U[0, pi]",
        _square(4.0),
        _moons,
    ),
)

SYNTHETIC: dict[str, Synthetic] = {each.name: each for each in _SETS}
