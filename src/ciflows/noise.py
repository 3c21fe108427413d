"""Where a model's randomness comes from."""

from __future__ import annotations

__all__ = ["Noise", "RowNoise", "TemperedNoise"]

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ciflows.densities import Density

N = TypeVar("N", bound="Noise")


class Noise:
    """A source of random numbers that layers draw from, and the way they draw an index.

    Arguments:
        generator: The generator that every number comes from; torch's own where it is None.

    Example:
        >>> first = Noise.seeded(0).normal((2,), like=torch.zeros(1))
        >>> again = Noise.seeded(0).normal((2,), like=torch.zeros(1))
        >>> torch.equal(first, again)
        True
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator
        self.data: Tensor | None = None
        self.counts: dict[float, int] = {}

    @classmethod
    def seeded(cls, seed: int | None, device: torch.device | str = "cpu") -> Noise:
        """Noise that repeats itself for the same seed; unseeded where the seed is None."""
        if seed is None:
            return cls()
        return cls(torch.Generator(device).manual_seed(seed))

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Give the numbers that are drawn inside once more after it; torch's own generator goes on."""
        state = None if self.generator is None else self.generator.get_state()
        try:
            yield
        finally:
            if self.generator is not None and state is not None:
                self.generator.set_state(state)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Standard normal numbers with the type and device of `like`."""
        return torch.randn(tuple(shape), dtype=like.dtype, device=like.device, generator=self.generator)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers uniform on [0, 1) with the type and device of `like`."""
        return torch.rand(tuple(shape), dtype=like.dtype, device=like.device, generator=self.generator)

    def about(self: N, x: Tensor, shape: Sequence[int]) -> N:
        """The same noise for x (*, shape), so that the `signs` of all that is made of it are its own."""
        if self.data is not None:  # a flow inside another one: the outer one's data count
            return self
        noise = copy.copy(self)
        noise.data = x.detach().flatten(x.ndim - len(shape))
        return noise

    def from_draw(self: N, first: int) -> N:
        """The noise of the draws from number `first` on, where they come some at a time."""
        return self

    def signs(self, x: Tensor, shape: Sequence[int], numbers: Sequence[int], seed: int = 0) -> Tensor:
        """Signs ±1 for x (*, shape) that no draw changes: (len(numbers), *, shape).

        Each is a hash of the seed, its number, its place in `shape` and the datum that x was made from
        (`about`; x itself where nothing is known). So all copies of one datum get the same signs,
        whatever its neighbours, its place in a batch and the device; different data, independent ones.

        Example:
            >>> x = torch.randn(3, 2)
            >>> copies = Noise().about(x, (2,)).signs(torch.randn(5, 3, 2), (2,), range(4))
            >>> copies.shape, bool((copies == copies[:, :1]).all())
            (torch.Size([4, 5, 3, 2]), True)
        """
        leading = x.shape[: x.ndim - len(shape)]
        data = x.detach().flatten(len(leading)) if self.data is None else self.data
        keys = _mix(_digest(data) ^ _mix(torch.tensor(seed, device=x.device)))
        each = torch.tensor(list(numbers), device=x.device).reshape(-1, *[1] * len(leading))
        places = torch.arange(torch.Size(shape).numel(), device=x.device)
        hashed = _mix(_mix(keys ^ _mix(each))[..., None] ^ _mix(places))
        signs = torch.where(hashed < 0, -1.0, 1.0).to(x.dtype)
        return signs.reshape(*hashed.shape[:-1], *shape).expand(len(each), *x.shape)

    def geometric(self, p: float) -> int:
        """A draw from P(n) = p (1 - p)^(n - 1) on n = 1, 2, ...; the one in `counts` where there is one.

        Where all blocks of a flow share it, what a step computes is known before it begins.
        """
        if p in self.counts:
            return self.counts[p]
        device = self.generator.device if self.generator is not None else "cpu"
        draw = torch.empty((), device=device).geometric_(p, generator=self.generator)
        return int(draw.item())

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        """Draw u ~ q(u | context), differentiably, with log q(u | context).

        Objectives that need other gradients of q than the plain ones override this.
        """
        return density.draw_with_log_prob(leading, context, self)


class TemperedNoise(Noise):
    """Noise whose normal numbers are multiplied by a temperature.

    A flow then draws its base, what leaves it early and its indices closer to their means (below 1) or
    farther away: fewer kinds of samples, but likelier ones, or more.

    Arguments:
        generator: The generator that every number comes from; torch's own where it is None.
        temperature: The factor.
    """

    def __init__(self, generator: torch.Generator | None, temperature: float) -> None:
        super().__init__(generator)
        self.temperature = temperature

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.temperature * super().normal(shape, like)


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


def _digest(data: Tensor) -> Tensor:
    """A 64-bit number for each row of some data: (*, d) -> (*)."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
    bits = data.contiguous().view(whole).long()
    places = torch.arange(data.shape[-1], device=data.device)
    return _mix(bits ^ _mix(places)).sum(-1)


def _mix(key: Tensor) -> Tensor:
    """Scatter 64-bit integers over all 64-bit integers (the finaliser of splitmix64, Steele et al.)."""
    key = key + _signed(0x9E3779B97F4A7C15)
    key = (key ^ _shift(key, 30)) * _signed(0xBF58476D1CE4E5B9)
    key = (key ^ _shift(key, 27)) * _signed(0x94D049BB133111EB)
    return key ^ _shift(key, 31)


def _shift(key: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros, where torch fills with the sign."""
    return (key >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
