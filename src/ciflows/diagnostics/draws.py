"""Are there enough draws? The estimate as their number grows, and how even the weights are."""

from __future__ import annotations

__all__ = ["CurvePoint", "LevelTest", "draws_curve", "level_test"]

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ciflows.core.evaluate import RunningEstimate, log_mean_exp
from ciflows.core.flow import Flow
from ciflows.core.noise import RowNoise
from ciflows.core.precision import float32_products
from ciflows.core.rows import Rows

CHUNK = 2**22  # log-weights held at once


class CurvePoint(NamedTuple):
    """The mean estimate of log p(x) from some number of draws.

    Attributes:
        samples: Draws for each point, m.
        log_prob: Mean over the data of log (1/m) Σ exp w_k, in nats.
        std_error: Standard error of that mean over the data, nearly the same for every m.
        monte_carlo_error: What the finite number of draws adds to it.
    """

    samples: int
    log_prob: float
    std_error: float
    monte_carlo_error: float


class LevelTest(NamedTuple):
    """Whether more draws would still change a mean log-likelihood.

    Attributes:
        rise: Mean over the rows of L_m - L_{m/2}, from the same draws. If the bias falls as 1/m, this
            is also what an endless number of draws would still add to L_m.
        std_error: Standard error of `rise`.
        effective: Effective draws of the rows: smallest, 5 % quantile, median.
        samples: m.
    """

    rise: float
    std_error: float
    effective: tuple[float, float, float]
    samples: int

    def is_level(self, tolerance: float = 0.01) -> bool:
        """Whether the rise is below a tolerance, with its error counted in."""
        return self.rise + 2 * self.std_error < tolerance


@torch.no_grad()
@float32_products()
def draws_curve(
    flow: Flow,
    x: Tensor,
    counts: Sequence[int] = (1, 2, 5, 10, 20, 50, 100),
    context: Tensor | None = None,
    seed: int | None = 0,
) -> list[CurvePoint]:
    """The mean of log_prob over points x (rows, shape) for a growing number of draws.

    The same draws serve all counts: for each m they are cut into as many groups of m as there are. The
    curve climbs from the ELBO and is level where more draws would change nothing.
    """
    _check(flow, "draws_curve")
    log_weights = flow.log_weights(x, max(counts), context, RowNoise(seed)).double()
    return [_curve_point(log_weights, m) for m in counts]


@torch.no_grad()
@float32_products()
def level_test(
    flow: Flow, x: Tensor, samples: int = 100, context: Tensor | None = None, seed: int | None = 0
) -> LevelTest:
    """Test whether m draws are enough for points x (rows, shape): is L_m above L_{m/2}?

    Arguments:
        samples: m, at least 2; an odd number is rounded down.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("maf", features=2, layers=1, seed=0).eval()
        >>> level_test(flow, torch.randn(10, 2)).is_level()  # a plain flow needs no draws
        True
    """
    _check(flow, "level_test")
    half = samples // 2
    if half < 1:
        raise ValueError(f"level_test: needs at least 2 draws; got {samples}.")
    step, rises, effective = max(1, CHUNK // samples), [], []
    rows = Rows(x, context)
    for start in range(0, len(x), step):
        some = rows[start : start + step]
        log_weights = flow.log_weights(some.x, 2 * half, some.context, RowNoise(seed)).double()
        halves = (log_mean_exp(log_weights[:half]) + log_mean_exp(log_weights[half:])) / 2
        rises.append(log_mean_exp(log_weights) - halves)
        running = RunningEstimate(2 * half)
        running.add(log_weights)
        effective.append(running.result().effective_samples)
    rise, counts = torch.cat(rises), torch.cat(effective).sort().values
    low, median = (counts[int(share * (len(counts) - 1))].item() for share in (0.05, 0.5))
    error = rise.std().item() / math.sqrt(len(rise)) if len(rise) > 1 else math.nan
    return LevelTest(rise.mean().item(), error, (counts[0].item(), low, median), 2 * half)


def _check(flow: Flow, what: str) -> None:
    if flow.noisy:
        raise ValueError(f"{what}: log-determinants must be exact; call flow.eval() first.")


def _curve_point(log_weights: Tensor, samples: int) -> CurvePoint:
    """Average (draws, rows) log-weights in disjoint groups of `samples`."""
    draws, rows = log_weights.shape
    groups = draws // samples
    grouped = log_weights[: groups * samples].reshape(samples, groups, rows)
    estimates = log_mean_exp(grouped)
    if groups > 1:
        variance = estimates.var(0) / groups
    else:
        running = RunningEstimate()
        running.add(log_weights[:samples])
        variance = running.result().std_error.square().nan_to_num()
    mean = estimates.mean(0)
    return CurvePoint(
        samples=samples,
        log_prob=mean.mean().item(),
        std_error=mean.std().item() / math.sqrt(rows) if rows > 1 else math.nan,
        monte_carlo_error=variance.sum().sqrt().item() / rows,
    )
