"""Reported likelihoods: estimates of log p(x) from importance weights, with errors that hold.

From m draws with log-weights w_k, where E[exp w_k] = p(x):

    log p(x) ≈ log (1/m) Σ exp w_k          a lower bound on average, tight as m grows
    ELBO     ≈ (1/m) Σ w_k                  the bound for m = 1
    ESS      = (Σ exp w_k)² / Σ exp 2w_k    effective number of draws, at most m
    SE²      = (1/ESS - 1/m) m/(m - 1)      variance of the first line (delta method)
    bias     = -SE²/2                       how far the first line lies below log p(x) on average
    k        see `ciflows.core.pareto`      whether SE and bias can be trusted

Draws are summed up as they come and thrown away; only the largest weights of each row are kept. Where
gradients are asked for, the first two lines have them, and the draws stay in memory.
"""

from __future__ import annotations

__all__ = [
    "Estimate",
    "RunningEstimate",
    "RunningSummary",
    "Summary",
    "check_eval_mode",
    "check_samples",
    "estimate",
    "log_mean_exp",
    "rows_at_once",
    "summarise",
]

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ciflows.core.layer import check_shape, leading_shape
from ciflows.core.noise import Noise
from ciflows.core.pareto import add_up, pareto_k, tail_size
from ciflows.core.proposals import WidenedNoise
from ciflows.core.rows import Rows
from ciflows.core.summary import HEAVY, RunningSummary, Summary, summarise

if TYPE_CHECKING:
    from ciflows.core.flow import Flow

FIRST_DRAWS = 4
TELLING_DRAWS = 32  # from here on a trial can tell that a tolerance is out of reach
GROUP = 32  # draws that are summed up together


class Estimate(NamedTuple):
    """What m draws say of log p(x), for each x.

    Attributes:
        log_prob: The importance-sampling estimate of log p(x) (*).
        elbo: The estimate of the evidence lower bound (*).
        std_error: Monte-Carlo standard error of `log_prob` (*); 0 if it is exact, NaN for one draw.
        effective_samples: Effective number of draws (*), between 1 and m.
        bias: Estimate of E[log_prob] - log p(x) (*), at most 0. `log_prob - bias` corrects for it.
        pareto_k: How heavy the tail of the weights is (*). Above 0.7 do not trust the other columns.
            NaN for fewer than 25 draws, 0 if no weight is twice the mean.
        samples: Draws that the row's numbers come from (*).
        widened: 1 where some of them come from a widened q, 0 elsewhere (*).
    """

    log_prob: Tensor
    elbo: Tensor
    std_error: Tensor
    effective_samples: Tensor
    bias: Tensor
    pareto_k: Tensor
    samples: Tensor
    widened: Tensor

    @classmethod
    def exact(cls, log_prob: Tensor, samples: int) -> Estimate:
        """The estimate of a density that needs no draws: every weight is p(x)."""
        zero, all_draws = torch.zeros_like(log_prob), torch.full_like(log_prob, samples)
        return cls(log_prob, log_prob.clone(), zero, all_draws, zero, zero, all_draws.clone(), zero)


def log_mean_exp(log_weights: Tensor) -> Tensor:
    """log (1/m) Σ_k exp w_k over the first dimension: (m, *) -> (*)."""
    return torch.logsumexp(log_weights, dim=0) - math.log(log_weights.shape[0])


class RunningEstimate:
    """An `Estimate` fed draw by draw; its memory does not grow with their number.

    Arguments:
        most: The most draws that will be fed; it sets how many of the largest weights are kept.

    Example:
        >>> running = RunningEstimate()
        >>> running.add(torch.zeros(4, 3))
        >>> running.result().effective_samples
        tensor([4., 4., 4.])
    """

    def __init__(self, most: int = 10_000) -> None:
        self.samples, self._keep = 0, tail_size(most) + 1
        self._peak, self._sums = torch.tensor(-math.inf), torch.zeros(3)
        self._largest: list[Tensor] = []

    def add(self, log_weights: Tensor) -> None:
        """Count in some more draws (k, *)."""
        peak = log_weights.detach().amax(0).clamp(min=torch.finfo(log_weights.dtype).min)
        if self.samples:
            peak = torch.maximum(self._peak, peak)  # sums are kept relative to the largest, for accuracy
        shifted = log_weights - peak
        weights = torch.exp(shifted)
        sums = torch.stack([add_up(weights), add_up(weights.square()), add_up(shifted)])
        if self.samples:
            moved = self._peak - peak
            shrink = torch.exp(moved)
            total, squares, logs = self._sums
            sums += torch.stack([total * shrink, squares * shrink**2, logs + self.samples * moved])
        self._peak, self._sums = peak, sums
        self.samples += log_weights.shape[0]
        self._largest.append(log_weights.detach())
        if sum(map(len, self._largest)) > 4 * self._keep:  # sorting at every call would cost more
            self._sort()

    def keep(self, some: Tensor) -> None:
        """Go on with some of the rows only, named by a mask or by indices (rows,)."""
        self._sort()
        self._peak, self._sums = self._peak[some], self._sums[:, some]
        self._largest = [part[:, some] for part in self._largest]

    def result(self, widened: bool = False) -> Estimate:
        """The estimate from all draws so far."""
        m = self.samples
        total, squares, logs = self._sums
        # where no draw has any weight all have the same, and the density is 0 without an error
        effective = torch.where(total > 0, total.square() / squares, m)
        if m > 1:
            variance = (1 / effective - 1 / m).clamp(min=0) * m / (m - 1)
        else:
            variance = torch.full_like(effective, math.nan)
        log_prob, elbo = self._peak + torch.log(total / m), self._peak + logs / m
        self._sort()
        k = pareto_k(self._largest[0], log_prob, m)
        counts = torch.full_like(log_prob, m), torch.full_like(log_prob, widened)
        return Estimate(log_prob, elbo, variance.sqrt(), effective, -variance / 2, k, *counts)

    def _sort(self) -> None:
        kept = torch.cat(self._largest)
        self._largest = [kept.topk(min(self._keep, len(kept)), dim=0).values]


def estimate(
    flow: Flow,
    x: Tensor,
    samples: int,
    std_error: float | None,
    min_samples: int,
    max_samples: int,
    context: Tensor | None,
    noise: Noise,
) -> Estimate:
    """Estimate log p(x) for each x (*, shape); see `Flow.estimate`."""
    check_samples(min(samples, min_samples, max_samples))
    if std_error is not None and not std_error > 0:
        raise ValueError(f"Flow: a standard error to reach must be above 0; got {std_error}.")
    _check_points(flow, x)
    leading = _common_leading(leading_shape(x, flow.shape), flow.leading_of(context))
    if not leading.numel():
        return Estimate(*(x.new_empty(leading, dtype=flow.dtype) for _ in Estimate._fields))
    if context is not None and flow.context_shape is not None:
        context = context.expand(*leading, *flow.context_shape).reshape(-1, *flow.context_shape)
    rows = Rows(x.expand(*leading, *flow.shape).reshape(-1, *flow.shape), context)
    with torch.set_grad_enabled(_wants_gradient(flow, rows)):
        if flow.exact or std_error is None:
            result = _estimate_rows(flow, rows, samples, noise)
        else:
            result = _estimate_until(flow, rows, std_error, min_samples, max_samples, noise)
    log_prob, elbo, *others = (column.reshape(leading) for column in result)
    return Estimate(log_prob, elbo, *(column.detach() for column in others))


def _common_leading(points: torch.Size, contexts: torch.Size) -> torch.Size:
    """The leading dimensions of points and their contexts together."""
    try:
        return torch.broadcast_shapes(points, contexts)
    except RuntimeError:
        raise ValueError(
            f"Flow: points {tuple(points)} and contexts {tuple(contexts)} do not fit together: give one "
            "context, or one for each point."
        ) from None


def check_samples(samples: int) -> None:
    """Refuse a number of draws below 1."""
    if samples < 1:
        raise ValueError(f"Flow: samples must be at least 1; got {samples}.")


def _estimate_rows(flow: Flow, rows: Rows, samples: int, noise: Noise) -> Estimate:
    """Estimate log p of rows from `samples` draws each."""
    parts = []
    for some in _chunks(flow, rows):
        if flow.exact:
            parts.append(Estimate.exact(flow.log_weight(some.x, some.context, noise), samples))
        else:
            running = RunningEstimate(samples)
            _draw(running, flow, some, noise, samples)
            parts.append(running.result(isinstance(noise, WidenedNoise)))
    return _joined(parts)


def _estimate_until(
    flow: Flow, rows: Rows, std_error: float, min_samples: int, max_samples: int, noise: Noise
) -> Estimate:
    """Estimate log p of rows with as many draws as each needs for a standard error."""
    limits = std_error, min_samples, max_samples
    result = _joined([_until(flow, some, *limits, noise) for some in _chunks(flow, rows)])
    late = int((result.std_error > std_error).sum())
    if late:
        warnings.warn(
            f"{late} of {len(rows)} points have a standard error above {std_error} (the largest: "
            f"{result.std_error.max():.3g}). {_spent(result, std_error, max_samples)}",
            stacklevel=5,
        )
    return result


def _spent(result: Estimate, std_error: float, max_samples: int) -> str:
    """What to do about rows that miss a tolerance: they had the most draws, or bad luck."""
    most = int(((result.std_error > std_error) & (result.samples >= max_samples)).sum())
    if most:
        return f"{most} of them took all of {max_samples} draws: raise max_samples."
    return "Ask for a smaller one to have all below it."


def rows_at_once(shape: tuple[int, ...], device: torch.device) -> int:
    """How many rows to push through the layers together: enough to be quick, few enough to fit.

    A residual block carries a tangent for each feature, so that a row of vectors costs as many. Networks
    of images hold a hundred channels or so for each pixel, and a few tangents: below 1 GB on a CPU.
    """
    if len(shape) == 3:
        return max(1, (2**20 if device.type == "cuda" else 2**16) // (shape[1] * shape[2]))
    size = 1 + torch.Size(shape).numel()
    return max(1, 2**20 // size if device.type == "cuda" else min(12_000, 2**19 // size))


def _check_points(flow: Flow, x: Tensor) -> None:
    """Refuse points, and states of a flow, for which a reported likelihood would be wrong."""
    check_shape(x, flow.shape, "Flow")
    if x.dtype != flow.input_dtype:
        raise ValueError(f"Flow: it takes {flow.input_dtype}, the points are {x.dtype}: convert them.")
    check_eval_mode(flow, "a point's likelihood")
    if torch.is_grad_enabled() and x.requires_grad and flow.discrete:
        raise ValueError("Flow: integers and atoms have probabilities, without a gradient in x.")
    if flow.noisy:
        raise ValueError(
            "Flow: its log-determinants are noisy estimates, and their noise would raise a "
            "log-mean-exp over draws. Evaluate in eval() mode with exact log-determinants "
            "(or, to compare with the paper's own scheme, call diagnostics.paper_log_prob)."
        )


def check_eval_mode(flow: Flow, what: str) -> None:
    """Refuse a flow in whose training mode something depends on more than the point."""
    if any(_depends_on_batch(part) for part in flow.modules()):
        raise ValueError(
            f"Flow: in training mode its batch norms or dropout make {what} depend on more than the "
            "point: call eval() first."
        )


def _wants_gradient(flow: Flow, rows: Rows) -> bool:
    """Whether gradients are enabled, and something asks for them."""
    tensors = [rows.x, *flow.parameters(), *([] if rows.context is None else [rows.context])]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _depends_on_batch(part: nn.Module) -> bool:
    """Whether a part depends, in training mode, on the other rows of a batch or on dropout."""
    if not part.training:
        return False
    batchwise = isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) or getattr(part, "batchwise", False)
    return batchwise or getattr(part, "dropout", 0.0) > 0


def _until(
    flow: Flow, rows: Rows, std_error: float, min_samples: int, max_samples: int, noise: Noise
) -> Estimate:
    """Double each row's trial draws until their standard error is small enough; then draw anew.

    Rows whose trial shows that no allowed number of draws will do get all of them at once.

    The draws that decide may not be the ones reported: those that look good, or bad, differ from the
    others in their estimates too. Rows whose trial weights have a heavy tail get more draws, some of
    them from a widened q.
    """
    pending, samples = torch.arange(len(rows), device=rows.x.device), min(min_samples, max_samples)
    trial, parts, places = RunningEstimate(max_samples), [], []
    fresh, wide = noise.from_draw(max_samples), WidenedNoise.like(noise).from_draw(2 * max_samples)
    while len(pending):
        with torch.no_grad():
            _draw(trial, flow, rows[pending], noise, samples)
        seen, margin = trial.result(), 1 + 1 / math.sqrt(samples)
        least = seen.std_error * math.sqrt(samples / max_samples)  # with all draws that are allowed
        hopeless = (least > std_error) & (samples >= min(TELLING_DRAWS, max_samples))
        ready = (margin * seen.std_error <= std_error) | hopeless | (samples >= max_samples)
        heavy, small = seen.pareto_k > HEAVY, 2 * seen.std_error <= std_error
        # twice the draws where the error is just small enough, or it would miss half of the time
        draws = torch.where(heavy, 4 * samples, torch.where(small, samples, 2 * samples))
        draws = torch.where(hopeless, max_samples, draws).clamp(max=max_samples)
        for chosen, source in ((ready & ~heavy, fresh), (ready & heavy, wide)):
            for count in draws[chosen].unique().tolist():
                some = pending[chosen & (draws == count)]
                places.append(some)
                parts.append(_estimate_rows(flow, rows[some], count, source))
        if ready.any():
            pending = pending[~ready]
            trial.keep(~ready)
        samples = min(2 * samples, max_samples)
    order = torch.cat(places).argsort()
    return Estimate(*(column[order] for column in _joined(parts)))


def _draw(running: RunningEstimate, flow: Flow, rows: Rows, noise: Noise, samples: int) -> None:
    """Bring a running estimate of rows up to `samples` draws."""
    start = running.samples
    chunks = flow.weight_chunks(rows.x, samples - start, rows.context, noise.from_draw(start))
    for log_weights in _grouped(chunks):
        running.add(log_weights)


def _grouped(chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same draws, GROUP at a time, however many fit in a chunk: a row's sums are rounded one way."""
    waiting: list[Tensor] = []
    for chunk in chunks:
        waiting.append(chunk)
        if sum(map(len, waiting)) >= GROUP:
            *groups, rest = torch.cat(waiting).split(GROUP)
            yield from groups
            waiting = [rest]
    yield from torch.cat(waiting).split(GROUP)


def _chunks(flow: Flow, rows: Rows) -> Iterator[Rows]:
    """The rows, some at a time."""
    step = rows_at_once(flow.shape, rows.x.device)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _joined(parts: list[Estimate]) -> Estimate:
    return Estimate(*(torch.cat(column) for column in zip(*parts, strict=True)))
