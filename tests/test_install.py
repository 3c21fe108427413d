"""What a plain `pip install ciflows` can do, and what it says about the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ciflows
from ciflows.errors import EXTRAS

SOURCE = Path(ciflows.__file__).parents[1]
COMMAND_LINE = ("rich", "typer", "tomli_w")
CORE = """
import torch
import ciflows
from ciflows.settings import parse_settings
from ciflows.training import TrainingSettings, fit_flow

flow = ciflows.build_model("cif-maf", features=2)
assert flow.sample(3).shape == (3, 2)
settings = parse_settings(TrainingSettings, {"steps": 2, "batch_size": 9}, "training")
assert fit_flow(flow, torch.randn(40, 2), torch.randn(9, 2), settings).steps == 2
assert flow.eval().estimate(torch.randn(5, 2), 3).log_prob.isfinite().all()
"""
TINY = ("--model", "maf", "--set", "steps=2", "--set", "layers=1", "--set", "hidden=[4]")


def run(folder: Path, *words: str, without: tuple[str, ...] = tuple(EXTRAS)) -> tuple[int, str]:
    """Run Python where some packages cannot be imported; its exit code and what it printed."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({without!r}))\n"
    (folder / "sitecustomize.py").write_text(blocked)
    path = os.pathsep.join([str(folder), str(SOURCE)])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_models_train_and_score_without_any_extra_nor_the_command_line(tmp_path: Path) -> None:
    code, text = run(tmp_path, "-c", CORE, without=(*EXTRAS, *COMMAND_LINE))
    assert code == 0, text


def test_run_without_extras_says_once_what_it_lacks(tmp_path: Path) -> None:
    code, text = run(tmp_path, "-m", "ciflows", "fit", "annulus", "--out", "run", *TINY)
    assert code == 0, text
    assert text.count('pip install "ciflows[tensorboard]"') == 1
    assert text.count('No report: matplotlib is not installed. Run: pip install "ciflows[report]"') == 1
    assert (tmp_path / "run" / "metrics.json").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["fit", "people.csv"], "tables"),
        (["search", "maf", "power"], "search"),
        (["compare", "annulus", "maf", "cif-maf"], "report"),
        (["fit", "photos"], "paper"),
    ],
)
def test_command_names_the_extra_that_it_needs(words: list[str], extra: str, tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "photos").mkdir()
    for number in range(10):
        (tmp_path / "photos" / f"{number}.png").write_bytes(b"")
    code, text = run(tmp_path, "-m", "ciflows", *words)
    assert code == 1
    assert f'is not installed. Run: pip install "ciflows[{extra}]"' in text
    assert "Traceback" not in text


def test_python_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("a,b\n1,2\n3,4\n")
    code, text = run(tmp_path, "-c", "import ciflows; ciflows.fit('people.csv')")
    assert code == 1
    assert 'polars is not installed. Run: pip install "ciflows[tables]"' in text


def test_version_needs_no_installation(tmp_path: Path) -> None:
    """Metadata of an installed package are not read: a source tree has none."""
    blocked = "import importlib.metadata as m; m.version = None; from ciflows.cli import main; main()"
    code, text = run(tmp_path, "-c", blocked, "--version")
    assert (code, text.strip()) == (0, f"ciflows {ciflows.__version__}")
