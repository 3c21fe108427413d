"""Data split into train, validation and test, always in the same way."""

from __future__ import annotations

__all__ = [
    "Dataset",
    "check_drawn",
    "holds_images",
    "holds_table",
    "is_built_in",
    "load_dataset",
    "table_dataset",
]

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ciflows.core.rows import Rows
from ciflows.datasets.cache import Parts, Source, load_prepared
from ciflows.datasets.image_files import SUFFIXES as IMAGE_SUFFIXES
from ciflows.datasets.image_files import image_files, read_images
from ciflows.datasets.literature import BENCHMARKS, load_benchmark
from ciflows.datasets.synthetic import SYNTHETIC, Synthetic
from ciflows.errors import UserError, nearest
from ciflows.files import cache_folder
from ciflows.optional import polars as pl
from ciflows.progress import Say, Watch, silent, unwatched
from ciflows.settings import parse_settings
from ciflows.tables.many_files import (
    check_schemas,
    data_name,
    holds_parquet,
    is_pattern,
    read_files,
    table_files,
)
from ciflows.tables.options import PLAIN_TABLE, TableSettings
from ciflows.tables.prepare import SPLIT_SEED, PreparedTable, prepare_table, split_rows
from ciflows.tables.read import READABLE, errors_of, is_large, read_chunks
from ciflows.tables.schema import Schema

MORE_SEED = 1  # of points beside those that are drawn with the other one
SYNTHETIC_SIZES = (10_000, 1_000, 5_000)


class Dataset(NamedTuple):
    """A data set and its split, which belongs to the data and not to the run.

    Attributes:
        name: A built-in name, or the path of a file or folder.
        train: Points to fit (rows, features), encoded if they come from a table in files; or images
            as bytes (rows, channels, height, width).
        validation: Points to choose weights by.
        test: Points to report on.
        columns: Names of the features; none for images.
        split_seed: Seed of the split (and of the points, if they are drawn).
        fingerprint: SHA-256 of all three parts.
        truth: The distribution itself, if it is known.
        schema: What the columns are, if they come from a table in files.
        contexts: What the rows of each part are conditioned on, if anything.
        weights: Weights of the rows of each part, 1 on average; None if all count the same.
        duplicates: Rows for validation or testing that are also in training, to the last value.
        left_out: Rows of validation and test that hold what training rows rule out.
        groups: Number of groups in training, if rows belong to groups.
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    columns: tuple[str, ...]
    split_seed: int
    fingerprint: str
    truth: Synthetic | None
    schema: Schema | None = None
    contexts: tuple[Tensor, ...] | None = None
    weights: tuple[Tensor, ...] | None = None
    duplicates: int = 0
    left_out: tuple[int, int] = (0, 0)
    groups: int | None = None

    @property
    def independent_rows(self) -> int:
        """Number of training rows or, since the rows of a group are alike, of groups."""
        return len(self.train) if self.groups is None else self.groups

    def rows(self, part: Literal["train", "validation", "test"]) -> Rows:
        """A part's points, with what belongs to them."""
        index = ("train", "validation", "test").index(part)
        context = None if self.contexts is None else self.contexts[index]
        return Rows(getattr(self, part), context, None if self.weights is None else self.weights[index])

    @property
    def context_features(self) -> int:
        """Size of what the points are conditioned on."""
        return 0 if self.schema is None else self.schema.context_features

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one point: (features,), or (channels, height, width)."""
        return tuple(self.train.shape[1:])

    @property
    def features(self) -> int:
        return math.prod(self.shape)

    @property
    def images(self) -> bool:
        return len(self.shape) == 3


def is_built_in(name: str) -> bool:
    """Whether a name is that of a built-in set; it wins over a file of the same name."""
    return name in SYNTHETIC or name in BENCHMARKS


def check_drawn(name: str) -> None:
    """Refuse a data set of which no more points can be drawn than it has."""
    if name not in SYNTHETIC:
        raise UserError(f"{name}: training_points is for built-in 2-D sets, which can be drawn from.")


def holds_images(name: str) -> bool:
    """Whether a data set is one of images: a built-in one, or a folder without tables."""
    if is_built_in(name):
        return name in BENCHMARKS and len(BENCHMARKS[name].shape) == 3
    return Path(name).is_dir() and not holds_parquet(Path(name))


def holds_table(name: str) -> bool:
    """Whether a data set is a table in files: a file, a folder of Parquet files, or a pattern."""
    if Path(name).is_dir():
        return not is_built_in(name) and holds_parquet(Path(name))
    return not is_built_in(name) and Path(name).suffix.lower() in READABLE


def load_dataset(
    name: str,
    folder: Path | None = None,
    say: Say = silent,
    table: TableSettings | None = None,
    watch: Watch = unwatched,
    training_points: int | None = None,
) -> Dataset:
    """Load a built-in set by its name, a table from its files, or images from a folder.

    Arguments:
        name: A built-in name, the path of a table, of a folder with Parquet files or with images, or a
            pattern for Parquet files.
        folder: Where the files of built-in sets are; the folder in CIFLOWS_DATA or ./data if None.
        say: Called with messages while it takes long.
        table: Which columns of a table to take, and how.
        watch: Shows how far the reading of a table has come.
        training_points: How many points to draw for training, in place of the 10,000 that a built-in 2-D
            set has; those for validation and testing stay the same.

    Example:
        >>> load_dataset("two-uniforms").train.shape
        torch.Size([10000, 2])
    """
    if (is_built_in(name) or holds_images(name)) and table not in (None, PLAIN_TABLE):
        raise UserError(f"{name}: columns, bounds, weights and the like are for tables in files.")
    if training_points is not None:
        check_drawn(name)
    if name in SYNTHETIC:
        truth = SYNTHETIC[name]
        points = truth.sample(sum(SYNTHETIC_SIZES), seed=SPLIT_SEED)
        train, validation, test = points.split(SYNTHETIC_SIZES)
        if training_points is not None:
            train = truth.sample(training_points, seed=MORE_SEED)
        digest = hashlib.sha256(torch.cat([train, validation, test]).numpy().tobytes()).hexdigest()
        return Dataset(name, train, validation, test, ("x1", "x2"), SPLIT_SEED, digest, truth)
    if name in BENCHMARKS:
        train, validation, test, columns, fingerprint, _ = load_benchmark(name, folder, say)
        seed = BENCHMARKS[name].seed
        return Dataset(name, train, validation, test, columns, seed, fingerprint, None)
    if not Path(name).suffix and not Path(name).exists() and not is_pattern(name):
        raise UserError(
            f"There is no data set {name!r}. {nearest(name, [*SYNTHETIC, *BENCHMARKS])} "
            f"Or give a file that ends in {', '.join(READABLE)}, or a folder of images or Parquet files."
        )
    if Path(name).is_dir() and _is_of_images(Path(name)):
        return _load_folder(name, say)
    with errors_of(name):
        return _load_table(name, table or PLAIN_TABLE, say, watch)


def table_dataset(
    name: str,
    chunks: Callable[[], Iterable[pl.DataFrame]],
    settings: TableSettings,
    say: Say = silent,
    watch: Watch = unwatched,
) -> Dataset:
    """A data set from a table's rows, encoded.

    Arguments:
        chunks: Gives the rows, some at a time; called twice.
    """
    table = prepare_table(chunks, settings, say, watch)
    digest = hashlib.sha256(table.schema.model_dump_json().encode())
    for part in table.parts:
        digest.update(np.ascontiguousarray(part).data)
    return _unpack(name, table, digest.hexdigest())


def _is_of_images(folder: Path) -> bool:
    """Whether a folder is one of images; refused if it holds tables too, or neither."""
    images = any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.iterdir())
    tables = holds_parquet(folder)
    if images and tables:
        raise UserError(f"{folder}: it holds images and Parquet files: give each a folder of its own.")
    if not images and not tables:
        raise UserError(
            f"{folder}: it holds no images ({', '.join(IMAGE_SUFFIXES)}) and no .parquet files."
        )
    return images


def _load_table(name: str, settings: TableSettings, say: Say, watch: Watch) -> Dataset:
    """A table from its files; the rows of a large one are kept in the cache and mapped into memory."""
    files = table_files(name)
    if len(files) > 1:
        check_schemas(files)
    chunks = partial(read_files, files) if len(files) > 1 else partial(read_chunks, files[0])
    if not is_large(*files):
        return table_dataset(name, chunks, settings, say, watch)

    def prepare() -> Parts:
        table = prepare_table(chunks, settings, say, watch, _mapped)
        facts = {"schema": table.schema.model_dump(), "duplicates": table.duplicates}
        facts |= {"left_out": list(table.left_out), "groups": table.groups}
        train, validation, test = table.parts
        return Parts(train, validation, test, table.schema.names, facts)

    form = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()
    prepared = load_prepared(Source(data_name(name), f"table-{form[:16]}", files), prepare, say)
    facts = prepared.facts
    schema = parse_settings(Schema, facts["schema"], "the schema in the cache")
    parts = [part.numpy() for part in prepared[:3]]
    left_out, groups = tuple(facts["left_out"]), facts.get("groups")
    table = PreparedTable(schema, parts, facts["duplicates"], left_out, groups)
    return _unpack(name, table, prepared.fingerprint)


def _mapped(shape: tuple[int, int]) -> np.ndarray:
    """An array in a file that is gone once nobody uses it."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        return np.memmap(file, dtype=np.float64, mode="w+", shape=shape)


def _unpack(name: str, table: PreparedTable, fingerprint: str) -> Dataset:
    schema, parts = table.schema, [torch.from_numpy(part) for part in table.parts]
    features = len(schema.columns)
    until = features + schema.context_features
    train, validation, test = (part[:, :features] for part in parts)
    contexts = tuple(part[:, features:until].float() for part in parts) if schema.given else None
    weights = None
    if schema.weights:
        mean = parts[0][:, -1].mean()
        weights = tuple((part[:, -1] / mean).float() for part in parts)
    known = (name, train, validation, test, schema.names, SPLIT_SEED, fingerprint, None, schema)
    return Dataset(*known, contexts, weights, table.duplicates, table.left_out, table.groups)


def _load_folder(name: str, say: Say) -> Dataset:
    """Images from a folder, kept in the cache: to decode many takes long."""
    files = image_files(Path(name))
    with errors_of(name):
        split = split_rows(len(files), "images")

    def prepare() -> Parts:
        parts = np.split(read_images(files)[np.argsort(split.place)], np.cumsum(split.sizes)[:2])
        train, validation, test = parts
        return Parts(train, validation, test)

    source = Source(Path(name).resolve().name, "folder", files)
    train, validation, test, columns, fingerprint, _ = load_prepared(source, prepare, say)
    return Dataset(name, train, validation, test, columns, SPLIT_SEED, fingerprint, None)
