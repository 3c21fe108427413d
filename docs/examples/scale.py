"""What scoring costs: one process, and Ray with one and two workers, in turns on the same files.

    python docs/examples/scale.py RUN 'big/*.parquet' [--std-error 0.1] [--turns 1] [--workers 0 1]

Prints, for each, rows per second of the clock and of processor time, and the largest memory of a worker.
On a shared machine processor time is the figure to trust. A machine with a GPU scores there, with one
worker for each GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import polars as pl
import torch

from ciflows.runs import parts
from ciflows.runs.run import load_run
from ciflows.runs.score import ScoreSettings

TICKS = os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Notes the processor time and the memory of the workers that hold a model, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[str, float] = {}
        self.mebibytes: dict[str, float] = {}
        self.stopped = threading.Event()
        self.others = {folder.name for folder in Path("/proc").glob("[0-9]*") if is_worker(folder)}

    def run(self) -> None:
        while not self.stopped.wait(0.2):
            for folder in Path("/proc").glob("[0-9]*"):
                if folder.name not in self.others and is_worker(folder):
                    with suppress(OSError, StopIteration):  # it has ended meanwhile
                        self._note(folder)

    def _note(self, folder: Path) -> None:
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        self.seconds[folder.name] = (int(fields[11]) + int(fields[12])) / TICKS
        lines = (folder / "status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM")).split()[1]
        self.mebibytes[folder.name] = int(peak) / 1024


def is_worker(folder: Path) -> bool:
    """Whether a folder of /proc is that of a process of Ray that holds a model."""
    try:
        return (folder / "cmdline").read_text().startswith("ray::MapWorker")
    except OSError:  # it has ended meanwhile
        return False


def measure(folder: str, data: str, settings: ScoreSettings, workers: int) -> pl.DataFrame:
    """Score all files with so many workers of Ray, or in this process for 0; print what it took."""
    out, run = Path(mkdtemp()) / "scores", load_run(folder, "auto")
    job = parts.plan_scores(run, data, out, settings, ())
    rows = sum(part.rows for part in job.parts)
    parts.open_job(job, resume=False)
    watch, start, used = Watch(), time.perf_counter(), time.process_time()
    if workers:
        from ciflows.runs.cluster import make_parts_with_ray

        watch.start()
        make_parts_with_ray(job, job.parts, workers=workers, quiet=True)
        watch.stopped.set()
        used = sum(watch.seconds.values())
    else:
        for part in job.parts:
            parts.make_part(run, job, part)
        used = time.process_time() - used
    seconds = time.perf_counter() - start
    memory = f", {max(watch.mebibytes.values()):.0f} MiB a worker" if workers else ""
    name = f"ray, {workers} workers" if workers else "one process"
    print(f"{name}: {rows / seconds:.0f} rows/s, {rows / used:.0f} rows per processor second{memory}")
    scores = pl.read_parquet(out / "*.parquet")
    shutil.rmtree(out.parent)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("data")
    parser.add_argument("--std-error", type=float, default=None)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--part-rows", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="0: this process")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts.PART_ROWS = given.part_rows
    if any(given.workers):
        import ray

        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error"
        )
    settings = ScoreSettings(std_error=given.std_error)
    for _ in range(given.turns):
        one, *others = (measure(given.run, given.data, settings, workers) for workers in given.workers)
        print("the same bits:", all(one.equals(other) for other in others))


if __name__ == "__main__":
    main()
