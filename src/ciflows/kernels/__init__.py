"""Small networks, densities and maps by hand, forwards and backwards.

On a CPU `native` has networks in C, where there is a compiler, and `cpu` in few operations; `normal` has
densities and maps so. `gpu`, `gpu_normal` and `gpu_log_det` have them as one kernel each way, where
triton is installed (it comes with torch's CUDA builds); `linear` takes the gradients of many weights at
once there. `plain` says in torch what networks do, for second derivatives and for tests.
"""

from __future__ import annotations

__all__ = ["fits", "fits_matrix", "fits_vectors"]

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

MOST_HIDDEN = 256
MOST_HIDDEN_WITH_TANGENTS = 128
MOST_INPUTS = 64
MOST_ROWS = 64
MOST_NUMBERS = 2**31 - 1  # offsets are 32-bit integers; padding up to doubles what there is

INSTALLED = find_spec("triton") is not None


def fits(x: Tensor, sizes: Sequence[int], tangents: int = 0) -> bool:
    """Whether `kernels.gpu.chain` takes a network of x (*, sizes[0]) with such sizes of its layers."""
    inputs, *hidden, outputs = sizes
    return (
        INSTALLED
        and x.is_cuda
        and x.dtype == torch.float32
        and len(hidden) > 1
        and len(set(hidden)) == 1
        and hidden[0] <= (MOST_HIDDEN_WITH_TANGENTS if tangents else MOST_HIDDEN)
        and max(inputs, outputs) <= MOST_INPUTS
        and 0 < x.numel() // inputs * (1 + tangents) * 2 * sum(hidden) <= MOST_NUMBERS
    )


def fits_matrix(matrix: Tensor) -> bool:
    """Whether `kernels.gpu_log_det.log_det` takes matrices (d, *, d)."""
    return (
        INSTALLED
        and matrix.is_cuda
        and matrix.dtype == torch.float32
        and len(matrix) <= MOST_ROWS
        and 0 < matrix.numel() <= MOST_NUMBERS
    )


def fits_vectors(x: Tensor, halves: Tensor, shape: Sequence[int]) -> bool:
    """Whether `kernels.gpu_normal` takes x (*, shape) and a network's output (*, 2d) for it."""
    if not INSTALLED or not x.is_cuda or len(shape) != 1 or shape[0] > MOST_INPUTS:
        return False
    leading = torch.broadcast_shapes(x.shape[:-1], halves.shape[:-1])
    few = 0 < 4 * leading.numel() * shape[0] <= MOST_NUMBERS
    return few and x.dtype == halves.dtype == torch.float32
