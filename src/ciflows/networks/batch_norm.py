"""Batch norm for networks of images, over a batch that several processes may share."""

from __future__ import annotations

__all__ = ["BatchNorm2d"]

from typing import cast

import torch
from torch import Tensor, nn

from ciflows.core.moments import Gather, batch_moments


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`; with `gather` set, over the rows of all processes in training mode."""

    gather: Gather | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.gather is None:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            rows = x.to(self.weight.dtype)
            mean, variance, n = batch_moments(rows, self.gather)
            self._update(mean.detach(), (variance * n / (n - 1)).detach())
            scale = self.weight * torch.rsqrt(variance + self.eps)
            shift = self.bias - mean * scale
            return (rows * scale[:, None, None] + shift[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        momentum = cast(float, self.momentum)
        cast(Tensor, self.running_mean).lerp_(mean, momentum)
        cast(Tensor, self.running_var).lerp_(variance, momentum)
        cast(Tensor, self.num_batches_tracked).add_(1)
