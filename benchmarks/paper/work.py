"""Work off the queue: each run in a process of its own, several at once, all of it resumable.

The run folders are the truth: a run with metrics.json is finished, one without it resumes from its last
checkpoint. queue.json, written whole after each change, tells a reader how far the queue has come.
"""

from __future__ import annotations

__all__ = ["STATE", "Progress", "work_off"]

import fcntl
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.paper.plan import Job
from ciflows.devices import find_device
from ciflows.errors import UserError
from ciflows.files import write_json
from ciflows.runs.config import RunConfig
from ciflows.runs.fit import fit, resume
from ciflows.runs.folder import is_finished, read_description

STATE, LOCK, LOG = "queue.json", ".queue.lock", "log.txt"
SAVE_SECONDS = 120.0
STOPPED = 130

Say = Callable[[str], None]


@dataclass
class Progress:
    """How far a run has come: waiting, running, finished or failed, and why it failed."""

    state: str = "waiting"
    device: str | None = None
    seconds: float = 0.0
    reason: str | None = None


class _Running:
    """A run's process, the device it has, and when it began."""

    def __init__(self, job: Job, process: BaseProcess, device: str) -> None:
        self.job, self.process, self.device = job, process, device
        self.started = time.monotonic()


def work_off(
    jobs: Sequence[Job],
    folder: Path,
    *,
    at_once: int = 1,
    device: str = "auto",
    minutes: float | None = None,
    say: Say = print,
) -> dict[str, Progress]:
    """Train every run that is not finished; how far each has come then.

    Arguments:
        jobs: The runs, in the order to start them.
        folder: The queue's folder, with a run folder for each.
        at_once: Runs at the same time.
        device: auto, cpu, cuda or cuda:N; with several GPUs "cuda" spreads the runs over them.
        minutes: Stop after so long; a run that is not finished is saved, and resumes the next time.
        say: Called with a line for each run that begins or ends.
    """
    configs = {job.key: job.config() for job in jobs}
    _check_folders(configs, folder)
    devices = _devices(device, at_once)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / LOCK):
        worker = _Queue(jobs, configs, folder, devices, say)
        worker.run(None if minutes is None else time.monotonic() + 60 * minutes)
        return worker.progress


class _Queue:
    def __init__(
        self,
        jobs: Sequence[Job],
        configs: dict[str, RunConfig],
        folder: Path,
        devices: list[str],
        say: Say,
    ) -> None:
        self.configs, self.folder, self.free, self.say = configs, folder, devices, say
        self.at_once = len(devices)
        done = {job.key: is_finished(folder / job.key) for job in jobs}
        self.progress = {key: Progress("finished" if end else "waiting") for key, end in done.items()}
        self.waiting = [job for job in jobs if not done[job.key]]
        self.running: list[_Running] = []
        self.context = _context()

    def run(self, deadline: float | None) -> None:
        """Start runs as others end, until all have ended or time is over."""
        self._write()
        try:
            while self.running or (self.waiting and not _over(deadline)):
                while self.waiting and self.free and not _over(deadline):
                    self._start(self.waiting.pop(0))
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                wait([one.process.sentinel for one in self.running], left)
                for one in [one for one in self.running if not one.process.is_alive()]:
                    self._end(one)
                if _over(deadline):
                    self._stop()
        finally:
            self._stop()

    def _start(self, job: Job) -> None:
        device = self.free.pop(0)
        arguments = (self.configs[job.key], self.folder / job.key, device, self.at_once)
        process = self.context.Process(target=_train, args=arguments, daemon=True)
        process.start()
        self.running.append(_Running(job, process, device))
        self.progress[job.key] = Progress("running", device)
        self._write()
        self.say(f"{job.key} begins on {device}.")

    def _end(self, one: _Running) -> None:
        """Note how a run ended, and free its device."""
        self.running.remove(one)
        self.free.append(one.device)
        code, folder = one.process.exitcode, self.folder / one.job.key
        seconds = round(time.monotonic() - one.started, 1)
        if is_finished(folder):
            found = Progress("finished", one.device, seconds)
        elif code == STOPPED:
            found = Progress("waiting", one.device, seconds, "stopped; it resumes the next time")
        else:
            found = Progress("failed", one.device, seconds, _reason(folder, code))
        self.progress[one.job.key] = found
        self._write()
        self.say(f"{one.job.key}: {found.state}{f' ({found.reason})' if found.reason else ''}.")

    def _stop(self) -> None:
        """Let every run save a checkpoint and end."""
        for one in self.running:
            one.process.terminate()
        for one in list(self.running):
            one.process.join(SAVE_SECONDS)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
            self._end(one)

    def _write(self) -> None:
        states = [one.state for one in self.progress.values()]
        counts = {state: states.count(state) for state in ("finished", "running", "waiting", "failed")}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        runs = {key: vars(one) for key, one in self.progress.items()}
        write_json(self.folder / STATE, {"updated": now, **counts, "runs": runs})


# -- in the process of a run ---------------------------------------------------------------------------


def _train(config: RunConfig, folder: Path, device: str, at_once: int) -> None:
    """Train or resume one run; what it says and why it fails goes to its log."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the queue passes it on, once
    _end_with_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // at_once))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _log_of(folder).open("a", encoding="utf-8") as log:
        console = Console(file=log, emoji=False, width=110)
        try:
            if folder.exists():
                resume(folder, device=device, console=console)
            else:
                fit(config, folder, device=device, console=console)
        except KeyboardInterrupt:
            raise SystemExit(STOPPED) from None
        except Exception:
            log.write(traceback.format_exc())
            raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End at once if the queue is killed, so that two processes never train the same run."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# -- around them ---------------------------------------------------------------------------------------


def _context() -> Any:
    """Processes that fork from one which has imported torch, but has used no device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.paper.work"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it inherits this: Ctrl-C is for the queue
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    return context


def _devices(device: str, at_once: int) -> list[str]:
    """The device of each of the runs at once, in turn if there are several GPUs."""
    target = find_device(device)
    if target.type != "cuda" or ":" in device:
        return [str(target)] * at_once
    return [f"cuda:{index % torch.cuda.device_count()}" for index in range(at_once)]


def _check_folders(configs: dict[str, RunConfig], folder: Path) -> None:
    """Refuse to go on in run folders of other settings."""
    for key, config in configs.items():
        if (folder / key).exists() and read_description(folder / key)[0] != config:
            raise UserError(
                f"{folder / key} was begun with other settings: remove it, or choose another folder."
            )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock; the system frees it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process works off the queue in {path.parent}.") from None
        yield


def _log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{LOG}")


def _reason(folder: Path, code: int | None) -> str:
    """The last line of a run's log, or its exit status."""
    log = _log_of(folder)
    lines = log.read_text(encoding="utf-8").strip().splitlines() if log.exists() else []
    return lines[-1] if code == 1 and lines else f"its process ended with status {code}"


def _over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
