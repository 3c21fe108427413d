"""Estimated log-determinants: what their error does to a likelihood, and the paper's own estimator."""

from __future__ import annotations

__all__ = ["LogDetError", "log_det_error", "no_log_dets", "paper_log_prob"]

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ciflows.core.evaluate import log_mean_exp
from ciflows.core.flow import Flow
from ciflows.core.layer import check_shape, leading_shape
from ciflows.core.noise import Noise
from ciflows.core.precision import float32_products
from ciflows.layers import LogDet, Residual, Roulette, Series
from ciflows.networks.lipschitz import LipschitzNetwork

ROWS = 2**12


class LogDetError(NamedTuple):
    """The error in a data set's mean log_prob from the probes of estimated log-determinants, in nats.

    Attributes:
        std_error: Standard error of the mean that the choice of probes causes.
        bias: Estimate of how much too high the mean is: the probes' error differs a little between the
            copies of a row, and that raises a log-mean-exp. Subtract it from the mean.
        bias_error: Standard error of that estimate.
        truncation: Bound on the error from truncating the power series.
    """

    std_error: float
    bias: float
    bias_error: float
    truncation: float


@torch.no_grad()
@float32_products()
def log_det_error(
    flow: Flow,
    x: Tensor,
    samples: int = 100,
    context: Tensor | None = None,
    seed: int = 0,
    groups: int = 4,
) -> LogDetError:
    """The error that the probes of `Series` log-determinants leave in the mean of log_prob over rows.

    log_prob L is computed from all N probes and from each of G groups of N / G probes, with the same
    draws of u. Rows have independent probes, and to first order the groups' mean is L: their spread in a
    row gives the variance of its L. The bias of a log-mean-exp falls as 1 / N, so

        E[L_group] = L + b G / N,    E[L] = L + b / N,    b / N = (E[L_group] - E[L]) / (G - 1).

    This takes twice as long as `flow.estimate` of the same points; a part of the data is enough. A flow
    without such log-determinants has no such error.

    Arguments:
        groups: G, at least 2; it must divide the number of probes.
    """
    blocks = [block for block in flow.modules() if isinstance(block, Residual)]
    blocks = [block for block in blocks if isinstance(block.log_det, Series)]
    series = [cast(Series, block.log_det) for block in blocks]
    if not series or not len(x):
        return LogDetError(0.0, 0.0, 0.0, 0.0)
    whole = flow.estimate(x, samples, context=context, seed=seed).log_prob.double()
    parts = []
    for some in zip(*(one.split(groups) for one in series), strict=True):
        with _set_log_dets(blocks, some):
            parts.append(flow.estimate(x, samples, context=context, seed=seed).log_prob.double())
    variance, mean = torch.var_mean(torch.stack(parts), dim=0)
    bias = (mean - whole) / (groups - 1)
    return LogDetError(
        std_error=(variance / groups).sum().sqrt().item() / len(x),
        bias=bias.mean().item(),
        bias_error=bias.std().item() / math.sqrt(len(x)) if len(x) > 1 else math.nan,
        truncation=sum(one.tolerance for one in series),
    )


@torch.no_grad()
@float32_products()
def paper_log_prob(
    flow: Flow,
    x: Tensor,
    samples: int = 100,
    seed: int | None = None,
    exact_terms: int = 20,
    p: float = 0.5,
) -> Tensor:
    """The paper's estimate of log p(x): biased UPWARD, for comparison only.

    The roulette estimates the log-determinants of residual blocks, with a separate probe in each of the
    m copies of x, inside the log-mean-exp. By Jensen's inequality their noise raises the result, more so
    for larger m; even the likelihood of a plain residual flow, which needs no draws, rises with m.
    `Flow.log_prob` has no such bias. See docs/likelihoods.md.

    Arguments:
        exact_terms: Number of terms of the series that are always computed.
        p: Parameter of the geometric number of further terms.
    """
    check_shape(x, flow.shape, "paper_log_prob")
    noise = Noise.seeded(seed, x.device)
    with _log_dets(flow, Roulette(exact_terms, p)):
        parts = [
            log_mean_exp(flow.log_weights(x[start : start + ROWS], samples, noise=noise))
            for start in range(0, max(1, len(x)), ROWS)
        ]
    return torch.cat(parts)


def no_log_dets(flow: Flow) -> AbstractContextManager[None]:
    """Let residual blocks skip their log-determinants for a while."""
    return _log_dets(flow, _Omitted())


class _Omitted:
    """A log-determinant of 0, if only the map is needed."""

    noisy = False

    def __call__(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        return network(x, context=context)[0], x.new_zeros(leading_shape(x, network.shape))


def _log_dets(flow: Flow, strategy: LogDet) -> AbstractContextManager[None]:
    """Use this strategy in every residual block for a while."""
    blocks = [module for module in flow.modules() if isinstance(module, Residual)]
    return _set_log_dets(blocks, [strategy] * len(blocks))


@contextmanager
def _set_log_dets(blocks: Sequence[Residual], strategies: Sequence[LogDet]) -> Iterator[None]:
    """Use one strategy for each block for a while."""
    before = [(block.log_det, block.training_log_det) for block in blocks]
    try:
        for block, strategy in zip(blocks, strategies, strict=True):
            block.log_det = block.training_log_det = strategy
        yield
    finally:
        for block, (log_det, training_log_det) in zip(blocks, before, strict=True):
            block.log_det, block.training_log_det = log_det, training_log_det
