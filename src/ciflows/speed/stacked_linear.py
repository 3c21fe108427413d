"""Linear maps of one shape, whose weights' gradients are computed in one product, at the end.

Only the optimiser waits for the gradient of a weight. One by one, between those of the activations, they
take a GPU as long as these do; in one batched product a tenth of that. Until then their factors stay in
memory.
"""

from __future__ import annotations

__all__ = ["linear", "unstack"]

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ciflows.core.groups import grouped

# private: if a release of torch lacks it, each map computes its own gradients
_will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)


def unstack(weights: Tensor, biases: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The maps of stacked weights (maps, out, in) and biases (maps, out), for `linear`."""
    parts = _Unstack.apply(weights, biases)
    return list(zip(parts[: len(weights)], parts[len(weights) :], strict=True))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W x + b: (*, in) -> (*, out), for maps from `unstack` and any other."""
    products: _Products | None = getattr(weight.grad_fn, "products", None)
    if products is None or not torch.is_grad_enabled() or not products.take(weight.output_nr, x):
        return F.linear(x, weight, bias)
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, products, weight.output_nr)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _Products:
    """The factors of the gradients of a stack's weights: inputs, and gradients of the outputs."""

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device)
        self.applied: set[int] = set()
        self.factors: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, index: int, x: Tensor) -> bool:
        """Whether this is the map's first use, on the stream of the stack's gradients."""
        if index in self.applied or _stream(x.device) != self.stream:
            return False
        self.applied.add(index)
        return True


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class _Unstack(torch.autograd.Function):
    """The maps of a stack; their gradients come as factors, or, from other uses, as they are."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, biases: Tensor) -> tuple[Tensor, ...]:
        ctx.products = _Products(weights.device)
        ctx.set_materialize_grads(False)
        return *weights.unbind(), *biases.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parts, maps, factors = list(grads), len(grads) // 2, ctx.products.factors
        for some in grouped(sorted(factors), lambda index: factors[index][0].shape):
            x, grad = (torch.stack(each) for each in zip(*map(factors.pop, some), strict=True))
            for index, weight, bias in zip(some, grad.mT @ x, grad.sum(1), strict=True):
                parts[index] = _add(parts[index], weight)
                parts[maps + index] = _add(parts[maps + index], bias)
        return _stack(parts[:maps]), _stack(parts[maps:])


def _add(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts, with zeros for those that are None; None if all are."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if part is None else part for part in parts])


class _Linear(torch.autograd.Function):
    """A map that leaves the factors of its gradients to the stack it belongs to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, products: _Products, index: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.index = products, index
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        by_x = grad @ weight if ctx.needs_input_grad[0] else None
        if torch.is_grad_enabled() or _will_execute is None:  # to be differentiated again
            return by_x, grad.mT @ x, grad.sum(0), None, None
        if _will_execute(weight.grad_fn):  # not where x's gradient alone is wanted
            ctx.products.factors[ctx.index] = x.detach(), grad
        return by_x, None, None, None, None
