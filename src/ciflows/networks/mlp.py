"""Multilayer perceptrons."""

from __future__ import annotations

__all__ = ["MLP", "Perceptron", "stacked_maps"]

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ciflows import kernels
from ciflows.groups import grouped
from ciflows.kernels.cpu import perceptron


class Perceptron(nn.Sequential):
    """Linear maps with one activation between them, as one kernel where there is one for them.

    Arguments:
        modules: The maps and activations in turn.
        activation: What kernels call the activation, "tanh" or "relu"; None where it is another.
    """

    def __init__(self, *modules: nn.Module, activation: str | None) -> None:
        super().__init__(*modules)
        maps = self._maps
        self.sizes = [maps[0].in_features, *(part.out_features for part in maps)]
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is not None and kernels.fits(x, self.sizes):
            return self._fused(x)
        if self.activation is not None and x.is_cpu:
            biases = [part.bias for part in self._maps]
            y = perceptron(x.reshape(-1, x.shape[-1]), self._weights(), biases, self.activation)
            return y.reshape(*x.shape[:-1], y.shape[-1])
        return self._plain(x)

    @property
    def fused(self) -> bool:
        """Whether it goes to the GPU's kernel where it is now."""
        point = self._maps[0].weight.new_empty(1, self.sizes[0])
        return self.activation is not None and kernels.fits(point, self.sizes)

    @property
    def _maps(self) -> list[nn.Linear]:
        return [part for part in self if isinstance(part, nn.Linear)]

    def _weights(self) -> list[Tensor]:
        return [part.weight for part in self._maps]

    def _plain(self, x: Tensor) -> Tensor:
        """Layer by layer, in operations that torch differentiates and compiles."""
        for module in self:  # spelt out: torch does not compile the forward of its own containers
            x = module(x)
        return x

    def _fused(self, x: Tensor) -> Tensor:
        from ciflows.kernels.gpu import chain

        assert self.activation is not None
        first, *between, last = self._weights()
        biases: list[Tensor] = [part.bias for part in self._maps]
        given: Inner | None = self.__dict__.get("given")
        if given is None:
            middle = between[0][None] if len(between) == 1 else torch.stack(between)
            given = middle, torch.stack(biases[:-1])
        return chain(x, None, first, given[0], last, given[1], biases[-1], self.activation)[0]


Inner = tuple[Tensor, Tensor]


def stacked_maps(networks: Sequence[Perceptron]) -> dict[nn.Module, Inner]:
    """What the kernel takes of several networks beside their first and last weight and last bias.

    That is the weights between, and the biases, of all networks of one size in one piece.
    """
    stacked: dict[nn.Module, Inner] = {}
    for group in grouped(networks, lambda network: tuple(network.sizes)):
        maps = [network._maps for network in group]
        weights = torch.stack([part.weight for each in maps for part in each[1:-1]])
        biases = torch.stack([part.bias for each in maps for part in each[:-1]])
        pairs = (part.unflatten(0, (len(group), -1)).unbind() for part in (weights, biases))
        stacked |= zip(group, zip(*pairs, strict=True), strict=True)
    return stacked


class MLP(Perceptron):
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
        modules: list[nn.Module] = []
        sizes = [in_features, *hidden]
        for before, after in itertools.pairwise(sizes):
            modules += [nn.Linear(before, after), activation()]
        last = nn.Linear(sizes[-1], out_features)
        if zero_last:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        smooth = all(isinstance(part, nn.Tanh) for part in modules[1::2])
        super().__init__(*modules, last, activation="tanh" if smooth else None)
