"""What the README and the docs claim, run as a reader would; minutes, so for `make test-all`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_the_index_at_least_halves_gap_and_leak_in_the_demonstration(tmp_path: Path) -> None:
    words = ["compare", "two-uniforms", "resflow", "cif-resflow", "--config", "demo", "--out", "demo"]
    subprocess.run([sys.executable, "-m", "ciflows", *words], cwd=tmp_path, check=True, env=ONE_THREAD)
    plain, indexed = json.loads((tmp_path / "demo" / "compare.json").read_text())
    assert indexed["gap"] < 0.5 * plain["gap"]
    assert indexed["leaked_mass"] < 0.5 * plain["leaked_mass"]
    assert plain["gap"] < 0.5


@pytest.mark.slow
def test_noisy_log_determinants_rise_with_the_draws_and_exact_ones_do_not() -> None:
    script = ROOT / "docs" / "examples" / "trap.py"
    done = subprocess.run(
        [sys.executable, str(script)], check=True, capture_output=True, text=True, env=ONE_THREAD
    )
    rows = [[float(word) for word in line.split()] for line in done.stdout.splitlines()[1:]]
    exact, noisy = [row[1] for row in rows], [row[2] for row in rows]
    assert max(exact) - min(exact) < 1e-3
    assert noisy[2] > noisy[1] > noisy[0] + 1
