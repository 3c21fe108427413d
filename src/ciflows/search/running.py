"""A whole search, in this process or in several."""

from __future__ import annotations

__all__ = ["run_search"]

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rich.console import Console

from ciflows.data import load_dataset
from ciflows.devices import find_device
from ciflows.errors import UserError
from ciflows.search.plan import Plan
from ciflows.search.results import SearchResult, write_result
from ciflows.search.study import JOURNAL
from ciflows.search.worker import Search, Worker

ATTEMPTS = 3
PATIENCE_SECONDS = 15.0


def run_search(
    plan: Plan,
    folder: Path | str,
    *,
    seeds: int = 3,
    workers: int = 1,
    device: str = "auto",
    console: Console | None = None,
) -> SearchResult:
    """Choose settings by validation and test them over several seeds.

    The same call goes on with a search that was interrupted, or joins one that is under way.

    Arguments:
        plan: What to search.
        folder: The folder of the search; there must be nothing else in it.
        seeds: How many seeds, from that of the plan on.
        workers: How many processes.
        device: auto, cpu, cuda or cuda:N; several workers take turns at the devices of auto and cuda.
        console: Where progress is shown.
    """
    folder, console = Path(folder), console or Console(quiet=True)
    if min(seeds, workers) < 1:
        raise UserError(f"A search needs at least one seed and one worker; got {seeds} and {workers}.")
    _check_folder(folder)
    find_device(device)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    config = plan.config(plan.choices[0])
    points = config.training.training_points
    dataset = load_dataset(config.data, say=say, table=config.table, training_points=points)
    folder.mkdir(parents=True, exist_ok=True)
    search = Search(plan, folder, seeds, dataset.fingerprint)
    worker = Worker(search, device, console)
    if not plan.trials:
        say(f"{plan.title} has no grid to search over: its settings are taken as they are.")
    if workers > 1:
        _run_workers(search, workers, device, say)
    worker.work()
    result = worker.result()
    write_result(folder / "search.json", result)
    return result


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another --out.")
    if folder.exists() and any(folder.iterdir()) and not (folder / JOURNAL).exists():
        raise UserError(f"{folder} exists already, and holds no search: choose another --out.")


def _run_workers(search: Search, workers: int, device: str, say: Callable[[str], None]) -> None:
    """Let processes do the work; an interruption lets each of them save where it is."""
    spawn = multiprocessing.get_context("spawn")
    places = [_place(device, index) for index in range(workers)]
    children = [
        spawn.Process(target=_run_worker, args=(search, place, workers), daemon=True) for place in places
    ]
    _start(children)
    try:
        for child in children:
            child.join()
    except KeyboardInterrupt:
        _end(children)
        raise
    if any(child.exitcode for child in children):
        say("Not every worker came to its end; going on with what is left.")


def _end(children: Sequence[BaseProcess]) -> None:
    """Let processes save and end; asked again, since Python may drop what interrupts a callback."""
    for _ in range(ATTEMPTS):
        for child in children:
            child.terminate()
        for child in children:
            child.join(PATIENCE_SECONDS)
    for child in children:
        child.kill()


def _start(children: Sequence[BaseProcess]) -> None:
    """Start processes that leave Ctrl-C to this one, which then ends them in good order."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for child in children:
            child.start()
    finally:
        signal.signal(signal.SIGINT, before)


def _run_worker(search: Search, device: str, workers: int) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    # What went wrong here goes wrong in the parent too, which takes up what is left and tells it.
    with suppress(Exception, KeyboardInterrupt):
        Worker(search, device, Console(emoji=False), alone=False).work()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _place(device: str, index: int) -> str:
    """The device of a worker."""
    if find_device(device).type == "cuda" and ":" not in device:
        return f"cuda:{index % torch.cuda.device_count()}"
    return device
