"""Masked networks: the outputs for each feature depend on the features before it alone.

Units carry degrees: the features 1, ..., d in their order, the context 0, hidden units what they may see
at most. A weight is kept where its input's degree does not exceed its output's, and in the last map, to
the outputs of a feature, where it is less (Germain et al., 2015).
"""

from __future__ import annotations

__all__ = ["MaskedLinear", "MaskedMLP", "MaskedResidualNet"]

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import zuko
from torch import Tensor, nn

from ciflows.core.hook import replaceable
from ciflows.core.layer import check_order, join
from ciflows.core.noise import Noise
from ciflows.networks.mlp import Perceptron

BLOCK_START = 1e-3


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
        super().__init__(*network)


class MaskedResidualNet(nn.Module):
    """The residual masked network of Durkan et al. (2019): (*, features) -> (*, features, out).

    A linear map, blocks h + W₂ D a(W₁ a(h)) with D what dropout keeps, a linear map; all are masked.
    Without a context the first feature's outputs are constants.

    Arguments:
        out_per_feature: Number of outputs for each feature.
        hidden: Size of every hidden layer.
        context_features: Size of the context, which all outputs may depend on; 0 for none.
        dropout: Probability with which each hidden unit of a block is dropped in training.
        order: The features, first to last; 0, 1, ... if None.
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
        self.order = nn.Buffer(order.long().clone())

        ranks = torch.argsort(order) + 1
        inputs = torch.cat([ranks, torch.zeros(context_features, dtype=torch.long)])
        units = _hidden_degrees(features, hidden, context_features)
        outputs = ranks.repeat_interleave(out_per_feature)
        self.first = MaskedLinear(units[:, None] >= inputs)
        self.blocks = nn.ModuleList(_Block(units[:, None] >= units, activation) for _ in range(blocks))
        self.last = MaskedLinear(outputs[:, None] > units)

    def draw_masks(self, x: Tensor, context: Tensor | None, noise: Noise) -> Tensor | None:
        """Draw what dropout keeps, one mask a row: (blocks, rows, hidden), or None to keep all.

        Dimensions that lead the rows share their masks: importance draws of a row belong to the same
        network, so that no noise of its masks enters a log-mean-exp over them.
        """
        if not self.training or self.dropout == 0:
            return None
        shapes = [part.shape[:-1] for part in (x, context) if part is not None]
        rows = torch.broadcast_shapes(*shapes)[-1:]
        # blocks lead the rows here, as draws do elsewhere
        numbers = noise.from_draw(0).uniform((len(self.blocks), *rows, self.hidden), like=x)
        return (numbers >= self.dropout).to(x.dtype) / (1 - self.dropout)

    @replaceable
    def forward(self, x: Tensor, context: Tensor | None = None, masks: Tensor | None = None) -> Tensor:
        """The outputs (*, features, out_per_feature), with masks from `draw_masks`."""
        h = self.first(join(x, context))
        for index, block in enumerate(self.blocks):
            h = block(h, None if masks is None else masks[index])
        return self.last(h).unflatten(-1, (self.features, self.out_per_feature))


class MaskedLinear(nn.Linear):
    """A linear map (*, in) -> (*, out) of which the mask (out, in) keeps some weights."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.mask = nn.Buffer(mask.clone())  # files refuse tensors that share memory

    @replaceable
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.mask * self.weight, self.bias)


class _Block(nn.Module):
    """h + W₂ D a(W₁ a(h)), near the identity at the start."""

    def __init__(self, mask: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.inner = MaskedLinear(mask)
        self.outer = MaskedLinear(mask)
        nn.init.uniform_(self.outer.weight, -BLOCK_START, BLOCK_START)
        nn.init.uniform_(self.outer.bias, -BLOCK_START, BLOCK_START)

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        inside = self.activation(self.inner(self.activation(h)))
        return h + self.outer(inside if mask is None else inside * mask)


def _hidden_degrees(features: int, hidden: int, context_features: int) -> Tensor:
    """Degrees in turn from the least to features - 1, each about as often.

    Units of degree 0 see the context alone: without them the first feature could not depend on it.
    """
    least = 0 if context_features or features == 1 else 1
    return least + torch.arange(hidden) % (features - least)
