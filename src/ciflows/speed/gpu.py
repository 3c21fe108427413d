"""What the Triton kernels take, and how they become operations of torch.

Kernels run on CUDA tensors; with TRITON_INTERPRET=1 Triton interprets them on a CPU, for tests.
"""

from __future__ import annotations

__all__ = ["fits_chain", "fits_matrix", "fits_vectors", "operation", "refuse_twice"]

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MOST_HIDDEN = 256
MOST_HIDDEN_WITH_TANGENTS = 128
MOST_INPUTS = 64
MOST_ROWS = 64
MOST_NUMBERS = 2**31 - 1  # offsets are 32-bit integers; padding up to doubles the numbers

INSTALLED = find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"

_library = torch.library.Library("ciflows", "DEF")


def fits_chain(x: Tensor, sizes: Sequence[int], tangents: int = 0) -> bool:
    """Whether `gpu_chain.chain` takes a network of x (*, sizes[0]) with layers of these sizes."""
    inputs, *hidden, outputs = sizes
    return (
        _fits(x)
        and len(hidden) > 1
        and len(set(hidden)) == 1
        and hidden[0] <= (MOST_HIDDEN_WITH_TANGENTS if tangents else MOST_HIDDEN)
        and max(inputs, outputs) <= MOST_INPUTS
        and 0 < x.numel() // inputs * (1 + tangents) * 2 * sum(hidden) <= MOST_NUMBERS
    )


def fits_matrix(matrix: Tensor) -> bool:
    """Whether `gpu_log_det.log_det` takes matrices (d, *, d)."""
    return _fits(matrix) and len(matrix) <= MOST_ROWS and 0 < matrix.numel() <= MOST_NUMBERS


def fits_vectors(x: Tensor, halves: Tensor, shape: Sequence[int]) -> bool:
    """Whether `gpu_normal` takes x (*, shape) and a network's output (*, 2d) for it."""
    if not _fits(x) or halves.dtype != x.dtype or len(shape) != 1 or shape[0] > MOST_INPUTS:
        return False
    leading = torch.broadcast_shapes(x.shape[:-1], halves.shape[:-1])
    return 0 < 4 * leading.numel() * shape[0] <= MOST_NUMBERS


def _fits(x: Tensor) -> bool:
    return INSTALLED and (x.is_cuda or INTERPRETED) and x.dtype == torch.float32


def operation(
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that launches kernels as an operation, which torch's compiler leaves whole.

    `torch.library.custom_op` does the same, but loads the compiler at the first call.

    Arguments:
        fake: Makes results of the same shapes, without values.
        backward: Its gradients, from a context and those of its results; refused if None.
        setup_context: Saves in that context what they need.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        _library.define(name + torch.library.infer_schema(function, mutates_args=()))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ciflows::{name}", fake, lib=_library)
        torch.library.register_autograd(
            f"ciflows::{name}", backward or refuse_twice, setup_context=setup_context, lib=_library
        )
        made: Callable[..., Any] = getattr(torch.ops.ciflows, name).default
        return made

    return make


def refuse_twice(*_: Any) -> None:
    """Refuse a second derivative; without this torch would take it for zero."""
    raise RuntimeError("Kernels on a GPU are differentiated once: take second derivatives on a CPU.")
