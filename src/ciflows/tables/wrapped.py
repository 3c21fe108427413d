"""The map of columns on a circle: a circle has no ends, so it is unrolled onto the whole line."""

from __future__ import annotations

__all__ = ["Wrapped"]

import torch
from torch import Tensor

from ciflows.core.noise import Noise
from ciflows.tables.marginals import Marginal, log_normal, or_one

TURNS = 4  # either way; scores reach 8 there, for the widest scale


class Wrapped(Marginal):
    """Columns of period P, as the wrapped density p(x) = Σ_k p_line(x + k P).

    The turn k is an index, drawn from what it would be if the scores were normal:

        k ~ φ(z_k) / Σ_j φ(z_j),   z_k = (x + k P - centre) / scale,
        log_weight = log Σ_j φ(z_j) - log scale - log φ(z_k)

    Any continuous density of the scores is one on the circle that is continuous across the seam, which
    plays no part: the map is the same, up to a rotation, wherever [low, low + P) begins.

    Arguments:
        low: Where the values begin (columns,).
        period: P (columns,).
        step: Steps of lattices (columns,); 0 for columns that have a density.
        origin: A value of each lattice (columns,).

    Example:
        >>> layer = Wrapped(torch.zeros(1), torch.tensor([24.0]))
        >>> x = torch.tensor([[23.5], [24.5]]).double()
        >>> layer.decode(layer.encode(x, Noise())[0], Noise()).flatten().tolist()
        [23.5, 0.5]
    """

    low: Tensor
    period: Tensor
    step: Tensor
    origin: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(
        self, low: Tensor, period: Tensor, step: Tensor | None = None, origin: Tensor | None = None
    ) -> None:
        super().__init__(len(low))
        zero = torch.zeros(len(low), dtype=torch.float64)
        self._fix(low=low, period=period, step=zero if step is None else step)
        self._fix(origin=zero if origin is None else origin)
        self._keep(centre=zero, scale=0.5 * period)
        self.lattices = bool((self.step > 0).any())

    @property
    def discrete(self) -> bool:
        return self.lattices

    def encode(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        draw = noise.latent(self, noise.uniform((*x.shape, 2), like=x))
        x = x + self.step * draw[..., 0].clamp(2.0**-30, 1 - 2.0**-30)
        z, below = self._turns(x)
        turn = (draw[..., 1:] >= below).sum(-1, keepdim=True).clamp(max=2 * TURNS)
        chosen = z.gather(-1, turn)[..., 0]
        log_step = or_one(self.step).log()
        return chosen, log_step + self.log_density(x) - log_normal(chosen)

    def log_density(self, x: Tensor) -> Tensor:
        """The log-density of x (*, columns) where scores are normal, each column by itself."""
        return torch.logsumexp(log_normal(self._turns(x)[0]), -1) - torch.log(self.scale)

    def decode(self, z: Tensor, noise: Noise) -> Tensor:
        x = self.centre + self.scale * z
        turns, below = self._turns(x)
        turn = (turns - z[..., None]).abs().argmin(-1, keepdim=True)
        above = below.gather(-1, turn)[..., 0]
        share = torch.softmax(log_normal(turns), -1).gather(-1, turn)[..., 0]
        step = or_one(self.step)
        count = (x - self.origin) / step + 1e-9
        noise.record(self, torch.stack([count - torch.floor(count), above - 0.5 * share], -1))
        x = torch.where(self.step > 0, self.origin + step * torch.floor(count), x)
        inside = self.low + torch.remainder(x - self.low, self.period)
        return torch.where(inside < self.low + self.period, inside, self.low)

    def decode_with_log_weight(self, z: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        x = self.decode(z, noise)
        return x, self.log_density(x) - log_normal(z)

    def _turns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of x (*, columns) at each turn, and probabilities up to it; (*, columns, turns)."""
        nearest = torch.remainder(x - self.centre + 0.5 * self.period, self.period) - 0.5 * self.period
        k = torch.arange(-TURNS, TURNS + 1, dtype=x.dtype, device=x.device)
        z = (nearest[..., None] + k * self.period[:, None]) / self.scale[:, None]
        return z, torch.softmax(log_normal(z), -1).cumsum(-1)
