"""Densities: the base of a flow, the distributions of its indices, and flows themselves."""

from __future__ import annotations

__all__ = ["ConditionalNormal", "Density", "StandardNormal"]

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ciflows.core.hook import replaceable
from ciflows.core.layer import Shape, as_shape, check_halves, check_shape, sum_event
from ciflows.core.noise import Noise

LOG_2_PI = math.log(2 * math.pi)


class Density(nn.Module, ABC):
    """A density over x (*, shape), perhaps given a context (*, context_shape).

    Arguments:
        shape: Shape of one x.
        context_shape: Shape of the context; None if the density ignores it.
    """

    def __init__(self, shape: Shape, context_shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.context_shape = None if context_shape is None else tuple(context_shape)

    @property
    def exact(self) -> bool:
        """Whether `log_weight` is the log-density itself rather than an estimate of it."""
        return True

    @property
    def noisy(self) -> bool:
        """Whether `log_weight` carries noise that may not enter a log-mean-exp over draws."""
        return False

    @property
    def reparameterised(self) -> bool:
        """Whether draws are differentiable functions of the parameters and of fixed noise."""
        return True

    @abstractmethod
    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """The log (*) of an unbiased estimate of p(x | context), from one draw; exact if `exact`."""

    @abstractmethod
    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """Draw x (*leading, *shape); a context has the same leading dimensions, or fewer."""

    def draw_with_log_prob(
        self,
        leading: Shape,
        context: Tensor | None = None,
        noise: Noise | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw x differentiably, with its log-density (*leading); for exact densities alone.

        A shift (*leading, *shape) is added to x before its log-density is taken.
        """
        if not self.exact:
            raise ValueError(
                f"{type(self).__name__}: its density is only estimated, and the estimate at its own "
                "draws is biased. Call draw_with_log_weight."
            )
        x = self.draw(leading, context, noise)
        x = x if shift is None else x + shift
        return x, self.log_weight(x, context, noise)

    def draw_with_log_weight(
        self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw x differentiably, with log p(x, u) / q(u | x) (*leading); log p(x) if `exact`."""
        return self.draw_with_log_prob(leading, context, noise)


class StandardNormal(Density):
    """N(0, I), whatever the context.

    Example:
        >>> StandardNormal((2,)).log_weight(torch.zeros(3, 2)).shape
        torch.Size([3])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._like = nn.Buffer(torch.zeros(()), persistent=False)

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        check_shape(x, self.shape, "StandardNormal")
        return -0.5 * sum_event(x.square() + LOG_2_PI, self.shape)

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        return (noise or Noise()).normal((*leading, *self.shape), self._like)


class ConditionalNormal(Density):
    """N(mean(c), diag(exp(log_std(c)))²), with [mean, log_std] a network's output (section 3).

    Arguments:
        network: Maps the context (*, context_features) to (*, 2 features), means first; that of images
            gives twice their channels.
        features: Size of x, or its shape.
        context_features: Size of the context, or its shape.

    Example:
        >>> density = ConditionalNormal(nn.Linear(3, 2 * 2), features=2, context_features=3)
        >>> x, log_prob = density.draw_with_log_prob((5,), torch.zeros(5, 3))
        >>> torch.allclose(log_prob, density.log_weight(x, torch.zeros(5, 3)))
        True
    """

    def __init__(self, network: nn.Module, features: int | Shape, context_features: int | Shape) -> None:
        super().__init__(as_shape(features), as_shape(context_features))
        self.network = network

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        check_shape(x, self.shape, "ConditionalNormal")
        return log_normal(x, self._moments(self._check_context(context)), self.shape)

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        context = self._check_context(context)
        epsilon = self._epsilon(leading, context, noise)
        return draw_normal(epsilon, self._moments(context), self.shape)

    def draw_with_log_prob(
        self,
        leading: Shape,
        context: Tensor | None = None,
        noise: Noise | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        context = self._check_context(context)
        epsilon = self._epsilon(leading, context, noise)
        return place_normal(epsilon, self._moments(context), self.shape, shift)

    def _epsilon(self, leading: Shape, context: Tensor, noise: Noise | None) -> Tensor:
        return (noise or Noise()).normal((*leading, *self.shape), like=context)

    def _moments(self, context: Tensor) -> Tensor:
        return check_halves(self.network(context), self.shape, "ConditionalNormal")

    def _check_context(self, context: Tensor | None) -> Tensor:
        if context is None or self.context_shape is None:
            raise ValueError(f"ConditionalNormal: needs a context (*, {self.context_shape}).")
        check_shape(context, self.context_shape, "ConditionalNormal, context")
        return context


@replaceable
def log_normal(x: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    """log N(x; mean, diag(exp(log_std))²): (*, shape) -> (*).

    Arguments:
        x: Points (*, shape).
        moments: A network's output (*, 2c, ...): the mean, then log_std.
        shape: Shape of one x: (c, ...).
    """
    mean, log_std = moments.chunk(2, dim=-len(shape))
    scaled = (x - mean) * torch.exp(-log_std)
    return -sum_event(0.5 * (scaled.square() + LOG_2_PI) + log_std, shape)


@replaceable
def draw_normal(epsilon: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    """x = mean + exp(log_std) ε (*, shape), as in `place_normal`."""
    mean, log_std = moments.chunk(2, dim=-len(shape))
    return mean + torch.exp(log_std) * epsilon


@replaceable
def place_normal(
    epsilon: Tensor, moments: Tensor, shape: Shape, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x = mean + exp(log_std) ε + shift (*, shape), and log N(x; mean, diag(exp(log_std))²) (*).

    Arguments:
        epsilon: Standard normal numbers ε (*, shape).
        moments: A network's output (*, 2c, ...): the mean, then log_std.
        shape: Shape of one x: (c, ...).
        shift: What is added to x (*, shape).
    """
    x = draw_normal(epsilon, moments, shape)
    x = x if shift is None else x + shift
    # the same arithmetic as that of a prior: where p = q the two cancel to the last digit
    return x, log_normal(x, moments, shape)
