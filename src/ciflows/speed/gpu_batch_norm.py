"""Batch norm and ReLU of images in training, as three GPU kernels each way.

Images lie with the channels of a pixel side by side: rows of C numbers, one for each pixel. A program
takes tiles of rows and leaves partial sums; a second kernel adds these up; a third one maps the rows.
Sums are float32 whatever the images are.
"""

# ruff: noqa: N803
# mypy: ignore-errors
# Triton's functions are no Python: constants are in capitals, and types are those of its compiler.

from __future__ import annotations

__all__ = ["norm_relu"]

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ciflows.speed.gpu import refuse_twice

TILE = 4096  # numbers in a tile
PROGRAMS = 264  # that leave partial sums: two for each processor of an H200
TOGETHER = 64  # partial sums at once
CHANNELS = 16  # of which one program adds up the partial sums


def norm_relu(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """relu(norm(x)) of a batch x (rows, C, H, W), in training mode; updates the running averages."""
    norm.num_batches_tracked.add_(1)
    running = norm.running_mean, norm.running_var
    return _NormReLU.apply(x, norm.weight, norm.bias, *running, norm.momentum, norm.eps)


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps):
        y, tiles = torch.empty_like(x), _Tiles(x)
        means, squares = tiles.partial(x), tiles.partial(x)
        moments = x.new_empty((2, tiles.channels), dtype=torch.float32)
        tiles.launch(_moments_kernel, x, means, squares)
        tiles.launch_sums(
            _finish_moments_kernel, means, squares, moments, running_mean, running_var, momentum, eps
        )
        tiles.launch_each(_norm_relu_kernel, x, moments, weight, bias, y)
        ctx.save_for_backward(x, weight, bias, moments)
        return y

    @staticmethod
    def backward(ctx, by_y):
        if torch.is_grad_enabled():
            refuse_twice()
        x, weight, bias, moments = ctx.saved_tensors
        by_y, by_x = by_y.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
        tiles = _Tiles(x)
        shifts, scales = tiles.partial(x), tiles.partial(x)
        by_weight, by_bias = torch.empty_like(weight), torch.empty_like(bias)
        tiles.launch(_sums_kernel, x, moments, weight, bias, by_y, shifts, scales)
        tiles.launch_sums(_finish_sums_kernel, shifts, scales, by_bias, by_weight)
        tiles.launch_each(
            _norm_relu_backward_kernel, x, moments, weight, bias, by_y, by_bias, by_weight, by_x
        )
        return by_x, by_weight, by_bias, None, None, None, None


class _Tiles:
    """How rows are shared out among programs."""

    def __init__(self, x: Tensor) -> None:
        self.device, self.channels = x, x.shape[1]
        self.rows, self.tile = x.numel() // self.channels, max(1, TILE // self.channels)
        self.steps = triton.cdiv(triton.cdiv(self.rows, self.tile), PROGRAMS)
        self.programs = triton.cdiv(self.rows, self.tile * self.steps)

    def partial(self, x: Tensor) -> Tensor:
        """Room for the partial sums of each program."""
        return x.new_empty((self.programs, self.channels), dtype=torch.float32)

    def launch(self, kernel, *tensors):
        """Partial sums of several tiles in each program."""
        sizes = {"R": self.tile, "C": self.channels}
        with torch.cuda.device_of(self.device):
            kernel[(self.programs,)](*tensors, self.rows, self.steps, **sizes)

    def launch_sums(self, kernel, *arguments):
        """The sums of partial sums, some channels in each program."""
        some = min(CHANNELS, self.channels)
        sizes = {"R": self.tile, "C": self.channels, "SOME": some, "G": TOGETHER}
        with torch.cuda.device_of(self.device):
            kernel[(self.channels // some,)](
                *arguments, self.rows, self.steps, self.programs, **sizes, num_warps=4
            )

    def launch_each(self, kernel, *tensors):
        """A map of each row, a tile in each program."""
        sizes = {"R": self.tile, "C": self.channels}
        with torch.cuda.device_of(self.device):
            kernel[(triton.cdiv(self.rows, self.tile),)](*tensors, self.rows, **sizes)


@triton.jit
def _place(tile, n, R: tl.constexpr, C: tl.constexpr):
    """Where a tile's numbers lie, and which are there."""
    rows = tile * R + tl.arange(0, R)
    at = rows[:, None] * C + tl.arange(0, C)[None, :]
    return at, (rows < n)[:, None]


@triton.jit
def _moments_kernel(x_ptr, means_ptr, squares_ptr, n, steps, R: tl.constexpr, C: tl.constexpr):
    """Mean of a program's rows and sum of the squares around it, merged tile by tile (Chan et al.)."""
    program = tl.program_id(0)
    mean, square, count = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0
    for step in range(steps):
        at, inside = _place(program * steps + step, n, R, C)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        here = tl.sum(tl.where(inside, 1.0, 0.0))
        own = tl.sum(x, axis=0) / tl.maximum(here, 1.0)
        off = tl.where(inside, x - own[None, :], 0.0)
        share = here / tl.maximum(count + here, 1.0)
        square += tl.sum(off * off, axis=0) + (own - mean) * (own - mean) * count * share
        mean += (own - mean) * share
        count += here
    columns = program * C + tl.arange(0, C)
    tl.store(means_ptr + columns, mean)
    tl.store(squares_ptr + columns, square)


@triton.jit
def _partial(
    start, n, steps, programs, R: tl.constexpr, C: tl.constexpr, SOME: tl.constexpr, G: tl.constexpr
):
    """Where some partial sums of a program's channels lie, which are there, and of how many rows."""
    each, columns = start + tl.arange(0, G), tl.program_id(0) * SOME + tl.arange(0, SOME)
    counts = tl.minimum(tl.maximum(n - each * steps * R, 0), steps * R).to(tl.float32)
    return each[:, None] * C + columns[None, :], (each < programs)[:, None], counts[:, None]


@triton.jit
def _finish_moments_kernel(
    means_ptr, squares_ptr, moments_ptr, running_mean_ptr, running_var_ptr, momentum, eps,
    n, steps, programs, R: tl.constexpr, C: tl.constexpr, SOME: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / standard deviation of each channel, and the running averages."""
    mean, square = tl.zeros((SOME,), tl.float32), tl.zeros((SOME,), tl.float32)
    for start in range(0, programs, G):
        at, inside, counts = _partial(start, n, steps, programs, R, C, SOME, G)
        mean += tl.sum(tl.load(means_ptr + at, mask=inside, other=0.0) * (counts / n), axis=0)
    for start in range(0, programs, G):
        at, inside, counts = _partial(start, n, steps, programs, R, C, SOME, G)
        off = tl.load(means_ptr + at, mask=inside, other=0.0) - mean[None, :]
        own = tl.load(squares_ptr + at, mask=inside, other=0.0) + counts * off * off
        square += tl.sum(tl.where(inside, own, 0.0), axis=0)
    columns = tl.program_id(0) * SOME + tl.arange(0, SOME)
    tl.store(moments_ptr + columns, mean)
    tl.store(moments_ptr + C + columns, 1 / tl.sqrt(square / n + eps))
    before = tl.load(running_mean_ptr + columns)
    tl.store(running_mean_ptr + columns, before + momentum * (mean - before))
    before = tl.load(running_var_ptr + columns)
    tl.store(running_var_ptr + columns, before + momentum * (square / (n - 1) - before))


@triton.jit
def _channels(moments_ptr, weight_ptr, bias_ptr, C: tl.constexpr):
    columns = tl.arange(0, C)
    mean, scale = tl.load(moments_ptr + columns), tl.load(moments_ptr + C + columns)
    weight, bias = tl.load(weight_ptr + columns), tl.load(bias_ptr + columns)
    return mean[None, :], scale[None, :], weight[None, :], bias[None, :]


@triton.jit
def _norm_relu_kernel(
    x_ptr, moments_ptr, weight_ptr, bias_ptr, y_ptr, n, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    at, inside = _place(tl.program_id(0), n, R, C)
    mean, scale, weight, bias = _channels(moments_ptr, weight_ptr, bias_ptr, C)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.maximum((x - mean) * scale * weight + bias, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _passed(at, inside, x_ptr, by_y_ptr, mean, scale, weight, bias):
    """Normalised numbers, and the gradients that the ReLU lets pass."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    by_y = tl.load(by_y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normal = (x - mean) * scale
    return normal, tl.where(normal * weight + bias > 0, by_y, 0.0)


@triton.jit
def _sums_kernel(
    x_ptr, moments_ptr, weight_ptr, bias_ptr, by_y_ptr, shifts_ptr, scales_ptr, n, steps,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    mean, scale, weight, bias = _channels(moments_ptr, weight_ptr, bias_ptr, C)
    by_shift, by_scale = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for step in range(steps):
        at, inside = _place(program * steps + step, n, R, C)
        normal, passed = _passed(at, inside, x_ptr, by_y_ptr, mean, scale, weight, bias)
        by_shift += tl.sum(passed, axis=0)
        by_scale += tl.sum(passed * normal, axis=0)
    columns = program * C + tl.arange(0, C)
    tl.store(shifts_ptr + columns, by_shift)
    tl.store(scales_ptr + columns, by_scale)


@triton.jit
def _finish_sums_kernel(
    shifts_ptr, scales_ptr, by_bias_ptr, by_weight_ptr, n, steps, programs,
    R: tl.constexpr, C: tl.constexpr, SOME: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    by_shift, by_scale = tl.zeros((SOME,), tl.float32), tl.zeros((SOME,), tl.float32)
    for start in range(0, programs, G):
        at, inside, _ = _partial(start, n, steps, programs, R, C, SOME, G)
        by_shift += tl.sum(tl.load(shifts_ptr + at, mask=inside, other=0.0), axis=0)
        by_scale += tl.sum(tl.load(scales_ptr + at, mask=inside, other=0.0), axis=0)
    columns = tl.program_id(0) * SOME + tl.arange(0, SOME)
    tl.store(by_bias_ptr + columns, by_shift)
    tl.store(by_weight_ptr + columns, by_scale)


@triton.jit
def _norm_relu_backward_kernel(
    x_ptr, moments_ptr, weight_ptr, bias_ptr, by_y_ptr, by_bias_ptr, by_weight_ptr, by_x_ptr, n,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Mean and variance move with x too: what is common to all rows is taken off."""
    at, inside = _place(tl.program_id(0), n, R, C)
    mean, scale, weight, bias = _channels(moments_ptr, weight_ptr, bias_ptr, C)
    normal, passed = _passed(at, inside, x_ptr, by_y_ptr, mean, scale, weight, bias)
    columns = tl.arange(0, C)
    by_shift = (tl.load(by_bias_ptr + columns) / n)[None, :]
    by_scale = (tl.load(by_weight_ptr + columns) / n)[None, :]
    by_x = scale * weight * (passed - by_shift - normal * by_scale)
    tl.store(by_x_ptr + at, by_x.to(by_x_ptr.dtype.element_ty), mask=inside)
