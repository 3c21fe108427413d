"""Data split into train, validation and test, always in the same way."""

from __future__ import annotations

__all__ = ["Dataset", "holds_images", "is_built_in", "load_dataset"]

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ciflows.data.benchmarks import BENCHMARKS, load_benchmark
from ciflows.data.images import image_files, read_images
from ciflows.data.prepared import Parts, Say, Source, load_prepared, silent
from ciflows.data.synthetic import SYNTHETIC, Synthetic
from ciflows.data.tables import READABLE, read_table
from ciflows.errors import UserError, nearest

SPLIT_SEED = 2020
SYNTHETIC_SIZES = (10_000, 1_000, 5_000)
HELD_OUT = 0.1
FEWEST_ROWS = 10


class Dataset(NamedTuple):
    """A data set and its split, which belongs to the data and not to the run.

    Attributes:
        name: A built-in name, or the path of a file or folder.
        train: Points to fit (rows, features): float64 from a file, float32 where they are built in; or
            images as bytes (rows, channels, height, width).
        validation: Points to choose weights by.
        test: Points to report on.
        columns: Names of the features; none for images.
        split_seed: Seed of the split (and of the points, where they are drawn).
        fingerprint: SHA-256 of all three parts.
        truth: The distribution itself, where it is known.
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    columns: tuple[str, ...]
    split_seed: int
    fingerprint: str
    truth: Synthetic | None

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


def holds_images(name: str) -> bool:
    """Whether a data set is one of images, as far as its name tells: a built-in one, or a folder."""
    if is_built_in(name):
        return name in BENCHMARKS and len(BENCHMARKS[name].shape) == 3
    return Path(name).is_dir()


def load_dataset(name: str, folder: Path | None = None, say: Say = silent) -> Dataset:
    """Load a built-in set by its name, a table from a file, or images from a folder.

    Arguments:
        name: A built-in name, or the path of a table or of a folder with images.
        folder: Where the files of built-in sets are; the folder in CIFLOWS_DATA or ./data if None.
        say: Hears what takes long.

    Example:
        >>> load_dataset("two-uniforms").train.shape
        torch.Size([10000, 2])
    """
    if name in SYNTHETIC:
        truth = SYNTHETIC[name]
        points = truth.sample(sum(SYNTHETIC_SIZES), seed=SPLIT_SEED)
        return _split(name, points, SYNTHETIC_SIZES, ("x1", "x2"), truth)
    if name in BENCHMARKS:
        train, validation, test, columns, fingerprint = load_benchmark(name, folder, say)
        seed = BENCHMARKS[name].seed
        return Dataset(name, train, validation, test, columns, seed, fingerprint, None)
    if not Path(name).suffix and not Path(name).exists():
        raise UserError(
            f"There is no data set {name!r}. {nearest(name, [*SYNTHETIC, *BENCHMARKS])} "
            f"Or give a file that ends in {', '.join(READABLE)}, or a folder of images."
        )
    if Path(name).is_dir():
        return _load_folder(name, say)
    table = read_table(Path(name))
    order, sizes = _shuffle(name, len(table.values), "rows")
    return _split(name, table.values[order], sizes, table.columns, None)


def _load_folder(name: str, say: Say) -> Dataset:
    """Images from a folder, kept in the cache: to decode many takes long."""
    files = image_files(Path(name))
    order, sizes = _shuffle(name, len(files), "images")

    def prepare() -> Parts:
        parts = torch.from_numpy(read_images(files))[order].split(list(sizes))
        train, validation, test = (part.numpy() for part in parts)
        return Parts(train, validation, test)

    source = Source(Path(name).resolve().name, "folder", files)
    train, validation, test, columns, fingerprint = load_prepared(source, prepare, say)
    return Dataset(name, train, validation, test, columns, SPLIT_SEED, fingerprint, None)


def _shuffle(name: str, rows: int, what: str) -> tuple[Tensor, tuple[int, int, int]]:
    """An order fixed for good, in which the last fifth is for validation and test; and the sizes."""
    if rows < FEWEST_ROWS:
        raise UserError(f"{name}: {rows} {what} are too few to fit; at least {FEWEST_ROWS} needed.")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(SPLIT_SEED))
    held_out = max(1, int(HELD_OUT * rows))
    return order, (rows - 2 * held_out, held_out, held_out)


def _split(
    name: str,
    points: Tensor,
    sizes: tuple[int, int, int],
    columns: tuple[str, ...],
    truth: Synthetic | None,
) -> Dataset:
    train, validation, test = points.split(list(sizes))
    digest = hashlib.sha256(points.contiguous().numpy().tobytes()).hexdigest()
    return Dataset(name, train, validation, test, columns, SPLIT_SEED, digest, truth)
