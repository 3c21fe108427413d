"""Column by column from a table's values to scores that are about N(0, 1), with mass 1 for any data.

A marginal maps values x, in the file's units and in float64, to scores z and back. It returns a
log-weight for each column such that exp(log_weight) p(z) estimates the density or probability of x
without bias:

| values | score | log_weight |
|---|---|---|
| real, perhaps bounded | z = T(x), a bijection of the open domain onto the real line | log T'(x) |
| wide lattice of step h | z = T(x + h v), v ~ U(0, 1) | log h + log T'(x + h v) |
| on a circle of period P | z = (x + k P - centre) / scale, k drawn | see `wrapped` |
| few levels with probabilities p_k | z = Φ⁻¹(C_k + p_k v) | log p_k - log φ(z) |
| some rounded to a grid | z = Φ⁻¹(G(x)), G the distribution function | see `rounded` |
| atoms of probability p_a, and a rest | z = Φ⁻¹(G(x)), G the distribution function | see `jumps` |

Everything here is arithmetic in float64: values such as 10⁷ ± 1, or 10⁻³⁰⁰ beside 1, keep their digits.
"""

from __future__ import annotations

__all__ = ["Marginal", "Smooth", "log_normal", "normal_between", "or_one", "quantile"]

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ciflows.core.density import LOG_2_PI
from ciflows.core.noise import Noise

if TYPE_CHECKING:
    from typing_extensions import Self

FARTHEST = 500.0  # e^z and sinh z stay finite in float64


class Marginal(nn.Module, ABC):
    """A map of several columns, each on its own."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    @property
    def exact(self) -> bool:
        """Whether encode draws nothing."""
        return False

    @property
    def discrete(self) -> bool:
        """Whether some values have probabilities, and no density."""
        return not self.exact

    @abstractmethod
    def encode(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Map values x (*, columns) to scores z and log-weights, both (*, columns)."""

    @abstractmethod
    def decode(self, z: Tensor, noise: Noise) -> Tensor:
        """Map scores z (*, columns) to values x (*, columns)."""

    def decode_with_log_weight(self, z: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Values and the log-weights that `encode` has for them with the same draws; not for atoms."""
        x = self.decode(z, noise)
        return x, self.encode(x, noise)[1]

    def _place(self, noise: Noise, shape: Sequence[int], like: Tensor) -> Tensor:
        """v ~ U(0, 1), inside (0, 1): where in its cell or jump a value's score lies."""
        v = noise.latent(self, noise.uniform(shape, like=like))
        return v.clamp(2.0**-30, 1 - 2.0**-30)

    def _on_jump(self, below: Tensor, p: Tensor, above: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """A score on a jump of the distribution function by p, and its log-weight log p - log φ(z)."""
        v = self._place(noise, p.shape, p)
        z = quantile(below + p * v, above + p * (1 - v))
        return z, torch.log(p) - log_normal(z)

    def _off_jump(self, u: Tensor, c: Tensor, below: Tensor, p: Tensor, above: Tensor) -> Tensor:
        """v in [0, 1] of a score on a jump by p, from its probability u = 1 - c: exact in both tails."""
        return torch.where(u < 0.5, (u - below) / p, 1 - (c - above) / p).clamp(0, 1)

    def inside(self) -> Tensor:
        """Values (columns,) between the bounds, to stand in for those that the map does not see."""
        return self.decode(next(self.buffers()).new_zeros(self.columns), Noise())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the module to its device, and stay in float64 whatever type it is converted to."""
        for child in self.children():
            child._apply(fn)
        for name, buffer in self.named_buffers(recurse=False):
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self

    def _keep(self, **tensors: Tensor) -> None:
        """Register float64 buffers that are fitted to data, and saved with a model's weights."""
        for name, value in tensors.items():
            self.register_buffer(name, value.double().clone())

    def _fix(self, **tensors: Tensor) -> None:
        """Register float64 buffers that the table's schema decides."""
        for name, value in tensors.items():
            self.register_buffer(name, value.double().clone(), persistent=False)


class Smooth(Marginal):
    """Columns with a density, or wide lattices: z = (arsinh(λu) / λ - mean) / std with u = (y - c) / s.

    y is x itself, log(x - low), -log(high - x) or the sum of both, by the bounds that there are, less
    what it is at a value inside: of a bound far away nothing is left but (x - inner) / (inner - low).
    λ = 0 stands for u itself; a larger λ turns tails of a power of x into tails of e^-z.

    Arguments:
        low: Lower bounds (columns,); -inf for none.
        high: Upper bounds (columns,); inf for none. A lattice ends one step after its last value.
        step: Steps of lattices (columns,); 0 for columns that have a density.
        origin: A value of each lattice (columns,).

    Example:
        >>> layer = Smooth(torch.tensor([0.0]), torch.tensor([math.inf]))
        >>> z, log_weight = layer.encode(torch.tensor([[1.0], [-1.0]]).double(), Noise())
        >>> z[0].item(), log_weight.flatten().tolist()
        (0.0, [0.0, -inf])
    """

    low: Tensor
    high: Tensor
    step: Tensor
    origin: Tensor
    nearest: Tensor
    inner: Tensor
    centre: Tensor
    scale: Tensor
    tail: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self, low: Tensor, high: Tensor, step: Tensor | None = None, origin: Tensor | None = None
    ) -> None:
        super().__init__(len(low))
        zero = torch.zeros(len(low), dtype=torch.float64)
        self._fix(low=low, high=high, step=zero if step is None else step)
        self._fix(origin=zero if origin is None else origin)
        self._keep(nearest=zero + 1e-9, inner=_between(self.low, self.high))
        self._keep(centre=zero, scale=zero + 1, tail=zero, mean=zero, std=zero + 1)
        sides = [
            (math.isfinite(a), math.isfinite(b))
            for a, b in zip(low.tolist(), high.tolist(), strict=True)
        ]
        self.lattices = bool((self.step > 0).any())
        for kind, wanted in _SIDES.items():
            places = [place for place, side in enumerate(sides) if side == wanted]
            self.register_buffer(f"{kind}_places", torch.tensor(places).long(), persistent=False)

    @property
    def exact(self) -> bool:
        return not self.lattices

    def encode(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        log_step = torch.zeros_like(x)
        if self.lattices:
            outside = (x < self.low) | (x >= self.high)
            x = x + self.step * self._place(noise, x.shape, x)
            log_step = or_one(self.step).log().expand_as(x)
            log_step = torch.where(outside & (self.step > 0), -torch.inf, log_step)
        z, log_slope = self.scores(x)
        return z, log_step + log_slope

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = T(x) and log T'(x), both (*, columns), without any draw; -inf outside the bounds."""
        y, log_slope = self._unbounded(x)
        u = (y - self.centre) / self.scale
        tail = or_one(self.tail)
        t = torch.where(self.tail > 0, torch.asinh(tail * u) / tail, u)
        log_slope = log_slope - torch.log(torch.hypot(torch.ones_like(u), self.tail * u))
        return (t - self.mean) / self.std, log_slope - torch.log(self.scale * self.std)

    def score(self, x: Tensor) -> Tensor:
        """T(x) (*, columns), infinite on and beyond the bounds."""
        t = torch.where(x <= self.low, -torch.inf, self.scores(x)[0])
        return torch.where(x >= self.high, torch.inf, t)

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores between which x (*, columns) lies: they are equal for a density."""
        return self.score(x), self.score(x + self.step)

    def values(self, z: Tensor) -> Tensor:
        """x = T⁻¹(z), between the points of lattices too."""
        t, tail = z * self.std + self.mean, or_one(self.tail)
        u = torch.where(self.tail > 0, torch.sinh((tail * t).clamp(-FARTHEST, FARTHEST)) / tail, t)
        return self._bounded(u * self.scale + self.centre)

    def decode(self, z: Tensor, noise: Noise) -> Tensor:
        x = self.values(z)
        if self.lattices:
            step = or_one(self.step)
            count = (x - self.origin) / step + 1e-9
            noise.record(self, count - torch.floor(count))
            whole = self.origin + step * torch.floor(count)
            x = torch.where(self.step > 0, whole.clamp(self.low, self.high - self.step), x)
        return x

    def _unbounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and log dy/dx; values on a bound count as the nearest one inside that training has seen."""
        outside = (x < self.low) | (x > self.high)
        inside = torch.minimum(torch.maximum(x, self.low + self.nearest), self.high - self.nearest)
        x = torch.where((x <= self.low) | (x >= self.high), inside, x)
        y, log_slope = x.clone(), torch.zeros_like(x)
        for kind, places in self._bounded_places():
            ends = self.low[places], self.inner[places], self.high[places]
            y[..., places], log_slope[..., places] = _OPEN[kind](x[..., places], *ends)
        return y, torch.where(outside, -torch.inf, log_slope)

    def _bounded(self, y: Tensor) -> Tensor:
        """x from y."""
        x = y.clone()
        for kind, places in self._bounded_places():
            ends = self.low[places], self.inner[places], self.high[places]
            x[..., places] = _CLOSE[kind](y[..., places].clamp(-700.0, 700.0), *ends)
        return x

    def _bounded_places(self) -> Iterator[tuple[str, Tensor]]:
        """The places of columns with bounds, by the kind of their bounds.

        Tensors, not lists: a list would have to be copied to a GPU at each use, which no CUDA graph can.
        """
        for kind in _SIDES:
            places = self.get_buffer(f"{kind}_places")
            if len(places):
                yield kind, places


def _between(low: Tensor, high: Tensor) -> Tensor:
    """A value between bounds that may be infinite."""
    low, high = low.clamp(min=-torch.finfo(low.dtype).max), high.clamp(max=torch.finfo(low.dtype).max)
    below, above = torch.where(low < -1e300, high - 2, low), torch.where(high > 1e300, low + 2, high)
    return torch.where((low < -1e300) & (high > 1e300), 0.0, below + 0.5 * (above - below))


def _log_gap(gap: Tensor, beyond: Tensor, reach: Tensor) -> Tensor:
    """log(gap / reach), where gap = reach + beyond: accurate for a small gap and for one like reach."""
    near = gap < 0.5 * reach
    far = torch.log1p(torch.where(near, 0.0, beyond / reach))
    return torch.where(near, torch.log(gap) - torch.log(reach), far)


def _open_lower(x: Tensor, low: Tensor, inner: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return _log_gap(x - low, x - inner, inner - low), -torch.log(x - low)


def _open_upper(x: Tensor, low: Tensor, inner: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return -_log_gap(high - x, inner - x, high - inner), -torch.log(high - x)


def _open_both(x: Tensor, low: Tensor, inner: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    (above, slope_above), (below, slope_below) = (
        part(x, low, inner, high) for part in (_open_lower, _open_upper)
    )
    return above + below, torch.log(high - low) + slope_above + slope_below


def _close_lower(y: Tensor, low: Tensor, inner: Tensor, high: Tensor) -> Tensor:
    reach = inner - low
    return torch.where(y < -0.5, low + reach * torch.exp(y), inner + reach * torch.expm1(y))


def _close_upper(y: Tensor, low: Tensor, inner: Tensor, high: Tensor) -> Tensor:
    return -_close_lower(-y, -high, -inner, -low)


def _close_both(y: Tensor, low: Tensor, inner: Tensor, high: Tensor) -> Tensor:
    """x from y = log((x - low) / a) - log((high - x) / b), with a = inner - low and b = high - inner."""
    a, b = inner - low, high - inner
    logit, fall = y + torch.log(a) - torch.log(b), torch.exp(-y.abs())
    move = torch.where(
        y < 0, a * torch.expm1(y) / (1 + a / b * fall), -b * torch.expm1(-y) / (1 + b / a * fall)
    )
    near_low = low + (high - low) * torch.sigmoid(logit)
    near_high = high - (high - low) * torch.sigmoid(-logit)
    x = torch.where(move < -0.5 * a, near_low, inner + move)
    return torch.where(move > 0.5 * b, near_high, x)


_SIDES = {"lower": (True, False), "upper": (False, True), "both": (True, True)}  # has it low, high?
_OPEN = {"lower": _open_lower, "upper": _open_upper, "both": _open_both}
_CLOSE = {"lower": _close_lower, "upper": _close_upper, "both": _close_both}


def or_one(numbers: Tensor) -> Tensor:
    """Numbers, and 1 where they are 0 and unused: both branches of a `where` have to be finite."""
    return torch.where(numbers > 0, numbers, 1.0)


def log_normal(z: Tensor) -> Tensor:
    """log φ(z), each number by itself."""
    return -0.5 * (z.square() + LOG_2_PI)


def normal_between(low: Tensor, high: Tensor) -> Tensor:
    """Φ(high) - Φ(low), accurate in both tails."""
    upper = low > 0
    a, b = torch.where(upper, -high, low), torch.where(upper, -low, high)
    return torch.special.ndtr(b) - torch.special.ndtr(a)


def quantile(below: Tensor, above: Tensor) -> Tensor:
    """Φ⁻¹ of a probability from it and its complement: accurate in both tails, and finite."""
    lower, upper = (part.clamp(1e-300, 1.0) for part in (below, above))
    return torch.where(lower < 0.5, torch.special.ndtri(lower), -torch.special.ndtri(upper))
