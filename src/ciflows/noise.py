"""Where a model's randomness comes from."""

from __future__ import annotations

__all__ = ["Noise"]

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ciflows.densities import Density


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

    @classmethod
    def seeded(cls, seed: int | None, device: torch.device | str = "cpu") -> Noise:
        """Noise that repeats itself for the same seed; unseeded where the seed is None."""
        if seed is None:
            return cls()
        return cls(torch.Generator(device).manual_seed(seed))

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Standard normal numbers with the type and device of `like`."""
        return torch.randn(tuple(shape), dtype=like.dtype, device=like.device, generator=self.generator)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers uniform on [0, 1) with the type and device of `like`."""
        return torch.rand(tuple(shape), dtype=like.dtype, device=like.device, generator=self.generator)

    def geometric(self, p: float) -> int:
        """A draw from P(n) = p (1 - p)^(n - 1) on n = 1, 2, ..."""
        device = self.generator.device if self.generator is not None else "cpu"
        draw = torch.empty((), device=device).geometric_(p, generator=self.generator)
        return int(draw.item())

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        """Draw u ~ q(u | context), differentiably, with log q(u | context).

        Objectives that need other gradients of q than the plain ones override this.
        """
        return density.draw_with_log_prob(leading, context, self)
