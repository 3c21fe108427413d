"""Write a Parquet file of many rows: eight columns with two modes each.

python docs/examples/million.py million.parquet 1000000
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("rows", type=int)
    options = parser.parse_args()
    rng, rows = np.random.default_rng(0), options.rows
    columns = {f"x{i}": rng.normal(size=rows) + 4 * (rng.random(rows) < 0.5) for i in range(8)}
    pl.DataFrame(columns).write_parquet(options.path, row_group_size=100_000)


if __name__ == "__main__":
    main()
