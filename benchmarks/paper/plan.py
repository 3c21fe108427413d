"""The queue's file: tables of rows, and the runs that they stand for."""

from __future__ import annotations

__all__ = ["QUEUE", "QUICK", "Job", "Row", "Table", "choose", "list_jobs", "read_queue"]

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from ciflows.errors import UserError, nearest
from ciflows.files import parse_toml
from ciflows.runs.config import RunConfig, read_config, resolve
from ciflows.runs.experiments import Published, read_experiment
from ciflows.settings import Seed, Settings, parse_settings

QUEUE = Path(__file__).with_name("queue.toml")
QUICK = Path(__file__).with_name("quick.toml")
QUICK_SEEDS = 2
SECTIONS = ("architecture", "training", "evaluation")


class Row(Settings):
    """A model of a table, to be trained on its data sets."""

    name: str = Field(description="its name in run folders and for --only")
    label: str = Field(description="its name on the page")
    pair: str | None = Field(None, description="the plain row that a CIF is compared with")
    model: str | None = Field(None, description="a model, where there is no experiment")
    experiment: str | None = Field(None, description="an experiment of the package")
    data: list[str] | None = Field(None, description="its data sets, if not all of the table's")
    architecture: dict[str, Any] = Field({}, description="settings of the model")
    training: dict[str, Any] = Field({}, description="settings of training")
    evaluation: dict[str, Any] = Field({}, description="settings of the test")
    minutes: float = Field(gt=0, description="about how long one run takes on an H200")
    comparable: bool = Field(True, description="whether the paper's figure measures the same")
    paper: dict[str, Published] = Field({}, description="the paper's figures by data set")

    def published(self, data: str) -> Published:
        """The paper's figures on a data set."""
        if self.experiment is None or data in self.paper:
            return self.paper.get(data) or parse_settings(Published, {}, self.name)
        return read_experiment(self.experiment).published(data)


class Table(Settings):
    """Rows that are trained on the same data sets, with the same seeds."""

    name: str
    title: str
    data: list[str]
    seeds: list[Seed]
    rows: list[Row]
    config: list[str] = Field([], description="presets over every row")
    architecture: dict[str, Any] = Field({}, description="settings of every row's model")
    training: dict[str, Any] = Field({}, description="settings of every row's training")
    evaluation: dict[str, Any] = Field({}, description="settings of every row's test")


class Job(NamedTuple):
    """One run: a row on a data set with a seed.

    Attributes:
        table: Its table.
        row: Its row.
        data: The data set.
        seed: The seed.
        quick: Whether it is a tiny run that only shows that everything works.
    """

    table: Table
    row: Row
    data: str
    seed: int
    quick: bool

    @property
    def key(self) -> str:
        """Its name, and the path of its run folder below the queue's."""
        return f"{self.table.name}/{self.row.name}-{self.data}-{self.seed}"

    def config(self) -> RunConfig:
        """The configuration of the run."""
        layers = [*map(read_config, self._configs()), self._settings()]
        layers += [read_config(str(QUICK))] if self.quick else []
        return resolve(self.data, self._model(), self.seed, layers)

    def command(self) -> str:
        """The `ciflows fit` command that trains the same run, at full length even if it is quick."""
        words = ["ciflows", "fit", self.data]
        words += [] if self.row.experiment else ["--model", self._model()]
        words += [word for name in self._configs() for word in ("-c", name)]
        words += ["--seed", str(self.seed)]
        for section, values in self._settings().items():
            for key, value in values.items():
                words += ["--set", f"{section}.{key}={_toml(value)}"]
        return shlex.join(words)

    def _model(self) -> str:
        row = self.row
        if row.experiment is not None:
            return read_experiment(row.experiment).model
        if row.model is None:
            raise UserError(f"{self.table.name}, {row.name}: give a model or an experiment.")
        return row.model

    def _configs(self) -> list[str]:
        return [*([self.row.experiment] if self.row.experiment else []), *self.table.config]

    def _settings(self) -> dict[str, dict[str, Any]]:
        """The settings of the table with those of the row on top, by section."""
        return {key: getattr(self.table, key) | getattr(self.row, key) for key in SECTIONS}


def read_queue(path: Path = QUEUE) -> list[Table]:
    """Read and check the queue's file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise UserError(f"There is no file {path}.") from None
    values = parse_toml(text, str(path)).get("tables", [])
    tables = [parse_settings(Table, value, str(path)) for value in values]
    for table in tables:
        names = [row.name for row in table.rows]
        for row in table.rows:
            if row.pair is not None and row.pair not in names:
                raise UserError(
                    f"{table.name}, {row.name}: no row {row.pair!r}. {nearest(row.pair, names)}"
                )
    return tables


def list_jobs(tables: Sequence[Table], quick: bool = False) -> list[Job]:
    """All runs in the order of the file, the first seed of every row before the second."""
    return [job for table in tables for job in _jobs(table, quick)]


def choose(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """The runs whose names contain one of the words; all where there are no words."""
    chosen = [job for job in jobs if not only or any(word in job.key for word in only)]
    if not chosen:
        names = sorted({job.table.name for job in jobs})
        raise UserError(f"No run has {' or '.join(only)} in its name. Tables: {', '.join(names)}.")
    return chosen


def _jobs(table: Table, quick: bool) -> Iterator[Job]:
    for seed in table.seeds[:QUICK_SEEDS] if quick else table.seeds:
        for data in table.data:
            for row in table.rows:
                if row.data is None or data in row.data:
                    yield Job(table, row, data, seed, quick)


def _toml(value: Any) -> str:
    """A value as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
