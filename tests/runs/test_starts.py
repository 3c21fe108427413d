"""What the flow of a table starts from, and which start is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ciflows
from ciflows import Indexed
from ciflows.tables import start
from ciflows.training import staged


def test_a_mixture_of_flows_that_helps_is_kept_and_saved(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(400, 6))
    bent = np.concatenate([x[:, :1], x[:, 1:] + x[:, :-1] ** 2], axis=1)
    frame = dict(zip("abcdef", bent.T, strict=True))
    small = {"layers": 1, "hidden": [16], "steps": 300, "validate_every": 20, "learning_rate": 0.01}
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    members = run.metrics["members"]
    assert sum(member["trained"] for member in members) > 1
    assert any(member["components"] > 1 for member in members)
    assert run.metrics["indexed"] is False
    assert f"mixture of {len(members)} flows" in run.metrics["story"]
    again = ciflows.load_run(tmp_path / "run")
    rows = {name: values[:50] for name, values in frame.items()}
    assert torch.equal(again.log_prob(rows), run.log_prob(rows))


def test_the_mixture_that_a_small_table_starts_from_finds_its_clusters(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    which = random.integers(0, 5, 3000)
    frame = {name: 10 * random.normal(size=5)[which] + random.normal(size=3000) for name in "ab"}
    small = {"layers": 1, "hidden": [8], "steps": 20, "validate_every": 20, "validation_samples": 2}
    run = ciflows.fit(frame, "nsf", out=tmp_path / "run", **small)
    assert len(run.flow.base.means) >= 5


def test_clusters_keep_their_shape_where_columns_look_heavy_tailed(tmp_path: Path) -> None:
    """Four narrow clusters, most rows in one: each column has heavy tails, and no cluster has."""
    random = np.random.default_rng(0)
    which = random.choice(4, size=1200, p=[0.7, 0.1, 0.1, 0.1])
    centres = np.array([[0, 0], [9, 5], [-8, 7], [10, -9]])[which]
    both = random.normal(size=(1200, 1))
    x = centres + both + 0.05 * random.normal(size=(1200, 2))
    frame = dict(zip("ab", x.T, strict=True))
    small = {"layers": 1, "hidden": [8], "steps": 100, "validate_every": 20, "learning_rate": 0.001}
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    fixed = run.metrics["members"][-1]
    assert not fixed["trained"]
    assert not fixed["tails"]
    again = ciflows.load_run(tmp_path / "run")
    assert np.array_equal(again.log_prob(frame), run.log_prob(frame))
    assert np.allclose(np.cov(run.sample(5000, seed=0).to_numpy().T), np.cov(x.T), rtol=0.2)


def test_a_large_table_has_all_of_the_time_for_one_flow(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    frame = {name: random.normal(size=7000) for name in "ab"}
    small = {"layers": 1, "hidden": [8], "steps": 80, "validate_every": 20, "validation_samples": 2}
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    assert "members" not in run.metrics


def test_a_second_flow_for_a_large_table_is_mixed_in_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = {"STILL_LEARNING": np.inf, "LEAST_NATS": np.inf}
    mixed = {"LEAST_BY_MIXTURE": -np.inf, "LEAST_GAIN": -np.inf, "LEAST_SHARE": -np.inf}
    for name, value in (settled | mixed).items():
        monkeypatch.setattr(staged, name, value)
    random = np.random.default_rng(0)
    frame = {"a": random.normal(size=7000), "b": random.poisson(3.0, size=7000)}
    small = {"layers": 1, "hidden": [16], "steps": 220, "validate_every": 20, "validation_samples": 2}
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    first, second = run.metrics["members"]
    assert first == second
    assert "mixture of 2 flows" in run.metrics["story"]
    again = ciflows.load_run(tmp_path / "run")
    rows = {name: values[:50] for name, values in frame.items()}
    pair = [each.log_prob(rows, seed=0) for each in (run, again)]
    assert torch.equal(*pair)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_panel_is_as_large_as_it_has_groups(
    grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "FEW_ROWS", 100)
    which, random = np.repeat(np.arange(60), 10), np.random.default_rng(0)
    where = 10 * np.sign(random.normal(size=(2, 60)))[:, which]  # four clusters
    frame = dict(zip("ab", where + random.normal(size=(2, 600)), strict=True))
    named = {"group": "who"} if grouped else {"exclude": ["who"]}
    small = {"layers": 1, "hidden": [8], "steps": 20, "validate_every": 20, "validation_samples": 2}
    run = ciflows.fit(frame | {"who": which}, "nsf", out=tmp_path / "run", **named, **small)
    assert (len(run.flow.base.means) >= 4) == grouped


def test_an_informative_index_keeps_the_mixture_that_a_table_starts_from(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    which = random.integers(0, 5, 600)
    frame = {name: 10 * random.normal(size=5)[which] + random.normal(size=600) for name in "ab"}
    small = {"layers": 1, "hidden": [8], "steps": 20, "validate_every": 20, "validation_samples": 2}
    small |= {"staged": True, "index_start": "informative"}  # which nothing may set aside in silence
    run = ciflows.fit(frame, "cif-nsf", out=tmp_path / "run", **small)
    assert any(isinstance(layer, Indexed) for layer in run.flow.layers)
    assert len(run.flow.base.means) >= 5
    again = ciflows.load_run(tmp_path / "run")
    assert torch.equal(again.log_prob(frame, seed=0), run.log_prob(frame, seed=0))
