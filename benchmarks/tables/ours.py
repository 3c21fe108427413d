"""This software on the suite's tables: what `ciflows fit` does, on the suite's own split and clock."""

from __future__ import annotations

__all__ = ["fit_default", "fit_indexed", "fit_informative", "fit_muon", "fit_plain"]

import time
from collections.abc import Callable

import numpy as np
import polars as pl
import torch

from benchmarks.tables.data import Table
from ciflows.core.flow import Flow
from ciflows.datasets.dataset import Dataset
from ciflows.models.index import IndexSettings
from ciflows.runs.assemble import build_flow, other_starts
from ciflows.runs.config import RunConfig, read_config, resolve
from ciflows.settings import parse_settings
from ciflows.tables import PLAIN_TABLE, Schema
from ciflows.tables.survey import survey_table
from ciflows.training import fit_flow
from ciflows.training.staged import fit_staged

LogProb = Callable[[np.ndarray], np.ndarray]
DRAWS = 100


def fit_default(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """The best of several plain flows, then indices where validation says that they pay."""
    begun = time.process_time()
    dataset, schema = _dataset(table)
    flow = build_flow(_config(seconds, seed), dataset)
    others = other_starts(_config(seconds, seed), dataset, flow)
    config = _config(seconds - (time.process_time() - begun), seed)
    index = parse_settings(IndexSettings, _index(), "the preset")
    staged = fit_staged(
        flow,
        dataset.rows("train"),
        dataset.rows("validation"),
        config.training,
        index,
        others=[other for variant, other in others.items() if variant.trained],
        fixed=[other for variant, other in others.items() if not variant.trained],
        seed=seed,
        clock=time.process_time,
    )
    return _log_prob(staged.flow, schema), f"{staged.outcome.steps} steps. {staged.story}"


def fit_plain(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """The plain spline flow of the same preset, with Adam, for all of the time."""
    return _fit_alone("nsf", table, seconds, seed)


def fit_muon(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """The same flow with Muon."""
    return _fit_alone("nsf", table, seconds, seed, optimizer="muon")


def fit_indexed(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """The same flow with an index from the first step on, for all of the time."""
    return _fit_alone("cif-nsf", table, seconds, seed)


def fit_informative(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """The same, with an index that starts informative."""
    return _fit_alone("cif-nsf", table, seconds, seed, index_start="informative")


def _fit_alone(
    model: str, table: Table, seconds: float, seed: int, optimizer: str = "adam", **architecture: str
) -> tuple[LogProb, str]:
    begun = time.process_time()
    dataset, schema = _dataset(table)
    flow = build_flow(_config(seconds, seed, model, **architecture), dataset)
    config = _config(seconds - (time.process_time() - begun), seed, model, **architecture)
    training = config.training.model_copy(update={"optimizer": optimizer})
    train, validation = dataset.rows("train"), dataset.rows("validation")
    outcome = fit_flow(flow, train, validation, training, seed=seed, clock=time.process_time)
    return _log_prob(flow, schema), f"{outcome.steps} steps"


def _config(seconds: float, seed: int, model: str = "nsf", **architecture: str) -> RunConfig:
    """The preset of tables, for so many seconds and without stages, which `fit_default` makes itself."""
    changes = {"steps": 10**6, "max_minutes": seconds / 60, "validation_samples": 5, "patience": None}
    changes |= {"staged": False}
    changed = {"training": changes, "architecture": architecture}
    return resolve("table.csv", model, seed, [read_config("table"), changed])


def _index() -> dict[str, list[int]]:
    """The index's settings in the preset of tables."""
    architecture = read_config("table")["architecture"]["cif-nsf"]
    return {key: value for key, value in architecture.items() if key in IndexSettings.model_fields}


def _dataset(table: Table) -> tuple[Dataset, Schema]:
    frames = [_frame(part) for part in (table.train, table.validation, table.test)]
    names = frames[0].columns
    # every column has a density here, for all methods: those on a lattice were given noise
    densities = {"atoms": dict.fromkeys(names, "none"), "step": dict.fromkeys(names, 0.0)}
    settings = PLAIN_TABLE.model_copy(update=densities)
    schema = survey_table(frames[:1], settings)
    train, validation, test = (schema.encode(frame).x for frame in frames)
    known = (table.name, train, validation, test, schema.names, 0, "", None, schema)
    return Dataset(*known, groups=table.groups), schema


def _frame(rows: np.ndarray) -> pl.DataFrame:
    return pl.DataFrame({f"column {i}": column for i, column in enumerate(rows.T)})


def _log_prob(flow: Flow, schema: Schema) -> LogProb:
    @torch.no_grad()
    def log_prob(x: np.ndarray) -> np.ndarray:
        rows = schema.encode(_frame(x)).x
        return flow.estimate(rows, DRAWS, seed=0).log_prob.double().numpy()

    return log_prob
