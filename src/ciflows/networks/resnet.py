"""Convolutional networks on images (*, channels, height, width)."""

from __future__ import annotations

__all__ = ["ResNet", "fold"]

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ciflows.core.hook import replaceable
from ciflows.networks.batch_norm import BatchNorm2d


def fold(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a network on (rows, C, H, W), the shape of torch's convolutions, to images (*, C, H, W)."""
    y = network(x.reshape(-1, *x.shape[-3:]))
    return y.reshape(*x.shape[:-3], *y.shape[1:])


class ResNet(nn.Module):
    """The paper's network for couplings and indices: (*, in_channels, H, W) -> (*, out_channels, H, W).

    A 3×3 convolution, residual blocks of two, batch norm, a 1×1 convolution, and w ⊙ tanh(·) + b with w
    and b for each channel, so that log-scales are bounded. In training mode batch norm uses the batch's
    statistics; in evaluation mode rows are independent. With `mixed` set, training mode computes all but
    the last line in bfloat16.

    Ten couplings of such networks, each followed by a batch norm (with parameters in plain flows only),
    have as many parameters as the authors' code: 5,932,116 (8 blocks) and 5,988,872 with indices for
    Fashion-MNIST, 5,956,348 and 6,067,016 for CIFAR-10. Plain flows of 4 blocks have 2,972,756 and
    2,996,988; the paper prints 2.99M and 3.05M, which a last convolution of 3×3 would give.

    Arguments:
        hidden: Channels inside.
        zero_last: Start with the last weight and bias at 0, so that the output is 0.
        activation: The activation after each batch norm.

    Example:
        >>> network = ResNet(1, 2, hidden=64, blocks=8)
        >>> network(torch.zeros(5, 3, 1, 6, 6)).shape, sum(p.numel() for p in network.parameters())
        (torch.Size([5, 3, 2, 6, 6]), 592710)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden: int = 64,
        blocks: int = 4,
        zero_last: bool = False,
        activation: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.mixed = False
        self.first = _convolution(in_channels, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, activation) for _ in range(blocks))
        self.norm = BatchNorm2d(hidden)
        self.last = nn.Conv2d(hidden, out_channels, kernel_size=1)
        self.scale = nn.Parameter(torch.ones(out_channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(out_channels, 1, 1))
        if zero_last:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.get_parameter("bias"))

    def forward(self, x: Tensor) -> Tensor:
        return fold(self._rows, x)

    def _rows(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.mixed and self.training):
            h = self.first(x)
            # on a GPU convolutions are fastest with the channels of a pixel side by side in memory
            if x.is_cuda:
                h = h.contiguous(memory_format=torch.channels_last)
            for block in self.blocks:
                h = block(h)
            h = pointwise(self.last, self.activation(self.norm(h)))
        return self.scale * torch.tanh(h.to(x.dtype)) + self.shift


@replaceable
def pointwise(convolution: nn.Conv2d, h: Tensor) -> Tensor:
    """A 1×1 convolution of images (rows, C, H, W)."""
    y: Tensor = convolution(h)
    return y


class _Block(nn.Module):
    """h + W₂ a(N₂(W₁ a(N₁(h)))), with convolutions W and batch norms N (He et al., 2016)."""

    def __init__(self, channels: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.norms = nn.ModuleList(BatchNorm2d(channels) for _ in range(2))
        self.convolutions = nn.ModuleList(_convolution(channels, channels) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        inside = h
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            inside = convolution(self.activation(norm(inside)))
        return h + inside


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    """3×3, same size out; without a bias, which the next batch norm would remove."""
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
