"""Score a table wherever Ray reads and writes: folders, S3, Delta, SQL."""

from __future__ import annotations

import ray

import ciflows


def score_files(folder: str, files: str, out: str) -> None:
    run = ciflows.load_run(folder)
    table = ray.data.read_parquet(files)
    run.score_dataset(table, key=["id"], std_error=0.1).write_parquet(out)
