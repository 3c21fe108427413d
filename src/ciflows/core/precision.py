"""How many bits products keep on a GPU: fewer where training asks for speed, all in evaluation."""

from __future__ import annotations

__all__ = ["float32_products"]

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_products(exact: bool = True) -> Iterator[None]:
    """Multiply and convolve float32 in full, or with the 10 bits of TF32, for a while.

    Also a decorator. Torch's own default has convolutions in TF32.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
