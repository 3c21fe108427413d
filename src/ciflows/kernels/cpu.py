"""Chains of activations and linear maps, for a CPU.

There such a chain is bound by its matrix products, as long as nothing else takes time. So what is done
to each number is done in place, in few passes; products have the layout that is quickest for their
shapes; and the backward pass is written out. Where tangents are carried along with a value, all go
through one product a layer, in blocks of rows that stay in a core's cache.
"""

from __future__ import annotations

__all__ = ["silu_chain", "tanh_chain"]

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 3000


def silu_chain(stack: Tensor, weights: Sequence[Tensor], shifts: Sequence[Tensor]) -> Tensor:
    """y ← V a(y) + c for each weight V and shift c, with tangents T ← V (a'(y) ⊙ T) carried along.

    The activation is a = yσ(y), so that a' = a + σ - aσ and a'' = a' + σ - 2a'σ.

    Arguments:
        stack: The value y and k tangents T, (1 + k, rows, features).
        weights: V of each layer, (out, in).
        shifts: c of each layer, (out,) or (rows, out).
    """
    return _SiluChain.apply(stack, *weights, *shifts)


class _SiluChain(torch.autograd.Function):
    """Of each layer (y, T) alone is kept for the backward pass: memory is slower than to activate again.

    All else goes through the same few buffers, layer after layer, which so stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, stack: Tensor, *maps: Tensor) -> Tensor:
        layers = len(maps) // 2
        weights, shifts = maps[:layers], maps[layers:]
        kept: list[Tensor] = []
        buffers = _buffers(stack, weights)
        result = stack.new_empty(*stack.shape[:2], len(weights[-1]))
        for some in _blocks(stack):
            part = stack[:, some]
            for weight, shift in zip(weights, _part(shifts, some), strict=True):
                active = _activate(part, buffers[0])[0]
                if any(ctx.needs_input_grad):
                    kept.append(part)
                    part = _product(active, weight.mT)
                else:
                    part = _product(active, weight.mT, buffers[1])
                part[0] += shift
            result[:, some] = part
        ctx.save_for_backward(*maps, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), layers = grads, len(ctx.needs_input_grad) // 2
        maps, kept = ctx.saved_tensors[: 2 * layers], ctx.saved_tensors[2 * layers :]
        by_maps = [torch.zeros_like(part) for part in maps]
        by_stack = []
        buffers = _buffers(grad, maps[:layers])
        for start, some in zip(range(0, len(kept), layers), _blocks(grad), strict=True):
            part, by_shifts = grad[:, some], _part(by_maps[layers:], some)
            for index in reversed(range(layers)):
                stack, weight = kept[start + index], maps[index]
                active, s, slope = _activate(stack, buffers[0])
                by_shifts[index] += part[0].sum_to_size(by_shifts[index].shape)
                _add_outer(by_maps[index], part.flatten(0, 1), active.flatten(0, 1))
                if index == 0 and not ctx.needs_input_grad[0]:
                    break
                part = _product(part, weight, buffers[1 + index % 2])
                bend = _dot(part[1:], stack[1:]) if len(part) > 1 else None
                part *= slope
                if bend is not None:
                    part[0].addcmul_(bend, torch.addcmul(s, s, slope, value=-2).add_(slope))
            by_stack.append(part.clone())
        return (torch.cat(by_stack, dim=1) if ctx.needs_input_grad[0] else None), *by_maps


def _buffers(stack: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Room for three stacks of a block, as wide as any."""
    width = max(max(weight.shape) for weight in weights)
    rows = min(max(1, BLOCK // len(stack)), stack.shape[1])
    return stack.new_empty(3, len(stack) * rows * width)


def _view(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _blocks(stack: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // len(stack))
    return (slice(start, start + rows) for start in range(0, max(1, stack.shape[1]), rows))


def _part(shifts: Sequence[Tensor], some: slice) -> list[Tensor]:
    """The shifts of some rows; those of all rows are shared."""
    return [shift[some] if shift.ndim == 2 else shift for shift in shifts]


def _activate(stack: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(a(y), a'(y) ⊙ T) in a buffer, with σ(y) and a'(y)."""
    active = _view(buffer, stack.shape)
    s = torch.sigmoid(stack[0])
    value = torch.mul(stack[0], s, out=active[0])
    slope = torch.addcmul(value, value, s, value=-1).add_(s)
    if len(stack) > 1:
        torch.mul(stack[1:], slope, out=active[1:])
    return active, s, slope


def _product(stack: Tensor, matrix: Tensor, buffer: Tensor | None = None) -> Tensor:
    """All rows of a stack (1 + k, rows, in) times a matrix (in, out)."""
    shape = (*stack.shape[:2], matrix.shape[1])
    result = stack.new_empty(shape) if buffer is None else _view(buffer, shape)
    torch.mm(stack.flatten(0, 1), _by_columns(matrix), out=result.flatten(0, 1))
    return result


def _by_columns(matrix: Tensor) -> Tensor:
    """The same matrix; a narrow one by columns, which makes its products several times quicker."""
    return matrix.mT.contiguous().mT if matrix.shape[1] < matrix.shape[0] else matrix


def _add_outer(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add rowsᵀ inputs (out, in); that of narrow inputs is several times quicker transposed."""
    if inputs.shape[1] < rows.shape[1]:
        total += (inputs.mT @ rows).mT
    else:
        torch.addmm(total, rows.mT, inputs, out=total)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ_k of products (k, rows, features), k above 0."""
    total = first[0] * second[0]
    for one, other in zip(first[1:], second[1:], strict=True):
        total.addcmul_(one, other)
    return total


def tanh_chain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """h ← W h + b for each weight and bias, with a tanh between: (rows, in) -> (rows, out)."""
    return _TanhChain.apply(x, *weights, *biases)


class _TanhChain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *maps: Tensor) -> Tensor:
        layers = len(maps) // 2
        inputs = [x]
        for weight, bias in zip(maps[: layers - 1], maps[layers:-1], strict=True):
            h = torch.addmm(bias, inputs[-1], weight.mT)
            inputs.append(
                h.mul_(2).sigmoid_().mul_(2).sub_(1)
            )  # torch's own tanh takes four times as long
        ctx.save_for_backward(*maps[:layers], *inputs)
        return torch.addmm(maps[-1], inputs[-1], maps[layers - 1].mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), layers = grads, len(ctx.needs_input_grad) // 2
        weights, inputs = ctx.saved_tensors[:layers], ctx.saved_tensors[layers:]
        by_weights = [torch.zeros_like(weight) for weight in weights]
        by_biases: list[Tensor] = []
        for index in reversed(range(layers)):
            by_biases.insert(0, grad.sum(0))
            _add_outer(by_weights[index], grad, inputs[index])
            if index == 0 and not ctx.needs_input_grad[0]:
                return None, *by_weights, *by_biases
            grad = grad @ _by_columns(weights[index])
            if index:
                y = inputs[index]
                grad.addcmul_(grad * y, y, value=-1)
        return grad, *by_weights, *by_biases
