"""Affine maps: the paper's usual indexed family, and the scaling of data."""

from __future__ import annotations

__all__ = ["Affine", "Scale", "Standardise", "affine"]

import math

import torch
from torch import Tensor, nn

from ciflows.core.hook import replaceable
from ciflows.core.layer import Bijection, Shape, as_shape, check_halves, halves, leading_shape, sum_event
from ciflows.core.noise import Noise


class Affine(Bijection):
    """z = e^s ⊙ (x + t), where [s, t] is a network's output for the context (section 3.1).

    Arguments:
        features: Size of x, or its shape.
        network: Maps the context (*, context_features) to (*, 2 features), s first; that of images gives
            twice their channels. Where its last weights are zero the map is the identity.
        context_features: Size of the context, or its shape.

    Example:
        >>> from ciflows.networks import MLP
        >>> layer = Affine(2, MLP(1, 2 * 2, zero_last=True), context_features=1)
        >>> z, log_det = layer.encode(torch.ones(3, 2), torch.zeros(3, 1))
        >>> bool((z == 1).all()), bool((log_det == 0).all())
        (True, True)
    """

    def __init__(self, features: int | Shape, network: nn.Module, context_features: int | Shape) -> None:
        super().__init__(as_shape(features), context_shape=as_shape(context_features))
        self.network = network

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return affine(x, check_halves(self.network(context), self.shape, "Affine"), self.shape)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        s, t = halves(self.network(context), self.shape, "Affine")
        return torch.exp(-s) * z - t


@replaceable
def affine(x: Tensor, parameters: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """e^s ⊙ (x + t) (*, shape) and Σ s (*), for a network's output [s, t] (*, 2c, ...)."""
    s, t = parameters.chunk(2, dim=-len(shape))
    z = torch.exp(s) * (x + t)
    return z, sum_event(s, shape).expand(leading_shape(z, shape))


class Standardise(Bijection):
    """z = (x - mean) / scale with fixed numbers (*shape): likelihoods stay in the units of the data.

    Example:
        >>> layer = Standardise(torch.zeros(2), torch.tensor([2.0, 5.0]))
        >>> layer.encode(torch.tensor([2.0, 5.0]))[0]
        tensor([1., 1.])
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__(tuple(mean.shape))
        if mean.shape != scale.shape or not bool((scale > 0).all()):
            raise ValueError("Standardise: expected as many positive scales as means.")
        self.mean = nn.Buffer(mean.clone())
        self.scale = nn.Buffer(scale.clone())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        log_det = -torch.log(self.scale).sum()
        return (x - self.mean) / self.scale, log_det.expand(leading_shape(x, self.shape))

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z * self.scale + self.mean


class Scale(Bijection):
    """z = factor x, as pixels from 0 to 256 are brought to [0, 1].

    Example:
        >>> z, log_det = Scale((1, 2, 2), 1 / 256).encode(torch.full((1, 2, 2), 128.0))
        >>> bool((z == 0.5).all()), round(log_det.item(), 4)
        (True, -22.1807)
    """

    def __init__(self, shape: Shape, factor: float) -> None:
        super().__init__(shape)
        if not factor > 0:
            raise ValueError(f"Scale: the factor must be positive; got {factor}.")
        self.factor = factor

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        log_det = math.prod(self.shape) * math.log(self.factor)
        return self.factor * x, x.new_full(leading_shape(x, self.shape), log_det)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z / self.factor
