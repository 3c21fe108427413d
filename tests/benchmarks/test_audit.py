"""The script of docs/audit.md: its mathematics, and that the page shows what it measured."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("audit", ROOT / "docs" / "examples" / "audit.py")
assert SPEC is not None
assert SPEC.loader is not None
audit = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(audit)


def test_gaussian_noise_raises_a_log_mean_exp_by_half_its_variance() -> None:
    few, many = audit.gaussian_bias(torch.tensor([0.0, 0.5, 20.0]), 100), 0.25
    assert few[0] == 0
    assert math.isclose(few[1], many, abs_tol=0.02)
    assert 3 < few[2] < 8  # far from 10: the largest of a hundred draws decides
    assert audit.gaussian_bias(torch.tensor([2.0]), 1).abs() < 0.1


def test_one_draw_has_no_bias_and_more_draws_have_more() -> None:
    noise = torch.randn(100, 2000, generator=torch.Generator().manual_seed(0))
    means = [audit.averaged(noise, m).mean().item() for m in (1, 10, 100)]
    assert abs(means[0]) < 0.01
    assert means[0] < means[1] < means[2] < 0.5


def test_plain_flows_are_measured() -> None:
    found = audit.on_modes(3, steps=2, rows=5)
    assert len(found["variance"]) == len(found["row bias"]) == 5
    assert min(found["variance"]) > 0
    assert set(found["bias"]) == set(audit.DRAWS)


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    found = json.loads((ROOT / "docs" / "figures" / "audit.json").read_text())
    assert audit.fill(page, found) == page
    assert [one["features"] for one in found["made up"]] == list(audit.DIMENSIONS)
