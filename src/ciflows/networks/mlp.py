"""Multilayer perceptrons."""

from __future__ import annotations

__all__ = ["MLP", "Perceptron"]

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ciflows.core.hook import replaceable


class Perceptron(nn.Sequential):
    """Linear maps with activations between them, each module in turn."""

    @replaceable
    def forward(self, x: Tensor) -> Tensor:
        for module in self:  # spelt out: torch does not compile the forward of its own containers
            x = module(x)
        return x


class MLP(Perceptron):
    """Linear maps with an activation between them: (*, in_features) -> (*, out_features).

    Arguments:
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
        activation: Callable[[], nn.Module] = nn.Tanh,
        zero_last: bool = False,
    ) -> None:
        modules: list[nn.Module] = []
        sizes = [in_features, *hidden]
        for before, after in itertools.pairwise(sizes):
            modules += [nn.Linear(before, after), activation()]
        last = nn.Linear(sizes[-1], out_features)
        if zero_last:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        super().__init__(*modules, last)
