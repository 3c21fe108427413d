"""Samples with weights that bound their density from above: what variational inference needs."""

from __future__ import annotations

__all__ = ["check_rsample", "rsample_with_log_weight"]

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ciflows.core.evaluate import check_eval_mode, log_mean_exp
from ciflows.core.noise import Noise

if TYPE_CHECKING:
    from ciflows.core.flow import Flow


def rsample_with_log_weight(
    flow: Flow, n: int, context: Tensor | None, inner: int, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Draw n points, differentiably, with their log-weights; see `Flow.rsample_with_log_weight`."""
    check_rsample(flow, inner)
    if n < 1:
        raise ValueError(f"Flow.rsample_with_log_weight: n must be at least 1; got {n}.")
    x, log_weight = flow.draw_with_log_weight((n, *flow.leading_of(context)), context, noise)
    if inner == 1 or flow.exact:
        return x, log_weight
    more = flow.log_weights(x, inner - 1, context, noise)
    return x, log_mean_exp(torch.cat([log_weight[None], more]))


def check_rsample(flow: Flow, inner: int = 1) -> None:
    """Refuse a flow without differentiable samples or without weights for them."""
    if inner < 1:
        raise ValueError(f"Flow: inner draws must be at least 1; got {inner}.")
    check_eval_mode(flow, "a sample's weight")
    parts = [*flow.layers, flow.base]
    bare = [part for part in parts if not getattr(part, "weighs_samples", True)]
    if bare:
        raise ValueError(f"Flow: samples of {_names(bare)}, such as integers, have no density.")
    if inner > 1 and flow.noisy:
        raise ValueError("Flow: several inner draws need exact log-determinants: call eval() first.")
    wanted = torch.is_grad_enabled() and any(p.requires_grad for p in flow.parameters())
    if wanted and not flow.reparameterised:
        chosen = [part for part in parts if not part.reparameterised]
        raise ValueError(
            f"Flow: samples of {_names(chosen)} have no right gradient: they are chosen from several, "
            "and no gradient passes the choice, or zuko finds them by bisection of a network. Sample "
            "under torch.no_grad(), or use another layer or base."
        )


def _names(parts: Iterable[nn.Module]) -> str:
    return " and ".join(type(part).__name__ for part in parts)
