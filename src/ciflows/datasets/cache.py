"""The cache of prepared data sets: arrays on the disk, mapped into memory when they are used."""

from __future__ import annotations

__all__ = [
    "Parts",
    "Prepared",
    "Source",
    "load_prepared",
    "prepared_sizes",
]

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.errors import UserError
from ciflows.files import cache_folder, read_json, write_json
from ciflows.progress import Say, silent

VERSION = 3  # of the preparation: raise it whenever its results change
NAMES = ("train", "validation", "test")
ATTEMPTS = 3

Array = NDArray[Any]


class Parts(NamedTuple):
    """The parts of a data set, and facts about it as JSON values.

    Each part is (rows, features) with the names of its columns, or images (rows, C, H, W) as bytes.
    """

    train: Array
    validation: Array
    test: Array
    columns: tuple[str, ...] = ()
    facts: Mapping[str, Any] = {}


class Prepared(NamedTuple):
    """The parts of a data set as memory-mapped tensors, and their SHA-256."""

    train: Tensor
    validation: Tensor
    test: Tensor
    columns: tuple[str, ...]
    fingerprint: str
    facts: Mapping[str, Any]


class Source(NamedTuple):
    """What a data set is prepared from: its name, the form of its files, and the files."""

    name: str
    form: str
    files: tuple[Path, ...]

    def folder(self) -> Path:
        """Its folder in the cache, which depends on the version and date of every file."""
        key = hashlib.sha256(json.dumps([VERSION, self.facts()]).encode()).hexdigest()
        return cache_folder() / self.name / f"{self.form}-{key[:16]}"

    def facts(self) -> list[dict[str, Any]]:
        stats = [(path.resolve(), path.stat()) for path in self.files]
        return [
            {"path": str(path), "bytes": stat.st_size, "modified": stat.st_mtime_ns}
            for path, stat in stats
        ]


def load_prepared(source: Source, prepare: Callable[[], Parts], say: Say = silent) -> Prepared:
    """Load a data set from the cache; prepare it first if it is missing or damaged."""
    folder = source.folder()
    for _ in range(ATTEMPTS):
        if folder.exists():
            try:
                return _open(folder)
            except _DamagedError as error:
                say(f"{folder} is damaged ({error}).")
                _discard(folder)
        say(f"Preparing {source.name} from {_words(source.files)}; this is done once ...")
        _write(folder, source, prepare())
    raise UserError(f"{folder} is damaged again and again: set CIFLOWS_CACHE to another cache folder.")


def prepared_sizes(source: Source) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """The sizes of the parts and the shape of a point; None if the data set is not in the cache."""
    path = source.folder() / "about.json"
    try:
        about = read_json(path) if path.exists() else {}
        train, validation, test = about["sizes"]
        return (train, validation, test), tuple(about["shape"])
    except (UserError, KeyError, TypeError, ValueError):
        return None


# -- inside ------------------------------------------------------------------------------------------


class _DamagedError(Exception):
    """What is wrong with a folder in the cache."""


def _open(folder: Path) -> Prepared:
    try:
        about = read_json(folder / "about.json")
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="c") for name in NAMES]
        columns, shape = tuple(str(name) for name in about["columns"]), tuple(about["shape"])
    except (UserError, OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise _DamagedError(str(error)) from None
    if any(str(array.dtype) != about["dtype"] or array.shape[1:] != shape for array in arrays):
        raise _DamagedError("its arrays do not have the shapes in about.json")
    if _fingerprint(arrays) != about.get("fingerprint"):
        raise _DamagedError("its SHA-256 has changed")
    train, validation, test = (torch.from_numpy(array) for array in arrays)
    return Prepared(train, validation, test, columns, about["fingerprint"], about.get("facts", {}))


def _write(folder: Path, source: Source, parts: Parts) -> None:
    """Write a data set under a temporary name, then rename it: whole or not at all."""
    kept = {"uint8": "u1", "float64": "<f8"} if parts.facts else {"uint8": "u1"}
    kind = kept.get(str(parts.train.dtype), "<f4")
    arrays = [np.ascontiguousarray(part, dtype=kind) for part in parts[:3]]
    about = {
        "version": VERSION,
        "source": source.form,
        "files": source.facts(),
        "sizes": [len(array) for array in arrays],
        "shape": list(parts.train.shape[1:]),
        "dtype": str(arrays[0].dtype),
        "columns": list(parts.columns),
        "facts": dict(parts.facts),
        "fingerprint": _fingerprint(arrays),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(folder)
        temporary.mkdir()
        try:
            for name, array in zip(NAMES, arrays, strict=True):
                np.save(temporary / f"{name}.npy", array)
            write_json(temporary / "about.json", about)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        why = error.strerror or error
        raise UserError(
            f"{folder.parent} cannot be written: {why}. Set CIFLOWS_CACHE to another cache folder."
        ) from error


def _publish(temporary: Path, folder: Path) -> None:
    """Rename a folder to its final name; if another process was first, keep what is there."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _discard(folder: Path) -> None:
    """Remove a damaged folder; rename it first, so that no process reads half of it."""
    away = _beside(folder)
    try:
        folder.rename(away)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"{folder} is damaged and cannot be removed: {error.strerror}. "
            "Set CIFLOWS_CACHE to another cache folder."
        ) from error
    shutil.rmtree(away, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")


def _fingerprint(arrays: Sequence[Array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest()


def _words(files: Sequence[Path]) -> str:
    if len(files) < 3:
        return ", ".join(map(str, files))
    return f"{len(files)} files in {os.path.commonpath(files)}"
