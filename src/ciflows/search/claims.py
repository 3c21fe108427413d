"""Claims: which of several processes, on one machine or on several with a common folder, does what.

A claim is a file that its process has locked. The system takes the lock off when the process ends,
however that comes, so what a killed one worked on is free at once. Not every common folder shows locks
to other machines: a claim also names its machine, and its file is touched now and then. One from another
machine counts as given up only when that has stopped.
"""

from __future__ import annotations

__all__ = ["Claim", "Claims", "locked"]

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ciflows.errors import UserError

try:
    import fcntl
except ImportError:
    raise UserError("A search needs the file locks of Linux or macOS.") from None

TOUCH_SECONDS = 15.0
SILENT_SECONDS = 90.0


class Claims:
    """The claims in a folder.

    Arguments:
        folder: Where their files are.
        machine: The name of this one.
    """

    def __init__(self, folder: Path, machine: str = platform.node()) -> None:
        self.folder, self.machine = folder, machine
        self.seen: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> Claim | None:
        """Claim something; None where another process has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = (self.folder / name).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        file.seek(0)
        elsewhere = file.read() not in ("", self.machine)
        if elsewhere and self._is_alive(name, os.fstat(file.fileno()).st_mtime):
            file.close()
            return None
        return Claim(file, self.machine)

    def _is_alive(self, name: str, touched: float) -> bool:
        """Whether a file was touched lately, by this machine's clock: that of another may differ."""
        before, since = self.seen.get(name, (None, 0.0))
        if touched != before:
            self.seen[name] = (touched, time.monotonic())
            return True
        return time.monotonic() - since < SILENT_SECONDS


class Claim:
    """A claim that is held until it is left as a context.

    Arguments:
        file: Its locked file.
        machine: What to write into it.
    """

    def __init__(self, file: IO[str], machine: str) -> None:
        self.file = file
        self._write(machine)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._touch, daemon=True)
        self.thread.start()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self._write("")
        self.file.close()

    def _write(self, text: str) -> None:
        self.file.truncate(0)
        self.file.write(text)
        self.file.flush()

    def _touch(self) -> None:
        while not self.over.wait(TOUCH_SECONDS):
            os.utime(self.file.fileno())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process in such a block for the same path."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
