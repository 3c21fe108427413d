"""Data split into train, validation and test, always in the same way."""

from __future__ import annotations

__all__ = ["Dataset", "load_dataset"]

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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
        name: A built-in name, or the path of a file.
        train: Points to fit (rows, features): float64 from a file, float32 where they are drawn.
        validation: Points to choose weights by.
        test: Points to report on.
        columns: Names of the features.
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
    def features(self) -> int:
        return self.train.shape[1]


def load_dataset(name: str) -> Dataset:
    """Load a built-in set by its name, or a table from a file.

    Example:
        >>> load_dataset("two-uniforms").train.shape
        torch.Size([10000, 2])
    """
    if name in SYNTHETIC:
        truth = SYNTHETIC[name]
        points = truth.sample(sum(SYNTHETIC_SIZES), seed=SPLIT_SEED)
        return _split(name, points, SYNTHETIC_SIZES, ("x1", "x2"), truth)
    if not Path(name).suffix and not Path(name).exists():
        raise UserError(
            f"There is no data set {name!r}. {nearest(name, SYNTHETIC)} "
            f"Or give a file that ends in {', '.join(READABLE)}."
        )
    table = read_table(Path(name))
    rows = len(table.values)
    if rows < FEWEST_ROWS:
        raise UserError(f"{name}: {rows} rows are too few to fit; at least {FEWEST_ROWS} needed.")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(SPLIT_SEED))
    held_out = max(1, int(HELD_OUT * rows))
    sizes = (rows - 2 * held_out, held_out, held_out)
    return _split(name, table.values[order], sizes, table.columns, None)


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
