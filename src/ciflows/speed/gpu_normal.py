"""Normal densities and affine maps of vectors, as one GPU kernel forward and one backward.

A program takes a tile of rows of d numbers, and of 2d from a network's output.
"""

# ruff: noqa: N803
# mypy: ignore-errors
# Triton's functions are no Python: constants are in capitals, and types are those of its compiler.

from __future__ import annotations

__all__ = ["affine", "log_normal", "place_normal"]

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ciflows.speed.gpu import refuse_twice

HALF_LOG_2_PI: tl.constexpr = tl.constexpr(0.5 * math.log(2 * math.pi))
TILE = 512  # numbers of one kind in a program


def log_normal(x: Tensor, moments: Tensor) -> Tensor:
    """log N(x; mean, diag(exp(log_std))²) (*) for x (*, d) and moments (*, 2d)."""
    x, moments = _spread(x, moments)
    return _LogNormal.apply(x, moments)


def place_normal(epsilon: Tensor, moments: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """x = mean + exp(log_std) ε + shift (*, d), and log N(x; mean, diag(exp(log_std))²) (*)."""
    epsilon, moments = _spread(epsilon, moments)
    return _PlaceNormal.apply(epsilon, moments, None if shift is None else shift.expand_as(epsilon))


def affine(x: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """e^s ⊙ (x + t) (*, d), and the sum of s (*), for s and t in halves (*, 2d)."""
    x, parameters = _spread(x, parameters)
    return _Affine.apply(x, parameters)


class _LogNormal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moments):
        x, moments = x.contiguous(), moments.contiguous()
        value = x.new_empty(x.shape[:-1])
        _launch(_log_normal_kernel, x, moments, value)
        ctx.save_for_backward(x, moments)
        return value

    @staticmethod
    def backward(ctx, grad):
        _check_once()
        x, moments = ctx.saved_tensors
        by_x, by_moments, grad = torch.empty_like(x), torch.empty_like(moments), grad.reshape(-1)
        _launch(_log_normal_backward_kernel, x, moments, grad, by_x, by_moments, grad.stride(0))
        return by_x, by_moments


class _PlaceNormal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, epsilon, moments, shift):
        epsilon, moments = epsilon.contiguous(), moments.contiguous()
        shifted = shift is not None
        shift = shift.contiguous() if shifted else epsilon
        x, value = torch.empty_like(epsilon), epsilon.new_empty(epsilon.shape[:-1])
        _launch(_place_kernel, epsilon, moments, shift, x, value, SHIFTED=shifted)
        ctx.shifted = shifted
        ctx.save_for_backward(epsilon, moments, shift)
        ctx.set_materialize_grads(False)
        return x, value

    @staticmethod
    def backward(ctx, by_x, grad):
        _check_once()
        epsilon, moments, shift = ctx.saved_tensors
        by_x = torch.zeros_like(epsilon) if by_x is None else by_x.contiguous()
        grad = by_x.new_zeros(1).expand(by_x[..., 0].numel()) if grad is None else grad.reshape(-1)
        by_moments = torch.empty_like(moments)
        by_shift = torch.empty_like(shift) if ctx.shifted else by_x
        _launch(
            _place_backward_kernel, epsilon, moments, shift, by_x, grad, by_moments, by_shift,
            grad.stride(0), SHIFTED=ctx.shifted,
        )  # fmt: skip
        return None, by_moments, by_shift if ctx.shifted else None


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, parameters):
        x, parameters = x.contiguous(), parameters.contiguous()
        z, log_det = torch.empty_like(x), x.new_empty(x.shape[:-1])
        _launch(_affine_kernel, x, parameters, z, log_det)
        ctx.save_for_backward(parameters, z)
        return z, log_det

    @staticmethod
    def backward(ctx, by_z, grad):
        _check_once()
        parameters, z = ctx.saved_tensors
        by_z, grad = by_z.contiguous(), grad.reshape(-1)
        by_x, by_parameters = torch.empty_like(z), torch.empty_like(parameters)
        _launch(_affine_backward_kernel, z, parameters, by_z, grad, by_x, by_parameters, grad.stride(0))
        return by_x, by_parameters


def _check_once():
    if torch.is_grad_enabled():
        refuse_twice()


def _spread(x: Tensor, halves: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the leading dimensions that either has."""
    if x.shape[:-1] == halves.shape[:-1]:
        return x, halves
    leading = torch.broadcast_shapes(x.shape[:-1], halves.shape[:-1])
    return x.expand(*leading, -1), halves.expand(*leading, -1)


def _launch(kernel, first, *rest, **options):
    """Launch a kernel over tiles of the rows of its first argument (*, d)."""
    d = first.shape[-1]
    rows, width = first.numel() // d, triton.next_power_of_2(d)
    tile = max(1, TILE // width)
    with torch.cuda.device_of(first):
        kernel[(triton.cdiv(rows, tile),)](first, *rest, rows, d, R=tile, D=width, **options)


@triton.jit
def _tile(n, d, R: tl.constexpr, D: tl.constexpr):
    """The rows of a program, where each number of theirs lies, and each of a network's output; masks."""
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    here = rows < n
    inside = here[:, None] & (columns < d)[None, :]
    at, columns = rows[:, None] * d, columns[None, :]
    return rows, at + columns, 2 * at + columns, here, inside


@triton.jit
def _log_density(x, mean, log_std, inside):
    scaled = (x - mean) * tl.exp(-log_std)
    return -tl.sum(tl.where(inside, 0.5 * scaled * scaled + log_std + HALF_LOG_2_PI, 0.0), axis=1)


@triton.jit
def _log_normal_kernel(x_ptr, moments_ptr, value_ptr, n, d, R: tl.constexpr, D: tl.constexpr):
    rows, at, twice, here, inside = _tile(n, d, R, D)
    mean = tl.load(moments_ptr + twice, mask=inside, other=0.0)
    log_std = tl.load(moments_ptr + twice + d, mask=inside, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(value_ptr + rows, _log_density(x, mean, log_std, inside), mask=here)


@triton.jit
def _log_normal_backward_kernel(
    x_ptr, moments_ptr, grad_ptr, by_x_ptr, by_moments_ptr, stride, n, d,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows, at, twice, here, inside = _tile(n, d, R, D)
    mean = tl.load(moments_ptr + twice, mask=inside, other=0.0)
    log_std = tl.load(moments_ptr + twice + d, mask=inside, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + rows * stride, mask=here, other=0.0)[:, None]
    scale = tl.exp(-log_std)
    scaled = (x - mean) * scale
    by_mean = grad * scaled * scale
    tl.store(by_x_ptr + at, -by_mean, mask=inside)
    tl.store(by_moments_ptr + twice, by_mean, mask=inside)
    tl.store(by_moments_ptr + twice + d, grad * (scaled * scaled - 1), mask=inside)


@triton.jit
def _place_kernel(
    epsilon_ptr, moments_ptr, shift_ptr, x_ptr, value_ptr, n, d,
    SHIFTED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows, at, twice, here, inside = _tile(n, d, R, D)
    mean = tl.load(moments_ptr + twice, mask=inside, other=0.0)
    log_std = tl.load(moments_ptr + twice + d, mask=inside, other=0.0)
    x = mean + tl.exp(log_std) * tl.load(epsilon_ptr + at, mask=inside, other=0.0)
    if SHIFTED:
        x += tl.load(shift_ptr + at, mask=inside, other=0.0)
    tl.store(x_ptr + at, x, mask=inside)
    tl.store(value_ptr + rows, _log_density(x, mean, log_std, inside), mask=here)


@triton.jit
def _place_backward_kernel(
    epsilon_ptr, moments_ptr, shift_ptr, by_x_ptr, grad_ptr, by_moments_ptr, by_shift_ptr, stride, n, d,
    SHIFTED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Where x moves with mean and log_std, (x - mean) / std stays, but for the shift."""
    rows, at, twice, here, inside = _tile(n, d, R, D)
    log_std = tl.load(moments_ptr + twice + d, mask=inside, other=0.0)
    epsilon = tl.load(epsilon_ptr + at, mask=inside, other=0.0)
    by_x = tl.load(by_x_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + rows * stride, mask=here, other=0.0)[:, None]
    by_log_std = by_x * tl.exp(log_std) * epsilon - grad
    if SHIFTED:
        scale = tl.exp(-log_std)
        moved = tl.load(shift_ptr + at, mask=inside, other=0.0) * scale
        weighted = grad * (epsilon + moved)
        by_log_std += weighted * moved
        tl.store(by_shift_ptr + at, by_x - weighted * scale, mask=inside)
    tl.store(by_moments_ptr + twice, by_x, mask=inside)
    tl.store(by_moments_ptr + twice + d, by_log_std, mask=inside)


@triton.jit
def _affine_kernel(x_ptr, parameters_ptr, z_ptr, log_det_ptr, n, d, R: tl.constexpr, D: tl.constexpr):
    rows, at, twice, here, inside = _tile(n, d, R, D)
    s = tl.load(parameters_ptr + twice, mask=inside, other=0.0)
    t = tl.load(parameters_ptr + twice + d, mask=inside, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(z_ptr + at, tl.exp(s) * (x + t), mask=inside)
    tl.store(log_det_ptr + rows, tl.sum(s, axis=1), mask=here)


@triton.jit
def _affine_backward_kernel(
    z_ptr, parameters_ptr, by_z_ptr, grad_ptr, by_x_ptr, by_parameters_ptr, stride, n, d,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    rows, at, twice, here, inside = _tile(n, d, R, D)
    s = tl.load(parameters_ptr + twice, mask=inside, other=0.0)
    z = tl.load(z_ptr + at, mask=inside, other=0.0)
    by_z = tl.load(by_z_ptr + at, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + rows * stride, mask=here, other=0.0)[:, None]
    by_x = by_z * tl.exp(s)
    tl.store(by_x_ptr + at, by_x, mask=inside)
    tl.store(by_parameters_ptr + twice, by_z * z + grad, mask=inside)
    tl.store(by_parameters_ptr + twice + d, by_x, mask=inside)
