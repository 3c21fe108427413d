"""Sets that take long to prepare: prepared once, kept on the disk, and mapped into memory from there."""

from __future__ import annotations

__all__ = [
    "Parts",
    "Prepared",
    "Say",
    "Source",
    "Watch",
    "load_prepared",
    "prepared_sizes",
    "silent",
    "unwatched",
]

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.errors import UserError
from ciflows.files import cache_folder, read_json, write_json

VERSION = 2  # of the preparation: raise it with every change of what is prepared
NAMES = ("train", "validation", "test")
ATTEMPTS = 3

Array = NDArray[Any]
Say = Callable[[str], None]
T = TypeVar("T")


class Watch(Protocol):
    """Passes on what it is given, piece by piece, and shows how far that has come."""

    def __call__(self, chunks: Iterable[T], what: str) -> Iterable[T]: ...


class Parts(NamedTuple):
    """The parts of a set: (rows, features) with the names of the features, or images (rows, C, H, W).

    Images are bytes, whose pixels have no names. Facts are what else has to be known of a set, as plain
    values.
    """

    train: Array
    validation: Array
    test: Array
    columns: tuple[str, ...] = ()
    facts: Mapping[str, Any] = {}


class Prepared(NamedTuple):
    """The parts of a set as tensors over mapped files, in float32 or bytes, and their SHA-256."""

    train: Tensor
    validation: Tensor
    test: Tensor
    columns: tuple[str, ...]
    fingerprint: str
    facts: Mapping[str, Any]


class Source(NamedTuple):
    """What a set is prepared from: its name, which of its forms it is, and the files."""

    name: str
    form: str
    files: tuple[Path, ...]

    def folder(self) -> Path:
        """Where in the cache it is kept: another place for every version of every file."""
        key = hashlib.sha256(json.dumps([VERSION, self.facts()]).encode()).hexdigest()
        return cache_folder() / self.name / f"{self.form}-{key[:16]}"

    def facts(self) -> list[dict[str, Any]]:
        stats = [(path.resolve(), path.stat()) for path in self.files]
        return [
            {"path": str(path), "bytes": stat.st_size, "modified": stat.st_mtime_ns}
            for path, stat in stats
        ]


def silent(message: str) -> None:
    """Says nothing."""


def unwatched(chunks: Iterable[T], what: str) -> Iterable[T]:
    """Shows nothing."""
    return chunks


def load_prepared(source: Source, prepare: Callable[[], Parts], say: Say = silent) -> Prepared:
    """A set from the cache; prepared and put there where it is not, or is damaged.

    Arguments:
        source: What it is prepared from.
        prepare: Prepares it.
        say: Hears what takes long.
    """
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
    raise UserError(f"{folder} is damaged again and again: name another cache folder in CIFLOWS_CACHE.")


def prepared_sizes(source: Source) -> tuple[tuple[int, int, int], tuple[int, ...]] | None:
    """The sizes of the parts and the shape of a point of a set in the cache; None where it is not."""
    path = source.folder() / "about.json"
    try:
        about = read_json(path) if path.exists() else {}
        train, validation, test = about["sizes"]
        return (train, validation, test), tuple(about["shape"])
    except (UserError, KeyError, TypeError, ValueError):
        return None


# -- inside ------------------------------------------------------------------------------------------


class _DamagedError(Exception):
    """What is wrong with a folder of the cache."""


def _open(folder: Path) -> Prepared:
    try:
        about = read_json(folder / "about.json")
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="c") for name in NAMES]
        columns, shape = tuple(str(name) for name in about["columns"]), tuple(about["shape"])
    except (UserError, OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise _DamagedError(str(error)) from None
    kind = np.float32 if len(shape) == 1 else np.uint8
    if any(array.dtype != kind or array.shape[1:] != shape for array in arrays):
        raise _DamagedError("its arrays have other shapes than it says")
    if _fingerprint(arrays) != about.get("fingerprint"):
        raise _DamagedError("its SHA-256 is not what it was")
    train, validation, test = (torch.from_numpy(array) for array in arrays)
    return Prepared(train, validation, test, columns, about["fingerprint"], about.get("facts", {}))


def _write(folder: Path, source: Source, parts: Parts) -> None:
    """Write a set under another name, then move it into its place, whole or not at all."""
    kind = "u1" if parts.train.dtype == np.uint8 else "<f4"
    arrays = [np.ascontiguousarray(part, dtype=kind) for part in parts[:3]]
    about = {
        "version": VERSION,
        "source": source.form,
        "files": source.facts(),
        "sizes": [len(array) for array in arrays],
        "shape": list(parts.train.shape[1:]),
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
            f"{folder.parent} cannot be written: {why}. Name another cache folder in CIFLOWS_CACHE."
        ) from error


def _publish(temporary: Path, folder: Path) -> None:
    """Move a folder into its place; where another process was first, what is there stays."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _discard(folder: Path) -> None:
    """Remove a damaged folder: moved away first, so that nobody meets half of it."""
    away = _beside(folder)
    try:
        folder.rename(away)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"{folder} is damaged and cannot be removed: {error.strerror}. "
            "Name another cache folder in CIFLOWS_CACHE."
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
