"""A data set's log-likelihood: estimates of its rows, averaged, with errors over data and draws."""

from __future__ import annotations

__all__ = ["RunningSummary", "Summary", "summarise"]

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ciflows.core.evaluate import Estimate

HEAVY = 0.7  # above this k a row's weights have too heavy a tail
DOUBTFUL_SHARE = 0.2  # of such rows: noise in k alone stays below it, for a q that is fair
BIAS_ERROR = 0.25  # what -SE²/2 leaves out of the bias, as a share of it
REMEMBERED = 2**20  # distinct rows whose errors are held at once


class Summary(NamedTuple):
    """A data set's log-likelihood, with everything needed to judge it.

    Attributes:
        log_prob: Mean of the estimates of log p(x), in nats.
        std_error: Standard error of that mean over the data.
        monte_carlo_error: What the finite number of draws adds to it.
        bias: Estimate of how far the mean lies below the true one, for the finite number of draws:
            0 or less. It does not average out over rows. `log_prob - bias` corrects for it.
        elbo: Mean evidence lower bound.
        effective_samples: Mean effective number of draws.
        effective_min: The smallest one.
        pareto_share: Share of the rows whose weights have too heavy a tail (`pareto_k` above 0.7); NaN
            where all have too few draws to tell.
        samples: Draws for each point, m; their mean where points differ, 1 where the model is exact.
        points: Number of data points.
        widened: Number of points with draws from a widened q.
    """

    log_prob: float
    std_error: float
    monte_carlo_error: float
    bias: float
    elbo: float
    effective_samples: float
    effective_min: float
    pareto_share: float
    samples: int
    points: int
    widened: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval for these rows' mean log p(x): what an endless number of draws would give.

        log_prob - bias ± 1.96 √(monte_carlo_error² + (bias / 4)²): the estimate of the bias is good to
        about a quarter. It does not hold where `doubtful`.
        """
        half = 1.96 * math.hypot(self.monte_carlo_error, BIAS_ERROR * self.bias)
        return self.log_prob - self.bias - half, self.log_prob - self.bias + half

    @property
    def doubtful(self) -> bool:
        """Whether too many rows have heavy-tailed weights for the stated errors to hold.

        Rows that were redrawn from a widened q count too: their trial draws had such weights.
        """
        return max(self.widened / self.points, self.pareto_share) > DOUBTFUL_SHARE

    def __str__(self) -> str:
        if math.isnan(self.log_prob):
            return f"no finite log-likelihood over {self.points} rows"
        error = "" if math.isnan(self.std_error) else f" ± {self.std_error:.4f}"  # as of one row
        mean = f"{self.log_prob:.4f}{error} nats over {self.points} rows"
        if self.samples == 1 and self.monte_carlo_error == 0:
            return f"{mean} (exact)"
        tails = "" if math.isnan(self.pareto_share) else f", {100 * self.pareto_share:.1f} % k > 0.7"
        widened = f", {self.widened} rows redrawn from a wider q" if self.widened else ""
        return (
            f"{mean} (m = {self.samples}, Monte-Carlo {self.monte_carlo_error:.4f}, "
            f"bias {self.bias:.4f}, {self.effective_samples:.0f} effective draws{tails}{widened})"
        )


class RunningSummary:
    """A `Summary` fed some points at a time; its memory does not grow with their number.

    Arguments:
        samples: Draws for each point, where all have the same; None to take what the estimates say.

    Example:
        >>> from ciflows import Estimate
        >>> running = RunningSummary()
        >>> running.add(Estimate.exact(torch.tensor([1.0, 2.0, 3.0]), samples=1))
        >>> print(running.result())
        2.0000 ± 0.5774 nats over 3 rows (exact)
    """

    def __init__(self, samples: int | None = None) -> None:
        self.samples, self.points, self.widened = samples, 0, 0
        self._origin, self._effective_min = 0.0, math.inf
        self._means = torch.zeros(8, dtype=torch.float64)
        self._spread = torch.zeros(3, dtype=torch.float64)
        self._keys = torch.zeros(0, 2, dtype=torch.float64)
        self._errors, self._squared_errors = torch.zeros(0, dtype=torch.float64), 0.0

    @property
    def counts(self) -> bool:
        """Whether any point counts: not where all weights are 0."""
        return self._means[0].item() > 0

    def add(self, estimate: Estimate, weight: Tensor | None = None) -> None:
        """Count in some more points (points,), with weights (points,) if they count differently."""
        columns = type(estimate)(*(column.double().cpu() for column in estimate))
        weight = torch.ones_like(columns.log_prob) if weight is None else weight.double().cpu()
        if not self.points:  # sums are kept relative to about the mean, for accuracy
            self._origin = columns.log_prob.nan_to_num(posinf=0, neginf=0).mean().item()
        shifted = columns.log_prob - self._origin
        known, heavy = ~columns.pareto_k.isnan(), columns.pareto_k > HEAVY
        values = [torch.ones_like(weight), shifted, columns.elbo, columns.bias]
        values += [columns.effective_samples, columns.samples, known.double(), heavy.double()]
        self._means += (weight * torch.stack(values)).sum(1)
        self._spread += torch.stack([weight**2 * shifted**power for power in range(3)]).sum(1)
        self._effective_min = min(self._effective_min, columns.effective_samples.min().item())
        self.points += len(shifted)
        self.widened += int(columns.widened.sum())
        self._add_errors(columns, weight)

    def result(self) -> Summary:
        """The summary of all points so far."""
        total = self._means[0].item() or math.nan  # no row counts
        _, mean, elbo, bias, effective, samples, known, heavy = (self._means / total).tolist()
        s0, s1, s2 = self._spread.tolist()
        n = self.points
        spread = (s2 - 2 * mean * s1 + mean**2 * s0) * n / (n - 1) if n > 1 else math.nan
        error = self._squared_errors + self._errors.square().sum().item()
        return Summary(
            log_prob=self._origin + mean,
            std_error=math.sqrt(max(0.0, spread)) / total if not math.isnan(spread) else math.nan,
            monte_carlo_error=math.sqrt(error) / total,
            bias=bias,
            elbo=elbo,
            effective_samples=effective,
            effective_min=self._effective_min,
            pareto_share=heavy / known if known else math.nan,
            samples=round(samples) if self.samples is None else self.samples,
            points=n,
            widened=self.widened,
        )

    def _add_errors(self, columns: Estimate, weight: Tensor) -> None:
        """Add up standard errors: at once for rows that are equal, in squares for others.

        Draws belong to rows, so that equal rows have equal errors, which do not average out. Rows with
        the same log_prob and ELBO to 1e-4 count as equal.
        """
        keys = torch.stack([columns.log_prob, columns.elbo], 1).mul(1e4).round().nan_to_num()
        keys = torch.cat([self._keys, keys])
        errors = torch.cat([self._errors, weight * columns.std_error])
        self._keys, inverse = keys.unique(dim=0, return_inverse=True)
        self._errors = errors.new_zeros(len(self._keys)).index_add_(0, inverse, errors)
        if len(self._keys) > REMEMBERED:
            self._squared_errors += self._errors.square().sum().item()
            self._keys, self._errors = self._keys[:0], self._errors[:0]


def summarise(estimate: Estimate, samples: int | None = None, weight: Tensor | None = None) -> Summary:
    """Average per-point estimates (points,) over a data set, with errors over data and draws.

    Arguments:
        samples: Draws for each point; None to take what the estimate says.
        weight: How much each point counts (points,); all the same if None.
    """
    running = RunningSummary(samples)
    running.add(estimate, weight)
    return running.result()
