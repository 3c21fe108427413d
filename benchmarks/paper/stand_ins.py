"""Small made-up files in the formats of the literature's data sets, for tiny runs on a fresh clone."""

from __future__ import annotations

__all__ = ["write_stand_ins"]

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import RandomState

from ciflows.files import atomic_path

ROWS, SIDE = 400, 8


def write_stand_ins(folder: Path) -> None:
    """Write random POWER, BSDS300, MNIST and Fashion-MNIST; files that are there stay."""
    random = RandomState(0)
    _write_power(folder / "power" / "data.npy", random)
    _write_patches(folder / "BSDS300" / "BSDS300.hdf5", random)
    for name in ("mnist", "fashion-mnist"):
        for part, rows in (("train", ROWS), ("t10k", ROWS // 4)):
            _write_images(folder / name / f"{part}-images-idx3-ubyte.gz", rows, random)


def _write_power(path: Path, random: RandomState) -> None:
    modes = random.randint(0, 2, (ROWS, 8))
    rows = modes + 0.1 * random.randn(ROWS, 8)

    def write(new: Path) -> None:
        with new.open("wb") as file:  # given a path, numpy would add a suffix to it
            np.save(file, rows)

    _write(path, write)


def _write_patches(path: Path, random: RandomState) -> None:
    import h5py

    def write(new: Path) -> None:
        with h5py.File(new, "w") as file:
            for name in ("train", "validation", "test"):
                file[name] = 0.1 * random.randn(ROWS // 2, 63)

    _write(path, write)


def _write_images(path: Path, rows: int, random: RandomState) -> None:
    pixels = random.randint(0, 256, (rows, SIDE, SIDE)).astype(np.uint8)
    content = struct.pack(">4I", 2051, rows, SIDE, SIDE) + pixels.tobytes()
    _write(path, lambda new: new.write_bytes(gzip.compress(content)))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole, under its own name, unless it is there: the cache goes by its date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with atomic_path(path) as new:
            write(new)
