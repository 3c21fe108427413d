"""How unusual a row is: the share of the model's own samples that are no likelier.

With n samples s_k of the model, given what the row is given:

    p = #{log p(s_k) <= log p(x)} / n

The error has two parts: that of a share of n, and how far p moves if log p(x) moves by its own error.
"""

from __future__ import annotations

__all__ = ["PValues", "p_value"]

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ciflows.core.evaluate import Estimate
from ciflows.core.row_samples import sample_rows
from ciflows.core.rows import Rows
from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.runs.frames import like
from ciflows.tables import TableLike

if TYPE_CHECKING:
    from ciflows.runs.run import Run

SAMPLES, SAMPLES_A_ROW = 2000, 100
DECIMALS = 4  # of log p: equal rows score alike up to rounding
VALUES = 2**21  # samples in memory at once


def p_value(
    run: Run, x: TableLike, *, n: int | None = None, samples: int | None = None, seed: int = 0
) -> Any:
    """The share of the run's samples that are no likelier than each row: `p_value`, `p_value_std_error`.

    If the model is right, p-values of new rows are uniform between 0 and 1, but for ties. A row's
    p-value depends on the row and the seed alone. A pandas frame gives a pandas frame with its index.

    Arguments:
        x: A table in the units of the data.
        n: Samples of the run: 2,000 if None, or 100 for each row of a conditional density, given the
            same as the row.
        samples: Draws of the index for each log p, of rows and of samples; if None, as many as 0.1 nats
            take, at most 100.
        seed: Seed of all draws.
    """
    rows = run.rows(x)
    estimate = run.estimate(rows, samples, seed)
    return like(x, PValues(run, n, seed, samples=samples).frame(rows, estimate))


class PValues:
    """Gives rows their p-values; one set of samples serves all rows, or all with the same context.

    Arguments:
        n: Samples of the run: 2,000 if None, or 100 for each row of a conditional density.
        options: How log p is estimated, as in `Run.estimate`: for samples as for rows.
    """

    def __init__(self, run: Run, n: int | None, seed: int | None, **options: Any) -> None:
        if run.images:
            raise UserError("P-values are for tables and points: this run is a density over images.")
        conditional = run.flow.context_shape is not None
        self.run, self.seed, self.options = run, seed, options
        self.n = n or (SAMPLES_A_ROW if conditional else SAMPLES)
        self._scores = None if conditional else self._score(run.flow.sample(self.n, seed=seed))

    def frame(self, rows: Rows, estimate: Estimate) -> pl.DataFrame:
        """What `of` gives, as the columns p_value and p_value_std_error."""
        p, error = self.of(rows, estimate)
        return pl.DataFrame({"p_value": p.numpy(), "p_value_std_error": error.numpy()})

    def of(self, rows: Rows, estimate: Estimate) -> tuple[Tensor, Tensor]:
        """The p-values of rows (rows,), and their standard errors (rows,)."""
        middle = estimate.log_prob.double().cpu()
        spread = estimate.std_error.double().cpu().nan_to_num(0.0)
        ends = torch.stack([middle, middle - spread, middle + spread], dim=1)
        if self._scores is not None:
            p, low, high = self._shares(self._scores, ends).unbind(1)
        else:
            p, low, high = self._given_shares(rows, ends).unbind(1)
        smooth = (self.n * p + 1) / (self.n + 2)
        error = torch.sqrt(smooth * (1 - smooth) / self.n + ((high - low) / 2).square())
        return p, error

    def _given_shares(self, rows: Rows, log_prob: Tensor) -> Tensor:
        """Shares (rows, 3) among samples given the context of each row, drawn once for each context."""
        assert rows.context is not None
        contexts, which = torch.unique(rows.context, dim=0, return_inverse=True)
        shares = torch.empty_like(log_prob)
        step = max(1, VALUES // (self.n * torch.Size(self.run.flow.shape).numel()))
        for start in range(0, len(contexts), step):
            some = contexts[start : start + step]
            x = sample_rows(self.run.flow, self.n, some, self.seed).transpose(0, 1)
            scores = self._score(x.flatten(0, 1), some.repeat_interleave(self.n, 0)).reshape(-1, self.n)
            mine = (which >= start) & (which < start + step)
            own = scores.sort(1).values[which[mine] - start]
            shares[mine] = self._shares(own, log_prob[mine])
        return shares

    def _score(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """log p of samples (samples,), in ascending order if they share a context."""
        log_prob = self.run.estimate(Rows(x, context), seed=self.seed, **self.options).log_prob
        log_prob = (
            log_prob.double().cpu().round(decimals=DECIMALS).nan_to_num(-torch.inf, neginf=-torch.inf)
        )
        return log_prob if context is not None else log_prob.sort().values

    def _shares(self, scores: Tensor, log_prob: Tensor) -> Tensor:
        """Shares of scores (n,) or (rows, n) at or below some log p (rows, 3)."""
        rounded = log_prob.round(decimals=DECIMALS).contiguous()
        return torch.searchsorted(scores.contiguous(), rounded, right=True).double() / self.n
