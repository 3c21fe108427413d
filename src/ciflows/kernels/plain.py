"""Backward passes that can be differentiated again, for functions whose own is written out by hand."""

from __future__ import annotations

__all__ = ["plain_gradients"]

from collections.abc import Callable, Sequence
from typing import Any

import torch
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
