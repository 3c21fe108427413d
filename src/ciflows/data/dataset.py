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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ciflows.data.benchmarks import BENCHMARKS, load_benchmark
from ciflows.data.images import image_files, read_images
from ciflows.data.prepared import (
    Parts,
    Say,
    Source,
    Watch,
    load_prepared,
    silent,
    unwatched,
)
from ciflows.data.schema import PLAIN_TABLE, Schema, TableSettings, filled
from ciflows.data.survey import survey_table
from ciflows.data.synthetic import SYNTHETIC, Synthetic
from ciflows.data.tables import READABLE, errors_of, is_large, read_chunks
from ciflows.errors import UserError, nearest
from ciflows.files import cache_folder
from ciflows.rows import Rows
from ciflows.settings import parse_settings

if TYPE_CHECKING:
    import polars as pl

SPLIT_SEED = 2020
MORE_SEED = 1  # of points beside those that are drawn with the other one
SYNTHETIC_SIZES = (10_000, 1_000, 5_000)
HELD_OUT = 0.1
FEWEST_ROWS = 10


class Dataset(NamedTuple):
    """A data set and its split, which belongs to the data and not to the run.

    Attributes:
        name: A built-in name, or the path of a file or folder.
        train: Points to fit (rows, features), codes where they are from a table of one's own; or images
            as bytes (rows, channels, height, width).
        validation: Points to choose weights by.
        test: Points to report on.
        columns: Names of the features; none for images.
        split_seed: Seed of the split (and of the points, where they are drawn).
        fingerprint: SHA-256 of all three parts.
        truth: The distribution itself, where it is known.
        schema: What the columns are, where they are from a table of one's own.
        contexts: What the rows of each part are conditioned on, if anything.
        weights: Weights of the rows of each part, 1 on average; None where all count the same.
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
    """Whether a data set is one of images, as far as its name tells: a built-in one, or a folder."""
    if is_built_in(name):
        return name in BENCHMARKS and len(BENCHMARKS[name].shape) == 3
    return Path(name).is_dir()


def holds_table(name: str) -> bool:
    """Whether a data set is a table of one's own: a file."""
    return not is_built_in(name) and Path(name).suffix.lower() in READABLE and not Path(name).is_dir()


def load_dataset(
    name: str,
    folder: Path | None = None,
    say: Say = silent,
    table: TableSettings | None = None,
    watch: Watch = unwatched,
    training_points: int | None = None,
) -> Dataset:
    """Load a built-in set by its name, a table from a file, or images from a folder.

    Arguments:
        name: A built-in name, or the path of a table or of a folder with images.
        folder: Where the files of built-in sets are; the folder in CIFLOWS_DATA or ./data if None.
        say: Hears what takes long.
        table: Which columns of a table to take, and how.
        watch: Shows how far the reading of a table has come.
        training_points: How many points to draw for training, in place of the 10,000 that a built-in 2-D
            set has; those for validation and testing stay the same.

    Example:
        >>> load_dataset("two-uniforms").train.shape
        torch.Size([10000, 2])
    """
    if (is_built_in(name) or Path(name).is_dir()) and table not in (None, PLAIN_TABLE):
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
    if not Path(name).suffix and not Path(name).exists():
        raise UserError(
            f"There is no data set {name!r}. {nearest(name, [*SYNTHETIC, *BENCHMARKS])} "
            f"Or give a file that ends in {', '.join(READABLE)}, or a folder of images."
        )
    if Path(name).is_dir():
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
    """A data set from a table's rows, as codes.

    Arguments:
        name: What to call it.
        chunks: Gives the rows, some at a time; called twice.
        settings: Which columns to take, and how.
        say: Hears what was found in the columns.
        watch: Shows how far the reading has come.
    """
    schema, parts = _prepare_table(chunks, settings, say, watch, partial(np.empty, dtype=np.float32))
    digest = hashlib.sha256(schema.model_dump_json().encode())
    for part in parts:
        digest.update(part.data)
    return _unpack(name, schema, [torch.from_numpy(part) for part in parts], digest.hexdigest())


def _load_table(name: str, settings: TableSettings, say: Say, watch: Watch) -> Dataset:
    """A table from a file; the codes of a large one are kept in the cache and mapped into memory."""
    path = Path(name)
    chunks = partial(read_chunks, path)
    if not is_large(path):
        return table_dataset(name, chunks, settings, say, watch)

    def prepare() -> Parts:
        schema, (train, validation, test) = _prepare_table(chunks, settings, say, watch, _mapped)
        return Parts(train, validation, test, schema.names, schema.model_dump())

    form = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()
    prepared = load_prepared(Source(path.stem, f"table-{form[:16]}", (path,)), prepare, say)
    schema = parse_settings(Schema, prepared.facts, "the schema in the cache")
    return _unpack(name, schema, prepared[:3], prepared.fingerprint)


def _prepare_table(
    chunks: Callable[[], Iterable[pl.DataFrame]],
    settings: TableSettings,
    say: Say,
    watch: Watch,
    allocate: Callable[[tuple[int, int]], np.ndarray],
) -> tuple[Schema, list[np.ndarray]]:
    """The schema, and the three parts' rows packed into arrays: in two passes over the table."""
    schema, count = survey_table(watch(chunks(), "reading"), settings, say)
    order, sizes = _shuffle(count, "rows")
    places, start = order.argsort().numpy(), 0
    width = len(schema.columns) + schema.context_features + (schema.weights is not None)
    packed = allocate((count, width))
    for chunk in watch(chunks(), "preparing"):
        some = chunk.select(schema.needed(weights=True) + [c.name for c in schema.constants])
        rows = schema.encode(some.filter(filled(some)), weights=True)
        packed[places[start : start + len(rows)]] = _pack(rows)
        start += len(rows)
    return schema, np.split(packed, np.cumsum(sizes[:2]))


def _mapped(shape: tuple[int, int]) -> np.ndarray:
    """An array in a file that is gone once nobody uses it."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        return np.memmap(file, dtype=np.float32, mode="w+", shape=shape)


def _pack(rows: Rows) -> np.ndarray:
    """Points, contexts and weights side by side."""
    weight = None if rows.weight is None else rows.weight.float()[:, None]
    parts = [part for part in (rows.x, rows.context, weight) if part is not None]
    return torch.cat(parts, dim=1).numpy()


def _unpack(name: str, schema: Schema, parts: Sequence[Tensor], fingerprint: str) -> Dataset:
    features = len(schema.columns)
    until = features + schema.context_features
    train, validation, test = (part[:, :features] for part in parts)
    contexts = tuple(part[:, features:until] for part in parts) if schema.given else None
    weights = None
    if schema.weights:
        mean = parts[0][:, -1].double().mean().float()
        weights = tuple(part[:, -1] / mean for part in parts)
    return Dataset(
        name,
        train,
        validation,
        test,
        schema.names,
        SPLIT_SEED,
        fingerprint,
        None,
        schema,
        contexts,
        weights,
    )


def _load_folder(name: str, say: Say) -> Dataset:
    """Images from a folder, kept in the cache: to decode many takes long."""
    files = image_files(Path(name))
    with errors_of(name):
        order, sizes = _shuffle(len(files), "images")

    def prepare() -> Parts:
        parts = torch.from_numpy(read_images(files))[order].split(list(sizes))
        train, validation, test = (part.numpy() for part in parts)
        return Parts(train, validation, test)

    source = Source(Path(name).resolve().name, "folder", files)
    train, validation, test, columns, fingerprint, _ = load_prepared(source, prepare, say)
    return Dataset(name, train, validation, test, columns, SPLIT_SEED, fingerprint, None)


def _shuffle(rows: int, what: str) -> tuple[Tensor, tuple[int, int, int]]:
    """An order fixed for good, in which the last fifth is for validation and test; and the sizes."""
    if rows < FEWEST_ROWS:
        raise UserError(f"{rows} {what} are too few to fit; at least {FEWEST_ROWS} needed.")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(SPLIT_SEED))
    held_out = max(1, int(HELD_OUT * rows))
    return order, (rows - 2 * held_out, held_out, held_out)
