"""The benchmark: what it measures, what it writes, and what it does without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.__main__ import main
from benchmarks.cases import CASES, GROWING, GROWTH, Case, growing_case
from benchmarks.markdown import to_markdown, update_document
from benchmarks.measure import BenchSettings, run_bench
from benchmarks.results import Machine, Result, Row, Side, Timing, read_result
from ciflows.errors import UserError
from ciflows.models import build_model

TINY = Case("resflow, tiny", "resflow", 2, {"layers": 1, "hidden": [8]}, batch=50)
NOT_NEEDED = (
    *("polars", "pyarrow", "pandas", "matplotlib", "normflows", "safetensors", "tensorboard", "optuna"),
    *("h5py", "jinja2", "PIL", "tomli_w", "scipy"),
)


def settings(**given: object) -> BenchSettings:
    return BenchSettings.model_validate({"repeats": 2} | given)


def side(name: str, ms: list[float]) -> Side:
    timing = Timing(ms=ms, mib=10.0, gflop=1.0)
    works = {"step": timing, "log_prob": timing, "sample": timing}
    return Side(name=name, parameters=1000, start_s=1.0, torch="2", works=works, round_trip=1e-6)


def result(kind: str = "cpu") -> Result:
    sides = [side("ours", [10.0, 20.0, 10.0]), side("normflows", [20.0, 60.0, 40.0])]
    shape = {"model": "resflow", "features": 2, "batch": 1000, "draws": 10}
    row = Row(case="resflow, 2-D", **shape, gflops=[100.0, 200.0, 100.0], sides=sides)
    machine = Machine(
        **{"device": "a processor", "kind": kind, "threads": 1, "cores": 2, "system": "Linux"},
        **{"python": "3", "torch": "2", "ciflows": "0", "date": "2026-01-01"},
    )
    return Result(machine=machine, points=1000, rows=[row], growth=[], notes=["maf, zuko: not there"])


def test_the_command_needs_few_libraries(tmp_path: Path) -> None:
    """On a machine that only computes there may be nothing else; and what is measured is kept."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)  # for the workers too
    words = ["--no-peers", "--repeats", "1", "--only", "nsf, 2-D", "--out", "bench"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_result(tmp_path / "bench" / "bench.json").rows
    (ours,) = row.sides
    assert all(timing.ms[0] > 0 and (timing.gflop or 0) > 0 for timing in ours.works.values())
    assert row.over_products("step") > 1
    assert "nsf, 2-D" in (tmp_path / "bench" / "bench.md").read_text()


def test_a_side_that_fails_is_told_of_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "CASES", [Case(**vars(TINY) | {"peer": "no such library"})])
    found = run_bench(tmp_path / "bench.json", settings(peers=Path(sys.executable), growth=False))
    assert [one.name for one in found.rows[0].sides] == ["ours"]
    assert found.notes == ["resflow, tiny, no such library: KeyError: 'no such library'"]
    assert read_result(tmp_path / "bench.json") == found


CHECKOUT = {
    "config/__init__.py": """
def get_config(dataset, model, use_baseline):
    return {"sizes": [[2, model, dataset, use_baseline]]}
def expand_grid(config):
    return [{"size": size} for size in config["sizes"]]
def get_schema(config):
    assert config["size"] == [2, "nsf-ar", "power", False] and config["model"] == "nsf-ar"
    return config["size"][:1]
""",
    "cif/models/__init__.py": """
import torch
class Density(torch.nn.Linear):
    def elbo(self, x, num_importance_samples):
        return {"log-w": self(x)[:, None, :1].expand(-1, num_importance_samples, -1)}
    def sample(self, n):
        return torch.zeros(n, 2)
def get_density(schema, x_train):
    return Density(*schema, x_train.shape[1])
""",
}


def test_the_authors_code_is_called_as_its_own_commands_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the same entry points: the code itself cannot be fetched in a test."""
    for name, text in CHECKOUT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sizes = {"layers": 1, "hidden": [8], "affine_hidden": [8], "prior_hidden": [8]}
    case = Case("cif-nsf, tiny", "cif-nsf", 2, sizes, batch=50, draws=2, authors="power")
    monkeypatch.setattr(measure, "CASES", [case])
    found = run_bench(tmp_path / "bench.json", settings(authors=tmp_path, growth=False, repeats=1))
    assert found.notes == []
    assert [one.name for one in found.rows[0].sides] == ["ours", "authors"]
    assert found.rows[0].ratios("authors", "log_prob")
    assert "the authors' code" in to_markdown(found)


def test_what_was_measured_before_an_interruption_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "CASES", [TINY, Case(**vars(TINY) | {"name": "second"})])

    def interrupt(what: str, done: float) -> None:
        if what == "second":
            assert 0 < done < 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(tmp_path / "bench.json", settings(growth=False), interrupt)
    assert [row.case for row in read_result(tmp_path / "bench.json").rows] == ["resflow, tiny"]


def test_ratios_are_taken_within_repetitions() -> None:
    (row,) = result().rows
    assert row.ratios("normflows", "step") == [2.0, 3.0, 4.0]
    assert row.ratios("zuko", "step") == []
    assert row.over_products("step") == pytest.approx(1.0)  # 1 GFLOP at 100 GFLOP/s: 10 ms
    assert "| resflow, 2-D | normflows | 3.00 (2.50–3.50) |" in to_markdown(result())


def test_a_result_takes_its_own_place_in_a_document(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n<!-- bench cpu: begin -->\nold\n<!-- bench cpu: end -->\nmiddle\n"
        "<!-- bench cuda: begin -->\nkept\n<!-- bench cuda: end -->\nlast\n"
    )
    for _ in range(2):
        update_document(page, result())
    text = page.read_text()
    assert text.count("a processor") == 1
    assert "old" not in text
    assert all(word in text for word in ("# Top", "middle", "kept", "last", "maf, zuko: not there"))
    page.write_text("nothing")
    with pytest.raises(UserError, match="has no part between"):
        update_document(page, result())


def test_the_page_of_the_docs_has_a_place_for_each_kind_of_device() -> None:
    page = (Path(__file__).parent.parent / "docs" / "performance-tables.md").read_text()
    for kind in ("cpu", "cuda"):
        assert page.index(f"<!-- bench {kind}: begin -->") < page.index(f"<!-- bench {kind}: end -->")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_can_be_built(case: Case) -> None:
    flow = build_model(case.model, features=case.features, **case.settings)
    assert flow.exact == (not case.model.startswith("cif-"))
    if case.plain is not None:
        assert build_model(case.model.removeprefix("cif-"), features=case.features, **case.plain).exact


@pytest.mark.parametrize("model", GROWING)
@pytest.mark.parametrize("growth", GROWTH, ids=lambda growth: growth.size)
def test_a_size_grows_alone(model: str, growth: object) -> None:
    first, last = (growing_case(model, growth, growth.values[at]) for at in (0, -1))
    flat = [vars(case) | case.settings | {"name": "", "settings": None} for case in (first, last)]
    assert [key for key in flat[0] if flat[0][key] != flat[1][key]] == [growth.size]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in this process and an empty folder; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert (end.value.code or 0) == code, printed
        return printed.out + printed.err

    return run


def test_mistakes_are_named(command: Callable[..., str], tmp_path: Path) -> None:
    assert "No case has nonsense" in command("--only", "nonsense", code=1)
    assert "There is no device" in command("--device", "tpu", code=1)
    assert "There is no file" in command("--show", "none.json", code=1)
    (tmp_path / "odd.json").write_text("{}")
    assert "is not a benchmark's result" in command("--show", "odd.json", code=1)
    assert "not a checkout" in command("--no-peers", "--authors", "nowhere", code=1)
    assert not (tmp_path / "runs").exists()
