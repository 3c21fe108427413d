"""Columns some of whose values are rounded to a grid, beside a density or a finer lattice."""

from __future__ import annotations

__all__ = ["Rounded"]

import torch
from torch import Tensor

from ciflows.core.noise import Noise
from ciflows.tables.marginals import Marginal, Smooth, log_normal, normal_between, or_one, quantile

ON_GRID = 1e-9  # of a step: what is nearer to the end of a cell is in the next


class Rounded(Marginal):
    """Columns of which a share s is rounded to a grid, with a `Smooth` map T for all values.

    With F = Φ ∘ T, and for each value k of the grid the cell [l, h) of values that are rounded to it,

        on the grid:    P = s (F(h) - F(l)) + (1 - s) P_T(k),   P_T(k) = 0 unless T is of a lattice
        elsewhere:      (1 - s) times what T gives

    The score is the normal quantile of the distribution function, which at the ends of all cells is F
    itself; on the grid, where it jumps, it is drawn.

    Arguments:
        rest: The map for all values, rounded or not.
        grid: The step of each column's grid (columns,); for a lattice a multiple of its own step.
        origin: A value of each grid (columns,).

    Example:
        >>> import math
        >>> from ciflows.core.density import LOG_2_PI
        >>> rest = Smooth(torch.tensor([-math.inf]), torch.tensor([math.inf]))
        >>> layer = Rounded(rest, torch.tensor([1.0]), torch.tensor([0.0]))
        >>> layer.share.fill_(0.5)
        tensor([0.5000], dtype=torch.float64)
        >>> z, log_weight = layer.encode(torch.arange(-9.0, 10.0).double()[:, None], Noise())
        >>> torch.exp(log_weight - 0.5 * (z**2 + LOG_2_PI)).sum().item()
        0.5
    """

    grid: Tensor
    origin: Tensor
    share: Tensor

    def __init__(self, rest: Smooth, grid: Tensor, origin: Tensor) -> None:
        super().__init__(rest.columns)
        self.rest = rest
        self._fix(grid=grid, origin=origin)
        self._keep(share=torch.full_like(grid, 0.5))

    @property
    def low(self) -> Tensor:
        """Lower bounds (columns,)."""
        return self.rest.low

    @property
    def high(self) -> Tensor:
        """Upper bounds (columns,)."""
        return self.rest.high

    @property
    def step(self) -> Tensor:
        """Steps of lattices (columns,); 0 for a density."""
        return self.rest.step

    def on_grid(self, x: Tensor) -> Tensor:
        """Which values x (*, columns) are on the grid, up to rounding."""
        count = (x - self.origin) / self.grid
        off = 8 * torch.finfo(x.dtype).eps * (x.abs() + self.origin.abs()) / self.grid
        return (count - torch.round(count)).abs() <= off

    def encode(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        on, (k, low, high) = self.on_grid(x), self.cell(x)
        t, log_weight = self.rest.encode(torch.where(on, self.rest.inside(), x), noise)
        edge = torch.where(x < k, low, high)
        z = quantile(self._mix(t, edge), self._mix(-t, -edge))
        log_rest = torch.log1p(-self.share) + log_weight + log_normal(t) - log_normal(z)
        z_on, log_on = self._on_jump(*self._jump(k, low, high), noise)
        beyond = torch.where(self.step > 0, x >= self.high, x > self.high)
        log_on = torch.where((x < self.low) | beyond, -torch.inf, log_on)
        return torch.where(on, z_on, z), torch.where(on, log_on, log_rest)

    def decode(self, z: Tensor, noise: Noise) -> Tensor:
        u, c = torch.special.ndtr(z), torch.special.ndtr(-z)
        k, low, high = self.cell(self.rest.values(z))
        below, p, above = self._jump(k, low, high)
        lower = u < 0.5
        under = torch.where(lower, u < below, c > above + p)
        over = torch.where(lower, u >= below + p, c <= above) & ~under
        edge, rest = torch.where(under, low, high), 1 - self.share
        t = quantile(
            (u - self.share * torch.special.ndtr(edge)) / rest,
            (c - self.share * torch.special.ndtr(-edge)) / rest,
        )
        x = self.rest.decode(t, noise)
        noise.record(self, torch.where(under | over, 0.0, self._off_jump(u, c, below, p, above)))
        return torch.where(under | over, x, k)

    def cell(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The value of the grid that x (*, columns) is rounded to, and T at the ends of its cell."""
        step = self.step
        half = torch.where(step > 0, step * torch.floor(0.5 * self.grid / or_one(step)), 0.5 * self.grid)
        count = torch.floor((x - self.origin + half) / self.grid + ON_GRID)
        first = torch.ceil((self.low - self.origin) / self.grid - ON_GRID)
        last = torch.floor((self.high - step - self.origin) / self.grid + ON_GRID)
        count = torch.minimum(torch.maximum(count, first), last)
        k = self.origin + self.grid * count
        low = torch.where(count <= first, -torch.inf, self.rest.score(k - half))
        return k, low, torch.where(count >= last, torch.inf, self.rest.score(k - half + self.grid))

    def edges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores between which x (*, columns) lies: they are equal where it has a density."""
        k, low, high = self.cell(x)
        on, edge = self.on_grid(x), torch.where(x < k, low, high)
        below, p, above = self._jump(k, low, high)
        t, t_after = self.rest.edges(x)
        first = torch.where(on, below, self._mix(t, edge))
        last = torch.where(on, above, self._mix(-t_after, -edge))
        p = torch.where(on, p, (1 - self.share) * normal_between(t, t_after))
        return _open_quantile(first, p + last), _open_quantile(first + p, last)

    def _jump(self, k: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The probabilities of all below a value of the grid, of itself, and of all above it."""
        t, t_after = self.rest.edges(k)
        p = self.share * normal_between(low, high) + (1 - self.share) * normal_between(t, t_after)
        return self._mix(t, low), p.clamp(min=1e-300), self._mix(-t_after, -high)

    def _mix(self, t: Tensor, edge: Tensor) -> Tensor:
        """(1 - s) Φ(t) + s Φ(edge)."""
        return (1 - self.share) * torch.special.ndtr(t) + self.share * torch.special.ndtr(edge)


def _open_quantile(below: Tensor, above: Tensor) -> Tensor:
    """Φ⁻¹ of a probability from it and its complement, infinite at 0 and 1."""
    z = torch.where(below <= 0, -torch.inf, quantile(below, above))
    return torch.where(above <= 0, torch.inf, z)
