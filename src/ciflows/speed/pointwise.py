"""1×1 convolutions to few channels on a GPU."""

from __future__ import annotations

__all__ = ["by_image", "pointwise"]

from collections.abc import Callable

import torch
from torch import Tensor, nn


def pointwise(plain: Callable[..., Tensor], convolution: nn.Conv2d, h: Tensor) -> Tensor:
    """`pointwise` of networks, in training on a GPU."""
    if h.is_cuda and torch.is_grad_enabled():
        return by_image(convolution, h)
    return plain(convolution, h)


def by_image(convolution: nn.Conv2d, h: Tensor) -> Tensor:
    """A 1×1 convolution of images (rows, C, H, W), as a product for each image.

    The gradient of a convolution's weight is one product over all pixels of a batch. If few channels
    come out, one of the GPU's processors computes it alone. Here each image has its own, and then their
    sum is taken.
    """
    pixels = h.permute(0, 2, 3, 1).flatten(1, 2)
    weight = convolution.weight.flatten(1).T.expand(len(h), -1, -1)
    y = torch.baddbmm(convolution.get_parameter("bias"), pixels, weight)
    return y.unflatten(1, h.shape[2:]).permute(0, 3, 1, 2)
