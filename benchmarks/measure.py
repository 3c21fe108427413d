"""Run the cases. Each library runs in a process of its own; within a case they take turns.

Times on a shared machine drift from minute to minute. So the libraries alternate, one repetition each,
and the result reports ratios within repetitions, with quartiles.
"""

from __future__ import annotations

__all__ = ["BenchSettings", "run_bench"]

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from benchmarks.cases import CASES, GROWING, GROWTH, Case, Growth, growing_case
from benchmarks.results import WORKS, Grown, Machine, Result, Row, Side, Timing
from benchmarks.side import describe_device
from ciflows import __version__
from ciflows.errors import UserError
from ciflows.settings import Settings

POINTS = 1000
SLICE_MS = 100.0  # quick work is repeated within a repetition, up to about this long
MOST_CALLS = 50

Progress = Callable[[str, float], None]


class WorkerError(RuntimeError):
    """A worker process ended early."""


class Worker:
    """One side of a comparison: `side.py` in its own process, under its own Python.

    Arguments:
        python: The interpreter.
        threads: Its number of CPU threads.
    """

    def __init__(self, python: Path, threads: int) -> None:
        self.facts: dict[str, Any] = {}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        self.process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("side.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )

    def begin(self, job: dict[str, Any]) -> None:
        """Build the model and take a first step."""
        self.facts = self.ask(job)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def _last_words(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with code {self.process.returncode}"


class BenchSettings(Settings):
    """What is measured, and how."""

    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="threads of each side on a CPU")
    repeats: int = Field(9, ge=1, description="repetitions of each measurement")
    only: tuple[str, ...] = Field((), description="words that the names of cases contain; all if empty")
    growth: bool = Field(True, description="whether cost is measured as sizes grow; not with `only`")
    authors: Path | None = Field(None, description="a checkout of the authors' code, if any")
    peers: Path | None = Field(None, description="a Python that has the other libraries, if any")


def chosen_cases(settings: BenchSettings) -> list[Case]:
    """The cases whose names contain one of the words in `only`; an error if there is none."""
    only = settings.only
    cases = [case for case in CASES if not only or any(word in case.name for word in only)]
    if not cases:
        names = "; ".join(case.name for case in CASES)
        raise UserError(f"No case has {' or '.join(only)} in its name: {names}.")
    return cases


def run_bench(
    path: Path, settings: BenchSettings, progress: Progress = lambda what, done: None
) -> Result:
    """Measure all cases and write the result after each.

    Arguments:
        path: The result file; after an interruption it holds the finished cases.
        settings: What to measure, and how.
        progress: Called with the current case and the finished share.
    """
    cases = chosen_cases(settings)
    steps = _growing() if settings.growth and not settings.only else []
    total = len(cases) + len(steps)
    result = Result(machine=_machine(settings), points=POINTS, rows=[], growth=[], notes=[])
    for index, case in enumerate(cases):
        progress(case.name, index / total)
        row, notes = _measure(case, settings)
        rows = [*result.rows, row] if row is not None else result.rows
        result = result.model_copy(update={"rows": rows, "notes": [*result.notes, *notes]})
        result.write(path)
    for index, (model, grow, value) in enumerate(steps):
        case = growing_case(model, grow, value)
        progress(case.name, (len(cases) + index) / total)
        timing = _grown(case, grow.work, settings)
        grown = Grown(model=model, size=grow.size, value=value, work=grow.work, timing=timing)
        result = result.model_copy(update={"growth": [*result.growth, grown]})
        result.write(path)
    return result


def _growing() -> list[tuple[str, Growth, int]]:
    return [(model, grow, value) for grow in GROWTH for model in GROWING for value in grow.values]


def _jobs(case: Case, settings: BenchSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sides of a case: name and job."""
    common = {
        "features": case.features,
        "batch": case.batch,
        "points": POINTS,
        "draws": case.draws,
        "device": settings.device,
        "threads": settings.threads,
    }
    own = {"side": "ours", "model": case.model, "settings": case.settings}
    yield "ours", common | own
    if case.plain is not None:
        model = case.model.removeprefix("cif-")
        yield "plain", common | own | {"model": model, "settings": case.plain}
    if case.peer is not None and settings.peers is not None:
        yield case.peer, common | own | {"side": case.peer}
    if case.authors is not None and settings.authors is not None:
        theirs = {"checkout": str(settings.authors.absolute()), "dataset": case.authors}
        yield "authors", common | own | theirs | {"side": "authors"}


def _python(side: str, settings: BenchSettings) -> Path:
    """The interpreter of a side; the authors' code uses its own .venv if there is one."""
    own, peers = Path(sys.executable), settings.peers or Path(sys.executable)
    if side != "authors" or settings.authors is None:
        return own if side == "ours" else peers
    theirs = settings.authors.absolute() / ".venv" / "bin" / "python"
    return theirs if theirs.exists() else peers


@contextmanager
def _workers(case: Case, settings: BenchSettings, notes: list[str]) -> Iterator[dict[str, Worker]]:
    """Start the sides of a case; add a note for each that fails."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, job in _jobs(case, settings):
            worker = Worker(_python(job["side"], settings), settings.threads)
            stack.callback(worker.close)
            try:
                worker.begin(job)
                workers[name] = worker
            except WorkerError as error:
                notes.append(f"{case.name}, {name}: {error}")
        yield workers


def _measure(case: Case, settings: BenchSettings) -> tuple[Row | None, list[str]]:
    """Measure one case on all sides."""
    notes: list[str] = []
    with _workers(case, settings, notes) as workers:
        if "ours" not in workers:
            return None, notes
        timings: dict[str, dict[str, Timing]] = {name: {} for name in workers}
        gflops: list[float] = []
        for work in WORKS:
            found = _in_turns(work, workers, settings.repeats, gflops, case.name, notes)
            for name, timing in found.items():
                timings[name][work] = timing
        sides = [
            Side(
                name=name,
                parameters=worker.facts["parameters"],
                start_s=worker.facts["start_s"],
                torch=worker.facts["torch"],
                works=timings[name],
                round_trip=_try(worker, {"work": "round_trip"}).get("error"),
            )
            for name, worker in workers.items()
        ]
        shape = {"features": case.features, "batch": case.batch, "draws": case.draws}
        row = Row(case=case.name, model=case.model, **shape, gflops=gflops, sides=sides)
        return row, notes


def _in_turns(
    work: str,
    workers: dict[str, Worker],
    repeats: int,
    gflops: list[float],
    case: str,
    notes: list[str],
) -> dict[str, Timing]:
    """Repeat one measurement, alternating sides, and measure the matrix product rate in between."""
    counts: dict[str, int] = {}
    weights: dict[str, dict[str, Any]] = {}
    ms: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(repeats + 1):
        for name, worker in list(workers.items()):
            try:
                if turn == 0:
                    first = worker.ask({"work": work, "calls": 1})["ms"][0]
                    counts[name] = min(MOST_CALLS, max(1, int(SLICE_MS / first)))
                    weights[name] = worker.ask({"work": work, "weigh": True})
                else:
                    times = worker.ask({"work": work, "calls": counts[name]})["ms"]
                    ms[name].append(sum(times) / len(times))
            except WorkerError as error:
                del workers[name]
                notes.append(f"{case}, {name}, {WORKS[work]}: {error}")
        if "ours" in workers:
            gflops += workers["ours"].ask({"work": "rate", "calls": 5})["gflops"][1:]
    return {name: Timing(ms=ms[name], **weights[name]) for name in workers}


def _try(worker: Worker, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return worker.ask(question)
    except WorkerError:
        return {}


def _grown(case: Case, work: str, settings: BenchSettings) -> Timing:
    """Time one of our own models; three repetitions are enough for a curve."""
    (_, job), *_ = _jobs(case, settings)
    worker = Worker(Path(sys.executable), settings.threads)
    try:
        worker.begin(job)
        worker.ask({"work": work, "calls": 1})
        weight = worker.ask({"work": work, "weigh": True})
        return Timing(ms=worker.ask({"work": work, "calls": 3})["ms"], **weight)
    finally:
        worker.close()


def _machine(settings: BenchSettings) -> Machine:
    device = torch.device(settings.device)
    return Machine(
        device=describe_device(device),
        kind=device.type,
        threads=settings.threads,
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        ciflows=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    )
