"""Chains of activations and linear maps, for a CPU.

There such a chain is bound by its matrix products, as long as nothing else takes time. Where tangents
are carried along with a value, all go through one product a layer. That is done in C (`native`) where
there is a compiler. Otherwise it is done here, in blocks of rows that stay in a core's cache: what is
done to each number is done in place, in few passes; products have the layout that is quickest for their
shapes; and the backward pass is written out.
"""

from __future__ import annotations

__all__ = ["perceptron", "silu_chain"]

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ciflows.kernels import native
from ciflows.kernels.memory import thread_memory
from ciflows.kernels.plain import halves, plain_chain, plain_gradients

BLOCK = 1500


def silu_chain(stack: Tensor, weights: Sequence[Tensor], shifts: Sequence[Tensor]) -> Tensor:
    """y ← V a(y) + c for each weight V and shift c, with tangents T ← V (a'(y) ⊙ T) carried along.

    The activation is a = yσ(y), so that a' = a + σ - aσ and a'' = a' + σ - 2a'σ.

    Arguments:
        stack: The value y and k tangents T, (1 + k, rows, features).
        weights: V of each layer, (out, in).
        shifts: c of each layer, (out,) or (rows, out).
    """
    maps = *weights, *shifts
    if native.fits(stack, maps):
        return native.chain("silu", stack, maps)
    return _SiluChain.apply(torch.is_grad_enabled(), stack, *maps)


class _SiluChain(torch.autograd.Function):
    """Of each layer (y, T) alone is kept for the backward pass: memory is slower than to activate again.

    What comes out of the first layer is not kept either: to make it of so few features takes less time.
    """

    @staticmethod
    def forward(ctx: Any, keep: bool, stack: Tensor, *maps: Tensor) -> Tensor:
        weights, shifts = halves(maps)
        turned = [_by_columns(weight.mT) for weight in weights]
        hidden = range(1, len(weights) - 1) if keep and any(ctx.needs_input_grad) else ()
        kept: list[Tensor] = []
        results: list[Tensor] = []
        for some in _blocks(stack):
            part = _Stack(stack[:, some])
            rooms = _rooms(part.whole, weights, stacks=2, values=2)
            for index, (weight, shift) in enumerate(zip(turned, _part(shifts, some), strict=True)):
                before, out = (rooms[width] for width in weight.shape)
                if index in hidden:
                    kept.append(torch.empty_like(out.active.whole))
                    part = _layer(part, weight, shift, before, _Stack(kept[-1]))
                else:
                    part = _layer(part, weight, shift, before, out.free[0])
            results.append(part.whole.clone())
        ctx.save_for_backward(stack, *maps, *kept)
        return torch.cat(results, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (stack, *saved) = grads, ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 2
        if torch.is_grad_enabled():
            return None, *plain_gradients(partial(plain_chain, "silu"), [stack, *saved[:count]], grads)
        (weights, shifts), kept = halves(saved[:count]), iter(saved[count:])
        turned, first = [_by_columns(weight) for weight in weights], _by_columns(weights[0].mT)
        by_weights, by_shifts = halves([torch.zeros_like(part) for part in saved[:count]])
        by_stack = torch.empty_like(stack) if ctx.needs_input_grad[1] else None
        for some in _blocks(stack):
            inputs = [_Stack(stack[:, some])]
            rooms = _rooms(inputs[0].whole, weights, stacks=4, values=3)
            if len(weights) > 1:
                before, out = (rooms[width] for width in first.shape)
                inputs.append(_layer(inputs[0], first, _part(shifts, some)[0], before, out.free[2]))
            inputs += [_Stack(next(kept)) for _ in weights[2:]]
            part = _Stack(grad[:, some])
            by_some = _part(by_shifts, some)
            for index in reversed(range(len(weights))):
                given, room = inputs[index], rooms[weights[index].shape[1]]
                _activate(given, room)
                by_some[index] += part.value.sum_to_size(by_some[index].shape)
                by_weights[index].add_(_outer(part.rows, room.active.rows))
                if index == 0 and by_stack is None:
                    break
                torch.mm(part.rows, turned[index], out=room.free[index % 2].rows)
                part = _deactivate(room.free[index % 2], given, room)
            if by_stack is not None:
                by_stack[:, some] = part.whole
        return None, by_stack, *by_weights, *by_shifts


class _Stack:
    """A value y (rows, width) above its tangents T (k, rows, width), and views of them."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.value = whole[0]
        self.tangents = whole[1:]
        self.rows = whole.flatten(0, 1)


class _Room:
    """Memory for the stacks of one width: one for (a, a' ⊙ T), free ones, and some of a value's size."""

    def __init__(self, stacks: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.active, *self.free = map(_Stack, stacks)
        self.s, self.slope, *self.values = values
        self.one = self.s.new_ones(())


def _rooms(stack: Tensor, weights: Sequence[Tensor], stacks: int, values: int) -> Mapping[int, _Room]:
    """A room for each width that the layers have."""
    widths = frozenset(size for weight in weights for size in weight.shape)
    sizes = (len(stack),) * stacks + (1,) * values
    return _furnish(threading.get_ident(), stack.dtype, stack.shape[1], widths, sizes, stacks)


@lru_cache(maxsize=16)
def _furnish(
    thread: int, dtype: torch.dtype, rows: int, widths: frozenset[int], sizes: Sequence[int], stacks: int
) -> Mapping[int, _Room]:
    """Cut rooms out of a thread's memory; they are remembered, since many views take a while to make."""
    with torch.inference_mode(False):  # they shall serve outside of it too
        most = rows * max(widths)
        parts = thread_memory.get(sum(sizes) * most, dtype).split([size * most for size in sizes])
        rooms = {}
        for width in widths:
            pairs = zip(parts, sizes, strict=True)
            views = [part[: size * rows * width].view(size, rows, width) for part, size in pairs]
            rooms[width] = _Room(views[:stacks], [view[0] for view in views[stacks:]])
        return rooms


def _blocks(stack: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // len(stack))
    return (slice(start, start + rows) for start in range(0, max(1, stack.shape[1]), rows))


def _part(shifts: Sequence[Tensor], some: slice) -> list[Tensor]:
    """The shifts of some rows; those of all rows are shared."""
    return [shift[some] if shift.ndim == 2 else shift for shift in shifts]


def _layer(given: _Stack, weight: Tensor, shift: Tensor, room: _Room, out: _Stack) -> _Stack:
    """(V a(y) + c, V (a'(y) ⊙ T)) for a weight Vᵀ, in `out`."""
    _activate(given, room)
    torch.mm(room.active.rows, weight, out=out.rows)
    out.value.add_(shift)
    return out


def _activate(given: _Stack, room: _Room) -> None:
    """Make (a(y), a'(y) ⊙ T) of (y, T)."""
    torch.sigmoid(given.value, out=room.s)
    torch.mul(given.value, room.s, out=room.active.value)
    if len(given.tangents):
        torch.mul(given.tangents, _slope(room), out=room.active.tangents)


def _slope(room: _Room) -> Tensor:
    """a' = a + σ - aσ of what was activated."""
    return torch.lerp(room.active.value, room.one, room.s, out=room.slope)


def _deactivate(grad: _Stack, given: _Stack, room: _Room) -> _Stack:
    """Turn the gradient by (a(y), a'(y) ⊙ T) into the one by (y, T), in place."""
    if not len(given.tangents):
        grad.value.mul_(_slope(room))
        return grad
    bend, s, slope = room.values[0], room.s, room.slope
    torch.mul(grad.tangents[0], given.tangents[0], out=bend)
    for one, other in zip(grad.tangents[1:], given.tangents[1:], strict=True):
        bend.addcmul_(one, other)
    grad.whole.mul_(slope)
    grad.value.addcmul_(bend, torch.addcmul(s, s, slope, value=-2, out=s).add_(slope))
    return grad


def _by_columns(matrix: Tensor) -> Tensor:
    """The same matrix; a narrow one by columns, which makes its products several times quicker."""
    return matrix.mT.contiguous().mT if matrix.shape[1] < matrix.shape[0] else matrix


def _outer(rows: Tensor, inputs: Tensor) -> Tensor:
    """rowsᵀ inputs (out, in); that of narrow inputs is several times quicker transposed."""
    narrow = inputs.shape[1] < rows.shape[1]
    return (inputs.mT @ rows).mT if narrow else rows.mT @ inputs


def perceptron(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str
) -> Tensor:
    """h ← W h + b for each weight and bias, with a tanh or ReLU between: (rows, in) -> (rows, out)."""
    maps = *weights, *biases
    worth_it = activation == "tanh" or torch.is_grad_enabled()  # a ReLU takes torch no time
    if worth_it and native.fits(x, maps):
        return native.chain(activation, x, maps)
    if activation == "tanh":
        return _TanhChain.apply(x, *maps)
    x = F.linear(x, weights[0], biases[0])
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        x = F.linear(torch.relu_(x), weight, bias)
    return x


class _TanhChain(torch.autograd.Function):
    """Points are columns here: long rows of few units make products several times quicker."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *maps: Tensor) -> Tensor:
        weights, biases = halves(maps)
        inputs = [x.mT.contiguous()]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            twice = torch.addmm(bias[:, None], weight, inputs[-1], alpha=2, beta=2)
            # tanh(h) = 2 σ(2h) - 1, since torch's own takes four times as long
            inputs.append(twice.sigmoid_().mul_(2).sub_(1))
        ctx.save_for_backward(x, *maps, *inputs)
        return torch.addmm(biases[-1][:, None], weights[-1], inputs[-1]).mT.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.needs_input_grad)
        given, inputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            return plain_gradients(partial(plain_chain, "tanh"), given, grads)
        weights, _ = halves(given[1:])
        grad = grads[0].mT
        by_weights: list[Tensor] = []
        by_biases: list[Tensor] = []
        for index in reversed(range(len(weights))):
            by_weights.insert(0, _outer(grad.mT, inputs[index].mT))
            by_biases.insert(0, grad.sum(1))
            if index:
                grad = torch.ops.aten.tanh_backward(weights[index].mT @ grad, inputs[index])
        by_x = (weights[0].mT @ grad).mT if ctx.needs_input_grad[0] else None
        return by_x, *by_weights, *by_biases
