"""Chains and backward passes in plain torch, for what is otherwise written out by hand."""

from __future__ import annotations

__all__ = ["halves", "plain_chain", "plain_gradients"]

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_gradients(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Any], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of a function of ordinary operations, for each of its inputs that has one.

    A `backward` returns these where gradients are recorded (`torch.is_grad_enabled()`). They are those
    in views of the inputs: that one input was made of another is none of the function's doing.
    """
    given = [part.view_as(part) if isinstance(part, Tensor) else part for part in inputs]
    wanted = [isinstance(part, Tensor) and part.requires_grad for part in given]
    needed = [part for part, is_wanted in zip(given, wanted, strict=True) if is_wanted]
    outputs = function(*given)
    made = iter(torch.autograd.grad(outputs, needed, grads, create_graph=True, allow_unused=True))
    return tuple(next(made) if is_wanted else None for is_wanted in wanted)


def halves(maps: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The weights of a chain, and its shifts."""
    return maps[: len(maps) // 2], maps[len(maps) // 2 :]


def plain_chain(activation: str, stack: Tensor, *maps: Tensor) -> Tensor:
    """y ← V a(y) + c for each weight V and shift c, with tangents T ← V (a'(y) ⊙ T) carried along.

    Arguments:
        activation: "silu" is before each map; "tanh" and "relu" are between maps.
        stack: The value y and k tangents T, (1 + k, rows, features); or the value alone.
        maps: V of each layer, (out, in); then c of each, (out,) or (rows, out).
    """
    if stack.ndim == 2:
        return plain_chain(activation, stack[None], *maps)[0]
    for index, (weight, shift) in enumerate(zip(*halves(maps), strict=True)):
        if index or activation == "silu":
            value, slope = _activated(activation, stack[:1])
            stack = torch.cat([value, stack[1:] * slope]) if len(stack) > 1 else value
        stack = stack @ weight.mT
        stack = torch.cat([stack[:1] + shift, stack[1:]]) if len(stack) > 1 else stack + shift
    return stack


def _activated(activation: str, y: Tensor) -> tuple[Tensor, Tensor]:
    """a(y) and a'(y)."""
    if activation == "silu":
        s = torch.sigmoid(y)
        return F.silu(y), s * (1 + y * (1 - s))
    if activation == "tanh":
        value = torch.tanh(y)
        return value, 1 - value * value
    return torch.relu(y), (y > 0).to(y.dtype)
