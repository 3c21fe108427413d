"""What the flows of masked networks share: each layer is one network.

In an autoregressive layer each feature is transformed with a map chosen by all features before it; in a
coupling layer the second half is, by the first. Every other layer takes the features in reverse order.
"""

from __future__ import annotations

__all__ = ["check_affine", "feature_order", "masked_layer"]

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zuko.flows import MaskedAutoregressiveTransform

from ciflows.core.layer import Bijection
from ciflows.errors import UserError
from ciflows.layers import MaskedBijection, ZukoBijection
from ciflows.models.index import IndexSettings
from ciflows.networks import MaskedMLP
from ciflows.settings import Sizes


def check_affine(features: int, index: IndexSettings | None) -> None:
    """Refuse a plain flow of affine layers over one column: it would be a Gaussian."""
    if features == 1 and index is None:
        raise UserError("With one column, affine layers give only a Gaussian: use nsf or resflow.")


def feature_order(features: int, layer: int) -> Tensor:
    """The order in which a layer takes the features: as they are, or reversed."""
    order = torch.arange(features)
    return order.flip(0) if layer % 2 else order


def masked_layer(
    order: Tensor, context_features: int, hidden: Sizes, coupling: bool = False, **options: Any
) -> Bijection:
    """One autoregressive or coupling layer; affine, unless `options` name another scalar map.

    Arguments:
        order: Order of the features (features,).
        options: Passed on to zuko, such as `univariate` and `shapes`.
    """
    features = len(order)
    if features > 1:
        options |= {"order": order, "passes": 2 if coupling else None}
    transform = MaskedAutoregressiveTransform(
        features,
        context_features,
        hidden_features=hidden,
        activation=partial(nn.ReLU, inplace=True),
        **options,
    )
    if features == 1:
        return ZukoBijection(transform, features, context_features, compiles=True)
    transform.hyper = MaskedMLP(transform.hyper)
    return MaskedBijection(transform, features, context_features)
