"""Multilayer perceptrons."""

from __future__ import annotations

__all__ = ["MLP", "Tanh"]

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ciflows import kernels


class Tanh(nn.Tanh):
    """tanh x = 2 σ(2x) - 1, which on a CPU takes a quarter of the time that torch's own takes."""

    def forward(self, x: Tensor) -> Tensor:
        return _Tanh.apply(x) if x.is_cpu else torch.tanh(x)


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(2 * x).mul_(2).sub_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,), (y,) = grads, ctx.saved_tensors
        return torch.addcmul(grad, grad * y, y, value=-1)


class MLP(nn.Sequential):
    """Linear maps with an activation between them: (*, in_features) -> (*, out_features).

    Arguments:
        in_features: Size of the input.
        out_features: Size of the output.
        hidden: Sizes of the hidden layers.
        activation: Makes the activation after each hidden layer.
        zero_last: Start with zero as the last weight and bias, so that the output starts at 0.

    Example:
        >>> import torch
        >>> MLP(3, 4, hidden=[10, 10])(torch.zeros(7, 3)).shape
        torch.Size([7, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: Sequence[int] = (32, 32),
        activation: Callable[[], nn.Module] = Tanh,
        zero_last: bool = False,
    ) -> None:
        sizes = [in_features, *hidden]
        modules: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            modules += [nn.Linear(before, after), activation()]
        last = nn.Linear(sizes[-1], out_features)
        if zero_last:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        super().__init__(*modules, last)
        self.sizes = [*sizes, out_features]
        self.fusible = len(hidden) > 1 and isinstance(modules[-1], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        if self.fusible and kernels.fits(x, self.sizes):
            return self._fused(x)
        for module in self:  # spelt out: torch does not compile the forward of its own containers
            x = module(x)
        return x

    def _fused(self, x: Tensor) -> Tensor:
        from ciflows.kernels.chain import chain

        first, *between, last = (part for part in self if isinstance(part, nn.Linear))
        biases = [part.bias for part in (first, *between, last)]
        middle = torch.stack([part.weight for part in between])
        return chain(x, None, first.weight, middle, last.weight, biases, beta=None)[0]
