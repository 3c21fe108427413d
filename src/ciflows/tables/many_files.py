"""A table in many Parquet files: a folder of them, or all that fit a pattern such as big/*.parquet."""

from __future__ import annotations

__all__ = ["check_schemas", "data_name", "holds_parquet", "is_pattern", "read_files", "table_files"]

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.read import CHUNK, errors_of, read_chunks, readable

SUFFIX = ".parquet"
MOST_NAMED = 5


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern for files, and not itself the name of one."""
    return any(sign in name for sign in "*?[") and not Path(name).exists()


def holds_parquet(folder: Path) -> bool:
    """Whether there are Parquet files in a folder, or in folders inside it."""
    return next(_inside(folder), None) is not None


def data_name(name: str) -> str:
    """A short name for data, from their path.

    Example:
        >>> data_name("people.csv"), data_name("big/*.parquet"), data_name("annulus")
        ('people', 'big', 'annulus')
    """
    path = Path(name)
    return path.parent.name or "table" if is_pattern(name) else path.stem


def table_files(name: str) -> tuple[Path, ...]:
    """The files of a table, sorted: one file, the Parquet files of a folder, or those of a pattern."""
    path = Path(name)
    if path.is_dir():
        files = sorted(_inside(path))
        divided = next((file for file in files if "=" in str(file.parent.relative_to(path))), None)
        if divided is not None:
            raise UserError(
                f"{divided.parent.name} is a folder for one value of a column, which its files may "
                "lack: write that column into the files."
            )
        return tuple(files)
    if not is_pattern(name):
        return (path,)
    start = Path(path.anchor or ".")
    files = sorted(_shown(start.glob(str(path.relative_to(path.anchor)))))
    if not files:
        raise UserError("no file fits this pattern.")
    others = [file.name for file in files if file.suffix.lower() != SUFFIX]
    if others:
        raise UserError(f"of several files all have to be {SUFFIX} files; got {_some(others)}.")
    return tuple(files)


def check_schemas(files: Sequence[Path]) -> None:
    """Refuse files whose columns differ from those of the first, and name the differences."""
    schemas = [_schema(path) for path in files]
    for path, schema in zip(files, schemas, strict=True):
        found = _differences(schemas[0], schema)
        if found:
            raise UserError(f"{path.name} differs from {files[0].name}: {_some(found)}.")


def read_files(files: Sequence[Path], size: int = CHUNK) -> Iterator[pl.DataFrame]:
    """The rows of all files in order, `size` at a time, with the columns of the first."""
    columns: list[str] | None = None
    for path in files:
        with errors_of(path.name):
            for chunk in read_chunks(path, size):
                columns = columns or chunk.columns
                yield chunk.select(columns)


def _inside(folder: Path) -> Iterator[Path]:
    """The Parquet files inside a folder."""
    return _shown(path for path in folder.rglob("*") if path.suffix.lower() == SUFFIX)


def _shown(paths: Iterable[Path]) -> Iterator[Path]:
    """The files among paths, but for those that programs keep for themselves."""
    return (path for path in paths if path.is_file() and not path.name.startswith((".", "_")))


def _schema(path: Path) -> dict[str, pl.DataType]:
    with errors_of(path.name), readable(SUFFIX), path.open("rb") as file:
        return pl.read_parquet_schema(file)


def _differences(first: dict[str, pl.DataType], other: dict[str, pl.DataType]) -> list[str]:
    lacking = [f"it has no {name}" for name in first if name not in other]
    more = [f"{name} is new" for name in other if name not in first]
    kinds = [
        f"{name} is {other[name]}, not {kind}"
        for name, kind in first.items()
        if name in other and other[name] != kind
    ]
    return lacking + more + kinds


def _some(words: Sequence[str]) -> str:
    rest = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
