"""Two processes on a CPU do what one does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_training import Listener
from together import SMALL, gradient, spoilt, train
from torch import Tensor, nn
from torch.testing import assert_close

from ciflows import Flow, cli
from ciflows.core.noise import Noise
from ciflows.errors import LostProcessError, UserError
from ciflows.files import read_json
from ciflows.layers import ActNorm
from ciflows.training import Outcome, TrainingSettings, processes
from ciflows.training.processes import ALONE, Processes
from ciflows.training.step import Step

HERE = Path(__file__).parent
# standalone: on a port of its own, so that tests may run side by side
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def torchrun(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(cli.__file__).parents[1]), *sys.path[:1]])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [*TORCHRUN, *map(str, words)], env=env, cwd=cwd, capture_output=True, text=True, timeout=3600
    )


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """In one test, since the two take seconds to start."""
    done = torchrun(HERE / "together.py", "short", tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "equal.pt", weights_only=False)
    check_gradients(found["gradients"])
    check_training(found["training"])
    check_clock_and_loss(found["timed"], found["spoilt"])
    check_resumed(tmp_path)


def check_gradients(found: dict[tuple[str, str], Tensor]) -> None:
    assert {name for name, _ in found} == set(SMALL)
    for kind, values in found.items():
        same = torch.isclose(values, gradient(*kind), rtol=1e-6, atol=1e-9)
        assert bool(same.all()), kind


def check_training(found: dict[str, tuple[Outcome, Tensor]]) -> None:
    for name, (outcome, weights) in found.items():
        expected, alone = train(name, outcome.steps)
        assert tuple(outcome) == pytest.approx(tuple(expected), abs=1e-6), name
        assert_close(weights, alone, rtol=1e-4, atol=1e-6)


def check_clock_and_loss(timed: Outcome, rolled_back: Outcome) -> None:
    """The second process has another clock, and alone a loss that is not finite."""
    expected = train("cif-maf", 100, max_minutes=0.5)[0]
    assert 0 < expected.steps < 100
    assert timed.steps == expected.steps
    assert timed.validation == pytest.approx(expected.validation, abs=1e-6)
    assert rolled_back.rollbacks == 1
    assert rolled_back.validation == pytest.approx(spoilt().validation, abs=1e-6)


def check_resumed(folder: Path) -> None:
    """Checkpoints resume on another number of processes."""
    straight, listener = train("cif-maf", 40)[1], Listener()
    assert_close(train("cif-maf", 40, folder=folder / "by-two", monitor=listener)[1], straight)
    assert listener.rows[0][0] == 30  # it goes on after step 20
    assert_close(torch.load(folder / "resumed.pt", weights_only=False)[1], straight)


def test_a_killed_process_ends_the_run_with_a_sentence_and_a_checkpoint(tmp_path: Path) -> None:
    done = torchrun(HERE / "together.py", "killed", tmp_path)
    assert done.returncode != 0
    # from torch or from torchrun, whichever is first
    assert len(re.findall(r"LostProcessError: .*nother process of this run has ended", done.stderr)) == 1
    (checkpoint,) = (tmp_path / "killed").iterdir()
    assert checkpoint.name == "step-000000050.safetensors"
    assert train("cif-maf", 100, folder=tmp_path / "killed")[0].steps == 100


def test_torchrun_may_end_a_process_before_torch_knows() -> None:
    before = signal.signal(signal.SIGTERM, processes._end_on_request)
    try:
        with pytest.raises(LostProcessError, match="torchrun has ended"):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the second time nothing happens: the end is under way
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_writes_one_run_as_one_process_does(
    tmp_path: Path, command: Callable[..., str]
) -> None:
    rows = torch.randn(300, 2, generator=torch.Generator().manual_seed(0)).tolist()
    lines = [f"{a},{abs(a + b)},{'xy'[a > b]},{1 + b * b}" for a, b in rows]
    (tmp_path / "people.csv").write_text("\n".join(["a,b,c,w", *lines]))
    words = ["fit", "people.csv", "--weights", "w", "--no-report", "--precision", "float64"]
    for setting in ("staged=true", "steps=80", "layers=1", "hidden=[8]", "evaluation.samples=30"):
        words += ["--set", setting]
    two = torchrun("-m", "ciflows", *words, "--out", "two", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("Testing ...") == two.stdout.count("Next:") == 1
    command(*words, "--out", "one")
    found, expected = (read_json(tmp_path / name / "metrics.json") for name in ("two", "one"))
    assert found["test"] == pytest.approx(expected["test"], rel=1e-6)
    assert found["validation"] == pytest.approx(expected["validation"], abs=1e-6)
    assert found["story"] == expected["story"]


class Two(Processes):
    """Two processes, of which nothing is asked yet."""

    size = 2


def test_what_two_processes_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("together.BATCH", 1)
    with pytest.raises(UserError, match="A batch of 1 cannot be shared by 2 processes"):
        train("cif-maf", 10, Two())
    own = ActNorm((2,))
    own.norm = nn.BatchNorm1d(2)
    with pytest.raises(UserError, match="BatchNorm1d takes the mean over a batch"):
        Step(Flow([own]), TrainingSettings(), Noise(), Two(), 10)


def test_only_fit_runs_in_several_processes(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
) -> None:
    monkeypatch.setattr(cli, "_together", nullcontext)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "models runs in one process: leave out torchrun." in command("models", code=1)


@pytest.mark.slow
def test_two_hundred_steps_are_those_of_one_process(tmp_path: Path) -> None:
    done = torchrun(HERE / "together.py", "long", tmp_path)
    assert done.returncode == 0, done.stderr
    for name, (outcome, _) in torch.load(tmp_path / "equal.pt", weights_only=False)["training"].items():
        assert outcome.validation == pytest.approx(train(name, 200)[0].validation, abs=1e-4), name


def test_shares_make_up_the_whole() -> None:
    assert ALONE.share(5) == slice(0, 5)
    for rows in (2, 3, 7):
        shares = []
        for rank in range(3):
            process = Processes()
            process.rank, process.size = rank, 3
            shares += list(range(rows))[process.share(rows)]
        assert shares == list(range(rows))
