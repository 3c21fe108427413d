"""Other ways to draw a model's latent numbers: the true ones of a sample, and those of a widened q.

A layer that draws in `encode` takes part in both with two calls of its noise (see `Noise.latent`):
`latent` or `posterior` in `encode`, and `record` in `decode`.
"""

from __future__ import annotations

__all__ = ["RecordingNoise", "ReplayNoise", "SplitNoise", "TrueDrawNoise", "WidenedNoise"]

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ciflows.core.density import ConditionalNormal, Density
from ciflows.core.layer import leading_shape, sum_event
from ciflows.core.noise import Noise, RowNoise, random_seed

T = TypeVar("T", bound="TrueDrawNoise")

WIDE_SHARE = 0.5  # of the draws
WIDE_FACTOR = 3.0  # of q's standard deviation


class RecordingNoise(Noise):
    """Noise that keeps the latent numbers with which the model makes its samples.

    Attributes:
        values: What each layer, or each posterior, recorded.
        contexts: The contexts of the posteriors.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__(generator)
        self.values: dict[nn.Module, Tensor] = {}
        self.contexts: dict[nn.Module, Tensor] = {}

    def record(self, drawer: nn.Module, value: Tensor, context: Tensor | None = None) -> None:
        if drawer in self.values:
            raise ValueError(
                f"{type(drawer).__name__}: used twice in one flow; its draws are ambiguous."
            )
        self.values[drawer] = value
        if context is not None:
            self.contexts[drawer] = context


class ReplayNoise(Noise):
    """Noise that gives samples their own indices back in `encode`.

    q is evaluated at the context that was recorded with a sample. The one that `encode` computes has the
    same value, but not its gradients.
    """

    def __init__(self, record: RecordingNoise) -> None:
        super().__init__(record.generator)
        self.recorded = record

    def latent(self, drawer: nn.Module, draw: Tensor) -> Tensor:
        return self.recorded.values[drawer]

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        u = self.recorded.values[density]
        return u, density.log_weight(u, self.recorded.contexts[density], self)


class SplitNoise(ReplayNoise):
    """Noise that gives samples their own indices back, and takes gradients of q apart.

    Attributes:
        log_qs: log q(u | x) of each index, with gradients; log-weights have them without.
    """

    def __init__(self, record: RecordingNoise) -> None:
        super().__init__(record)
        self.log_qs: list[Tensor] = []

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        u = self.recorded.values[density]
        self.log_qs.append(density.log_weight(u, context, self))
        return u, self.log_qs[-1].detach()


class TrueDrawNoise(RowNoise):
    """Noise whose draw number 0 is the one that made each row; all others come from q.

    Arguments:
        values: What a `RecordingNoise` kept while the rows were sampled.
    """

    def __init__(self, seed: int, values: dict[nn.Module, Tensor]) -> None:
        super().__init__(seed)
        self.values = values
        self.unclaimed = torch.zeros((), dtype=torch.int64)  # shared by all copies of this noise

    def about(self: T, x: Tensor, shape: Sequence[int], context: Tensor | None = None) -> T:
        """Simulated rows may be equal, as of integers, and need draws of their own: places differ."""
        leading = leading_shape(x, tuple(shape))
        places = torch.arange(leading.numel(), device=x.device).reshape(*leading, 1)
        return super().about(x, shape, places)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        self.unclaimed += 1
        return super().uniform(shape, like)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        self.unclaimed += 1
        return super().normal(shape, like)

    def latent(self, drawer: nn.Module, draw: Tensor) -> Tensor:
        self.unclaimed -= 1
        return self._with_true(drawer, draw)

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        before = self.unclaimed.clone()
        u, log_q = super().posterior(density, leading, context)
        self.unclaimed.copy_(before)
        if self.first > 0:
            return u, log_q
        u = self._with_true(density, u)
        return u, density.log_weight(u, context, self)

    def _with_true(self, drawer: nn.Module, draw: Tensor) -> Tensor:
        if drawer not in self.values:
            raise ValueError(
                f"{type(drawer).__name__}: it draws in encode, but nothing was recorded for it in "
                "decode. Call noise.record(...) there with what encode would have to draw."
            )
        if self.first > 0:
            return draw
        return torch.cat([self.values[drawer][None].to(draw.dtype), draw[1:]])


class WidenedNoise(RowNoise):
    """Draws a share α of the indices u from q with c times its standard deviation.

    Each u is weighted by the density that it was drawn from, the mixture of both:

        log q_mix(u) = log q(u) + log((1 - α) + α q_c(u) / q(u)).

    A q that is too narrow then misses less. Posteriors that are not normal are drawn as they are.
    """

    @classmethod
    def like(cls, noise: Noise) -> WidenedNoise:
        """The widened version of some noise, with its seed if it has one."""
        return cls(noise.seed if isinstance(noise, RowNoise) else random_seed())

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(density, ConditionalNormal):
            return super().posterior(density, leading, context)
        wide = self.uniform(leading, like=context) < WIDE_SHARE
        scale = torch.where(wide, WIDE_FACTOR, 1.0).to(context.dtype)
        epsilon = self.normal((*leading, *density.shape), like=context)
        epsilon = epsilon * scale.reshape(*leading, *[1] * len(density.shape))
        u, log_q = density.draw_with_log_prob(leading, context, _FixedNoise(epsilon))
        gained = 0.5 * (1 - WIDE_FACTOR**-2) * epsilon.square() - math.log(WIDE_FACTOR)
        ratio = math.log(WIDE_SHARE) + sum_event(gained, density.shape)
        return u, log_q + torch.logaddexp(ratio, torch.full_like(ratio, math.log(1 - WIDE_SHARE)))


class _FixedNoise(Noise):
    """Gives the normal numbers that it was made with."""

    def __init__(self, epsilon: Tensor) -> None:
        super().__init__()
        self.epsilon = epsilon

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.epsilon
