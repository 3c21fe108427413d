"""What an index needs beside its networks: normal densities and affine maps, in few operations each way.

Their parameters are a network's output (*, 2c, ...), in two halves along the dimension of the c features
or channels. On rows of few numbers each operation takes about the same time, whatever it does; so the
backward passes are written out, in about as many operations as the forward ones.
"""

from __future__ import annotations

__all__ = ["affine", "draw_normal", "log_normal", "place_normal"]

import math
from typing import Any

import torch
from torch import Tensor

from ciflows import kernels
from ciflows.kernels.plain import plain_gradients
from ciflows.layers import Shape, beside_event, leading_shape, sum_event

HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def log_normal(x: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    """log N(x; mean, diag(exp(log_std))²) (*) for x (*, shape).

    Arguments:
        x: Where the density is taken.
        moments: The mean and log_std, halves of (*, 2c, ...).
        shape: Shape of one x.
    """
    if kernels.fits_vectors(x, moments, shape):
        from ciflows.kernels.gpu_normal import log_normal as by_kernel

        return by_kernel(x, moments)
    return _LogNormal.apply(x, moments, shape)


def draw_normal(epsilon: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    """x = mean + exp(log_std) ε, as `place_normal` has it: for moments alone there is a gradient."""
    if kernels.fits_vectors(epsilon, moments, shape):
        from ciflows.kernels.gpu_normal import place_normal as by_kernel

        return by_kernel(epsilon, moments, None)[0]
    mean, log_std = moments.chunk(2, dim=-len(shape))
    return mean + torch.exp(log_std) * epsilon.detach()


def place_normal(
    epsilon: Tensor, moments: Tensor, shape: Shape, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x = mean + exp(log_std) ε + shift, and log N(x; mean, diag(exp(log_std))²) (*).

    Arguments:
        epsilon: Numbers ε (*, shape), which get no gradient.
        moments: The mean and log_std, halves of (*, 2c, ...).
        shape: Shape of one x.
        shift: What is added (*, shape), if anything.
    """
    if kernels.fits_vectors(epsilon, moments, shape):
        from ciflows.kernels.gpu_normal import place_normal as by_kernel

        return by_kernel(epsilon, moments, shift)
    return _PlaceNormal.apply(epsilon, moments, shape, shift)


def affine(x: Tensor, parameters: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """e^s ⊙ (x + t) (*, shape), and the sum of s (*).

    Arguments:
        x: What is mapped.
        parameters: s and t, halves of (*, 2c, ...).
        shape: Shape of one x.
    """
    if kernels.fits_vectors(x, parameters, shape):
        from ciflows.kernels.gpu_normal import affine as by_kernel

        return by_kernel(x, parameters)
    return _Affine.apply(x, parameters, shape)


class _LogNormal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moments: Tensor, shape: Shape) -> Tensor:
        mean, log_std = moments.chunk(2, dim=-len(shape))
        scaled, scale = _standardised(x, mean, log_std)
        ctx.shape = shape
        ctx.save_for_backward(x, moments, scaled, scale)
        return _log_density(scaled, log_std, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, moments, scaled, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            return plain_gradients(_plain_log_normal, [x, moments, ctx.shape], grads)
        grad = beside_event(grads[0], ctx.shape)
        weighted = grad * scaled
        by_moments, by_mean, by_log_std = _parted(weighted, ctx.shape)
        torch.mul(weighted, scale, out=by_mean)
        torch.mul(weighted, scaled, out=by_log_std).sub_(grad)
        return by_mean.neg().sum_to_size(x.shape), by_moments.sum_to_size(moments.shape), None


class _PlaceNormal(torch.autograd.Function):
    """Where x moves with mean and log_std, (x - mean) / std stays, but for the shift."""

    @staticmethod
    def forward(
        ctx: Any, epsilon: Tensor, moments: Tensor, shape: Shape, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        mean, log_std = moments.chunk(2, dim=-len(shape))
        moved = torch.exp(log_std) * epsilon
        x = mean + moved
        x = x if shift is None else x + shift
        # by the same arithmetic as `log_normal`, so that equal p and q cancel to the last digit
        scaled, scale = _standardised(x, mean, log_std)
        ctx.shape = shape
        ctx.save_for_backward(epsilon, moments, shift, moved, scaled, scale)
        return x, _log_density(scaled, log_std, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        epsilon, moments, shift, moved, scaled, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            return plain_gradients(_plain_place_normal, [epsilon, moments, ctx.shape, shift], grads)
        by_x, grad = grads[0], beside_event(grads[1], ctx.shape)
        by_moments, by_mean, by_log_std = _parted(by_x, ctx.shape)
        by_mean.copy_(by_x)
        torch.mul(by_x, moved, out=by_log_std).sub_(grad)
        by_shift = None
        if shift is not None:
            weighted = grad * scaled
            by_log_std.addcmul_(weighted, scaled - epsilon)
            by_shift = torch.addcmul(by_x, weighted, scale, value=-1).sum_to_size(shift.shape)
        return None, by_moments.sum_to_size(moments.shape), None, by_shift


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        s, t = parameters.chunk(2, dim=-len(shape))
        scale = torch.exp(s)
        z = (x + t).mul_(scale)
        log_det = sum_event(s, shape).expand(leading_shape(z, shape))
        ctx.shape = shape
        ctx.save_for_backward(x, parameters, scale, z)
        return z, log_det

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, parameters, scale, z = ctx.saved_tensors
        if torch.is_grad_enabled():
            return plain_gradients(_plain_affine, [x, parameters, ctx.shape], grads)
        by_z, grad = grads[0], beside_event(grads[1], ctx.shape)
        by_parameters, by_s, by_t = _parted(by_z, ctx.shape)
        torch.mul(by_z, z, out=by_s).add_(grad)
        torch.mul(by_z, scale, out=by_t)
        return by_t.clone().sum_to_size(x.shape), by_parameters.sum_to_size(parameters.shape), None


def _standardised(x: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """(x - mean) / std, and 1 / std."""
    scale = torch.exp(-log_std)
    return (x - mean).mul_(scale), scale


def _log_density(scaled: Tensor, log_std: Tensor, shape: Shape) -> Tensor:
    energy = sum_event(torch.addcmul(log_std, scaled, scaled, value=0.5), shape)
    return energy.add_(HALF_LOG_2_PI * math.prod(shape)).neg_()


def _parted(like: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """An empty tensor of two halves, each like that which is given, and the two."""
    whole = like.new_empty((*leading_shape(like, shape), 2 * shape[0], *shape[1:]))
    first, second = whole.chunk(2, dim=-len(shape))
    return whole, first, second


def _plain_log_normal(x: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    mean, log_std = moments.chunk(2, dim=-len(shape))
    energy = 0.5 * ((x - mean) * torch.exp(-log_std)).square() + log_std + HALF_LOG_2_PI
    return -sum_event(energy, shape)


def _plain_place_normal(
    epsilon: Tensor, moments: Tensor, shape: Shape, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    mean, log_std = moments.chunk(2, dim=-len(shape))
    x = mean + torch.exp(log_std) * epsilon
    x = x if shift is None else x + shift
    return x, _plain_log_normal(x, moments, shape)


def _plain_affine(x: Tensor, parameters: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    s, t = parameters.chunk(2, dim=-len(shape))
    z = torch.exp(s) * (x + t)
    return z, sum_event(s, shape).expand(leading_shape(z, shape))
