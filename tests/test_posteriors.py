"""Variational inference on posteriors whose moments are known: those of docs/examples/posteriors.py."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "posteriors.py"
STEPS = {"funnel": 2000, "eight schools": 600, "logistic regression": 600}


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_weighted_moments_are_the_references(name: str, example: dict[str, Any]) -> None:
    posterior = example["POSTERIORS"][name]()
    flow = example["fit"](posterior, "cif-nsf", STEPS[name], 128)
    moments = example["weighted_moments"](flow, posterior, 20_000)
    away = (moments.mean - posterior.mean).abs()
    assert torch.all(away < 4 * moments.error + 0.01 * posterior.std)
    assert torch.all((moments.std / posterior.std - 1).abs() < 0.1)
