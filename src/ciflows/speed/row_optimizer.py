"""Optimiser steps with all tensors in one row of memory, for GPUs."""

from __future__ import annotations

__all__ = ["RowOptimizer"]

from collections.abc import Sequence

import torch
from torch import Tensor

from ciflows.training.optimizer import Adam, Optimizer, gradients

SMALL = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class RowOptimizer(Optimizer):
    """The same steps in fewer kernels.

    torch updates 36 tensors per kernel, each on few of the GPU's processors. Here the gradients and
    values of all parameters are copied into one row, for all processors, and the values are copied back.
    """

    def _pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([tensor.detach().flatten() for tensor in tensors])]

    def _moments(self, some: Sequence[Tensor], adam: Adam) -> tuple[list[Tensor], ...]:
        return adam.counts * len(some), _cut(adam.means[0], some), _cut(adam.squares[0], some)

    def _gather(self, clip: float) -> tuple[Tensor, list[list[Tensor]], list[Tensor]]:
        rows, stacks = [self._pack(gradients(some)) for some in self.others], self._stack()
        whole = [*(row for some in rows for row in some), *stacks]
        norm = torch.stack([part.norm() for part in whole]).norm()
        torch._foreach_mul_(whole, (clip / (norm + SMALL)).clamp(max=1))
        return norm, rows, stacks

    def _step_adam(self, some: Sequence[Tensor], adam: Adam, grads: list[Tensor]) -> None:
        values = self._pack(some)
        adam.step(values, grads, self.rate)
        torch._foreach_copy_([p.detach() for p in some], _cut(values[0], some))


def _cut(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a row, in the shapes of these tensors."""
    parts = row.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
