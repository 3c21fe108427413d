"""Estimates of log p(x) from importance weights, with their errors.

From m draws with log-weights w_k, where E[exp w_k] = p(x):

    log p(x) ≈ log (1/m) Σ exp w_k          a lower bound on average, tight as m grows
    ELBO     ≈ (1/m) Σ w_k                  the bound for m = 1
    ESS      = (Σ exp w_k)² / Σ exp 2w_k    effective number of draws, at most m
    SE²      = (1/ESS - 1/m) m/(m - 1)      variance of the first line (delta method)

All of it is kept as running sums, so that draws can be thrown away as soon as they are counted.
"""

from __future__ import annotations

__all__ = ["Estimate", "RunningEstimate", "RunningSummary", "Summary", "log_mean_exp", "summarise"]

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """What m draws say of log p(x), for each x.

    Attributes:
        log_prob: The importance-sampling estimate of log p(x) (*).
        elbo: The estimate of the evidence lower bound (*).
        std_error: Monte-Carlo standard error of `log_prob` (*); 0 where it is exact, NaN for one draw.
        effective_samples: Effective number of draws (*), between 1 and m.
    """

    log_prob: Tensor
    elbo: Tensor
    std_error: Tensor
    effective_samples: Tensor


class Summary(NamedTuple):
    """A data set's log-likelihood, with everything needed to judge it.

    Attributes:
        log_prob: Mean of the estimates of log p(x), in nats.
        std_error: Standard error of that mean over the data.
        monte_carlo_error: What the finite number of draws adds to it.
        elbo: Mean evidence lower bound.
        effective_samples: Mean effective number of draws.
        samples: Draws for each point, m; 1 where the model is exact.
        points: Number of data points.
    """

    log_prob: float
    std_error: float
    monte_carlo_error: float
    elbo: float
    effective_samples: float
    samples: int
    points: int


def log_mean_exp(log_weights: Tensor) -> Tensor:
    """log (1/m) Σ_k exp w_k over the first dimension: (m, *) -> (*)."""
    return torch.logsumexp(log_weights, dim=0) - math.log(log_weights.shape[0])


class RunningEstimate:
    """An `Estimate` fed draw by draw; its memory does not grow with their number.

    Example:
        >>> running = RunningEstimate()
        >>> running.add(torch.zeros(4, 3))
        >>> running.result().effective_samples
        tensor([4., 4., 4.])
    """

    def __init__(self) -> None:
        self.samples = 0
        self._peak, self._sums = torch.tensor(-math.inf), torch.zeros(3)

    def add(self, log_weights: Tensor) -> None:
        """Count in some more draws (k, *)."""
        peak = log_weights.amax(0).clamp(min=torch.finfo(log_weights.dtype).min)
        if self.samples:
            peak = torch.maximum(self._peak, peak)  # sums are kept relative to the largest, for accuracy
        shifted = log_weights - peak
        weights = torch.exp(shifted)
        sums = torch.stack([weights.sum(0), weights.square().sum(0), shifted.sum(0)])
        if self.samples:
            moved = self._peak - peak
            shrink = torch.exp(moved)
            total, squares, logs = self._sums
            sums += torch.stack([total * shrink, squares * shrink**2, logs + self.samples * moved])
        self._peak, self._sums = peak, sums
        self.samples += log_weights.shape[0]

    def result(self) -> Estimate:
        m = self.samples
        total, squares, logs = self._sums
        # where no draw has any weight all have the same, and the density is 0 without an error
        effective = torch.where(total > 0, total.square() / squares, m)
        if m > 1:
            variance = (1 / effective - 1 / m).clamp(min=0) * m / (m - 1)
        else:
            variance = torch.full_like(effective, math.nan)
        log_prob, elbo = self._peak + torch.log(total / m), self._peak + logs / m
        return Estimate(log_prob, elbo, variance.sqrt(), effective)


class RunningSummary:
    """A `Summary` fed some points at a time; its memory does not grow with their number.

    Arguments:
        samples: Draws for each point.

    Example:
        >>> running, zeros = RunningSummary(samples=1), torch.zeros(3)
        >>> running.add(Estimate(torch.tensor([1.0, 2.0, 3.0]), zeros, zeros, zeros))
        >>> running.result().log_prob, round(running.result().std_error, 4)
        (2.0, 0.5774)
    """

    def __init__(self, samples: int) -> None:
        self.samples, self.points = samples, 0
        self._means = torch.zeros(3, dtype=torch.float64)
        self._squares = self._errors = 0.0

    def add(self, estimate: Estimate) -> None:
        """Count in some more points (points,)."""
        log_prob, elbo, error, effective = (column.double().cpu() for column in estimate)
        new, before = len(log_prob), self.points
        means = torch.stack([log_prob.mean(), elbo.mean(), effective.mean()])
        step = means - self._means
        self.points += new
        # Chan et al.: the squares around a mean that moves
        moved = float(step[0] ** 2) * before * new / self.points
        self._squares += float((log_prob - means[0]).square().sum()) + moved
        self._means = self._means + step * new / self.points
        self._errors += float(error.square().sum())

    def result(self) -> Summary:
        n = self.points
        log_prob, elbo, effective = self._means.tolist()
        spread = math.sqrt(self._squares / (n - 1) / n) if n > 1 else math.nan
        return Summary(log_prob, spread, math.sqrt(self._errors) / n, elbo, effective, self.samples, n)


def summarise(estimate: Estimate, samples: int, weight: Tensor | None = None) -> Summary:
    """Average per-point estimates (points,) over a data set, with errors over data and draws.

    Arguments:
        estimate: The estimates.
        samples: Draws for each point.
        weight: How much each point counts (points,); all the same where None.
    """
    points = estimate.log_prob.numel()
    log_prob, elbo, error, effective = (column.double() for column in estimate)
    weight = torch.ones_like(log_prob) if weight is None else weight.to(log_prob)
    share = weight / weight.sum()
    mean = (share * log_prob).sum()
    spread = (share * (log_prob - mean)).square().sum() * (
        points / (points - 1) if points > 1 else math.nan
    )
    return Summary(
        log_prob=mean.item(),
        std_error=spread.sqrt().item(),
        monte_carlo_error=(share * error).square().sum().sqrt().item(),
        elbo=(share * elbo).sum().item(),
        effective_samples=(share * effective).sum().item(),
        samples=samples,
        points=points,
    )
