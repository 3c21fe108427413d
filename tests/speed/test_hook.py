"""One hook: what it replaces, and that nothing depends on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ciflows.core.indexed
import ciflows.training.step  # noqa: F401, both have replaceable functions
from ciflows.core.hook import plain, replaceable, replaceable_names
from ciflows.speed import VERSIONS, gpu

SOURCE = Path(__file__).parents[2] / "src"

TRAIN = """
import sys
import torch
if sys.argv[2] == "without":
    sys.modules["ciflows.speed"] = None
import ciflows
from ciflows.training import TrainingSettings, fit_flow

torch.set_num_threads(1)
x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
settings = TrainingSettings(steps=5, batch_size=50, validate_every=5, validation_samples=2)
found = []
for name in ("cif-resflow", "cif-maf", "cif-nsf"):
    flow = ciflows.build_model(name, features=2, layers=2, seed=0)
    fit_flow(flow, x[:150], x[150:], settings, seed=0)
    found += [flow.log_prob(x[:20], 5, seed=0), flow.sample(5, seed=0)]
assert any(name.startswith("ciflows.speed.") for name in sys.modules) is (sys.argv[2] == "with")
torch.save(found, sys.argv[1])
"""


def test_without_speed_the_library_gives_the_same_results(tmp_path: Path) -> None:
    found = []
    for how in ("with", "without"):
        command = [sys.executable, "-c", TRAIN, str(tmp_path / how), how]
        path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        found.append(torch.load(tmp_path / how))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_every_version_replaces_a_function_that_exists() -> None:
    assert VERSIONS.keys() - {"on"} == replaceable_names & VERSIONS.keys()
    assert len(VERSIONS) > 10


ROOMS = ["core", "layers", "networks", "models", "tables", "datasets", "training"]


@pytest.mark.parametrize("room", ROOMS)
def test_only_the_hook_reaches_speed(room: str) -> None:
    files = list((SOURCE / "ciflows" / room).glob("*.py"))
    assert files
    reaching = [path.name for path in files if "ciflows.speed" in path.read_text()]
    assert reaching == (["hook.py"] if room == "core" else [])


def test_plain_functions_run_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    @replaceable
    def double(x: int) -> int:
        return 2 * x

    name = next(name for name in replaceable_names if name.endswith("double"))
    monkeypatch.setitem(VERSIONS, name, lambda function, x: function(x) + 1)
    assert double(3) == 7
    with plain():
        assert double(3) == 6
    assert double(3) == 7


@pytest.mark.skipif(not gpu.INSTALLED, reason="needs triton")
@pytest.mark.skipif(gpu.INTERPRETED, reason="is itself interpreted")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs these tests itself")
def test_kernels_are_right_where_triton_interprets_them() -> None:
    tests = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
    command += ["-W", "ignore::RuntimeWarning"]  # numpy's, of memory that nothing reads in the end
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_cpu_has_no_kernels() -> None:
    assert gpu.INTERPRETED or not gpu.fits_matrix(torch.eye(2)[:, None])
