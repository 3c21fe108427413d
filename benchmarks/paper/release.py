"""Finished runs in one zip file, each without what only training needs."""

from __future__ import annotations

__all__ = ["KEPT", "pack"]

import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.plan import Job
from ciflows.errors import UserError
from ciflows.files import atomic_path
from ciflows.runs.folder import is_finished

# what `ciflows.load_run` reads; no checkpoints, no TensorBoard files, no scores of single rows
KEPT = ("config.toml", "about.json", "metrics.json", "metrics.jsonl", "weights.safetensors")


def pack(jobs: Sequence[Job], folder: Path, path: Path, largest: float = 20.0) -> list[str]:
    """Pack finished runs, one for each row and data set; the names of those that are in.

    Arguments:
        jobs: The runs; of those that differ in their seed alone, the first finished one is packed.
        folder: The queue's folder.
        path: The zip file to write.
        largest: Runs with more MB than this are left out.
    """
    chosen: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        if is_finished(folder / job.key) and _megabytes(folder / job.key) <= largest:
            chosen.setdefault((job.table.name, job.row.name, job.data), job)
    if not chosen:
        raise UserError(f"{folder} has no finished run of at most {largest:g} MB to pack.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as file:
        for job in chosen.values():
            for name in KEPT:
                if (folder / job.key / name).exists():
                    file.write(folder / job.key / name, f"{path.stem}/{job.key}/{name}")
    return [job.key for job in chosen.values()]


def _megabytes(folder: Path) -> float:
    return sum((folder / name).stat().st_size for name in KEPT if (folder / name).exists()) / 1e6
