"""Does a density mean what it says? Where rows lie among the model's own samples, and should lie.

For a row x and n samples s_k of the model, given what the row has:

    PIT of a column         r = (#{s_k < x} + v (#{s_k = x} + 1)) / (n + 1),   v ~ U(0, 1)
    rank of the row         r = (#{log p(s_k) > log p(x)} + v (#{=} + 1)) / (n + 1)

If the model is right both are uniform on (0, 1), whatever n is and also for integers, names and atoms; a
row's rank too where log p is estimated, since the rows' are estimated in the same way. A row lies in the
central interval of level c if |2r - 1| <= c, and in the highest-density region of level c if r <= c. So
a share c of the rows should. (Talts et al., 2018, SBC; Hermans et al., 2022, expected coverage.)
"""

from __future__ import annotations

__all__ = ["LEVELS", "Check", "Coverage", "calibrate", "uniform_p_value"]

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.row_samples import sample_rows
from ciflows.core.rows import Rows

Array = NDArray[np.float64]
LEVELS = (0.5, 0.8, 0.9, 0.95)
DOUBT = 0.05  # how often a right model is called off, all columns taken together
SLIGHT = 0.05  # a distance below this is slight, however many rows show it
BAND = 1.96
VALUES = 2**21  # samples in memory at once
DECIMALS = 4  # of log p: equal rows score alike up to rounding


class Check(NamedTuple):
    """How one column is calibrated, or the whole density.

    Attributes:
        name: The column; "joint density" for the whole.
        ranks: PIT of each row, or its rank by density (rows,): uniform if the model is right.
        depths: The level at which an interval or region begins to hold each row (rows,).
        coverage: Shares of the rows in the intervals or regions of `LEVELS`.
        gap: Largest distance of a distribution function, that of ranks or of depths, from uniform.
        p_value: Probability of such a distance if the model is right (Kolmogorov and Smirnov).
        verdict: In words.
    """

    name: str
    ranks: Array
    depths: Array
    coverage: tuple[float, ...]
    gap: float
    p_value: float
    verdict: str

    @property
    def fine(self) -> bool:
        """Whether nothing speaks against the model here."""
        return self.verdict == "fine"


@dataclass(frozen=True, repr=False)
class Coverage:
    """How a density is calibrated, column by column and as a whole; prints as a table.

    Attributes:
        columns: A check of each modelled column, given those that it is conditioned on.
        joint: The check of the whole density by its highest-density regions.
        rows: How many rows were looked at.
        samples: Samples of the model, for each row if it is conditional.
        effective: Rows that the bands stand for: fewer if rows have weights or share samples.
        weight: Weights of the rows (rows,), 1 on average.
    """

    columns: list[Check]
    joint: Check
    rows: int
    samples: int
    effective: float
    weight: Array

    @property
    def checks(self) -> list[Check]:
        """All checks, the joint one last."""
        return [*self.columns, self.joint]

    @property
    def off(self) -> list[str]:
        """Names of what is off."""
        return [check.name for check in self.checks if not check.fine]

    def band(self, level: float) -> tuple[float, float]:
        """Where 95 % of observed shares lie if the model is right: level ± 1.96 sqrt(c (1 - c) / N)."""
        half = BAND * math.sqrt(level * (1 - level) / self.effective)
        return max(0.0, level - half), min(1.0, level + half)

    def as_dict(self) -> dict[str, Any]:
        """What there is to say in numbers and words, without the ranks of single rows."""
        checks = [
            {
                "name": check.name,
                "coverage": dict(zip(map(str, LEVELS), check.coverage, strict=True)),
                "gap": check.gap,
                "p_value": check.p_value,
                "verdict": check.verdict,
            }
            for check in self.checks
        ]
        return {
            "rows": self.rows,
            "samples": self.samples,
            "effective_rows": self.effective,
            "bands": {str(level): list(self.band(level)) for level in LEVELS},
            "columns": checks[:-1],
            "joint": checks[-1],
            "off": self.off,
        }

    def __repr__(self) -> str:
        bands = [f"{100 * low:.1f}–{high:.1%}" for low, high in map(self.band, LEVELS)]
        shares = [(check.name, [f"{share:.1%}" for share in check.coverage]) for check in self.checks]
        table = [("", [f"{level:.0%}" for level in LEVELS]), ("band if right", bands), *shares]
        width = max(len(name) for name, _ in table)
        fine = [check.name for check in self.checks if check.fine]
        found = (("Off", self.off), ("Fine", fine))
        words = [f"{what}: {', '.join(names)}." for what, names in found if names]
        return "\n".join(
            [
                f"{self.rows:,} rows against {self.samples:,} samples. Share of rows in intervals of",
                *(
                    f"  {name:<{width}}" + "".join(f"{cell:>12}" for cell in cells)
                    for name, cells in table
                ),
                *(f"{check.name} is {check.verdict}." for check in self.checks if not check.fine),
                " ".join(words),
            ]
        )


@torch.no_grad()
def calibrate(
    flow: Flow,
    rows: Rows,
    names: Sequence[str],
    values: Callable[[Tensor], Array],
    samples: int,
    draws: int = 20,
    seed: int = 0,
) -> Coverage:
    """Check a density with rows that it was not trained on.

    Arguments:
        rows: The rows, with their contexts and weights if they have any.
        values: Turns points (*, columns) of the flow into values that can be compared.
        samples: Samples of the model; for each row, if it is conditional.
        draws: Draws of the index for each log p. Few are enough: all ranks suffer alike.
    """
    rows, rng = rows.on(flow), np.random.default_rng(seed)
    data, scores = values(rows.x), _scores(flow, rows.x, rows.context, draws, seed)
    if rows.context is None:
        fresh = flow.sample(samples, seed=seed).to(rows.x)
        ranks = _shared_ranks(data, values(fresh), rng)
        depths = _shared_ranks(-scores, -_scores(flow, fresh, None, draws, seed), rng)[:, 0]
    else:
        ranks, depths = np.empty_like(data), np.empty(len(data))
        step = max(1, VALUES // (samples * data.shape[1]))
        for start in range(0, len(data), step):
            some = slice(start, start + step)
            context, numbers = rows.context[some], torch.arange(start, min(start + step, len(data)))
            fresh = sample_rows(flow, samples, context, seed, numbers).to(rows.x)
            drawn = values(fresh.flatten(0, 1)).reshape(*fresh.shape)
            ranks[some] = _own_ranks(data[some], drawn, rng)
            drawn = _scores(flow, fresh, context, draws, seed)[..., 0]
            depths[some] = _own_ranks(-scores[some, 0], -drawn, rng)
    weight = np.ones(len(data)) if rows.weight is None else rows.weight.double().cpu().numpy()
    shared = samples if rows.context is None else None
    return _conclude(names, ranks, depths, weight / weight.mean(), samples, shared)


def _scores(flow: Flow, x: Tensor, context: Tensor | None, draws: int, seed: int) -> Array:
    """log p of points, rounded (*, 1); the lowest of all where it is not a number."""
    log_prob = flow.estimate(x, draws, context=context, seed=seed).log_prob.double().cpu().numpy()
    return np.where(np.isnan(log_prob), -np.inf, log_prob.round(DECIMALS))[..., None]


def _shared_ranks(data: Array, samples: Array, rng: np.random.Generator) -> Array:
    """Randomised ranks of data (rows, columns) among samples (n, columns) that all rows share."""
    ordered, n = np.sort(samples, axis=0), len(samples)
    low, high = (
        np.stack([np.searchsorted(s, x, side) for s, x in zip(ordered.T, data.T, strict=True)], axis=1)
        for side in ("left", "right")
    )
    return np.asarray((low + rng.random(data.shape) * (high - low + 1)) / (n + 1))


def _own_ranks(data: Array, samples: Array, rng: np.random.Generator) -> Array:
    """Randomised ranks of data (rows, *) among samples (n, rows, *), each row's own."""
    below, equal = (samples < data).sum(0), (samples == data).sum(0)
    return np.asarray((below + rng.random(data.shape) * (equal + 1)) / (len(samples) + 1))


def _conclude(
    names: Sequence[str], ranks: Array, depths: Array, weight: Array, samples: int, shared: int | None
) -> Coverage:
    """Put ranks into words."""
    effective = 1 / (np.square(weight).sum() / weight.sum() ** 2 + (1 / shared if shared else 0))
    doubt = DOUBT / (len(names) + 1)
    columns = [
        _check(name, r, np.abs(2 * r - 1), weight, effective, doubt)
        for name, r in zip(names, ranks.T, strict=True)
    ]
    joint = _check("joint density", depths, depths, weight, effective, doubt)
    return Coverage(columns, joint, len(ranks), samples, float(effective), weight)


def _check(
    name: str, ranks: Array, depths: Array, weight: Array, effective: float, doubt: float
) -> Check:
    joint = ranks is depths
    gaps = [uniform_gap(each, weight) for each in ([depths] if joint else [ranks, depths])]
    p_value = min(1.0, len(gaps) * uniform_p_value(max(gaps), effective))
    coverage = tuple(float(np.average(depths <= level, weights=weight)) for level in LEVELS)
    verdict = "fine"
    if p_value < doubt:
        shift = 0.0 if joint else float(np.average(ranks, weights=weight)) - 0.5
        spread = float(np.average(depths, weights=weight)) - 0.5
        verdict = _verdict(max(gaps), shift, spread, 2 / math.sqrt(12 * effective))
    return Check(name, ranks, depths, coverage, max(gaps), p_value, verdict)


def _verdict(gap: float, shift: float, spread: float, noise: float) -> str:
    """How ranks that are not uniform differ: by their mean, by that of depths, or otherwise."""
    if max(abs(shift), abs(spread)) < noise:
        how = "has the wrong shape"
    elif abs(shift) > abs(spread):
        how = "is too low" if shift > 0 else "is too high"
    else:
        how = "is too narrow" if spread > 0 else "is too wide"
    return f"{'slightly ' if gap < SLIGHT else ''}off: the model {how} (largest gap {gap:.1%})"


def uniform_gap(ranks: Array, weight: Array) -> float:
    """The largest distance of the distribution function of ranks from that of U(0, 1)."""
    order = np.argsort(ranks)
    share = weight[order].cumsum() / weight.sum()
    below = np.concatenate([[0.0], share[:-1]])
    return float(np.maximum(np.abs(share - ranks[order]), np.abs(below - ranks[order])).max())


def uniform_p_value(gap: float, n: float) -> float:
    """Probability that n uniform numbers have such a distance, or a larger one (Stephens, 1970).

    Example:
        >>> round(uniform_p_value(1.358 / math.sqrt(10_000), 10_000), 3)
        0.05
    """
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * gap
    if x < 0.2:
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))
