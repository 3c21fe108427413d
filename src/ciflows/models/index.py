"""The indexed affine map that the paper puts after each bijection of a flow over vectors."""

from __future__ import annotations

__all__ = ["IndexSettings", "add_index", "indexed_affine", "with_index"]

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from ciflows.core.density import ConditionalNormal, StandardNormal
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import Bijection, Layer
from ciflows.errors import UserError
from ciflows.layers import Affine
from ciflows.networks import MLP
from ciflows.settings import Settings, Sizes

# Where u tells little of z at the start, nothing teaches s and t to use it. So p(u | z) starts with
# means that differ from row to row, and with a standard deviation below these differences.
MEAN_GAIN, LOG_STD = 8.0, -2.0


class IndexSettings(Settings):
    """Settings of the indices of a CIF over vectors."""

    index_features: int | None = Field(
        None, ge=1, description="size of each layer's index u; about a quarter of the features if none"
    )
    affine_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of s and t")
    prior_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of p(u|z)")
    posterior_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of q(u|x)")
    index_start: Literal["identity", "informative"] = Field(
        "identity",
        description="identity: u changes nothing at first, and may stay idle; informative: u tells much "
        "of z and moves it from the start",
    )


def indexed_affine(
    features: int,
    context_features: int,
    index_features: int,
    network: nn.Module,
    prior_hidden: Sizes | None,
    posterior_hidden: Sizes,
) -> Indexed:
    """F(z; u) = e^{-s(u)} z - t(u), with Gaussian p(u|z) and q(u|x).

    Arguments:
        features: Size of x.
        context_features: Size of the outer context; 0 for none.
        index_features: Size of u.
        network: Maps u, joined with the context, to [s, t].
        prior_hidden: Hidden sizes of the network of p(u|z); None for p(u) = N(0, I).
        posterior_hidden: Hidden sizes of the network of q(u|x).
    """
    sizes = features + context_features, 2 * index_features
    return Indexed(
        Affine(features, network, index_features + context_features),
        StandardNormal((index_features,))
        if prior_hidden is None
        else ConditionalNormal(MLP(*sizes, prior_hidden), index_features, sizes[0]),
        ConditionalNormal(MLP(*sizes, posterior_hidden), index_features, sizes[0]),
        context_shape=(context_features,) if context_features else None,
    )


def with_index(
    steps: Sequence[Sequence[Bijection]],
    features: int,
    context_features: int,
    index: IndexSettings | None,
) -> list[Layer]:
    """A flow's layers: steps of bijections, each followed by an indexed affine map; by none if `index`
    is None."""
    layers: list[Layer] = []
    for step in steps:
        layers += step
        if index is not None:
            layers.append(_fresh_index(features, context_features, index))
    return layers


def _fresh_index(features: int, context_features: int, index: IndexSettings) -> Indexed:
    if index.index_start == "identity":
        return _make_index(features, context_features, index, zero_last=True)
    if index.prior_hidden != index.posterior_hidden:
        raise UserError(
            "index_start = informative needs equal prior_hidden and posterior_hidden: q starts as p."
        )
    return _inform(_make_index(features, context_features, index, zero_last=False))


def _make_index(features: int, context_features: int, index: IndexSettings, zero_last: bool) -> Indexed:
    """An indexed affine map; with `zero_last` it starts as the identity: s = t = 0."""
    size = index.index_features or max(1, round(features / 4))
    affine = MLP(size + context_features, 2 * features, index.affine_hidden, zero_last=zero_last)
    hidden = index.prior_hidden, index.posterior_hidden
    return indexed_affine(features, context_features, size, affine, *hidden)


def add_index(flow: Flow, settings: IndexSettings, seed: int = 0) -> Flow:
    """Add an index after each trainable bijection of a flow over vectors, without changing its density.

    At the start s = t = 0 and q(u | x) = p(u | z), so that every draw of log p(x, u) - log q(u | x) is
    log p(x) of the flow without an index.

    Arguments:
        flow: A flow; its layers and base are shared with the result, not copied.
        settings: Sizes of the indices and their networks; those of p and q must be equal.
        seed: Seed of the index's first weights.

    Example:
        >>> from ciflows import build_model
        >>> flow = build_model("nsf", features=2, layers=2, hidden=[16], seed=0).eval()
        >>> indexed, x = add_index(flow, IndexSettings()).eval(), torch.randn(5, 2)
        >>> len(indexed.layers), torch.equal(indexed.log_weight(x), flow.log_weight(x))
        (4, True)
    """
    if settings.prior_hidden != settings.posterior_hidden:
        raise ValueError("add_index: prior_hidden and posterior_hidden must be equal: q starts as p.")
    if len(flow.shape) != 1:
        raise ValueError(f"add_index: the flow must be over vectors; its shape is {flow.shape}.")
    if not any(_trains(layer) for layer in flow.layers):
        raise ValueError("add_index: the flow has no bijection with weights to train.")
    context = flow.context_shape[0] if flow.context_shape else 0
    layers: list[Layer] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in flow.layers:
            layers.append(layer)
            if _trains(layer):
                index = _inform(_make_index(flow.shape[0], context, settings, zero_last=True))
                layers.append(index.to(flow.device, flow.dtype))
    return Flow(layers, flow.base)


def _inform(layer: Indexed) -> Indexed:
    """Let u tell much of z at the start, and q be p."""
    last = [part for part in layer.prior.modules() if isinstance(part, nn.Linear)][-1]
    means = layer.prior.shape[0]
    with torch.no_grad():
        last.weight[:means] *= MEAN_GAIN
        last.bias[means:] = LOG_STD
    layer.posterior.load_state_dict(layer.prior.state_dict())
    return layer


def _trains(layer: nn.Module) -> bool:
    return isinstance(layer, Bijection) and any(p.requires_grad for p in layer.parameters())
