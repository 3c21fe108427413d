"""Log-determinants of small matrices near the identity, with their inverses, as one GPU kernel."""

# ruff: noqa: N803
# mypy: ignore-errors
# Triton's functions are no Python: constants are in capitals, and types are those of its compiler.

from __future__ import annotations

__all__ = ["log_det"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from ciflows.speed.gpu import operation


def log_det(matrix: Tensor) -> Tensor:
    """log|det A| (*) for A (d, *, d), rows first, all of whose leading minors are away from 0.

    So are those of I + J where J has a norm below 1: there no pivots are needed.
    """
    leading = matrix.shape[1:-1]
    logs, _ = _log_det(matrix.flatten(1, -2), torch.is_grad_enabled())
    return logs.reshape(leading)


@triton.jit
def _kernel(
    matrix_ptr, logs_ptr, inverse_ptr, n, d, row, matrix, column, D: tl.constexpr, SAVE: tl.constexpr
):
    """One program: one matrix, inverted in place, row by row (Gauss and Jordan)."""
    program = tl.program_id(0)
    each = tl.arange(0, D)
    rows, columns = each[:, None], each[None, :]
    inside = (rows < d) & (columns < d)
    at = matrix_ptr + program * matrix + rows * row + columns * column
    tile = tl.where(inside, tl.load(at, mask=inside, other=0.0), tl.where(rows == columns, 1.0, 0.0))
    total = 0.0
    for step in range(d):
        here = tl.where(each == step, 1.0, 0.0)
        down = tl.sum(tile * here[None, :], axis=1)
        across = tl.sum(tile * here[:, None], axis=0)
        pivot = tl.sum(across * here)
        total += tl.log(tl.abs(pivot))
        tile -= (down - here)[:, None] * ((across + here) / pivot)[None, :]
    tl.store(logs_ptr + program, total)
    if SAVE:  # transposed, as the gradient is
        tl.store(inverse_ptr + columns * n * d + program * d + rows, tile, mask=inside)


def _outputs(matrix, save):
    d, n, _ = matrix.shape
    return matrix.new_empty(n), matrix.new_empty((d, n, d) if save else 0)


@operation(lambda grad, matrix, inverse: torch.empty_like(inverse))
def _log_det_backward(grad: Tensor, matrix: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of the matrix; an argument, so that torch knows that this depends on it."""
    return grad[:, None] * inverse


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    return None if grad is None else _log_det_backward(grad, *ctx.saved_tensors), None


@operation(_outputs, _backward, _keep)
def _log_det(matrix: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """Those of (d, n, d), (n,); and A⁻ᵀ (d, n, d) where it is saved for the backward pass."""
    d, n, _ = matrix.shape
    logs, inverse = _outputs(matrix, save)
    size = max(16, triton.next_power_of_2(d))
    with torch.cuda.device_of(matrix):
        # one warp a matrix: none waits for another
        _kernel[(n,)](matrix, logs, inverse, n, d, *matrix.stride(), D=size, SAVE=save, num_warps=1)
    return logs, inverse
