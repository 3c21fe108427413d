"""An environment for the libraries to compare with."""

from __future__ import annotations

__all__ = ["peer_python"]

import os
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

import torch

from ciflows.errors import UserError
from ciflows.files import cache_folder, write_text

PEERS = ("zuko==1.6.0", "normflows==1.7.3")


def peer_python(say: Callable[[str], None]) -> Path:
    """The Python of an environment with the peers and this torch; created on first use."""
    wanted = "\n".join([f"torch=={torch.__version__.partition('+')[0]}", *PEERS])
    folder = cache_folder() / "bench"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"Installing {', '.join(PEERS)} and torch into {folder}, once …")
    venv.create(folder, clear=True, with_pip=True)
    words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*words, *wanted.splitlines()], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"The peers could not be installed: {reason}. Use --no-peers to skip them.")
    write_text(stamp, wanted)
    return python
