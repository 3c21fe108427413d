"""What the flow of a table starts from, and which start is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import ciflows


def test_a_mixture_of_gaussians_that_helps_is_kept_and_saved(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    which = random.integers(0, 5, 3000)
    frame = {name: 10 * random.normal(size=5)[which] + random.normal(size=3000) for name in "ab"}
    small = {"layers": 1, "hidden": [8], "steps": 80, "validate_every": 20, "validation_samples": 2}
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    own, *mixtures = run.metrics["members"]
    assert own["trained"]
    assert mixtures
    assert not any(mixture["trained"] for mixture in mixtures)
    assert all(mixture["components"] > 1 for mixture in mixtures)
    assert run.metrics["indexed"] is False
    assert "mixture" in run.metrics["story"]
    again = ciflows.load_run(tmp_path / "run")
    rows = {name: values[:50] for name, values in frame.items()}
    assert torch.equal(again.log_prob(rows), run.log_prob(rows))


def test_a_large_table_has_all_of_the_time_for_one_flow(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    frame = {name: random.normal(size=13_000) for name in "ab"}
    small = {"layers": 1, "hidden": [8], "steps": 80, "validate_every": 20, "validation_samples": 2}
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    assert "members" not in run.metrics
