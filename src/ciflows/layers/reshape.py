"""Bijections that only move numbers: squeezing images, and flattening them."""

from __future__ import annotations

__all__ = ["Flatten", "Squeeze"]

import math

import torch.nn.functional as F
from torch import Tensor

from ciflows.core.layer import Bijection, Shape, leading_shape
from ciflows.core.noise import Noise


class Squeeze(Bijection):
    """2×2 pixels become four channels: (C, H, W) -> (4 C, H / 2, W / 2) (Dinh et al., 2017).

    The four, from pixels (0, 0), (0, 1), (1, 0), (1, 1), take the place of their channel.

    Arguments:
        shape: Shape of one x: (channels, height, width).

    Example:
        >>> import torch
        >>> Squeeze((1, 2, 2)).encode(torch.arange(4.0).reshape(1, 2, 2))[0].flatten()
        tensor([0., 1., 2., 3.])
        >>> Squeeze((3, 32, 32)).noise_shape
        (12, 16, 16)
    """

    def __init__(self, shape: Shape) -> None:
        if len(shape) != 3 or shape[1] % 2 or shape[2] % 2:
            raise ValueError(f"Squeeze: needs images of even height and width; got {tuple(shape)}.")
        channels, height, width = shape
        super().__init__(shape, (4 * channels, height // 2, width // 2))

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return F.pixel_unshuffle(x, 2), x.new_zeros(leading_shape(x, self.shape))

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return F.pixel_shuffle(z, 2)


class Flatten(Bijection):
    """Images as vectors: (C, H, W) -> (C · H · W,).

    Example:
        >>> import torch
        >>> Flatten((3, 4, 4)).encode(torch.zeros(5, 3, 4, 4))[0].shape
        torch.Size([5, 48])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, (math.prod(shape),))

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        leading = leading_shape(x, self.shape)
        return x.reshape(*leading, *self.noise_shape), x.new_zeros(leading)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z.reshape(*z.shape[:-1], *self.shape)
