"""Scores of a table's columns, with their tails as they are in the file."""

from __future__ import annotations

__all__ = ["WithoutTails", "find_tails"]

import math

import torch
from torch import Tensor

from ciflows.core.layer import Bijection
from ciflows.core.noise import Noise
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.marginals import Smooth, or_one

FARTHEST = 20.0  # beyond this, sinh goes on as a line: it stays finite


class WithoutTails(Bijection):
    """Undo what `Smooth` does to tails: u = (sinh(λt) / λ - shift) / scale with t = std z + mean.

    The tails of a column are drawn in if that makes the column more like a Gaussian. For clusters it
    may do the reverse: each by itself was one, and is bent.

    Arguments:
        tail: λ of each feature (features,); 0 for features to leave as they are.
        mean: The mean of t (features,).
        std: The standard deviation of t (features,).

    Example:
        >>> layer = WithoutTails(torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2))
        >>> layer.encode(torch.ones(1, 2))[0]
        tensor([[1.0000, 1.1752]])
    """

    tail: Tensor
    mean: Tensor
    std: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, tail: Tensor, mean: Tensor, std: Tensor) -> None:
        super().__init__((len(tail),))
        named = {"tail": tail, "mean": mean, "std": std}
        named |= {"shift": torch.zeros_like(tail), "scale": torch.ones_like(tail)}
        for name, value in named.items():
            self.register_buffer(name, value.float().clone())

    @torch.no_grad()
    def standardise(self, z: Tensor) -> None:
        """Let u have mean 0 and standard deviation 1 for these scores (rows, features)."""
        self.shift.zero_()
        self.scale.fill_(1)
        u = self.encode(z)[0].double()
        self.shift.copy_(u.mean(0))
        self.scale.copy_(u.std(0).clamp(min=1e-6))

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        t = x * self.std + self.mean
        bent = self.tail * t
        inside = bent.clamp(-FARTHEST, FARTHEST)
        straight = torch.sinh(inside) + torch.cosh(inside) * (bent - inside)
        u = torch.where(self.tail > 0, straight / or_one(self.tail), t)
        log_slope = torch.log(torch.cosh(inside)) + torch.log(self.std / self.scale)
        return (u - self.shift) / self.scale, log_slope.sum(-1)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        u = z * self.scale + self.shift
        straight, last = self.tail * u, math.sinh(FARTHEST)
        inside = straight.clamp(-last, last)
        bent = torch.asinh(inside) + (straight - inside) / math.cosh(FARTHEST)
        t = torch.where(self.tail > 0, bent / or_one(self.tail), u)
        return (t - self.mean) / self.std


def find_tails(columns: ColumnLayer) -> WithoutTails | None:
    """The map that undoes the tails of a table's columns; None if there are none to undo."""
    features = columns.shape[0]
    tail, mean, std = torch.zeros(features), torch.zeros(features), torch.ones(features)
    for places, marginal in zip(columns.places, columns.marginals, strict=True):
        if isinstance(marginal, Smooth):
            tail[places], mean[places], std[places] = (
                part.float().cpu() for part in (marginal.tail, marginal.mean, marginal.std)
            )
    return WithoutTails(tail, mean, std) if bool((tail > 0).any()) else None
