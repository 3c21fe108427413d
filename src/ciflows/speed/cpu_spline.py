"""Splines in C, one number after the other: torch takes some forty operations for them."""

from __future__ import annotations

__all__ = ["spline", "spline_inverse"]

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ciflows.speed.cpu_chain import address, is_plain, library, plain_gradients

MOST_BINS = 64  # as in spline.c
LEAST_NUMBERS = 4096  # that are worth a thread
Plain = Callable[..., Any]


def spline(
    plain: Plain, x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, least: float
) -> tuple[Tensor, Tensor]:
    """`spline` of layers/splines.py, for float32 on a CPU."""
    numbers = widths, heights, slopes
    if not _fits(x, numbers):
        return plain(x, *numbers, bound, least)
    if torch.is_grad_enabled() and any(part.requires_grad for part in (x, *numbers)):
        return _Splined.apply(plain, bound, least, x, *numbers)
    return _forward(_Spline(x, numbers, bound, least), x)


def spline_inverse(
    plain: Plain, y: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, least: float
) -> Tensor:
    """`spline_inverse` of layers/splines.py, for float32 on a CPU."""
    numbers = widths, heights, slopes
    if not _fits(y, numbers):
        return plain(y, *numbers, bound, least)
    if torch.is_grad_enabled() and any(part.requires_grad for part in (y, *numbers)):
        return _Inverse.apply(plain, bound, least, y, *numbers)
    return _inverse(_Spline(y, numbers, bound, least), y)[0]


def _fits(x: Tensor, numbers: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if not all(map(is_plain, (x, *numbers))) or not x.numel():
        return False
    if any(part.shape[:-1] != x.shape for part in numbers) or numbers[0].shape[-1] > MOST_BINS:
        return False
    found = library()
    return found is not None and (found.has_threads or torch.get_num_threads() == 1)


class _Spline(ctypes.Structure):
    """What splines are, for C."""

    _fields_ = (
        ("rows", ctypes.c_long),
        ("bins", ctypes.c_int),
        ("parts", ctypes.c_int),
        ("along", ctypes.c_long * 3),
        ("bound", ctypes.c_float),
        ("log_ratio", ctypes.c_float),
        ("x", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p * 3),
    )

    def __init__(self, x: Tensor, numbers: Sequence[Tensor], bound: float, least: float) -> None:
        flat = [part.reshape(-1, part.shape[-1]) for part in numbers]
        flat = [
            part if part.stride(1) == 1 or part.shape[1] == 1 else part.contiguous() for part in flat
        ]
        self.held = x.contiguous(), flat  # as long as C may read them
        parts = max(1, min(torch.get_num_threads(), x.numel() // LEAST_NUMBERS))
        super().__init__(
            x.numel(),
            flat[0].shape[1],
            parts,
            (ctypes.c_long * 3)(*(part.stride(0) for part in flat)),
            bound,
            -math.log(least),
            address(self.held[0]),
            (ctypes.c_void_p * 3)(*map(address, flat)),
        )


def _forward(splines: _Spline, x: Tensor) -> tuple[Tensor, Tensor]:
    y, log_slope = x.new_empty(x.shape), x.new_empty(x.shape)
    library().spline_forward(ctypes.byref(splines), address(y), address(log_slope))
    return y, log_slope


def _inverse(splines: _Spline, y: Tensor) -> tuple[Tensor, Tensor]:
    x, slope = y.new_empty(y.shape), y.new_empty(y.shape)
    library().spline_inverse(ctypes.byref(splines), address(x), address(slope))
    return x, slope


def _backward(splines: _Spline, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients by x and the numbers, from those by y and the logarithms of the slopes."""
    made, grads = [part.new_empty(part.shape) for part in inputs], [grad.contiguous() for grad in grads]
    library().spline_backward(ctypes.byref(splines), *map(address, (*grads, *made)))
    return made


def _with_options(plain: Plain, options: Sequence[float], *parts: Tensor) -> Any:
    return plain(*parts, *options)


class _Splined(torch.autograd.Function):
    """All but the inputs is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, plain: Plain, bound: float, least: float, x: Tensor, *numbers: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.plain, ctx.options = plain, (bound, least)
        ctx.save_for_backward(x, *numbers)
        return _forward(_Spline(x, numbers, bound, least), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            plain = partial(_with_options, ctx.plain, ctx.options)
            return None, None, None, *plain_gradients(plain, inputs, grads)
        x, *numbers = inputs
        return None, None, None, *_backward(_Spline(x, numbers, *ctx.options), inputs, grads)


class _Inverse(torch.autograd.Function):
    """x of y = f(x; numbers): dx/dy = 1 / f', and dx/dnumbers = -(df/dnumbers) / f', both taken at x."""

    @staticmethod
    def forward(
        ctx: Any, plain: Plain, bound: float, least: float, y: Tensor, *numbers: Tensor
    ) -> Tensor:
        ctx.plain, ctx.options = plain, (bound, least)
        x, slope = _inverse(_Spline(y, numbers, bound, least), y)
        ctx.save_for_backward(y, x, slope, *numbers)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, x, slope, *numbers = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            plain = partial(_with_options, ctx.plain, ctx.options)
            return None, None, None, *plain_gradients(plain, (y, *numbers), grads)
        by_y = grads[0] / slope
        splines = _Spline(x, numbers, *ctx.options)
        _, *by_numbers = _backward(splines, (x, *numbers), (-by_y, torch.zeros_like(by_y)))
        return None, None, None, by_y, *by_numbers
