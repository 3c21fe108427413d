"""Random numbers that belong to the rows of the data, not to their places in a batch."""

from __future__ import annotations

__all__ = ["RowNoise"]

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ciflows.noise import Noise, _digest, _mix, _shift


class RowNoise(Noise):
    """Noise that belongs to the data: a row gets the same numbers whatever its neighbours.

    Each is a hash of the seed, the datum (`about`), the number of the draw, and its place among the
    numbers of that draw. So the estimate of a row is the same in every batch and order, to rounding.

    Arguments:
        seed: The seed.

    Example:
        >>> x = torch.randn(3, 2)
        >>> three = RowNoise(0).about(x, (2,)).normal((5, 3, 4), like=x)
        >>> one = RowNoise(0).about(x[1:2], (2,)).from_draw(3).normal((2, 1, 4), like=x)
        >>> torch.equal(three[3:, 1:2], one)
        True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.first, self.calls = seed, 0, 0

    def from_draw(self, first: int) -> RowNoise:
        """The noise of the draws from number `first` on, where they come some at a time."""
        noise = copy.copy(self)
        noise.first, noise.calls = self.first + first, 0
        return noise

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        halfway = (_shift(self._hashes(shape), 11).double() + 0.5) * 2.0**-53  # inside (0, 1)
        return (math.sqrt(2) * torch.erfinv(2 * halfway - 1)).to(like.dtype)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return _shift(self._hashes(shape), 40).to(like.dtype) * 2.0**-24  # no rounding up to 1

    def _hashes(self, shape: Sequence[int]) -> Tensor:
        """Hashes (draws, rows, *event) for the rows that this noise is about."""
        assert self.data is not None, "RowNoise: nothing is known of the data"
        device, leading = self.data.device, self.data.ndim - 1
        keys = _mix(_digest(self.data) ^ _mix(torch.tensor(self.seed, device=device)))
        keys = _mix(keys ^ _mix(torch.tensor(self.calls, device=device)))
        draws = self.first + torch.arange(shape[0], device=device)
        places = torch.arange(math.prod(shape[1 + leading :]), device=device)
        self.calls += 1
        each = _mix(keys ^ _mix(draws.reshape(-1, *[1] * leading)))
        return _mix(each[..., None] ^ _mix(places)).reshape(tuple(shape))
