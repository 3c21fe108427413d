"""A table in many Parquet files is the table in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from ciflows.datasets import holds_images, holds_table, load_dataset
from ciflows.errors import UserError
from ciflows.files import read_json
from ciflows.tables import read as tables
from ciflows.tables.many_files import data_name, is_pattern, read_files, table_files

ROWS = 900


@pytest.fixture
def whole() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    kinds = rng.choice(["x", "y"], ROWS)
    return pl.DataFrame({"a": rng.normal(size=ROWS), "b": rng.gamma(2.0, size=ROWS), "c": kinds})


@pytest.fixture
def folder(tmp_path: Path, whole: pl.DataFrame) -> Path:
    """The table in four files, one of them without rows and one with its columns in another order."""
    path = tmp_path / "big"
    (path / "more").mkdir(parents=True)
    whole[:100].write_parquet(path / "part-1.parquet")
    whole[:0].write_parquet(path / "part-2.parquet")
    whole[100:500].select("c", "a", "b").write_parquet(path / "part-3.parquet")
    whole[500:].write_parquet(path / "part-4.parquet")
    (path / "_SUCCESS").write_text("")
    (path / "_hidden.parquet").write_text("not a table")
    return path


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("pattern", ["big", "big/part-*.parquet", "b*/part-?.parquet"])
@pytest.mark.usefixtures("folder")
def test_many_files_are_prepared_as_one(
    pattern: str,
    large: bool,
    whole: pl.DataFrame,
    tmp_path: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole.write_parquet(tmp_path / "one.parquet")
    if large:
        monkeypatch.setattr(tables, "LARGE", 0)
    one = load_dataset(str(tmp_path / "one.parquet"))
    said: list[str] = []
    many = [load_dataset(str(tmp_path / pattern), say=said.append) for _ in range(2)][1]
    assert many.schema == one.schema
    assert many.fingerprint == one.fingerprint
    assert torch.equal(many.train, one.train)
    assert torch.equal(many.test, one.test)
    assert sum("this is done once" in line for line in said) == large


def test_no_more_rows_are_read_at_once_than_asked_for(folder: Path, whole: pl.DataFrame) -> None:
    pieces = list(read_files(table_files(str(folder)), 90))
    assert max(map(len, pieces)) <= 90
    assert pl.concat(pieces).equals(whole)


def test_names_of_data(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert holds_table(str(folder))
    assert not holds_images(str(folder))
    assert holds_images(str(tmp_path / "empty"))
    assert holds_table("big/*.parquet")
    odd = tmp_path / "data[1]*.parquet"
    odd.write_text("")
    assert not is_pattern(str(odd))
    assert data_name(str(folder / "*.parquet")) == data_name(str(folder)) == "big"


def test_what_is_wrong_with_many_files_is_said(
    folder: Path, whole: pl.DataFrame, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no images \(.png.* and no .parquet files"):
        load_dataset(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no file fits this pattern"):
        load_dataset(str(folder / "x*.parquet"))
    (folder / "part-5.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"all have to be .parquet files; got part-5.csv"):
        load_dataset(str(folder / "part-*"))
    other = whole.with_columns(d=pl.lit(1), b=pl.col("b").cast(pl.String)).drop("a")
    other.write_parquet(folder / "part-6.parquet")
    differences = "part-6.parquet differs from part-1.parquet: it has no a, d is new, b is String, not"
    with pytest.raises(UserError, match=differences):
        load_dataset(str(folder))
    (folder / "part-6.parquet").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"part-6.parquet: damaged, cut short or not a .parquet file"):
        load_dataset(str(folder))
    (folder / "part-6.parquet").unlink()
    (folder / "picture.png").write_bytes(b"")
    with pytest.raises(UserError, match="holds images and Parquet files"):
        load_dataset(str(folder))
    (folder / "picture.png").unlink()
    (folder / "year=2020").mkdir()
    whole.write_parquet(folder / "year=2020" / "part-1.parquet")
    with pytest.raises(UserError, match="year=2020 is a folder for one value of a column"):
        load_dataset(str(folder))


def test_fit_takes_a_pattern(folder: Path, tmp_path: Path, command: Callable[..., str]) -> None:
    few = [word for key in ("steps=5", "layers=1", "hidden=[8]") for word in ("--set", key)]
    command("fit", "big/*.parquet", "--exclude", "c", "--no-report", *few)
    run = tmp_path / "runs" / "big-cif-nsf-0"
    assert read_json(run / "metrics.json")["test"]["points"] == ROWS // 10
    assert read_json(run / "about.json")["columns"] == ["a", "b"]
    assert f'data = "{folder}/*.parquet"' in (run / "config.toml").read_text()
