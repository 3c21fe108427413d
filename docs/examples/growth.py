"""How the cost of a score grows with columns and draws: untrained models of the default sizes.

python docs/examples/growth.py
"""

from __future__ import annotations

import time

import torch

import ciflows
from ciflows.core.rows import Rows
from ciflows.runs.metrics import estimate_rows

ROWS = 3000


def cost(model: str, columns: int, draws: int) -> float:
    """Microseconds of processor time for a row, the best of three turns."""
    flow = ciflows.build_model(model, features=columns, seed=0).eval()
    rows, turns = Rows(torch.randn(ROWS, columns)), []
    for _ in range(3):
        start = time.process_time()
        estimate_rows(flow, rows, draws, 0)
        turns.append(time.process_time() - start)
    return 1e6 * min(turns) / ROWS


def main() -> None:
    torch.set_num_threads(1)
    for columns in (4, 8, 16, 32):
        print(f"nsf, {columns} columns: {cost('nsf', columns, 1):.0f} µs a row")
    for columns in (4, 8, 16, 32):
        print(f"cif-nsf, {columns} columns, 10 draws: {cost('cif-nsf', columns, 10):.0f} µs a row")
    for draws in (1, 3, 10, 30):
        print(f"cif-nsf, 8 columns, {draws} draws: {cost('cif-nsf', 8, draws):.0f} µs a row")


if __name__ == "__main__":
    main()
