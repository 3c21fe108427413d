"""Tables of numbers, read from and written to the files that people have."""

from __future__ import annotations

__all__ = ["Table", "read_table", "write_table"]

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ciflows.errors import UserError
from ciflows.files import atomic_path

READABLE = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".npy")


class Table(NamedTuple):
    """Numbers (rows, columns) in float32, and the names of the columns."""

    values: Tensor
    columns: tuple[str, ...]


def read_table(path: Path) -> Table:
    """Read a table of finite numbers, or say what is wrong with it."""
    if not path.exists():
        raise UserError(f"There is no file {path}.")
    if path.suffix not in READABLE:
        raise UserError(f"{path}: cannot read {path.suffix!r} files; give {', '.join(READABLE)}.")
    try:
        array, columns = _read_npy(path) if path.suffix == ".npy" else _read_frame(path)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: cannot be read as {path.suffix}: {error}") from None
    if array.ndim != 2:
        raise UserError(f"{path}: expected a table (rows, columns); got shape {array.shape}.")
    if not array.size:
        raise UserError(f"{path}: the table is empty.")
    bad = ~np.isfinite(array)
    if bad.any():
        counts = [f"{c} ({n})" for c, n in zip(columns, bad.sum(0), strict=True) if n]
        raise UserError(f"{path}: missing or infinite values in {', '.join(counts)}.")
    return Table(torch.from_numpy(np.ascontiguousarray(array)), columns)


def write_table(path: Path, columns: Mapping[str, Tensor]) -> None:
    """Write columns (rows,) to a CSV or Parquet file, whole or not at all."""
    import polars as pl

    frame = pl.DataFrame({name: values.cpu().numpy() for name, values in columns.items()})
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"{path}: cannot write {path.suffix!r} files; give .csv or .parquet.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        if path.suffix == ".csv":
            frame.write_csv(temporary)
        else:
            frame.write_parquet(temporary)


def _read_npy(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    array = np.load(path, allow_pickle=False)
    array = array.astype(np.float32, casting="same_kind" if array.dtype.kind == "f" else "unsafe")
    return array, tuple(f"x{i + 1}" for i in range(array.shape[-1] if array.ndim else 0))


def _read_frame(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    import polars as pl

    readers = {
        ".csv": pl.read_csv,
        ".tsv": lambda p: pl.read_csv(p, separator="\t"),
        ".parquet": pl.read_parquet,
        ".arrow": pl.read_ipc,
        ".feather": pl.read_ipc,
    }
    frame = readers[path.suffix](path)
    wrong = [f"{name} ({kind})" for name, kind in frame.schema.items() if not kind.is_numeric()]
    if wrong:
        raise UserError(f"{path}: columns that are not numbers: {', '.join(wrong)}.")
    return frame.cast(pl.Float32).to_numpy(), tuple(frame.columns)
