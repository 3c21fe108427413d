"""`Run`: a trained density in the units of its data."""

from __future__ import annotations

__all__ = ["Run", "load_run"]

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciflows.core.evaluate import Estimate
from ciflows.core.flow import Flow
from ciflows.core.rows import Rows
from ciflows.datasets import Dataset
from ciflows.devices import find_device
from ciflows.errors import GapsError, UserError
from ciflows.optional import polars as pl
from ciflows.runs import ask, check, p_values
from ciflows.runs import folder as folders
from ciflows.runs.assemble import Variant, rebuild_flow
from ciflows.runs.config import RunConfig
from ciflows.runs.frames import like, read_given
from ciflows.runs.gaps import check_done, check_missing, estimate_gaps, impute
from ciflows.runs.metrics import estimate_rows, read_summary
from ciflows.tables import Schema, TableLike, as_frame, read_table
from ciflows.tables.integrate import GapFlow
from ciflows.tables.read import own_names, read_frame
from ciflows.training.monitor import read_history

SCORES = ("log_prob", "std_error", "effective_samples")


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run: a density that takes and gives values in the units of its data.

    Tables may be data frames (polars or pandas), arrays, tensors, mappings of columns, or paths.
    Columns are found by name; those of an array or tensor go by their order in training.

    Attributes:
        path: Its folder.
        config: Its configuration.
        flow: The trained flow, in eval mode. It takes the numbers that `rows` makes of a table.
        about: Package versions, commit, machine, fingerprint of the data.
        metrics: The content of metrics.json: the test result and what belongs to it.
        history: The rows of metrics.jsonl.
    """

    path: Path
    config: RunConfig
    flow: Flow
    about: dict[str, Any]
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    _data: Dataset | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        metrics, data = self.metrics, Path(self.config.data).name
        names = ", ".join(self._columns()) or "×".join(map(str, self.flow.shape)) + " images"
        given = "" if self.schema is None else ", ".join(c.name for c in self.schema.given)
        weights = f", weighted by {self.weights}" if self.weights else ""
        size = f"{metrics['parameters']:,} parameters, {metrics['steps']:,} steps"
        lines = [
            f"Run of {self.config.model} on {data}, in {self.path}",
            f"  density of {_shorten(names)}" + (f" given {_shorten(given)}" if given else ""),
            f"  {size} in {metrics['seconds']:.0f} s on {metrics['device']}{weights}",
            f"  test: {read_summary(metrics['test'])}",
            "  use log_prob, scores, sample, quantile, interval, coverage, dataset, save",
        ]
        return "\n".join(lines)

    def dataset(self) -> Dataset:
        """The data it was trained on; refused if they have changed since."""
        return self._data or folders.load_run_data(self.path, self.config, self.about)

    @cached_property
    def schema(self) -> Schema | None:
        """The columns of its table; None for a built-in set and for images."""
        return folders.read_schema(self.about)

    @property
    def weights(self) -> str | None:
        """The column with the weights of the rows, if it was trained with one."""
        return None if self.schema is None else self.schema.weights

    @property
    def images(self) -> bool:
        """Whether it is a density over images."""
        return len(self.flow.shape) == 3

    def estimate(
        self,
        x: TableLike | Rows,
        samples: int | None = None,
        seed: int | None = None,
        *,
        std_error: float | None = None,
        max_samples: int = 10_000,
        missing: str = "refuse",
    ) -> Estimate:
        """Estimate log p(x) of each row, with its Monte-Carlo error; `run.flow` has gradients too.

        By default each row gets as many draws as a standard error of 0.1 nats takes, and at most 100.

        Arguments:
            x: A table in the units of the data, or what `rows` made of one.
            samples: Draws for each row.
            seed: Seed of the draws; other draws at each call if None.
            std_error: Instead of `samples`, draw until each row's standard error is about this.
            max_samples: The most draws for one row then.
            missing: "refuse" gaps, or "integrate" over them: log p of the values that are there.
        """
        rows = x if isinstance(x, Rows) else self._rows_to_score(x, missing)
        if bool(rows.x.isnan().any()):
            result = estimate_gaps(
                self.gaps, rows, samples, seed, std_error=std_error, max_samples=max_samples
            )
            check_done(result.log_prob.isnan(), "scored")
            return result
        return estimate_rows(
            self.flow, rows, samples, seed, std_error=std_error, max_samples=max_samples
        )

    @cached_property
    def gaps(self) -> GapFlow:
        """The density of rows with gaps."""
        if self.schema is None:
            raise UserError("Gaps are for tables of your own: built-in sets and images have none.")
        return GapFlow(self.flow)

    def impute(self, x: TableLike, n: int = 1, seed: int | None = None) -> Any:
        """Fill the gaps of a table with draws given the values that are there.

        Columns that the table lacks are drawn too. Values that are there stay as they are. With n above
        1 the n filled tables stand one below the other, with a column `draw` (1 to n) in front.

        Arguments:
            x: A table in the units of the data. A pandas frame gives a pandas frame.
            n: How many draws for each gap.
            seed: Seed of the draws.
        """
        gaps, schema = self.gaps, self.schema
        assert schema is not None
        return impute(gaps, schema, x, self.named(read_frame(x)), n, seed)

    def log_prob(self, x: TableLike, samples: int | None = None, seed: int | None = None) -> Tensor:
        """log p(x) of each row of a table: (rows,)."""
        return self.estimate(x, samples, seed).log_prob

    def score(self, x: TableLike, samples: int | None = None, seed: int | None = None) -> float:
        """The mean of log p(x) over a table, weighted if it has the weights column of training."""
        rows = self._rows_to_score(x)
        self.check_counts(rows.weight is None or bool(rows.weight.any()))
        return rows.mean(self.estimate(rows, samples, seed).log_prob.double().cpu()).item()

    def scores(
        self,
        x: TableLike,
        samples: int | None = None,
        seed: int | None = None,
        *,
        missing: str = "refuse",
    ) -> Any:
        """A data frame with log_prob, std_error and effective_samples of each row.

        A pandas frame gives a pandas frame with the same index; all else a polars frame.
        """
        estimate = self.estimate(x, samples, seed, missing=missing)
        columns = {name: getattr(estimate, name).cpu().numpy() for name in SCORES}
        return like(x, pl.DataFrame(columns))

    def score_dataset(
        self,
        dataset: Any,
        *,
        key: Sequence[str] | None = None,
        workers: int | None = None,
        **settings: Any,
    ) -> Any:
        """A `ray.data.Dataset` with the scores of another one's rows, computed by Ray when it is used.

        Arguments:
            dataset: The rows, whose columns are checked now.
            key: The columns to carry over; all of them if None.
            workers: How many processes, fewer than there are cores; as Ray sees fit if None.
            settings: Those of `ciflows.runs.score.ScoreSettings`: samples, std_error, seed, ...
        """
        from ciflows.runs.cluster import score_dataset
        from ciflows.runs.score import ScoreSettings

        return score_dataset(self, dataset, ScoreSettings(**settings), key, workers)

    def sample(
        self,
        n: int,
        seed: int | None = None,
        temperature: float = 1.0,
        given: TableLike | None = None,
    ) -> Any:
        """Draw n points: a table with the columns, types and bounds of training, or a tensor (n, shape).

        Arguments:
            n: How many; for each row of `given`, if the density is conditional.
            seed: Seed of the draws.
            temperature: Factor of all normal numbers drawn; the model itself has 1.
            given: A table of the columns that the density is conditioned on. A pandas frame gives a
                pandas frame.
        """
        rows = read_given(self.schema, given)
        if self.schema is None:
            return self.flow.sample(n, seed=seed, temperature=temperature)
        if rows is None:
            return self.schema.decode(self.flow.sample(n, seed=seed, temperature=temperature))
        frame, context = rows
        x = self.flow.sample(n, context.to(self.flow.device, self.flow.dtype), seed, temperature)
        return like(given, self.schema.decode(x.transpose(0, 1).flatten(0, 1), frame), n)

    quantile, cdf, interval = ask.quantile, ask.cdf, ask.interval
    mean, expectation = ask.mean, ask.expectation
    coverage, p_value = check.coverage, p_values.p_value

    def save(self, folder: Path | str) -> Run:
        """Copy the run folder to another place, and load it from there."""
        if Path(folder).exists():
            raise UserError(f"{folder} exists already: choose another folder.")
        shutil.copytree(self.path, folder)
        return load_run(folder, str(self.flow.device))

    def rows(self, x: TableLike, missing: str = "refuse") -> Rows:
        """Encode a table as the numbers that the flow takes, with the rows' weights if it has them.

        Arguments:
            x: A table in the units of the data.
            missing: "refuse" gaps, or "integrate" over them later: they become NaN.
        """
        check_missing(missing)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "A run reads tables without gradients: give x.detach(). For gradients call "
                "run.flow.log_prob(points) with points = run.rows(x.detach()).x.requires_grad_()."
            )
        if self.schema is None:
            return Rows(self._points(x))
        frame = self.named(read_frame(x))
        return self.schema.encode(frame, self.weights in frame.columns, gaps=missing == "integrate")

    def check_counts(self, some: bool) -> None:
        """Refuse the mean of rows of which none counts."""
        if not some:
            raise UserError(f"weights {self.weights}: all are 0, so that no row counts in the mean.")

    def _rows_to_score(self, x: TableLike, missing: str = "refuse") -> Rows:
        """The same; where gaps are refused, with the call that takes them."""
        try:
            return self.rows(x, missing)
        except GapsError as error:
            call = 'run.estimate(x, missing="integrate")'
            raise UserError(f"{error} To integrate over them: {call}.") from None

    def _points(self, x: TableLike) -> Tensor:
        """Points (rows, shape) for a flow without a table's columns."""
        wanted = self._columns()
        if isinstance(x, str | Path):
            return read_table(Path(x), wanted).values
        if hasattr(x, "columns") or hasattr(x, "keys"):
            frame = as_frame(x)
            missing = [name for name in wanted if name not in frame.columns]
            if missing:
                raise UserError(f"the table lacks {', '.join(missing)}; it has {frame.columns}.")
            return torch.tensor(frame.select(wanted).to_numpy())
        points = torch.as_tensor(x)
        if tuple(points.shape[1:]) != self.flow.shape:
            raise UserError(
                f"expected points of shape {self.flow.shape} in a batch (rows, ...); "
                f"got shape {tuple(points.shape)}."
            )
        return points

    def named(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Name columns that came without names: there must be as many as in training."""
        assert self.schema is not None
        table, order = self.config.table, self.schema.order
        unnamed = tuple(frame.columns) == own_names(frame.width)
        if not unnamed or table.columns is not None or table.exclude:
            return frame
        weighted = self.weights in frame.columns
        if frame.width != len(order) + weighted:
            raise UserError(
                f"has {frame.width} columns without names; the run was trained on "
                f"{len(order)}: {', '.join(order)}."
            )
        return frame if weighted else frame.rename(dict(zip(frame.columns, order, strict=True)))

    def _columns(self) -> list[str]:
        return list(self.about["columns"])


def load_run(folder: Path | str, device: str = "cpu") -> Run:
    """Load a finished run.

    Arguments:
        folder: The run folder.
        device: Where to put the flow: auto, cpu, cuda or cuda:N.
    """
    folder = Path(folder)
    config, about = folders.read_description(folder)
    if not folders.is_finished(folder):
        command = f"ciflows fit --resume {folder}"
        raise UserError(f"{folder} is not finished: resume it first.", command=command)
    metrics = folders.read_metrics(folder)
    members = [Variant(**facts) for facts in metrics.get("members", [])]
    flow = rebuild_flow(config, about, metrics.get("indexed", True), members or None)
    try:
        flow.load_state_dict(folders.read_weights(folder))
    except RuntimeError:
        raise UserError(f"{folder}: the weights do not fit the model in its config.toml.") from None
    flow.to(find_device(device)).eval()
    history = read_history(folder / "metrics.jsonl")
    return Run(folder, config, flow, about, metrics, history)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
