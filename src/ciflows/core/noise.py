"""Where a model's randomness comes from."""

from __future__ import annotations

__all__ = ["Noise", "RowNoise", "ShareNoise", "TemperedNoise", "random_seed"]

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ciflows.core.density import Density

N = TypeVar("N", bound="Noise")
R = TypeVar("R", bound="RowNoise")
S = TypeVar("S", bound="ShareNoise")
_STEPS = (0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7)  # odd: no counters meet


class Noise:
    """A source of random numbers that layers draw from, and the way they draw their latent numbers.

    A layer that draws in `encode`, such as an index u or a dequantisation v, passes its draw through
    `latent` (or draws it by `posterior`), and hands the number that led to a sample to `record` in
    `decode`:

        v = noise.latent(self, noise.uniform(x.shape, like=x))      # in _encode
        noise.record(self, z - x)                                   # in _decode

    Then `diagnostics.sandwich` can put the true v among the draws of a sample.

    Arguments:
        generator: The generator that every number comes from; torch's default one if None.

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
        """Noise that repeats for the same seed; from torch's default generator if the seed is None."""
        if seed is None:
            return cls()
        return cls(torch.Generator(device).manual_seed(seed))

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Repeat after this block the numbers drawn in it; torch's default generator is not rewound."""
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

    def about(self: N, x: Tensor, shape: Sequence[int], context: Tensor | None = None) -> N:
        """The same noise for rows x (*, shape), whose `signs` depend on the row.

        Arguments:
            context: Their context (*, context_features); only `RowNoise` uses it.
        """
        if self.data is not None:  # inside another flow, whose data count
            return self
        noise = copy.copy(self)
        noise.data = x.detach().flatten(x.ndim - len(shape))
        return noise

    def from_draw(self: N, first: int) -> N:
        """The noise for draws number `first` and later, if draws come in chunks."""
        return self

    def latent(self, drawer: nn.Module, draw: Tensor) -> Tensor:
        """The latent number that a layer uses in `encode`: by default, the one it has just drawn."""
        return draw

    def record(self, drawer: nn.Module, value: Tensor, context: Tensor | None = None) -> None:
        """Take note, in `decode`, of the latent number that a sample was made with.

        Arguments:
            drawer: The layer; or the posterior that would draw the number in `encode`.
            value: The number (*leading, *shape).
            context: The posterior's context for this sample, with its gradients.
        """

    def signs(self, x: Tensor, shape: Sequence[int], numbers: Sequence[int], seed: int = 0) -> Tensor:
        """Signs ±1 for x (*, shape) that do not depend on the draws: (len(numbers), *, shape).

        Each is a hash of the seed, its number, its place in `shape` and the row that x was made from
        (see `about`; x itself if no row is known). So all copies of a row get the same signs in every
        batch and on every device, and different rows get independent ones.

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
        """Draw n = 1, 2, ... with P(n) = p (1 - p)^(n - 1), or take it from `counts`.

        With `counts` all blocks of a flow share n, and a step's work is known before it begins.
        """
        if p in self.counts:
            return self.counts[p]
        device = self.generator.device if self.generator is not None else "cpu"
        draw = torch.empty((), device=device).geometric_(p, generator=self.generator)
        return int(draw.item())

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        """Draw u ~ q(u | context), differentiably, with log q(u | context).

        Objectives with other gradients of q, and other proposals, override this.
        """
        return density.draw_with_log_prob(leading, context, self)


class TemperedNoise(Noise):
    """Noise whose normal numbers are multiplied by a temperature.

    Below 1 a flow's samples are less varied and more likely; above 1 the opposite.
    """

    def __init__(self, generator: torch.Generator | None, temperature: float) -> None:
        super().__init__(generator)
        self.temperature = temperature

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.temperature * super().normal(shape, like)


class ShareNoise(Noise):
    """Noise for some rows of a batch: the numbers that they have in the noise of the whole batch.

    So processes that share a batch draw, together, what one process would; and their generators stay
    the same.

    Arguments:
        generator: The generator that every number comes from; it must be the same for all shares.
        rows: Which rows of the batch these are.
        total: Number of rows in the whole batch.

    Example:
        >>> whole = Noise.seeded(0).normal((3, 5, 2), like=torch.zeros(1))
        >>> some = ShareNoise(Noise.seeded(0).generator, slice(1, 3), total=5).from_draw(0)
        >>> torch.equal(some.normal((3, 2, 2), like=torch.zeros(1)), whole[:, 1:3])
        True
    """

    def __init__(self, generator: torch.Generator | None, rows: slice, total: int) -> None:
        super().__init__(generator)
        self.rows, self.total = rows, total
        self.place = 0  # of the rows among the dimensions

    def from_draw(self: S, first: int) -> S:
        noise = copy.copy(self)
        noise.place = 1
        return noise

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._own(super().normal(self._whole(shape), like))

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._own(super().uniform(self._whole(shape), like))

    def _whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        own = self.rows.stop - self.rows.start
        assert shape[self.place] == own, f"ShareNoise: {own} rows, but numbers of shape {tuple(shape)}"
        return (*shape[: self.place], self.total, *shape[self.place + 1 :])

    def _own(self, numbers: Tensor) -> Tensor:
        return numbers[(slice(None),) * self.place + (self.rows,)].contiguous()


class RowNoise(Noise):
    """Noise that belongs to the rows: each row gets the same numbers in every batch and order.

    Each number is a hash of the seed, the row and its context (`about`), the number of the draw, and its
    place among the numbers of that draw. So a row's estimate does not depend on the others, to rounding.

    Arguments:
        seed: The seed; a random one if None.

    Example:
        >>> x = torch.randn(3, 2)
        >>> three = RowNoise(0).about(x, (2,)).normal((5, 3, 4), like=x)
        >>> one = RowNoise(0).about(x[1:2], (2,)).from_draw(3).normal((2, 1, 4), like=x)
        >>> torch.equal(three[3:, 1:2], one)
        True
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed = random_seed() if seed is None else seed
        self.first, self.calls = 0, 0
        self.keys: Tensor | None = None

    def about(self: R, x: Tensor, shape: Sequence[int], context: Tensor | None = None) -> R:
        noise = super().about(x, shape)
        if noise.data is not None and noise.keys is None:
            seed = torch.tensor(_signed(self.seed % 2**64), device=x.device)
            noise.keys = _mix(_digest(noise.data.double()) ^ _mix(seed))
            if context is not None:
                noise.keys = _mix(noise.keys ^ _mix(_digest(context.detach().double())))
        return noise

    def from_draw(self: R, first: int) -> R:
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
        assert self.keys is not None, "RowNoise: call about(x, shape) first"
        device, leading = self.keys.device, self.keys.ndim
        draws = self.first + torch.arange(shape[0], device=device)
        places = torch.arange(math.prod(shape[1 + leading :]), device=device)
        start = _signed(self.calls * _STEPS[0] % 2**64)
        counters = draws[:, None] * _signed(_STEPS[1]) + places * _signed(_STEPS[2]) + start
        counters = _mix(counters)  # small: only the next mix is of full size
        self.calls += 1
        counters = counters.reshape(-1, *[1] * leading, len(places))
        return _mix(self.keys[..., None] ^ counters).reshape(tuple(shape))


def random_seed() -> int:
    """A seed from torch's default generator."""
    return int(torch.randint(2**62, ()).item())


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
