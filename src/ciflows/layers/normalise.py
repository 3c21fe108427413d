"""Layers that normalise to mean 0 and standard deviation 1: once at the start, or in each batch.

Vectors are normalised by feature, images (channels, height, width) by channel.
"""

from __future__ import annotations

__all__ = ["ActNorm", "BatchNorm"]

import math

import torch
from torch import Tensor, nn

from ciflows.core.layer import Bijection, Shape
from ciflows.core.moments import Gather, batch_moments
from ciflows.core.noise import Noise


class ActNorm(Bijection):
    """z = e^s ⊙ (x + t) with parameters s and t for each channel (Kingma and Dhariwal, 2018).

    The identity until `initialise`, which normalises a first batch.

    Arguments:
        shape: Shape of one x: (features,), or (channels, height, width).

    Example:
        >>> layer, x = ActNorm((3, 4, 4)), 5 + 2 * torch.randn(100, 3, 4, 4)
        >>> layer.initialise(x)
        >>> z, log_det = layer.encode(x)
        >>> bool((z.mean((0, 2, 3)).abs() < 1e-5).all()), log_det.shape
        (True, torch.Size([100]))
    """

    pure = ("_encode",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.log_scale = nn.Parameter(_zeros(shape))
        self.shift = nn.Parameter(_zeros(shape))

    def _initialise(self, x: Tensor, context: Tensor | None) -> None:
        mean, variance = _moments(x, self.shape)
        std = variance.sqrt()
        self.log_scale.copy_(torch.where(std > 0, -torch.log(std), 0.0))
        self.shift.copy_(-mean)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return torch.exp(self.log_scale) * (x + self.shift), _log_det(self.log_scale, x, self.shape)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return torch.exp(-self.log_scale) * z - self.shift


class BatchNorm(Bijection):
    """z = e^g ⊙ (x - m) / √(v + ε) + b, with m and v the mean and variance of each channel.

    Training mode uses the batch's own, over all leading dimensions, and updates running averages;
    evaluation mode and `decode` use these averages. Training likelihoods depend on the whole batch
    (log_det takes m and v as constants): only those of evaluation mode are true.

    Arguments:
        shape: Shape of one x: (features,), or (channels, height, width).
        momentum: Weight of each batch in the running averages.
        affine: Whether g and b are parameters; otherwise both are 0.
        eps: ε, which keeps a constant channel finite.

    Example:
        >>> layer, x = BatchNorm((2,)), 5 + 3 * torch.randn(1000, 2)
        >>> z, log_det = layer.train().encode(x)
        >>> bool((z.mean(0).abs() < 1e-5).all()), bool(((z.std(0) - 1).abs() < 0.01).all())
        (True, True)
    """

    batchwise = True
    gather: Gather | None = None  # set in training where several processes share a batch

    def __init__(
        self, shape: Shape, momentum: float = 0.1, affine: bool = True, eps: float = 1e-5
    ) -> None:
        super().__init__(shape)
        self.momentum = momentum
        self.eps = eps
        self.log_scale: Tensor
        self.shift: Tensor
        for name in ("log_scale", "shift"):
            if affine:
                self.register_parameter(name, nn.Parameter(_zeros(shape)))
            else:
                self.register_buffer(name, _zeros(shape), persistent=False)
        self.mean = nn.Buffer(_zeros(shape))
        self.variance = nn.Buffer(_zeros(shape) + 1)

    def _initialise(self, x: Tensor, context: Tensor | None) -> None:
        mean, variance = _moments(x, self.shape)
        self.mean.copy_(mean)
        self.variance.copy_(variance)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        if self.training:
            mean, variance = _moments(x, self.shape, self.gather)
            self.mean.lerp_(mean.detach(), self.momentum)
            self.variance.lerp_(variance.detach(), self.momentum)
        else:
            mean, variance = self.mean, self.variance
        log_scale = self._total_log_scale(variance)
        return torch.exp(log_scale) * (x - mean) + self.shift, _log_det(log_scale, x, self.shape)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        log_scale = self._total_log_scale(self.variance)
        return torch.exp(-log_scale) * (z - self.shift) + self.mean

    def _total_log_scale(self, variance: Tensor) -> Tensor:
        return self.log_scale - 0.5 * torch.log(variance + self.eps)


def _zeros(shape: Shape) -> Tensor:
    """A number for each channel: (features,), or (channels, 1, 1) for images."""
    return torch.zeros(shape[0], *[1] * (len(shape) - 1))


def _moments(x: Tensor, shape: Shape, gather: Gather | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, in the shape of the parameters."""
    mean, variance, _ = batch_moments(x.reshape(-1, *shape), gather)
    each = (shape[0], *[1] * (len(shape) - 1))
    return mean.reshape(each), variance.reshape(each)


def _log_det(log_scale: Tensor, x: Tensor, shape: Shape) -> Tensor:
    """The sum over channels and pixels: (*)."""
    return (math.prod(shape[1:]) * log_scale.sum()).expand(x.shape[: x.ndim - len(shape)])
