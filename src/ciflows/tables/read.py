"""Tables, read from and written to the files that people have, and taken from their data frames."""

from __future__ import annotations

__all__ = [
    "GrowingTable",
    "Table",
    "TableLike",
    "as_frame",
    "check_output",
    "errors_of",
    "is_large",
    "own_names",
    "read_chunks",
    "read_frame",
    "read_table",
    "readable",
    "replace_frame",
    "write_frame",
    "write_table",
]

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ciflows.errors import UserError
from ciflows.files import atomic_path, remove_leftovers
from ciflows.optional import polars as pl
from ciflows.tables.schema import check_columns

READABLE = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".npy", ".npz")
WRITABLE = (".csv", ".parquet")
IN_WORDS = {
    "more fields": "a row has more fields than the first one",
    "utf-8": "the text is not UTF-8",
    "Object arrays": "it holds Python objects, not numbers",
}


CHUNK = 50_000
AS_READ: dict[str, Any] = {
    "infer_schema_length": None,
    "try_parse_dates": True,
    "null_values": ["", "NA", "N/A", "null", "NULL"],
}
LARGE = 2**24  # bytes: larger files are read piece by piece

# A polars or pandas data frame, an array (rows, columns), a tensor, columns by name, or a file's path.
TableLike = Any


class Table(NamedTuple):
    """Finite numbers (rows, columns) in float64, and the names of the columns."""

    values: Tensor
    columns: tuple[str, ...]


def read_table(path: Path, columns: Sequence[str] | None = None) -> Table:
    """Read a table of finite numbers, or say what is wrong with it.

    A file without names, be it .npy or a .csv of nothing but numbers, gets x1, x2, ...

    Arguments:
        path: A file whose suffix is in READABLE.
        columns: The columns to read, in this order; others may hold anything. All of them where None.
    """
    with errors_of(path):
        frame, named = _read_frame(path, columns)
        if columns is not None:
            frame = _select(frame, named, columns)
        return Table(torch.from_numpy(_numbers(frame)), tuple(frame.columns))


@contextmanager
def errors_of(where: Path | str) -> Iterator[None]:
    """Let what is wrong with some data begin with their name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}", error.command) from error.__cause__


def read_chunks(path: Path, size: int = CHUNK) -> Iterator[pl.DataFrame]:
    """The rows of a file, `size` at a time; a large file is never in memory as a whole."""
    if not is_large(path):
        frame, _ = _read_frame(path, None)
        yield from frame.iter_slices(size) if len(frame) else [frame]
        return
    suffix = path.suffix.lower()
    _check_input(path, suffix)
    with readable(suffix):
        yield from _scan(path, suffix, size)


def is_large(*files: Path) -> bool:
    """Whether a file, or several together, are better not read whole."""
    sizes = [path.stat().st_size for path in files if path.is_file() and path.suffix.lower() != ".npz"]
    return sum(sizes) > LARGE


def as_frame(data: TableLike) -> pl.DataFrame:
    """A table that is in memory, of whatever kind, as a polars data frame.

    Columns without names get x1, x2, ...

    Example:
        >>> as_frame(np.zeros((3, 2))).columns
        ['x1', 'x2']
    """
    if isinstance(data, pl.LazyFrame):
        return data.collect()
    if isinstance(data, pl.DataFrame):
        return data
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        names = [str(name) for name in data.columns]
        _check_once(names)
        return pl.DataFrame([_from_pandas(data.iloc[:, i], name) for i, name in enumerate(names)])
    if isinstance(data, Mapping):
        try:
            return pl.DataFrame({k: _as_polars(values) for k, values in data.items()}, strict=False)
        except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
            what = str(error).partition("\n")[0]
            raise UserError(f"the columns do not make a table: {what}.") from error
    array = data.detach().cpu().numpy() if isinstance(data, Tensor) else np.asarray(data)
    return _array_frame(array[:, None] if array.ndim == 1 else array)


def read_frame(data: TableLike) -> pl.DataFrame:
    """A table from a file or from memory."""
    if isinstance(data, str | Path):
        with errors_of(data):
            return pl.concat(read_chunks(Path(data)))
    return as_frame(data)


def write_table(path: Path, columns: Mapping[str, Tensor]) -> None:
    """Write columns (rows,) to a new CSV or Parquet file, whole or not at all."""
    write_frame(path, pl.DataFrame({name: values.cpu().numpy() for name, values in columns.items()}))


def write_frame(path: Path, frame: pl.DataFrame) -> None:
    """Write a data frame to a new CSV or Parquet file, whole or not at all."""
    check_output(path)
    replace_frame(path, frame)


def replace_frame(path: Path, frame: pl.DataFrame) -> None:
    """Write a data frame to a CSV or Parquet file, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".csv":
            frame.write_csv(temporary)
        else:
            frame.write_parquet(temporary)


class GrowingTable:
    """A new CSV or Parquet file, written piece by piece: there whole in the end, or not at all."""

    def __init__(self, path: Path) -> None:
        check_output(path)
        self.path, self.count = path, 0

    def __enter__(self) -> GrowingTable:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        prefix = f".{self.path.name}.{os.getpid()}."
        self.folder = TemporaryDirectory(dir=self.path.parent, prefix=prefix)
        return self

    def add(self, frame: pl.DataFrame) -> None:
        """Add rows below what is there."""
        replace_frame(Path(self.folder.name) / f"{self.count:09d}.parquet", frame)
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.folder:
            if kind is None and self.count:
                whole = pl.scan_parquet(sorted(Path(self.folder.name).glob("*.parquet")), glob=False)
                with atomic_path(self.path) as temporary:
                    if self.path.suffix.lower() == ".csv":
                        whole.sink_csv(temporary)
                    else:
                        whole.sink_parquet(temporary)


def check_output(path: Path, suffixes: Sequence[str] = WRITABLE) -> None:
    """Refuse a file that exists or that we cannot write, before any work is done."""
    if path.exists():
        raise UserError(f"{path} exists already: choose another file.")
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{path}: give a name that ends in {' or '.join(suffixes)}.")
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise UserError(f"{path}: {parent} is a file, not a folder.")


def _read_frame(path: Path, columns: Sequence[str] | None) -> tuple[pl.DataFrame, bool]:
    """All that a file holds, and whether it names its columns."""
    suffix = path.suffix.lower()
    _check_input(path, suffix)
    # Bytes and no paths: polars takes the [1] of "data[1].csv" for a pattern.
    content = path.read_bytes()
    if not content or content.isspace():
        raise UserError("the file is empty.")
    with readable(suffix):
        if suffix == ".npy":
            return _read_npy(content), False
        if suffix == ".npz":
            return _read_npz(content)
        if suffix in (".csv", ".tsv"):
            return _read_csv(content, "," if suffix == ".csv" else "\t", columns)
        return (pl.read_parquet if suffix == ".parquet" else pl.read_ipc)(content), True


@contextmanager
def readable(suffix: str) -> Iterator[None]:
    """Tell in words what a file that cannot be read has wrong with it."""
    try:
        yield
    except UserError:
        raise
    except (Exception, pl.exceptions.PanicException) as error:
        known = (words for part, words in IN_WORDS.items() if part in str(error))
        raise UserError(f"{next(known, f'damaged, cut short or not a {suffix} file')}.") from error


def _scan(path: Path, suffix: str, size: int) -> Iterator[pl.DataFrame]:
    """The rows of a file, piece by piece."""
    if suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(array), size):
            yield _array_frame(array[start : start + size])
        return
    if suffix in (".csv", ".tsv"):
        separator = "," if suffix == ".csv" else "\t"
        with path.open(encoding="utf-8-sig", newline="") as text:
            named = _has_header(text, separator)
        frame = pl.scan_csv(path, separator=separator, has_header=named, glob=False, **AS_READ)
        if not named:
            names = own_names(len(frame.collect_schema()))
            frame = frame.rename(dict(zip(frame.collect_schema().names(), names, strict=True)))
    else:
        frame = (pl.scan_parquet if suffix == ".parquet" else pl.scan_ipc)(path, glob=False)
    yield from frame.collect_batches(chunk_size=size, maintain_order=True, lazy=True)


def _has_header(text: Iterable[str], separator: str, columns: Sequence[str] | None = None) -> bool:
    """Whether the first row of a text names the columns; refuse a row that cannot be read."""
    first = next((row for row in csv.reader(text, delimiter=separator) if row), [])
    if len(first) == 1 and ";" in first[0]:
        raise UserError("semicolons seem to separate its values: write it with commas.")
    if all(_is_number(name) for name in first if name):
        return False
    _check_once(name for name in first if name in (columns or first))
    return True


def _check_once(names: Iterable[str]) -> None:
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise UserError(f"column names that occur more than once: {', '.join(twice)}.")


def _check_input(path: Path, suffix: str) -> None:
    give = f"give a file that ends in {', '.join(READABLE)}."
    if not path.exists():
        raise UserError("there is no such file.")
    if path.is_dir():
        raise UserError(f"this is a folder; {give}")
    if not suffix:
        raise UserError(f"its name has no suffix; {give}")
    if suffix not in READABLE:
        raise UserError(f"{suffix} files cannot be read; {give}")


def _read_npy(content: bytes) -> pl.DataFrame:
    # Not np.load, which would advise the reader of a damaged file to unpickle it.
    return _array_frame(np.lib.format.read_array(io.BytesIO(content), allow_pickle=False))


def _read_npz(content: bytes) -> tuple[pl.DataFrame, bool]:
    """One table, or a column for each array."""
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = dict(archive)
    if len(arrays) == 1 and next(iter(arrays.values())).ndim == 2:
        return _array_frame(next(iter(arrays.values()))), False
    wrong = [f"{name} {array.shape}" for name, array in arrays.items() if array.ndim != 1]
    if wrong:
        raise UserError(
            f"expected one table, or a column (rows,) in each array; got {', '.join(wrong)}."
        )
    return pl.DataFrame(arrays), True


def _from_pandas(values: Any, name: str = "") -> pl.Series:
    if values.dtype.__class__.__module__.startswith("numpy") and values.dtype.kind in "biufmM":
        return pl.Series(name, _as_polars(np.asarray(values)))
    known = [None if gap else value for value, gap in zip(values, values.isna(), strict=True)]
    return pl.Series(name, known, strict=False)


def _as_polars(values: Any) -> Any:
    """A column, or one value for all rows, as polars takes it."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if hasattr(values, "isna"):
        return _from_pandas(values)
    if isinstance(values, list) and values and isinstance(values[0], np.datetime64):
        values = np.array(values)
    if not isinstance(values, np.ndarray | np.datetime64):
        return values
    if values.dtype.kind == "M" and np.datetime_data(values.dtype)[0] not in ("D", "ms", "us", "ns"):
        values = values.astype("datetime64[us]")  # polars has no seconds
    return values.tolist() if values.dtype == object or values.ndim == 0 else values


def _array_frame(array: np.ndarray) -> pl.DataFrame:
    if array.dtype.kind not in "biuf":
        raise UserError(f"expected real numbers; got {array.dtype}.")
    if array.ndim != 2:
        raise UserError(f"expected a table (rows, columns); got shape {array.shape}.")
    kind = np.dtype(np.float64) if array.dtype.kind == "f" else array.dtype.newbyteorder("=")
    return pl.DataFrame(array.astype(kind), schema=own_names(array.shape[1]), orient="row")


def _read_csv(
    content: bytes, separator: str, columns: Sequence[str] | None
) -> tuple[pl.DataFrame, bool]:
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    named = _has_header(text, separator, columns)
    frame = pl.read_csv(content, separator=separator, has_header=named, **AS_READ)
    if not named:
        frame.columns = own_names(frame.width)
    return frame, named


def own_names(width: int) -> tuple[str, ...]:
    """The names x1, x2, ... of columns that have none."""
    return tuple(f"x{i + 1}" for i in range(width))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _select(frame: pl.DataFrame, named: bool, columns: Sequence[str]) -> pl.DataFrame:
    if not named and frame.width != len(columns):
        wanted = f"{len(columns)} columns: {', '.join(columns)}"
        raise UserError(f"has {frame.width} columns without names; expected {wanted}.")
    check_columns(frame, columns)
    return frame.select(columns)


def _numbers(frame: pl.DataFrame) -> np.ndarray:
    """The values (rows, columns), true and false as 1 and 0."""
    if 0 in frame.shape:
        raise UserError("the table is empty.")
    kinds = frame.schema.items()
    wrong = [f"{c} ({kind})" for c, kind in kinds if not kind.is_numeric() and kind != pl.Boolean]
    if wrong:
        raise UserError(f"columns that are not numbers: {', '.join(wrong)}.")
    array = frame.cast(pl.Float64).to_numpy(order="c", writable=True)
    bad = (~np.isfinite(array)).sum(0)
    if bad.any():
        counts = [f"{c} ({n})" for c, n in zip(frame.columns, bad, strict=True) if n]
        raise UserError(f"missing or infinite values in {', '.join(counts)}.")
    return array
