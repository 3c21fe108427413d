"""The recipe for Spark: the same bits as one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import polars as pl
import pytest
from test_parts import run
from test_score import people

from ciflows.runs.run import Run

__all__ = ["run"]
pytest.importorskip("pyspark", reason="pyspark is not installed")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_for_spark(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    import score_spark

    table = people(300, seed=5)
    table.write_parquet(tmp_path / "people.parquet")
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        read = spark.read.parquet(str(tmp_path / "people.parquet")).repartition(3)
        scores = pl.DataFrame(score_spark.score_table(str(run.path), read).toPandas()).sort("id")
    finally:
        spark.stop()
    assert scores.drop("id").equals(run.scores(table, seed=0))
