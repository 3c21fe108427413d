"""Tables that pandas has pickled, read without doing anything that the file says.

A pickle is a program, and loading one calls whatever it names. Here every name stands for an empty class
that only keeps what it is called with; the numbers are then picked out of what was kept.
"""

from __future__ import annotations

__all__ = ["read_frame"]

import pickle
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError

PACKAGES = ("numpy", "pandas", "pyarrow")
NAMES = {
    *(("_codecs", "encode"), ("builtins", "bytearray"), ("builtins", "object"), ("builtins", "slice")),
    *(("__builtin__", "bytearray"), ("__builtin__", "object"), ("__builtin__", "slice")),
    *(("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor")),
}
NUMBERS = re.compile("[biuf][1248]")


def read_frame(path: Path) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """The numbers (rows, columns) of a pickled pandas DataFrame, and the names of its columns.

    Read are the layout of pandas 0.14 to 1.2 (written by Python 2 or 3) and that of 1.3 and later.
    """
    try:
        with path.open("rb") as file:
            blocks, axes = _blocks_and_axes(_Reader(file, encoding="latin1").load())
        names = tuple(next(_texts(axes[0])))
        columns: dict[int, NDArray[Any]] = {}
        for values, places in blocks:
            columns |= dict(zip(_places(places, len(names)), _array(values), strict=True))
        table = np.stack([columns[i] for i in range(len(names))], axis=1).astype(np.float64)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (PermissionError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{path}: damaged, cut short or not a pickled table of numbers.") from error
    return table, names


class _StandIn:
    """Takes the place of whatever a pickle names: keeps what it is called with, and does nothing."""

    def __new__(cls, *parts: Any) -> _StandIn:
        self = super().__new__(cls)
        self.parts = [*parts]
        return self

    def __init__(self, *parts: Any) -> None:
        self.parts: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_StandIn]:
        if module.split(".")[0] not in PACKAGES and (module, name) not in NAMES:
            raise UserError(f"it calls {module}.{name}, which has no place in a table; nothing was run.")
        return type(name, (_StandIn,), {})


def _blocks_and_axes(frame: _StandIn) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """The blocks of a frame, each with the places of its columns, and the names of columns and rows."""
    state = frame.parts[-1]
    manager = state["_mgr"] if "_mgr" in state else state["_data"]
    last = manager.parts[-1]
    if isinstance(last, tuple):
        old = last[3]["0.14.1"]
        return [(block["values"], block["mgr_locs"]) for block in old["blocks"]], old["axes"]
    blocks, axes = manager.parts
    return [(block.parts[0], block.parts[1]) for block in blocks], axes


def _texts(value: Any) -> Iterator[list[str]]:
    """The lists of words found anywhere in what a pickle says of an index."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
    elif isinstance(value, _StandIn) and type(value).__name__ == "_restore_array":
        yield _arrow_texts(*value.parts[0])
    elif isinstance(value, _StandIn) and type(value).__name__ == "_reconstruct":
        yield [str(word) for word in _array(value)]
    elif isinstance(value, _StandIn):
        yield from _texts(value.parts)


def _arrow_texts(
    kind: _StandIn, length: int, nulls: int, offset: int, buffers: list[Any], *_: Any
) -> list[str]:
    """Words as Arrow keeps them: one long text, and where in it each word begins."""
    code = {"string": "<i4", "large_string": "<i8"}[kind.parts[0]]
    edges = np.frombuffer(_bytes(buffers[1]), code)[offset : offset + length + 1].tolist()
    text = _bytes(buffers[2])
    return [text[start:end].decode() for start, end in pairwise(edges)]


def _places(value: _StandIn, width: int) -> list[int]:
    if type(value).__name__ == "slice":
        return list(range(width))[slice(*value.parts)]
    return [int(place) for place in _array(value)]


def _array(value: _StandIn) -> NDArray[Any]:
    """An array from its bytes; one of words, which is an array of Python objects, from their list."""
    if type(value).__name__ == "_frombuffer":
        data, dtype, shape, order = value.parts
        return np.frombuffer(_bytes(data), _dtype(dtype)).reshape(shape, order=order)
    state = value.parts[3]
    # up to pandas 0.14 an index was itself an array, with a state of its own after that of the array
    _, shape, dtype, by_column, data = state[0] if isinstance(state[0], tuple) else state
    if isinstance(data, list):
        return np.array(data, dtype=object).reshape(shape)
    return np.frombuffer(_bytes(data), _dtype(dtype)).reshape(shape, order="F" if by_column else "C")


def _dtype(value: _StandIn) -> np.dtype[Any]:
    code, order = value.parts[0], value.parts[-1][1]
    if not NUMBERS.fullmatch(code):
        raise UserError(f"expected a table of numbers; it holds values of type {code}.")
    return np.dtype(code).newbyteorder(order)


def _bytes(value: Any) -> bytes:
    """Bytes, which old pickles write as text in Latin-1."""
    if isinstance(value, _StandIn):
        return _bytes(value.parts[0])
    return value.encode("latin1") if isinstance(value, str) else bytes(value)
