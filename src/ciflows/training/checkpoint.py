"""Checkpoints: the state of training in safetensors files, written whole or not at all."""

from __future__ import annotations

__all__ = ["Checkpoints", "InMemory", "load_tensors", "save_tensors"]

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ciflows.errors import UserError
from ciflows.files import write_bytes

KEPT = 2


class DamagedError(UserError):
    """A file whose content is not what was written."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, facts about them as JSON, and a checksum of both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(facts), sort_keys=True)
    # one entry, since the order of several is not fixed: equal content must give equal files
    note = json.dumps({"facts": text, "sha256": _checksum(ready, text)})
    write_bytes(path, save(ready, {"ciflows": note}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote; raise `DamagedError` if the file holds something else."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            note = json.loads((file.metadata() or {}).get("ciflows", "{}"))
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} is damaged: {error}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if note.get("sha256") != _checksum(tensors, note.get("facts", "")):
        raise DamagedError(f"{path} is damaged: its checksum does not match its content.")
    return tensors, json.loads(note["facts"])


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


class Checkpoints:
    """The newest checkpoints of a run, in a folder.

    Arguments:
        say: Called with a message if a damaged one is skipped.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self.say = say

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove all but the newest few."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(self.folder / f"step-{step:09d}.safetensors", tensors, facts)
        for path in [*self._paths()[:-KEPT], *self.folder.glob(".*.tmp")]:
            path.unlink()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint, or None; damaged ones are removed."""
        paths = self._paths()
        while paths:
            try:
                return load_tensors(paths[-1])
            except DamagedError as error:
                paths.pop().unlink()
                then = f"Falling back to {paths[-1].name}." if paths else "Training starts over."
                self.say(f"{error} {then}")
        return None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.safetensors"))


class InMemory(Checkpoints):
    """Checkpoints that need not outlive the process."""

    def __init__(self) -> None:
        self.last: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
        self.last = copies, dict(facts)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return self.last
