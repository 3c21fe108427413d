"""What two processes do together in test_processes.py: torchrun runs this file."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ciflows
from ciflows import Flow
from ciflows.core.noise import Noise, ShareNoise
from ciflows.core.objectives import ELBO
from ciflows.core.rows import Rows
from ciflows.datasets import SYNTHETIC
from ciflows.errors import LostProcessError
from ciflows.training import Outcome, TrainingSettings, fit_flow
from ciflows.training.checkpoint import Checkpoints
from ciflows.training.monitor import Monitor
from ciflows.training.processes import ALONE, Processes, join_processes
from ciflows.training.step import Step

BATCH = 33  # which two processes cannot share evenly
SMALL: dict[str, dict[str, Any]] = {
    "cif-resflow": {"features": 2, "layers": 2, "hidden": [16, 16]},
    "cif-maf": {"features": 2, "layers": 2, "hidden": [16]},
    "maf": {"features": 2, "layers": 2, "hidden": [16], "batch_norm": True},
    "cif-nsf": {"features": 2, "layers": 2, "hidden": [16], "residual": True, "dropout": 0.2},
    "cif-realnvp-image": {
        **{"shape": (1, 8, 8), "channels": 4, "blocks": 1, "affine_channels": 4, "affine_blocks": 1},
        **{"index_channels": 4, "index_blocks": 1},
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "cif-resflow": {"optimizer": "muon", "learning_rate": 1e-3, "patience": 3},
    "cif-maf": {"objective": "elbo", "clip": 0.5},
    "maf": {},
    "cif-nsf": {"average": 0.9, "learning_rate": 1e-3},
    "cif-realnvp-image": {"objective": "elbo", "learning_rate": 1e-3},
}


def build(name: str) -> Flow:
    return ciflows.build_model(name, seed=0, **SMALL[name]).double()


def points(name: str) -> Tensor:
    if name.endswith("image"):
        numbers = torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (240, 1, 8, 8), generator=numbers, dtype=torch.uint8)
    return SYNTHETIC["two-uniforms"].sample(360, seed=1)


def gradient(name: str, objective: str, processes: Processes = ALONE) -> Tensor:
    """The gradient of the first step, and what it leaves in the flow's buffers, in one vector."""
    flow, together = build(name), processes.size > 1
    rows = Rows(points(name)[:BATCH]).on(flow)
    rows = Rows(rows.x, weight=torch.linspace(0.5, 1.5, BATCH, dtype=torch.float64))
    flow.train().initialise(rows.x, None, Noise.seeded(0))
    settings = TrainingSettings(objective=objective, draws=3, precision="float64")
    own, numbers = processes.share(BATCH), Noise.seeded(5)
    noise = ShareNoise(numbers.generator, own, BATCH) if together else numbers
    step = Step(flow, settings, noise, processes, BATCH if together else None)
    step._spin()
    step._loss(rows[own]).backward()
    processes.add_gradients(step.parameters)
    grads = [p.grad for p in step.parameters if p.grad is not None]
    return torch.cat([t.detach().flatten().double() for t in (*grads, *flow.buffers())])


def train(
    name: str,
    steps: int,
    processes: Processes = ALONE,
    folder: Path | None = None,
    until: float = 1.0,
    monitor: Monitor | None = None,
    **others: Any,
) -> tuple[Outcome, Tensor]:
    """Train for some steps; the outcome without its time, and all weights in one vector."""
    flow, x = build(name), points(name)
    common = {"steps": steps, "batch_size": BATCH, "validate_every": 10, "validation_samples": 3}
    settings = TrainingSettings(**common | {"draws": 2, "precision": "float64"} | WAYS[name] | others)
    rows = Rows(x[60:], weight=torch.linspace(0.5, 1.5, len(x) - 60))
    held_out = Rows(x[:60], weight=torch.linspace(1.5, 0.5, 60))
    checkpoints = None if folder is None else Checkpoints(folder)
    outcome = fit_flow(
        flow, rows, held_out, settings, seed=2, checkpoints=checkpoints, until=until,
        processes=processes, monitor=monitor, clock=Clock(processes.rank),
    )  # fmt: skip
    state = torch.cat([value.flatten().double() for value in flow.state_dict().values()])
    digest = hashlib.sha256(state.numpy().tobytes()).hexdigest()
    processes.check_same(f"{digest} {outcome}", "Two processes ended with other weights.")
    return outcome._replace(seconds=0.0), state


class Clock:
    """A second passes whenever it is looked at; in the second process a minute."""

    def __init__(self, rank: int) -> None:
        self.tick, self.now = 60.0 if rank else 1.0, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Spoilt(ELBO):
    """An objective that is once not finite, in the last process alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        self.calls += 1
        last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        spoilt = math.nan if last and self.calls == 15 else 1.0
        return spoilt * super().__call__(flow, batch, noise)


class Mortal(ELBO):
    """An objective that kills the second process in the middle of a step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        self.calls += 1
        if self.calls == 60 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(flow, batch, noise)


def equal(folder: Path, steps: dict[str, int], processes: Processes) -> None:
    """Gradients, and training from start to end."""
    kinds = [(name, objective) for name in SMALL for objective in ("elbo", "dreg")]
    found = {
        "gradients": {kind: gradient(*kind, processes) for kind in kinds},
        "training": {name: train(name, count, processes) for name, count in steps.items()},
        "timed": train("cif-maf", 100, processes, max_minutes=0.5)[0],
        "spoilt": spoilt(processes),
    }
    if processes.main:
        torch.save(found, folder / "equal.pt")


def spoilt(processes: Processes = ALONE) -> Outcome:
    """Training with a loss that is once not finite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSettings, "make_objective", lambda _: Spoilt())
        return train("cif-maf", 20, processes)[0]


def resumed(folder: Path, processes: Processes) -> None:
    """Half of training by two processes, for one to finish; and the reverse."""
    train("cif-maf", 40, processes, folder / "by-two", until=0.5)
    if processes.main:
        train("cif-maf", 40, ALONE, folder / "by-one", until=0.5)
    finished = train("cif-maf", 40, processes, folder / "by-one")
    if processes.main:
        torch.save(finished, folder / "resumed.pt")


def killed(folder: Path, processes: Processes) -> None:
    """Training whose second process dies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSettings, "make_objective", lambda _: Mortal())
        train("cif-maf", 100, processes, folder / "killed")


@contextmanager
def slow_to_print() -> Iterator[None]:
    """Let torchrun's request to end come before the error is printed."""
    try:
        yield
    except LostProcessError:
        time.sleep(1)
        raise


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    if sys.argv[1] == "killed":
        with slow_to_print(), join_processes() as processes:
            killed(folder, processes)
        return
    with join_processes() as processes:
        if sys.argv[1] == "long":
            equal(folder, dict.fromkeys(SMALL, 200), processes)
        else:
            equal(folder, {"cif-resflow": 20, "maf": 20, "cif-nsf": 20}, processes)
            resumed(folder, processes)


if __name__ == "__main__":
    main()
