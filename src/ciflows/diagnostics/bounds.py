"""What an estimate may hide: bounds from both sides, differences of models, and mass that leaks."""

from __future__ import annotations

__all__ = ["Paired", "Sandwich", "Share", "leaked_mass", "paired", "sandwich"]

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ciflows.core.evaluate import Estimate, log_mean_exp, rows_at_once, summarise
from ciflows.core.flow import Flow
from ciflows.core.precision import float32_products
from ciflows.core.proposals import RecordingNoise, TrueDrawNoise

NORMAL_95 = 1.645  # one-sided


class Sandwich(NamedTuple):
    """Bounds on a model's mean log p(x) over its own samples, from both sides.

    Attributes:
        lower: Mean of L_m, from m draws of q: below the true mean, on average.
        upper: Mean of U_m, with the true draw among the m: above the true mean, on average.
        gap: upper - lower. What q hides from `log_prob` with m draws is less than this, on average.
        std_error: Standard error of the gap.
        samples: m.
        points: Number of simulated points.
    """

    lower: float
    upper: float
    gap: float
    std_error: float
    samples: int
    points: int

    def is_wide(self, tolerance: float = 0.1) -> bool:
        """Whether the gap is above a tolerance in nats, beyond its error."""
        return self.gap - 2 * self.std_error > tolerance


class Paired(NamedTuple):
    """How much higher one model's log-likelihood is than another's on the same rows.

    Attributes:
        difference: Mean of the difference, in nats, with the biases of both taken off.
        std_error: Standard error of that mean over the rows; the spread of the draws is in it.
        monte_carlo_error: The part of it that comes from draws.
        points: Number of rows.
    """

    difference: float
    std_error: float
    monte_carlo_error: float
    points: int

    def __str__(self) -> str:
        return f"{self.difference:+.4f} ± {self.std_error:.4f}"


class Share(NamedTuple):
    """A share of samples, with its binomial standard error and an upper bound.

    Attributes:
        share: The share.
        std_error: Its standard error; 0 if none or all of the samples count.
        upper: A one-sided 95 % bound: the true share is below it. About 3/n if none of n samples counts.
    """

    share: float
    std_error: float
    upper: float


@torch.no_grad()
@float32_products()
def sandwich(
    flow: Flow,
    n: int = 1000,
    samples: int = 100,
    context: Tensor | None = None,
    seed: int = 0,
) -> Sandwich:
    """Bound what q hides, on points that the model itself makes (Grosse et al., 2015).

    The model draws x together with all of its latent numbers u. With w_1, ..., w_m from q and w_0 from
    the true u,

        L_m = log (1/m) Σ_{k=1}^m exp w_k,      U_m = log (1/m) Σ_{k=0}^{m-1} exp w_k,
        E[L_m] <= E[log p(x)] <= E[U_m].

    A q that misses part of the posterior looks fine from its own draws, but the true u shows it.

    Arguments:
        n: Number of points to simulate, if there is no context.
        samples: Draws for each point, m.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("cif-maf", features=2, layers=1, hidden=[8], seed=0).eval()
        >>> sandwich(flow, n=200, samples=20).is_wide()
        False
    """
    flow.check_context(context)
    if flow.noisy:
        raise ValueError("sandwich: log-determinants must be exact; call flow.eval() first.")
    n = n if context is None else len(context)
    generator = torch.Generator(flow.device).manual_seed(seed)
    parts, step = [], rows_at_once(flow.shape, flow.device)
    for start in range(0, n, step):
        its_context = None if context is None else context[start : start + step]
        parts.append(_bounds(flow, min(step, n - start), samples, its_context, generator, seed + start))
    lower, upper = torch.cat(parts, dim=1)
    gap = upper - lower
    error = gap.std().item() / math.sqrt(n) if n > 1 else math.nan
    low, high, between = (value.mean().item() for value in (lower, upper, gap))
    return Sandwich(low, high, between, error, samples, n)


def paired(first: Estimate, second: Estimate, weight: Tensor | None = None) -> Paired:
    """Compare two models on the same rows: the mean of the rows' differences, and its error.

    Rows that are hard for one model are hard for the other too. Their difference has a smaller error
    than the two means have.

    Arguments:
        first: Estimates of the rows (points,) under one model.
        second: Estimates of the same rows under another.
        weight: How much each row counts (points,); all the same if None.
    """
    if first.log_prob.shape != second.log_prob.shape:
        raise ValueError(
            f"paired: needs the same rows twice; got {len(first.log_prob)} and {len(second.log_prob)}."
        )
    difference = (first.log_prob - first.bias) - (second.log_prob.to(first.log_prob) - second.bias)
    error = torch.hypot(first.std_error, second.std_error.to(first.std_error))
    together = first._replace(log_prob=difference, std_error=error)
    summary = summarise(together, weight=weight)
    return Paired(summary.log_prob, summary.std_error, summary.monte_carlo_error, summary.points)


def leaked_mass(
    flow: Flow, contains: Callable[[Tensor], Tensor], n: int = 20_000, seed: int | None = 0
) -> Share:
    """The share of a model's samples that fall outside the true support.

    Arguments:
        contains: Tells for points (n, shape) whether they lie in the support (n,).

    Example:
        >>> from ciflows.layers import Standardise
        >>> flow = Flow([Standardise(torch.zeros(2), torch.ones(2))])
        >>> leaked_mass(flow, lambda x: x[:, 0] > 0, n=1000).std_error < 0.02
        True
    """
    outside = n - int(contains(flow.sample(n, seed=seed)).sum())
    share = outside / n
    upper = share + (_most(outside) / n - share) * math.sqrt(1 - share)
    return Share(share, math.sqrt(share * (1 - share) / n), min(1.0, upper))


def _most(count: int) -> float:
    """The Poisson mean that gives so few with 5 % probability (Wilson and Hilferty, 1931)."""
    k = count + 1
    return k * (1 - 1 / (9 * k) + NORMAL_95 / (3 * math.sqrt(k))) ** 3


def _bounds(
    flow: Flow,
    n: int,
    samples: int,
    context: Tensor | None,
    generator: torch.Generator,
    seed: int,
) -> Tensor:
    """L_m and U_m of n new points: (2, n)."""
    record = RecordingNoise(generator)
    x = flow.draw((n,), context, record)
    noise = TrueDrawNoise(seed, record.values)
    log_weights = flow.log_weights(x, samples + 1, context, noise).double()
    if noise.unclaimed:
        raise ValueError(
            "sandwich: some layer draws in encode, but does not pass its draws through "
            "noise.latent(...) or noise.posterior(...), so its true draws are not known."
        )
    return torch.stack([log_mean_exp(log_weights[1:]), log_mean_exp(log_weights[:-1])])
