"""Columns with few values, each with a probability of its own."""

from __future__ import annotations

__all__ = ["Cells"]

import torch
from torch import Tensor

from ciflows.core.noise import Noise
from ciflows.tables.marginals import Marginal, log_normal, quantile

MOST_BEYOND = 2.0**40  # steps beyond the last level that a sample may go


class Cells(Marginal):
    """Levels, each a cell of the normal distribution of the level's own probability.

    With C_k = p_0 + ... + p_{k-1} the cell of level k is [Φ⁻¹(C_k), Φ⁻¹(C_{k+1})), and

        v ~ U(0, 1),  z = Φ⁻¹(C_k + p_k v),  log_weight = log p_k - log φ(z)

    so that P(x) = ∫ p(z) dz over the cell, estimated without bias; where p(z) is the normal density
    itself there is no variance at all. The first and last cell of a lattice without a bound stand for
    all values beyond: the j-th (j = 0, 1, ...) has 1 / ((j + 1)(j + 2)) of the cell's probability.

    Arguments:
        levels: How many levels each column has, its cells for values beyond included (columns,).
        origin: The value of the first level (columns,).
        step: The distance between levels (columns,).
        below: Whether the first cell stands for all values below (columns,).
        above: Whether the last cell stands for all values above (columns,).

    Example:
        >>> from ciflows.core.density import LOG_2_PI
        >>> layer = Cells(torch.tensor([3]))
        >>> layer.probabilities[0] = torch.tensor([0.2, 0.3, 0.5])
        >>> x = torch.tensor([[0.0], [1.0], [2.0]]).double()
        >>> z, log_weight = layer.encode(x, Noise())
        >>> torch.exp(log_weight - 0.5 * (z**2 + LOG_2_PI)).flatten()
        tensor([0.2000, 0.3000, 0.5000], dtype=torch.float64)
        >>> torch.equal(layer.decode(z, Noise()), x)
        True
    """

    probabilities: Tensor
    last: Tensor
    origin: Tensor
    step: Tensor
    below: Tensor
    above: Tensor

    def __init__(
        self,
        levels: Tensor,
        origin: Tensor | None = None,
        step: Tensor | None = None,
        below: Tensor | None = None,
        above: Tensor | None = None,
    ) -> None:
        super().__init__(len(levels))
        zero = torch.zeros(len(levels), dtype=torch.float64)
        self._fix(last=levels - 1, origin=zero if origin is None else origin)
        self._fix(step=zero + 1 if step is None else step)
        self._fix(below=zero if below is None else below, above=zero if above is None else above)
        there = torch.arange(int(levels.max())) < levels[:, None]
        self._keep(probabilities=there / levels[:, None])

    def cell(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The cell of values x (*, columns), and how many steps they lie beyond a tail's first value."""
        level = torch.round((x - self.origin) / self.step) + self.below
        cell = torch.minimum(level.clamp(min=0), self.last)
        return cell, (level - cell).abs()

    def encode(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        cell, beyond = self.cell(x)
        in_tail = ((cell == 0) & (self.below > 0)) | ((cell == self.last) & (self.above > 0))
        lower, upper = self._cumulative()
        index = cell.long()
        p = _look_up(self.probabilities, index)
        v = self._place(noise, x.shape, p)
        z = quantile(_look_up(lower, index) + p * v, _look_up(upper, index + 1) + p * (1 - v))
        share = torch.where(in_tail, -torch.log((beyond + 1) * (beyond + 2)), 0.0)
        share = torch.where((beyond > 0) & ~in_tail, -torch.inf, share)
        return z, torch.log(p) + share - log_normal(z)

    def decode(self, z: Tensor, noise: Noise) -> Tensor:
        lower, upper = self._cumulative()
        edges = quantile(lower, upper)[:, 1:-1].contiguous()
        columns = z.reshape(-1, self.columns).T.contiguous()
        cell = torch.searchsorted(edges, columns, right=True).T.reshape(z.shape)
        cell = torch.minimum(cell.to(z.dtype), self.last)
        index = cell.long()
        p, u, c = _look_up(self.probabilities, index), torch.special.ndtr(z), torch.special.ndtr(-z)
        below, above = _look_up(lower, index), _look_up(upper, index + 1)
        noise.record(self, self._off_jump(u, c, below, p, above))
        level = cell - self.below
        if bool((self.below + self.above).any()):
            u = noise.uniform(z.shape, like=z).clamp(min=1 / MOST_BEYOND)
            beyond = torch.floor(1 / u) - 1
            level = torch.where((cell == 0) & (self.below > 0), level - beyond, level)
            level = torch.where((cell == self.last) & (self.above > 0), level + beyond, level)
        return self.origin + self.step * level

    def _cumulative(self) -> tuple[Tensor, Tensor]:
        """Probabilities below and above each of the edges: (columns, levels + 1) both."""
        zero = self.probabilities.new_zeros(self.columns, 1)
        lower = torch.cat([zero, self.probabilities.cumsum(-1)], -1)
        upper = torch.cat([self.probabilities.flip(-1).cumsum(-1).flip(-1), zero], -1)
        return lower, upper


def _look_up(table: Tensor, level: Tensor) -> Tensor:
    """The entries of a table (columns, levels) at levels (*, columns)."""
    return table[torch.arange(len(table), device=table.device), level]
