"""Affine maps: the paper's usual indexed family, and the standardisation of data."""

from __future__ import annotations

__all__ = ["Affine", "Standardise"]

import torch
from torch import Tensor, nn

from ciflows.layers import Bijection
from ciflows.noise import Noise


class Affine(Bijection):
    """z = e^s ⊙ (x + t), where [s, t] is a network's output for the context (section 3.1).

    Arguments:
        features: Size of x.
        network: Maps the context (*, context_features) to (*, 2 features), s first. Where its last
            weights are zero the map is the identity.
        context_features: Size of the context.

    Example:
        >>> from ciflows.networks import MLP
        >>> layer = Affine(2, MLP(1, 2 * 2, zero_last=True), context_features=1)
        >>> z, log_det = layer.encode(torch.ones(3, 2), torch.zeros(3, 1))
        >>> bool((z == 1).all()), bool((log_det == 0).all())
        (True, True)
    """

    def __init__(self, features: int, network: nn.Module, context_features: int) -> None:
        super().__init__((features,), context_shape=(context_features,))
        self.network = network

    @property
    def pure(self) -> tuple[str, ...]:
        return ("_encode",)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        s, t = self.network(context).chunk(2, dim=-1)
        z = torch.exp(s) * (x + t)
        return z, s.sum(-1).expand(z.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        s, t = self.network(context).chunk(2, dim=-1)
        return torch.exp(-s) * z - t


class Standardise(Bijection):
    """z = (x - mean) / scale with fixed numbers, so that likelihoods stay in the units of the data.

    Arguments:
        mean: Means (features,).
        scale: Positive scales (features,).

    Example:
        >>> layer = Standardise(torch.zeros(2), torch.tensor([2.0, 5.0]))
        >>> layer.encode(torch.tensor([2.0, 5.0]))[0]
        tensor([1., 1.])
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__(tuple(mean.shape))
        if mean.shape != scale.shape or not bool((scale > 0).all()):
            raise ValueError("Standardise: expected as many positive scales as means.")
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", mean.clone())
        self.register_buffer("scale", scale.clone())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        leading = x.shape[: x.ndim - 1]
        log_det = -torch.log(self.scale).sum()
        return (x - self.mean) / self.scale, log_det.expand(leading)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z * self.scale + self.mean
