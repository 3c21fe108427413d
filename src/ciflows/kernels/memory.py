"""Memory that a thread uses over and over: fresh pages take as long as a product does."""

from __future__ import annotations

__all__ = ["thread_memory"]

import threading

import torch
from torch import Tensor


class _Memory(threading.local):
    def __init__(self) -> None:
        self.held: dict[torch.dtype, Tensor] = {}

    def get(self, size: int, dtype: torch.dtype) -> Tensor:
        """So many numbers; what they are is left from their last use."""
        if dtype not in self.held or len(self.held[dtype]) < size:
            with torch.inference_mode(False):  # it shall serve outside of it too
                self.held[dtype] = torch.empty(size, dtype=dtype)
        return self.held[dtype][:size]


thread_memory = _Memory()
