"""Masked networks: one number of outputs for each feature, which depend on the features before it alone.

Units carry degrees: the features 1, ..., d in their order, the context 0, hidden units what they may see
at most. A weight is kept where its input's degree does not exceed its output's, and in the last map, to
the outputs of a feature, where it is less (Germain et al., 2015).
"""

from __future__ import annotations

__all__ = ["MaskedMLP", "MaskedResidualNet", "masked_weights", "padded_maps"]

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
import zuko
from torch import Tensor, nn

from ciflows.groups import grouped
from ciflows.kernels.linear import apart, linear
from ciflows.layers import check_order, join
from ciflows.networks.mlp import Perceptron
from ciflows.noise import Noise

BLOCK_START = 1e-3
MULTIPLE = 8  # of which sizes are that make for quick products on a GPU


class MaskedMLP(Perceptron):
    """A masked network of zuko's, with ReLU between its maps.

    Arguments:
        network: What zuko made; its parameters are shared.
    """

    def __init__(self, network: zuko.nn.MaskedMLP) -> None:
        if not all(isinstance(part, zuko.nn.MaskedLinear | nn.ReLU) for part in network):
            raise ValueError(
                "MaskedMLP: takes linear maps with ReLU between them, and no residual blocks."
            )
        super().__init__(*network, activation="relu")

    @property
    def shared(self) -> list[nn.Linear]:
        """The maps whose weights `masked_weights` may make."""
        return self._maps if self.fused else []

    def _weights(self) -> list[Tensor]:
        weights: list[Tensor | None] = [part.__dict__.get("given") for part in self._maps]
        return [
            _masked_weight(part) if weight is None else weight
            for part, weight in zip(self._maps, weights, strict=True)
        ]


class MaskedResidualNet(nn.Module):
    """The residual masked network of Durkan et al. (2019): (*, features) -> (*, features, out).

    A linear map, blocks h + W₂ D a(W₁ a(h)) with D what dropout keeps, a linear map; all are masked.
    Without a context the first feature's outputs are constants.

    Arguments:
        features: Size of the input.
        out_per_feature: Number of outputs for each feature.
        hidden: Size of every hidden layer.
        blocks: Number of blocks.
        context_features: Size of the context, which all outputs may depend on; 0 for none.
        dropout: Probability with which each hidden unit of a block is dropped in training.
        order: The features, first to last; 0, 1, ... where None.
        activation: The activation a.

    Example:
        >>> network = MaskedResidualNet(6, 23, hidden=256, blocks=2)
        >>> network(torch.zeros(5, 6)).shape, sum(p.numel() for p in network.parameters())
        (torch.Size([5, 6, 23]), 300426)
    """

    def __init__(
        self,
        features: int,
        out_per_feature: int,
        hidden: int,
        blocks: int,
        context_features: int = 0,
        dropout: float = 0.0,
        order: Tensor | Sequence[int] | None = None,
        activation: Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"MaskedResidualNet: dropout must lie in [0, 1); got {dropout}.")
        order = torch.arange(features) if order is None else torch.as_tensor(order)
        check_order(order, "MaskedResidualNet, order")
        if len(order) != features:
            raise ValueError(f"MaskedResidualNet: {features} features, but {len(order)} in their order.")
        self.features = features
        self.out_per_feature = out_per_feature
        self.hidden = hidden
        self.context_features = context_features
        self.dropout = dropout
        self.order: Tensor
        self.register_buffer("order", order.long().clone())

        ranks = torch.argsort(order) + 1
        inputs = torch.cat([ranks, torch.zeros(context_features, dtype=torch.long)])
        units = _hidden_degrees(features, hidden, context_features)
        outputs = ranks.repeat_interleave(out_per_feature)
        self.first = _MaskedLinear(units[:, None] >= inputs)
        self.blocks = nn.ModuleList(_Block(units[:, None] >= units, activation) for _ in range(blocks))
        self.last = _MaskedLinear(outputs[:, None] > units)

    def draw_masks(self, x: Tensor, context: Tensor | None, noise: Noise) -> Tensor | None:
        """Draw what dropout keeps, one mask a row: (blocks, rows, hidden), or None to keep all.

        Dimensions that lead the rows share their masks: importance draws of a row belong to the same
        network, so that no noise of its masks enters a log-mean-exp over them.
        """
        if not self.training or self.dropout == 0:
            return None
        shapes = [part.shape[:-1] for part in (x, context) if part is not None]
        rows = torch.broadcast_shapes(*shapes)[-1:]
        numbers = noise.uniform((len(self.blocks), *rows, self.hidden), like=x)
        return (numbers >= self.dropout).to(x.dtype) / (1 - self.dropout)

    def forward(self, x: Tensor, context: Tensor | None = None, masks: Tensor | None = None) -> Tensor:
        """The outputs (*, features, out_per_feature), with masks from `draw_masks`."""
        h = self.first(join(x, context))
        if masks is not None:
            masks = F.pad(masks, (0, h.shape[-1] - self.hidden))
        for index, block in enumerate(self.blocks):
            h = block(h, None if masks is None else masks[index])
        return self.last(h).unflatten(-1, (self.features, self.out_per_feature))


class _MaskedLinear(nn.Linear):
    """A linear map (*, in) -> (*, out) of which the mask (out, in) keeps some weights."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.mask: Tensor
        self.register_buffer("mask", mask.clone())  # files refuse tensors that share memory

    def forward(self, input: Tensor) -> Tensor:
        given: tuple[Tensor, Tensor] | None = self.__dict__.get("given")
        weight, bias = (_masked_weight(self), self.bias) if given is None else given
        return linear(input, weight, bias)


class _Block(nn.Module):
    """h + W₂ D a(W₁ a(h)), near the identity at the start."""

    def __init__(self, mask: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.inner = _MaskedLinear(mask)
        self.outer = _MaskedLinear(mask)
        nn.init.uniform_(self.outer.weight, -BLOCK_START, BLOCK_START)
        nn.init.uniform_(self.outer.bias, -BLOCK_START, BLOCK_START)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        inside = self.activation(self.inner(self.activation(h)))
        return h + self.outer(inside if mask is None else inside * mask)


def _masked_weight(linear: nn.Linear) -> Tensor:
    """What the mask leaves of a weight."""
    return cast(Tensor, linear.mask) * linear.weight


def masked_weights(linears: Sequence[nn.Linear]) -> dict[nn.Module, Tensor]:
    """What masks leave of the weights of several maps, of all of one shape at once."""
    masked: dict[nn.Module, Tensor] = {}
    for some in grouped(linears, lambda linear: linear.weight.shape):
        masked |= zip(some, _all_masked(some).unbind(), strict=True)
    return masked


def padded_maps(networks: Sequence[MaskedResidualNet]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """Masked weights and biases of networks, of all maps of one shape at once.

    Beside the hidden units stand some that do nothing, so that their number makes for quick products.
    """
    maps: list[tuple[_MaskedLinear, int, int]] = []  # how many units are added before and behind each
    for network in networks:
        more = -network.hidden % MULTIPLE
        blocks = cast(Sequence[_Block], network.blocks)
        inner = [linear for block in blocks for linear in (block.inner, block.outer)]
        maps += [(network.first, 0, more), *((linear, more, more) for linear in inner)]
        maps += [(network.last, more, 0)]
    padded: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for alike in grouped(maps, lambda each: (each[0].weight.shape, *each[1:])):
        linears, (_, before, behind) = [linear for linear, *_ in alike], alike[0]
        weights = F.pad(_all_masked(linears), (0, before, 0, behind))
        biases = F.pad(torch.stack([linear.bias for linear in linears]), (0, behind))
        padded |= zip(linears, apart(weights, biases), strict=True)
    return padded


def _all_masked(linears: Sequence[nn.Linear]) -> Tensor:
    """What masks leave of the weights of several maps of one shape (maps, out, in)."""
    masks = torch.stack([linear.get_buffer("mask") for linear in linears])
    return masks * torch.stack([linear.weight for linear in linears])


def _hidden_degrees(features: int, hidden: int, context_features: int) -> Tensor:
    """Degrees that go round from the least to features - 1, so that each is met about as often.

    Units of degree 0 see the context alone: without them the first feature would never hear of it.
    """
    least = 0 if context_features or features == 1 else 1
    return least + torch.arange(hidden) % (features - least)
