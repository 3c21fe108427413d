"""Convolutional networks with a bounded Lipschitz constant (supplement, "Image Experiments").

The norm that bounds a convolution is that of the whole map of images, zero-padding included, not that of
its weight as a matrix: power iterations apply the convolution and its transpose to an image.

Power iterations approach a norm from below, slowly where singular values cluster, as those of
convolutions do. After `converge_norms` a norm was found up to 0.1 % too low (0.08 % over seven shapes
and four kinds of kernels), so a network scales its maps to a bound that is `MARGIN` lower.
"""

from __future__ import annotations

__all__ = ["LipschitzConvNet", "SpectralConv"]

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.core.layer import Shape
from ciflows.networks.lipschitz import (
    LipschitzNetwork,
    Spectral,
    SpectralLinear,
    converge_norms,
    lipswish,
)

START_TOLERANCE = 1e-3
MARGIN = 2e-3


class SpectralConv(Spectral):
    """A convolution (in, H, W) -> (out, H, W), scaled down to norm `bound` if it exceeds it.

    Arguments:
        shape: Shape of one input: (channels, height, width).
        out_channels: Channels of the output.
        kernel: Size of the kernel, odd; zeros around the image keep its size.
        bound: The largest norm, as a linear map of images of this shape.
    """

    def __init__(self, shape: Shape, out_channels: int, kernel: int, bound: float) -> None:
        channels, *size = shape
        weight = nn.init.orthogonal_(torch.empty(out_channels, channels, kernel, kernel))
        limit = 1 / math.sqrt(channels * kernel**2)
        bias = nn.init.uniform_(torch.empty(out_channels), -limit, limit)
        super().__init__(weight, bias, torch.randn(out_channels, *size), torch.randn(shape), bound)

    def _norm(self) -> Tensor:
        return (self.u * self.product(self.weight[None], self.v[None])[0]).sum()

    @staticmethod
    def product(weight: Tensor, v: Tensor) -> Tensor:
        n, padding = len(weight), weight.shape[-1] // 2
        output = F.conv2d(v.flatten(0, 1)[None], weight.flatten(0, 1), padding=padding, groups=n)
        return output[0].unflatten(0, (n, -1))

    @staticmethod
    def adjoint(weight: Tensor, u: Tensor) -> Tensor:
        n, padding = len(weight), weight.shape[-1] // 2
        image, weight = u.flatten(0, 1)[None], weight.flatten(0, 1)
        return F.conv_transpose2d(image, weight, padding=padding, groups=n)[0].unflatten(0, (n, -1))


class LipschitzConvNet(LipschitzNetwork):
    """(LipSwish, convolution) repeated, with Lipschitz constant at most `kappa`, on (*, C, H, W).

    Each convolution gets the same share of the constant: norm at most kappa^(1/n) for n of them, with
    a margin for the error of the norms once `converge_norms` has run.

    Arguments:
        shape: Shape of one x: (channels, height, width).
        hidden: Channels between the convolutions.
        kernels: Size of each convolution's kernel, odd.
        kappa: Bound on the Lipschitz constant, below 1.
        last_std: Standard deviation of the last weight at the start: small, so that g starts near 0.

    Example:
        >>> network = LipschitzConvNet((3, 8, 8), hidden=16)
        >>> g, tangents = network(torch.randn(7, 3, 8, 8), torch.randn(2, 7, 3, 8, 8))
        >>> g.shape, tangents.shape
        (torch.Size([7, 3, 8, 8]), torch.Size([2, 7, 3, 8, 8]))
    """

    def __init__(
        self,
        shape: Shape,
        hidden: int = 128,
        kernels: Sequence[int] = (3, 1, 3),
        kappa: float = 0.98,
        last_std: float = 1e-3,
    ) -> None:
        super().__init__(shape, kappa)
        if len(shape) != 3 or not kernels or any(kernel % 2 == 0 for kernel in kernels):
            raise ValueError(
                "LipschitzConvNet: expected a shape (channels, height, width) and kernels of odd "
                f"sizes; got {tuple(shape)} and {tuple(kernels)}."
            )
        sizes = [shape[0], *[hidden] * (len(kernels) - 1), shape[0]]
        bound = kappa ** (1 / len(kernels)) / (1 + MARGIN)
        self.convolutions = nn.ModuleList(
            _convolution((before, *shape[1:]), after, kernel, bound)
            for (before, after), kernel in zip(itertools.pairwise(sizes), kernels, strict=True)
        )
        self.beta = nn.Parameter(torch.full((len(kernels),), 0.5))
        last = self.convolutions[-1]
        nn.init.normal_(last.get_parameter("weight"), std=last_std)
        nn.init.zeros_(last.get_parameter("bias"))
        converge_norms(self, START_TOLERANCE)

    def forward(
        self, x: Tensor, directions: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """g(x) (*, C, H, W) and J directions (k, *, C, H, W), for directions of that same shape."""
        stack = x[None] if directions is None else torch.cat([x[None], directions])
        shape, bias = stack.shape, x.new_zeros(self.shape[0], 1, 1)
        stack = stack.reshape(len(stack), -1, *self.shape)
        for part, beta in zip(self.convolutions, F.softplus(self.beta).unbind(), strict=True):
            assert isinstance(part, Spectral)
            images = lipswish(stack, bias, beta).flatten(0, 1)
            weight = part.scaled_weight()
            weight = weight[..., None, None] if isinstance(part, SpectralLinear) else weight
            images = F.conv2d(images, weight, padding=weight.shape[-1] // 2)
            stack, bias = images.unflatten(0, stack.shape[:2]), part.bias[:, None, None]
        return (stack[0] + bias).reshape(shape[1:]), stack[1:].reshape(shape[0] - 1, *shape[1:])


def _convolution(shape: Shape, out_channels: int, kernel: int, bound: float) -> Spectral:
    """A convolution; one of 1×1 has the norm of its matrix, and is kept as a matrix."""
    if kernel == 1:
        return SpectralLinear(shape[0], out_channels, bound)
    return SpectralConv(shape, out_channels, kernel, bound)
