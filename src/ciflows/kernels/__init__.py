"""Small networks by hand, forwards and backwards.

`cpu` has them in few operations that stay in the cache, `gpu` as one kernel each way, where triton is
installed (it comes with torch's CUDA builds).
"""

from __future__ import annotations

__all__ = ["fits"]

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

MOST_HIDDEN = 128
MOST_INPUTS = 64
MOST_NUMBERS = 2**31 - 1  # offsets are 32-bit integers

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
        and hidden[0] <= MOST_HIDDEN
        and max(inputs, outputs) <= MOST_INPUTS
        and 0 < x.numel() // inputs * (1 + tangents) * sum(hidden) <= MOST_NUMBERS
    )
