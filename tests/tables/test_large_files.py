"""Large files: read piece by piece, prepared once, scored in flat memory, with the same results."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from test_tables import SUFFIXES, WRITERS

import ciflows
from ciflows.core.evaluate import Estimate, RunningSummary, summarise
from ciflows.datasets import load_dataset
from ciflows.errors import UserError
from ciflows.runs import score as scoring
from ciflows.runs.run import Run
from ciflows.tables import read as tables
from ciflows.tables import read_chunks
from ciflows.tables.read import GrowingTable

ROWS = 1000


def numbers(rows: int = ROWS) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    return pl.DataFrame({"x1": 1e9 + rng.normal(size=rows), "x2": rng.normal(size=rows) ** 3})


@pytest.fixture
def _all_large(monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> None:
    """Every file counts as large, and the cache is empty."""
    monkeypatch.setattr(tables, "LARGE", 0)


@pytest.mark.usefixtures("_all_large")
def test_names_that_occur_twice_are_refused_in_large_files_too(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n4,5,6\n")
    with pytest.raises(UserError, match="more than once: a"):
        list(read_chunks(tmp_path / "twice.csv"))


@pytest.mark.usefixtures("_all_large")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["data", "data[1]*?"])
def test_pieces_of_a_large_file_are_the_whole_of_it(suffix: str, name: str, tmp_path: Path) -> None:
    frame, path = numbers(), tmp_path / f"{name}{suffix}"
    WRITERS[suffix](frame, path)
    pieces = list(read_chunks(path, 90))
    assert max(map(len, pieces)) <= 90
    assert pl.concat(pieces).equals(frame)


@pytest.mark.usefixtures("_all_large")
def test_a_large_file_without_names_and_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    numbers().write_csv(path, include_header=False)
    assert pl.concat(read_chunks(path, 90)).columns == ["x1", "x2"]
    (tmp_path / "bad.parquet").write_bytes(b"x" * 200)
    with pytest.raises(UserError, match=r"damaged, cut short or not a \.parquet file"):
        list(read_chunks(tmp_path / "bad.parquet"))


@pytest.mark.parametrize(("given", "group"), [([], None), (["x2"], None), ([], "who")])
def test_a_large_table_is_prepared_once_and_split_as_a_small_one(
    given: list[str],
    group: str | None,
    tmp_path: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "data.parquet"
    frame = numbers().with_columns(w=pl.lit(2.0) + pl.col("x2").abs())
    named: dict[str, Any] = {"given": given, "weights": "w"}
    if group is not None:
        frame, named["group"] = frame.with_columns(who=pl.int_range(pl.len()) // 7), group
    frame.write_parquet(path)
    settings = ciflows.tables.TableSettings.model_validate(named)
    small = load_dataset(str(path), table=settings)
    monkeypatch.setattr(tables, "LARGE", 0)
    said: list[str] = []
    large = load_dataset(str(path), table=settings, say=said.append)
    again = load_dataset(str(path), table=settings, say=said.append)
    assert sum("this is done once" in line for line in said) == 1
    assert small.schema == large.schema == again.schema
    for part in ("train", "validation", "test"):
        one, other = small.rows(part), large.rows(part)  # type: ignore[arg-type]
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.weight, other.weight)  # type: ignore[arg-type]
        assert given == [] or torch.equal(one.context, other.context)  # type: ignore[arg-type]
    assert large.fingerprint == again.fingerprint
    assert small.groups == large.groups == again.groups
    assert (small.groups is None) == (group is None)


def test_scores_of_pieces_are_those_of_the_whole(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
) -> None:
    numbers().write_parquet(tmp_path / "data.parquet")
    small = {"layers": 1, "hidden": [8], "steps": 20}
    run = ciflows.fit(tmp_path / "data.parquet", "nsf", out=tmp_path / "run", **small)
    monkeypatch.setattr(tables, "LARGE", 0)
    monkeypatch.setattr(scoring, "ROWS", 64)
    seen: list[int] = []
    estimate = Run.estimate
    monkeypatch.setattr(
        Run,
        "estimate",
        lambda run, x, *rest, **named: seen.append(len(x)) or estimate(run, x, *rest, **named),
    )
    text = command("score", "run", "data.parquet", "--out", "scores.csv")
    assert f"over {ROWS} rows" in text
    assert max(seen) <= 64
    assert sum(seen) == ROWS
    expected = run.log_prob(numbers())
    assert np.allclose(pl.read_csv(tmp_path / "scores.csv")["log_prob"], expected, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir() if "scores" in path.name) == ["scores.csv"]


def test_a_growing_table_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.parquet"
    with GrowingTable(path) as table:
        for start in range(3):
            table.add(pl.DataFrame({"a": [2 * start, 2 * start + 1]}))
    assert pl.read_parquet(path)["a"].to_list() == [0, 1, 2, 3, 4, 5]
    table = GrowingTable(tmp_path / "half.csv")
    table.__enter__()
    table.add(pl.DataFrame({"a": [0, 1]}))
    table.__exit__(KeyboardInterrupt, None, None)
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


def test_what_a_killed_process_left_of_a_growing_table_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        (tmp_path / f".scores.csv.{pid}.abc").mkdir()
        (tmp_path / f".scores.csv.{pid}.abc" / "0.parquet").write_bytes(b"half")
    with GrowingTable(path) as table:
        table.add(pl.DataFrame({"a": [0.0, 0.0]}))
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"scores.csv", f".scores.csv.{os.getpid()}.abc"}


def test_a_running_summary_is_that_of_all_points() -> None:
    estimate = Estimate(*(1 + torch.rand(7, 500)), torch.ones(500))
    running = RunningSummary(samples=7)
    for start in range(0, 500, 130):
        running.add(Estimate(*(column[start : start + 130] for column in estimate)))
    assert tuple(running.result()) == pytest.approx(tuple(summarise(estimate, 7)), rel=1e-9)
