"""Files that are either whole or not there, and the folder for those that can be made again."""

from __future__ import annotations

__all__ = [
    "atomic_path",
    "cache_folder",
    "parse_toml",
    "read_json",
    "write_bytes",
    "write_json",
    "write_text",
]

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ciflows.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def cache_folder() -> Path:
    """The folder for what can be made again: CIFLOWS_CACHE, or ciflows in the user's cache folder."""
    own, general = os.environ.get("CIFLOWS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(general or Path.home() / ".cache") / "ciflows"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` only once all is written and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a text file whole."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole; numbers that are not finite become null, as JSON has none of them."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or name the file that does not hold one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it does not hold a JSON object.")
    return value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of a TOML text, or a word on where it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}.") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
