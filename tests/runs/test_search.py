"""Searches: each combination once, the best by validation, over seeds; through kills, beside others."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

import ciflows
from ciflows import cli
from ciflows.errors import InversionError, UserError
from ciflows.runs import fit as runs
from ciflows.runs.config import RunConfig
from ciflows.runs.experiments import Experiment, read_experiment
from ciflows.runs.fit import fit
from ciflows.runs.folder import read_description
from ciflows.runs.run import Run
from ciflows.runs.search import SAMPLERS, plan_search, run_search, study, worker
from ciflows.training import monitor

SHIPPED = sorted((Path(ciflows.__file__).parent / "experiments").glob("*.toml"))
TINY = """
model = "maf"

[architecture]
layers = 1
hidden = [8]

[training]
objective = "elbo"
steps = 40
batch_size = 200
validate_every = 4
validation_points = 200
checkpoint_seconds = 0.05

[on.two-uniforms]
grid = {grid}
paper = {{ log_prob = 0.19, std_error = 0.02 }}
"""
GRACE = 3
GRID = "{ learning_rate = [1e-4, 1e-2], hidden = [[8], [4, 4]] }"
LONG = "{ steps = [40, 800, 60], validate_every = [20] }"


def write(folder: Path, grid: str = GRID, text: str = TINY) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text.format(grid=grid))
    return path


def experiment(folder: Path, grid: str = GRID, text: str = TINY) -> Experiment:
    return read_experiment(write(folder, grid, text))


def configs(folder: Path) -> list[RunConfig]:
    """The configurations of the run folders inside a folder, in their order."""
    return [read_description(path)[0] for path in sorted(folder.iterdir())]


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())  # type: ignore[no-any-return]


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def command(*words: str | Path, grace: int) -> list[str]:
    """The command, with a heartbeat that counts as lost after some seconds."""
    code = (
        "import ciflows.cli, ciflows.runs.search.study as study\n"
        f"study.HEARTBEAT_SECONDS, study.GRACE_SECONDS = 1, {grace}\n"
        "ciflows.cli.main()"
    )
    return [sys.executable, "-c", code, "search", *map(str, words)]


def trials(folder: Path) -> list[FrozenTrial]:
    """The trials in a search's database, retries included.

    A process that finds the queue empty has left a pruned one without a folder.
    """
    queue = optuna.load_study(study_name="trials", storage=f"sqlite:///{folder}/search.db")
    return [trial for trial in queue.trials if "folder" in trial.user_attrs]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command in a process of its own; neither it nor its workers outlive the test."""
    processes: list[subprocess.Popen[str]] = []

    def popen(*words: str | Path, grace: int = 600) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*words, grace=grace),
            cwd=tmp_path,
            env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield popen
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(there: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 600
    while not there():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, "the search ended too early"
        time.sleep(0.01)


def test_grid_is_tried_once_and_the_best_validation_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = runs.evaluate

    def reversed_test(flow: Any, dataset: Any, config: RunConfig, *rest: Any) -> Any:
        """What does worse in validation does better in the test."""
        found = evaluate(flow, dataset, config, *rest)
        found.metrics["test"]["log_prob"] = -config.training.learning_rate
        return found

    monkeypatch.setattr(runs, "evaluate", reversed_test)
    out = tmp_path / "out"
    result = run_search(plan_search(experiment(tmp_path)), out, seeds=1)
    tried = [(c.training.learning_rate, c.architecture["hidden"]) for c in configs(out / "trials")]
    assert tried == [(1e-4, [8]), (1e-4, [4, 4]), (1e-2, [8]), (1e-2, [4, 4])]
    assert all(config.seed == 0 for config in configs(out / "trials"))
    scores = {row.folder: metrics(out / row.folder)["validation"] for row in result.candidates}
    assert scores == {row.folder: row.validation for row in result.candidates}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert sorted(scores) == ["trials/001", "trials/002", "trials/003", "trials/004"]
    assert result.settings == result.candidates[0].settings
    assert result.settings["learning_rate"] == 1e-2
    chosen = read_description(out / result.candidates[0].folder)[0]
    assert chosen.architecture["hidden"] == result.settings["hidden"]


def test_chosen_settings_are_tested_over_seeds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_search(plan_search(experiment(tmp_path), seed=5), out, seeds=3)
    assert [score.seed for score in result.seeds] == [5, 6, 7]
    assert [score.folder for score in result.seeds[1:]] == ["seeds/6", "seeds/7"]
    assert result.seeds[0].folder == result.candidates[0].folder
    for score in result.seeds:
        config = read_description(out / score.folder)[0]
        assert config.seed == score.seed
        assert config.training.learning_rate == result.settings["learning_rate"]
        assert config.architecture["hidden"] == result.settings["hidden"]
        assert score.log_prob == metrics(out / score.folder)["test"]["log_prob"]
    values = [score.log_prob for score in result.seeds]
    assert len(set(values)) == 3
    assert result.log_prob == pytest.approx(sum(values) / 3)
    assert result.std_error == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    assert result.parameters == metrics(out / "seeds/6")["parameters"]


def test_result_is_written_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_search(plan_search(experiment(tmp_path)), out, seeds=2)
    found = json.loads((out / "search.json").read_text())
    assert (found["experiment"], found["data"], found["model"]) == ("tiny", "two-uniforms", "maf")
    assert found["settings"] == result.settings
    assert found["candidates"] == [row._asdict() for row in result.candidates]
    assert found["seeds"] == [row._asdict() for row in result.seeds]
    assert (found["log_prob"], found["std_error"]) == (result.log_prob, result.std_error)
    assert found["published"]["log_prob"] == 0.19
    before = times(out)
    again = run_search(plan_search(experiment(tmp_path)), out, seeds=2)
    assert again == result
    del before[out / "search.json"]
    assert before.items() <= times(out).items()


def test_experiment_without_a_grid_is_only_repeated(tmp_path: Path) -> None:
    plan = plan_search(experiment(tmp_path, "{}"))
    result = run_search(plan, tmp_path / "out", seeds=2)
    assert result.candidates == []
    assert result.settings == {}
    assert [score.folder for score in result.seeds] == ["seeds/0", "seeds/1"]
    assert not (tmp_path / "out" / "trials").exists()


def test_a_table_is_taken_as_the_experiment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{i % 7},{i % 5}.5" for i in range(40))
    Path("people.csv").write_text(f"age,mass\n,1.5\n{rows}\n")
    text = TINY.replace("on.two-uniforms", 'on."people.csv"') + '[table]\nmissing = "drop"\n'
    result = run_search(plan_search(experiment(tmp_path, "{}", text)), tmp_path / "out", seeds=1)
    assert len(result.seeds) == 1


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_sampler_tries_so_many_and_none_twice(sampler: str, tmp_path: Path) -> None:
    grid = "{ learning_rate = [1e-4, 1e-3, 1e-2], hidden = [[8], [4]], clip = [1.0] }"
    tried = {}
    for trials, seed in ((4, 0), (9, 1)):
        plan = plan_search(
            experiment(tmp_path, grid), sampler=sampler, trials=trials, seed=seed, prune=False
        )
        result = run_search(plan, tmp_path / str(seed), seeds=1)
        tried[seed] = [json.dumps(row.settings) for row in result.candidates]
        assert len(list((tmp_path / str(seed) / "trials").iterdir())) == len(tried[seed])
        assert max(row.validation or -9 for row in result.candidates) == result.candidates[0].validation
    assert len(tried[0]) == len(set(tried[0])) == 4
    assert len(tried[1]) == len(set(tried[1])) == 6


def test_random_order_goes_by_the_seed(tmp_path: Path) -> None:
    grid = "{ learning_rate = [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4] }"
    plans = [
        plan_search(experiment(tmp_path, grid), sampler="random", trials=5, seed=s) for s in (0, 0, 1)
    ]
    queues = [plan.queue() for plan in plans]
    assert queues[0] == queues[1] != queues[2]
    assert queues[0] != plans[0].words[:5]


def test_trials_that_fall_behind_are_pruned(tmp_path: Path) -> None:
    grid = "{ learning_rate = [9e-3, 1e-2, 1.1e-2, 1.2e-2, 1e-9, 1.3e-2] }"
    out = tmp_path / "out"
    plan = plan_search(experiment(tmp_path, grid), prune=True)
    result = run_search(plan, out, seeds=1)
    behind = result.candidates[-1]
    assert (behind.settings["learning_rate"], behind.state) == (1e-9, "pruned")
    assert behind.folder == "trials/005"
    assert behind.validation is not None
    rows = monitor.read_history(out / "trials/005/metrics.jsonl")
    assert rows[-1]["step"] == 8  # a fifth of the steps is the warm-up
    assert json.loads((out / "trials/005/stopped.json").read_text())["state"] == "pruned"
    assert not (out / "trials/005/metrics.json").exists()
    assert [row.state for row in result.candidates if row.folder < "trials/005"] == ["finished"] * 4
    before = times(out / "trials")
    assert run_search(plan, out, seeds=1) == result
    assert times(out / "trials") == before


def test_grid_is_not_pruned_unless_asked(tmp_path: Path) -> None:
    given = experiment(tmp_path)
    assert [plan_search(given, sampler=sampler).prune for sampler in SAMPLERS] == [False, True, True]
    grid = "{ learning_rate = [9e-3, 1e-2, 1.1e-2, 1.2e-2, 1e-9] }"
    result = run_search(plan_search(experiment(tmp_path, grid)), tmp_path / "out", seeds=1)
    assert {row.state for row in result.candidates} == {"finished"}


class Begun(monitor.RunMonitor):
    """Remembers the runs that were trained, and from which step on."""

    runs: list[tuple[str, int]]

    def begin(self, step: int, steps: int, done: float) -> None:
        self.runs.append((f"{self.folder.parent.name}/{self.folder.name}", step))
        super().begin(step, steps, done)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    Begun.runs = []
    monkeypatch.setattr(runs, "RunMonitor", Begun)
    return Begun.runs


def test_killed_search_goes_on_where_it_was(
    tmp_path: Path,
    begun: list[tuple[str, int]],
    start: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, out = plan_search(experiment(tmp_path, LONG)), tmp_path / "out"
    whole = run_search(plan, tmp_path / "whole", seeds=2)
    assert whole.candidates[0].folder == "trials/002"
    begun.clear()
    monkeypatch.setattr(study, "GRACE_SECONDS", GRACE)
    for place in ("trials/002", "seeds/1"):
        process = start(tmp_path / "tiny.toml", "--out", out, "--seeds", "2", grace=GRACE)
        wait_for(lambda at=place: list(out.glob(f"{at}/checkpoints/step*")), process)  # type: ignore[misc]
        process.kill()
        process.wait()
        assert not (out / place / "metrics.json").exists()
    before = {path: time for path, time in times(out).items() if path.name == "metrics.json"}
    assert len(before) == 3
    result = run_search(plan, out, seeds=2)
    assert [run for run, _ in begun] == ["seeds/1"]
    assert begun[0][1] > 0
    assert before.items() <= times(out).items()
    assert result == whole
    # the trial that was killed went on in the second process, and was not begun anew there
    steps = [row["step"] for row in monitor.read_history(out / "trials/002/metrics.jsonl")]
    assert steps == sorted(set(steps))
    assert len(list((out / "trials/002/tensorboard").iterdir())) == 2


def test_interrupted_trial_is_taken_up_once(
    tmp_path: Path, begun: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = plan_search(experiment(tmp_path)), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_search(plan, out, seeds=1)
    result = run_search(plan, out, seeds=1)
    assert len(result.candidates) == 4
    # its training had ended: it is tested, and takes no step again
    assert [run for run, _ in begun] == [f"trials/00{k}" for k in (1, 2, 3, 4)]
    retried = [trial.state for trial in trials(out) if trial.user_attrs["folder"] == "trials/001"]
    assert retried == [TrialState.FAIL, TrialState.COMPLETE]


def test_steps_that_are_taken_again_are_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the first checkpoint: the run starts anew, and its trial does not."""
    text = TINY.replace("checkpoint_seconds = 0.05", "checkpoint_seconds = 1000")
    plan, out = plan_search(experiment(tmp_path, GRID, text)), tmp_path / "out"
    record = monitor.RunMonitor.record

    def crash(self: monitor.RunMonitor, step: int, values: dict[str, float], done: float) -> None:
        record(self, step, values, done)
        if step == 20:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(monitor.RunMonitor, "record", crash)
        with pytest.raises(MemoryError):
            run_search(plan, out, seeds=1)
    assert len(run_search(plan, out, seeds=1).candidates) == 4
    crashed, retried = (t for t in trials(out) if t.user_attrs["folder"] == "trials/001")
    assert (crashed.state, retried.state) == (TrialState.FAIL, TrialState.COMPLETE)
    assert list(retried.intermediate_values) == list(range(4, 41, 4))


def test_process_that_comes_late_has_nothing_to_do(other: tuple[Experiment, Path]) -> None:
    given, out = other
    with study.open_studies(out / "search.db", plan_search(given)) as (queue, _):
        study.work(queue, lambda trial: pytest.fail("a finished trial was run again"))


def test_database_is_created_once(tmp_path: Path) -> None:
    """Of two processes that start together, the second finds the database of the first."""
    plan, path = plan_search(experiment(tmp_path)), tmp_path / "search.db"
    study.create_database(path, plan, {"seed": 0}, [0, 1])
    before = path.read_bytes()
    study.create_database(path, plan, {"seed": 0}, [0, 1])
    assert path.read_bytes() == before
    assert [trial.user_attrs["folder"] for trial in trials(tmp_path)] == [
        f"trials/00{number}" for number in (1, 2, 3, 4)
    ]
    assert [path.name for path in tmp_path.iterdir() if "search.db" in path.name] == ["search.db"]


VANISH = """
import os, sys, time, optuna
from ciflows.runs.search import study
def vanish(trial):
    trial.report(0.5, 4)
    time.sleep(2)
    os._exit(9)
with study._open_storage(study.Path(sys.argv[1])) as storage:
    queue = optuna.load_study(study_name="trials", storage=storage)
"""
LATE = "    study.work(queue, vanish)"
EARLY = "    queue.ask()\n    os._exit(9)"


@pytest.mark.parametrize(("code", "scores"), [(LATE, {4: 0.5}), (EARLY, {})], ids=["late", "early"])
def test_lost_trial_is_queued_again_with_its_folder_and_scores(
    code: str, scores: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its process vanished after its first heartbeat or before."""
    monkeypatch.setattr(study, "GRACE_SECONDS", 1)
    plan, path = plan_search(experiment(tmp_path)), tmp_path / "search.db"
    study.create_database(path, plan, {}, [0])
    lost = subprocess.run(
        [sys.executable, "-c", VANISH + code, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert lost.returncode == 9, lost.stderr
    done: list[str] = []

    def finish(trial: optuna.Trial) -> float:
        done.append(trial.user_attrs["folder"])
        for key, options in plan.options.items():
            trial.suggest_categorical(key, list(options))
        return float(len(done))

    with study.open_studies(path, plan) as (queue, _):
        study.work(queue, finish)
        assert len(study.candidates(queue, plan)) == 4
    assert done == [f"trials/00{number}" for number in (2, 3, 4, 1)]
    retried = trials(tmp_path)[-1]
    assert retried.user_attrs["folder"] == "trials/001"
    assert retried.intermediate_values == scores


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_is_taken_by_one_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = plan_search(experiment(tmp_path)), tmp_path / study.DATABASE
    study.create_database(path, plan, {}, [0])
    check = RDBStorage.check_trial_is_updatable

    def slowly(self: RDBStorage, *state: Any) -> None:
        time.sleep(0.1)  # between reading that a trial is queued and writing that it runs
        check(self, *state)

    monkeypatch.setattr(RDBStorage, "check_trial_is_updatable", slowly)

    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        queues = [stack.enter_context(study.open_studies(path, plan))[0] for _ in range(4)]
        assert sorted(pool.map(lambda queue: queue.ask().number, queues)) == [0, 1, 2, 3]


def test_damaged_database_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "search.db").write_text("mine\nand mine\n")
    with pytest.raises(UserError, match="damaged"):
        run_search(plan_search(experiment(tmp_path)), out)
    assert (out / "search.db").read_text() == "mine\nand mine\n"


def test_workers_share_the_trials(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    out = tmp_path / "out"
    path = write(
        tmp_path, "{ learning_rate = [1e-4, 1e-3, 1e-2, 2e-2], steps = [400], validate_every = [40] }"
    )
    process = start(path, "--out", out, "--workers", "2", "--seeds", "3")
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text
    assert sorted(p.name for p in (out / "trials").iterdir()) == ["001", "002", "003", "004"]
    times = [(t.datetime_start, t.datetime_complete) for t in trials(out)]
    assert len(times) == 4
    assert any(a < b < end for a, end in times for b, _ in times)  # two at the same time
    for number in range(1, 5):
        assert text.count(f"Trial {number} of 4") == 1
        assert len(list((out / f"trials/00{number}/tensorboard").iterdir())) == 1
    assert len(json.loads((out / "search.json").read_text())["seeds"]) == 3


def test_interruption_lets_workers_save_and_tells_how_to_go_on(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    text = TINY.replace("checkpoint_seconds = 0.05", "checkpoint_seconds = 1000")
    path = write(tmp_path, "{ steps = [1_000_000, 1_000_001] }", text)
    process = start(path, "--workers", "2", "--out", "out")
    trials = [tmp_path / "out/trials" / name for name in ("001", "002")]
    wait_for(
        lambda: all(len(monitor.read_history(trial / "metrics.jsonl")) > 1 for trial in trials), process
    )
    os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert "Continue with the same command" in said
    assert "Traceback" not in said
    assert all(list((trial / "checkpoints").iterdir()) for trial in trials)


def test_workers_end_with_their_parent(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    path = write(tmp_path, "{ steps = [1_000_000, 1_000_001] }")
    process = start(path, "--workers", "2", "--out", "out")
    trial = tmp_path / "out/trials/001"
    wait_for(lambda: (trial / "metrics.jsonl").exists(), process)
    process.kill()
    process.wait()
    wait_for(lambda: not group_lives(process.pid))


def group_lives(number: int) -> bool:
    """Whether a process of this group is left."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"sampler": "random"}, "sampler"),
        ({"seed": 1}, "seed"),
        ({"prune": True}, "pruning"),
        ({"overrides": {"training": {"steps": 41}}}, "settings"),
    ],
)
def test_other_search_in_the_same_folder_is_refused(
    changed: dict[str, Any], expected: str, other: tuple[Experiment, Path]
) -> None:
    given, out = other
    before = times(out)
    with pytest.raises(UserError, match=rf"differs in its .*{expected}"):
        run_search(plan_search(given, **changed), out, seeds=1)
    assert times(out) == before


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    folder = tmp_path_factory.mktemp("other")
    given = experiment(folder)
    run_search(plan_search(given), folder / "out", seeds=1)
    return given, folder / "out"


def failing(config: RunConfig, bad: Callable[[RunConfig], bool], **options: Any) -> Run:
    if bad(config):
        raise InversionError("it did not invert")
    return fit(config, **options)


def fail_where(monkeypatch: pytest.MonkeyPatch, bad: Callable[[RunConfig], bool]) -> None:
    monkeypatch.setattr(
        worker, "fit", lambda config, folder, **options: failing(config, bad, folder=folder, **options)
    )


def test_failing_trial_is_recorded_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_where(monkeypatch, lambda config: config.training.learning_rate == 1e-4)
    plan, out = plan_search(experiment(tmp_path)), tmp_path / "out"
    result = run_search(plan, out, seeds=1)
    assert [row.state for row in result.candidates] == ["finished"] * 2 + ["failed"] * 2
    assert result.candidates[-1].reason == "it did not invert"
    assert result.candidates[-1].settings["learning_rate"] == 1e-4
    assert result.candidates[-1].validation is None
    assert json.loads((out / "trials/001/stopped.json").read_text())["reason"] == "it did not invert"
    monkeypatch.undo()
    assert run_search(plan, out, seeds=1) == result


def test_search_whose_trials_all_fail_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_where(monkeypatch, lambda _: True)
    with pytest.raises(UserError, match=r"every trial failed.*it did not invert"):
        run_search(plan_search(experiment(tmp_path)), tmp_path / "out")
    assert not (tmp_path / "out" / "search.json").exists()


def test_failing_seed_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_where(monkeypatch, lambda config: config.seed == 1)
    result = run_search(plan_search(experiment(tmp_path)), tmp_path / "out", seeds=3)
    assert [score.seed for score in result.seeds] == [0, 2]
    assert [(seed.seed, seed.reason) for seed in result.failed_seeds] == [(1, "it did not invert")]
    values = [score.log_prob for score in result.seeds]
    assert result.log_prob == pytest.approx(sum(values) / 2)


def test_setting_that_is_given_is_not_searched_over(tmp_path: Path) -> None:
    plan = plan_search(experiment(tmp_path), overrides={"training": {"learning_rate": 0.5}})
    assert plan.choices == [{"hidden": [8]}, {"hidden": [4, 4]}]
    assert plan.config(plan.choices[1]).training.learning_rate == 0.5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_experiment_can_be_searched(path: Path) -> None:
    given = read_experiment(path)
    for data in given.data:
        plan = plan_search(given, data)
        assert plan.trials == math.prod(map(len, given.grid(data).values())) * bool(given.grid(data))
        assert len(plan.queue()) == plan.trials


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command in this process and the test's folder; its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ciflows", "search", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code  # type: ignore[return-value]

    return call


def test_command_shows_the_table_and_the_headline(
    tmp_path: Path, main: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert main("tiny.toml", "--set", "steps=8", "--seeds", "2", "--max-minutes", "5") == 0
    text = capsys.readouterr().out
    out = tmp_path / "runs" / "search-tiny-two-uniforms"
    found = json.loads((out / "search.json").read_text())
    assert configs(out / "seeds")[0].training.steps == 8
    assert configs(out / "seeds")[0].training.max_minutes == 5
    for number, row in enumerate(found["candidates"], start=1):
        assert f"Trial {number} of 4" in text
        line = next(line for line in text.splitlines() if line.endswith(row["folder"].ljust(12)))
        assert f"{row['validation']:.4f}" in line
        assert str(row["settings"]["hidden"]) in line
    mean, error = found["log_prob"], found["std_error"]
    headline = f"tiny on two-uniforms: {mean:.3f} ± {error:.3f} over 2 seeds (paper: 0.19 ± 0.02)"
    assert headline in text
    assert main("tiny.toml", "--set", "steps=8", "--seeds", "2", "--max-minutes", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out) == found


SEVERAL = TINY + "\n[on.annulus]\npaper = {{ log_prob = 1.0 }}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tiny.toml", "two-uniform"], "Did you mean two-uniforms?"),
        (["tiny.toml"], "name one of its data sets: two-uniforms, annulus"),
        (["missing.toml", "two-uniforms"], "missing.toml"),
        (["plain.toml", "two-uniforms"], "is no experiment"),
        (["tiny.toml", "two-uniforms", "--workers", "0"], "at least one seed and one worker"),
        (["tiny.toml", "two-uniforms", "--seeds", "0"], "at least one seed and one worker"),
        (["tiny.toml", "two-uniforms", "--sampler", "gird"], "Did you mean grid?"),
        (["tiny.toml", "two-uniforms", "--trials", "3"], "needs the sampler random or tpe"),
        (["tiny.toml", "two-uniforms", "--set", "layrs=3"], "Did you mean layers"),
        (["tiny.toml", "two-uniforms", "--set", "batch_size=-3"], "batch_size"),
        (["tiny.toml", "two-uniforms", "--device", "tpu9"], "tpu9"),
        (["tiny.toml", "two-uniforms", "--out", "mine"], "holds no search"),
        (["tiny.toml", "two-uniforms", "--out", "plain.toml"], "is a file"),
    ],
)
def test_mistakes_get_one_sentence(
    words: list[str],
    expected: str,
    tmp_path: Path,
    main: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path, GRID, SEVERAL)
    (tmp_path / "plain.toml").write_text("[training]\nsteps = 3\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    before = times(tmp_path)
    assert main(*words) == 1
    text = capsys.readouterr().err
    assert expected in text
    assert text.count("Error:") == 1
    assert times(tmp_path) == before


def test_wrong_value_in_a_grid_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="learning_rate"):
        plan_search(experiment(tmp_path, "{ learning_rate = [1e-3, -1.0] }"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        run_search(plan_search(experiment(tmp_path)), tmp_path / "out", device="cuda")
    assert not (tmp_path / "out").exists()


def test_help_tells_what_decides(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Settings are chosen by validation log-likelihood; test rows play no part" in text
    assert all(word in text for word in ("--workers", "--sampler", "--prune", "--data-dir", "--seeds"))


def test_workers_take_turns_at_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker._default_workers("cpu") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert worker._default_workers("auto") == worker._default_workers("cuda") == 2
    assert worker._default_workers("cuda:1") == 1
    assert [worker._worker_device("auto", index) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert worker._worker_device("cuda:1", 0) == "cuda:1"
    assert worker._sharing(3, "auto") == "3 workers share the runs, on 2 GPUs."
