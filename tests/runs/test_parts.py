"""Folders of many files: what a part holds, bad rows, and jobs that are killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from test_score import people

import ciflows
from ciflows.errors import UserError
from ciflows.runs import engines, parts
from ciflows.runs.parts import Job, Part
from ciflows.runs.run import Run
from ciflows.runs.score import ScoreSettings, score_frame

SETTINGS = ScoreSettings(samples=6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    small = {"layers": 1, "hidden": [8], "steps": 10, "staged": False}
    table = people().drop("id")
    return ciflows.fit(table, "cif-nsf", out=tmp_path_factory.mktemp("runs") / "people", **small)


@pytest.fixture
def files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pl.DataFrame:
    """All rows of the files in big/, in parts of at most 100; the run stands beside them."""
    monkeypatch.setattr(parts, "PART_ROWS", 100)
    (tmp_path / "run").symlink_to(run.path)
    (tmp_path / "big").mkdir()
    tables = [people(rows, seed) for seed, rows in enumerate((150, 30, 220), 1)]
    for number, table in enumerate(tables):
        table.write_parquet(tmp_path / "big" / f"{number}.parquet")
    return pl.concat(tables)


def read(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "*.parquet")


def test_a_folder_has_the_scores_of_all_rows(
    run: Run, files: pl.DataFrame, tmp_path: Path, command: Callable[..., str]
) -> None:
    said = command("score", "run", "big/*.parquet", "--out", "scores", "-m", "6")
    assert "Wrote 400 rows" in said
    expected = score_frame(run, files, SETTINGS)
    assert read(tmp_path / "scores").drop("row").equals(expected)
    assert read(tmp_path / "scores")["row"].to_list() == list(range(400))
    assert len(list((tmp_path / "scores").glob("*.parquet"))) == 2 + 1 + 3
    (tmp_path / "big" / "more").mkdir()
    (tmp_path / "big" / "2.parquet").rename(tmp_path / "big" / "more" / "2.parquet")
    command("score", "run", "big", "--out", "keyed", "-m", "6", "--key", "id,sex")
    assert read(tmp_path / "keyed").equals(pl.concat([files[["id", "sex"]], expected], how="horizontal"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["big/*.csv", "--out", "x"], "no file fits this pattern"),
        (["ids.csv", "--out", "x"], "no such file"),
        (["big", "--out", "x", "--key", "name"], "lacks the column name"),
        (["big", "--out", "x", "--key", "log_prob"], "have a column log_prob already"),
        (["big", "--out", "x", "--key", "id,sex,id"], "names id twice"),
        (["big/0.parquet", "--key", "id,id"], "names id twice"),
        (["ids.parquet", "--out", "x", "--missing", "integrate"], "has none of the columns"),
        (["narrow.parquet", "--out", "x"], "lacks the columns"),
        (["words.parquet", "--out", "x"], "were numbers in training"),
        (["big", "--out", "x", "--resume"], "no job was begun"),
        (["big", "--out", "big"], "exists already"),
        (["big", "--out", "x.csv", "--engine", "ray"], "name of a folder"),
        (["big", "--out", "x", "--engine", "rai"], "Did you mean ray"),
        (["narrow.parquet", "--resume"], "without a suffix"),
        (["big", "--out", "x", "--p-value"], "--p-value writes one file"),
        (["big", "--out", "x", "--on-bad-row", "drp"], "Did you mean drop"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    words: list[str], answer: str, tmp_path: Path, command: Callable[..., str]
) -> None:
    people(20)[["id"]].write_parquet(tmp_path / "ids.parquet")
    people(20)[["height", "sex"]].write_parquet(tmp_path / "narrow.parquet")
    people(20).with_columns(height=pl.lit("tall")).write_parquet(tmp_path / "words.parquet")
    assert answer in command("score", "run", *words, code=1)
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "scores.csv").exists()


def test_a_job_that_ends_half_way_is_resumed(
    files: pl.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
) -> None:
    words = ["score", "run", "big", "--out", "scores", "-m", "6"]
    made: list[int] = []

    def make(run: Run, job: Job, part: Part) -> None:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(part.number)
        parts.make_part(run, job, part)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "make_part", make)
        assert "--resume" in command(*words, code=130)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "scores").glob("*.parquet")}
    assert len(times) == 3
    assert "settings" in command(*words, "--seed", "1", "--resume", code=1)
    assert "3 parts were there already" in command(*words, "--resume")
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    command(*words[:-4], "--out", "again", "-m", "6")
    assert read(tmp_path / "scores").equals(read(tmp_path / "again"))


@pytest.mark.usefixtures("files")
def test_a_killed_process_leaves_whole_files_alone(tmp_path: Path, command: Callable[..., str]) -> None:
    """SIGKILL as soon as the first part is there; what bears a part's name can be read."""
    code = "from ciflows.runs import parts; parts.PART_ROWS = 100; from ciflows.cli import main; main()"
    words = ["score", "run", "big", "--out", "scores", "-m", "500"]
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=tmp_path)
    deadline = time.monotonic() + 600
    while not list((tmp_path / "scores").glob("part-*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    there = list((tmp_path / "scores").glob("part-*.parquet"))
    assert there
    assert all(len(pl.read_parquet(path)) for path in there)
    (tmp_path / "scores" / ".part-000005.parquet.1.tmp").write_bytes(b"half")
    command(*words, "--resume")
    assert len(read(tmp_path / "scores")) == 400
    assert not list((tmp_path / "scores").glob(".part*"))


def spoil(table: pl.DataFrame) -> pl.DataFrame:
    """Row 3 without a height, row 5 with an infinite one, row 7 with an unseen category."""
    row = pl.int_range(pl.len())
    height = pl.when(row == 3).then(None).when(row == 5).then(float("inf")).otherwise(pl.col("height"))
    return table.with_columns(height=height, sex=pl.when(row == 7).then(pl.lit("x")).otherwise("sex"))


@pytest.mark.parametrize("way", ["null", "drop", "fail"])
def test_bad_rows(
    way: str, run: Run, files: pl.DataFrame, tmp_path: Path, command: Callable[..., str]
) -> None:
    spoil(files[:150]).write_parquet(tmp_path / "big" / "0.parquet")
    words = ["score", "run", "big", "--out", "scores", "-m", "6", "--on-bad-row", way]
    if way == "fail":
        assert "height" in command(*words, code=1)
        return
    assert "3 rows could not be scored" in command(*words)
    listed = pl.read_csv(tmp_path / "scores" / "_bad_rows.csv")
    assert listed.rows() == [(3, "height"), (5, "height"), (7, "sex")]
    expected = score_frame(run, files, SETTINGS).with_row_index("row")
    good = pl.col("row").is_in([3, 5, 7]).not_()
    scores = read(tmp_path / "scores")
    assert len(scores) == (397 if way == "drop" else 400)
    assert scores.filter(good).drop("row").equals(expected.filter(good).drop("row"))
    assert scores.filter(~good)["log_prob"].to_list() == ([] if way == "drop" else [None] * 3)


@pytest.mark.usefixtures("files")
def test_a_mean_of_minus_infinity_has_no_error(tmp_path: Path, command: Callable[..., str]) -> None:
    far = people(30, seed=2).with_columns(height=pl.lit(1e300))
    far.write_parquet(tmp_path / "big" / "1.parquet")
    said = command("score", "run", "big", "--out", "scores", "-m", "6")
    assert "Mean log-likelihood -inf, not weighted." in said
    assert "30 rows have density 0" in said


@pytest.mark.usefixtures("files")
def test_rows_with_gaps_are_no_bad_rows(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
) -> None:
    """Only those whose gaps cannot be integrated over are, and those that are wrong elsewhere."""
    table = spoil(people(20)).drop("size3")
    table.write_parquet(tmp_path / "gaps.parquet")
    words = ["score", "run", "gaps.parquet", "-m", "6", "--missing", "integrate"]
    assert "1 rows could not be scored" in command(*words, "--out", "scores")
    assert pl.read_csv(tmp_path / "scores" / "_bad_rows.csv").rows() == [(7, "sex")]
    expected = score_frame(run, table, ScoreSettings(samples=6, missing="integrate"))
    assert read(tmp_path / "scores").drop("row").equals(expected)
    said = command(*words, "--out", "dropped", "--on-bad-row", "drop")
    assert "Wrote 19 rows" in said
    failing = expected.with_columns(pl.when(pl.int_range(20) != 3).then(pl.all()))
    monkeypatch.setattr(parts, "score_frame", lambda *_: failing)
    command(*words, "--out", "hopeless")
    listed = pl.read_csv(tmp_path / "hopeless" / "_bad_rows.csv").rows()
    assert listed == [(3, "height, size3"), (7, "sex")]


@pytest.mark.parametrize("way", ["null", "drop", "fail"])
@pytest.mark.usefixtures("files")
def test_bad_rows_of_one_file(way: str, run: Run, tmp_path: Path, command: Callable[..., str]) -> None:
    spoil(people(20)).write_csv(tmp_path / "new.csv")
    words = ["score", "run", "new.csv", "--out", "scores.parquet", "-m", "6", "--on-bad-row", way]
    if way == "fail":
        assert "height" in command(*words, code=1)
        assert not list(tmp_path.glob("scores*"))
        return
    assert "scores-bad-rows.csv lists them" in command(*words)
    assert pl.read_csv(tmp_path / "scores-bad-rows.csv")["row"].to_list() == [3, 5, 7]
    scores = pl.read_parquet(tmp_path / "scores.parquet")
    assert scores["log_prob"].null_count() == (0 if way == "drop" else 3)
    assert len(scores) == (17 if way == "drop" else 20)
    good = [i for i in range(20) if i not in (3, 5, 7)]
    assert scores.drop_nulls()["row"].to_list() == good
    assert scores.drop_nulls().drop("row").equals(score_frame(run, people(20), SETTINGS)[good])


def test_a_frame_of_bad_rows_alone_has_nulls(run: Run) -> None:
    scores = score_frame(run, people(4).with_columns(height=pl.lit(None, pl.Float64)), SETTINGS)
    assert scores["log_prob"].to_list() == [None] * 4
    with pytest.raises(UserError, match="missing"):
        score_frame(run, spoil(people(4)), ScoreSettings(on_bad_row="fail"))


@pytest.mark.parametrize("way", ["null", "drop"])
def test_a_part_of_bad_rows_alone_ends_no_job(
    way: str, files: pl.DataFrame, tmp_path: Path, command: Callable[..., str]
) -> None:
    gap = pl.lit(None, pl.Float64)
    people(30, 2).with_columns(height=gap).write_parquet(tmp_path / "big" / "1.parquet")
    assert len(files) == 400
    words = ["score", "run", "big", "--out", "scores", "-m", "6", "--on-bad-row", way]
    assert "30 rows could not be scored" in command(*words)
    assert len(read(tmp_path / "scores").drop_nulls()) == 370


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("key", "answer"),
    [
        (pl.concat_list("id").alias("tags"), "the key tags is List(Int64), which no list"),
        (pl.duration(days="id").alias("age"), "the key age is Duration"),
        (pl.lit("a").alias("columns"), "has a column columns already"),
        (pl.col("id").cast(pl.Int32), "2.parquet: the key id is Int32 here, and Int64 in the first"),
    ],
)
def test_keys_that_no_list_of_bad_rows_can_hold_are_refused(
    key: pl.Expr, answer: str, tmp_path: Path, command: Callable[..., str]
) -> None:
    files, name = sorted((tmp_path / "big").iterdir()), key.meta.output_name()
    for path in files[2:] if name == "id" else files:
        spoil(pl.read_parquet(path)).with_columns(key).write_parquet(path)
    assert answer in command("score", "run", "big", "--out", "x", "-m", "6", "--key", name, code=1)
    assert not (tmp_path / "x").exists()


def test_samples_in_many_files(files: pl.DataFrame, tmp_path: Path, command: Callable[..., str]) -> None:
    command("sample", "run", "-n", "250", "--out", "one", "--seed", "2")
    command("sample", "run", "-n", "150", "--out", "two", "--seed", "2")
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one.columns == files.drop("id").columns
    assert len(one) == 250
    assert one[:100].equals(two[:100])  # the seed of a part is that of its number
    assert not one[:100].equals(one[100:200])
    assert "one file" in command("sample", "run", "--out", "three", "--given", "height=1", code=1)
