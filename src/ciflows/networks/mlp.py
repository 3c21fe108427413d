"""Multilayer perceptrons."""

from __future__ import annotations

__all__ = ["MLP"]

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ciflows import kernels
from ciflows.kernels.cpu import tanh_chain


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
        activation: Callable[[], nn.Module] = nn.Tanh,
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
        self.smooth = all(isinstance(part, nn.Tanh) for part in modules[1::2])

    def forward(self, x: Tensor) -> Tensor:
        if self.smooth and x.is_cpu:
            return self._chain(x)
        if self.smooth and kernels.fits(x, self.sizes):
            return self._fused(x)
        return self._plain(x)

    def _chain(self, x: Tensor) -> Tensor:
        """All layers at once, on a CPU."""
        maps = [part for part in self if isinstance(part, nn.Linear)]
        weights, biases = [part.weight for part in maps], [part.bias for part in maps]
        y = tanh_chain(x.reshape(-1, x.shape[-1]), weights, biases)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _plain(self, x: Tensor) -> Tensor:
        """Layer by layer, in operations that torch differentiates and compiles."""
        for module in self:  # spelt out: torch does not compile the forward of its own containers
            x = module(x)
        return x

    def _fused(self, x: Tensor) -> Tensor:
        from ciflows.kernels.gpu import perceptron

        maps = [part for part in self if isinstance(part, nn.Linear)]
        return perceptron(x, [part.weight for part in maps], [part.bias for part in maps], "tanh")
