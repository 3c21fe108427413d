"""Files written whole or not at all, and the cache folder."""

from __future__ import annotations

__all__ = [
    "atomic_path",
    "cache_folder",
    "finite",
    "parse_toml",
    "read_json",
    "remove_leftovers",
    "typed_path",
    "write_bytes",
    "write_json",
    "write_text",
]

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from ciflows.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FULL_DISK = f"(os error {errno.ENOSPC})"


def cache_folder() -> Path:
    """The cache folder: CIFLOWS_CACHE, or ciflows in the user's cache folder."""
    own, general = os.environ.get("CIFLOWS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(general or Path.home() / ".cache") / "ciflows"


def typed_path(path: str) -> str:
    """A path, or a name, as you would type it in a shell: relative where it is below this folder."""
    below = os.path.isabs(path) and Path(path).is_relative_to(Path.cwd())
    return quote(os.path.relpath(path) if below else path)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` once everything is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except Exception as error:
        if FULL_DISK not in str(error) or isinstance(error, OSError):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error  # polars' own words
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they wrote a file left beside it: .NAME.PID.*"""
    prefix = f".{path.name}."
    for left in path.parent.iterdir() if os.name == "posix" else ():
        pid = left.name.removeprefix(prefix).partition(".")[0]
        if left.name.startswith(prefix) and pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    """Whether a process of this number runs, here on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; numbers that are not finite become null."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an error names the file."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it does not hold a JSON object.")
    return value


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML text; an error names `where` it comes from."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}.") from None


def finite(value: Any) -> Any:
    """The same value with null for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
