"""Score a table with Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from pyspark.sql import DataFrame

import ciflows


def score_table(folder: str, table: DataFrame) -> DataFrame:
    def score(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        run = ciflows.load_run(folder)
        for batch in batches:
            yield pd.concat([batch[["id"]], run.scores(batch, seed=0)], axis=1)

    return table.mapInPandas(score, "id long, log_prob float, std_error float, effective_samples float")
