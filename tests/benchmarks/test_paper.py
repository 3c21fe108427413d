"""The queue of the paper's rows: what it lists, how it is worked off, and the page that it ends in."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
import ciflows
from benchmarks.paper.__main__ import app
from benchmarks.paper.chart import lines
from benchmarks.paper.figures import Figure, read_figures, write_figures
from benchmarks.paper.page import figures_table, write_pages
from benchmarks.paper.plan import choose, list_jobs, read_queue
from benchmarks.paper.release import KEPT, pack
from ciflows.errors import UserError
from ciflows.runs.config import read_config, read_overrides, resolve

ROOT = Path(__file__).parents[2]
TABLE = '[[tables]]\nname = "some"\ntitle = "Some"\nseeds = [0]\ndata = {data}\n'
ROW = '[[tables.rows]]\nname = "{name}"\nlabel = "{label}"\nmodel = "{model}"\nminutes = 1\n'
LONG = """training = { steps = 400, batch_size = 20, validate_every = 50, checkpoint_seconds = 0 }
architecture = { layers = 1, hidden = [8] }
evaluation = { points = 50 }
"""


def run_queue(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.paper", "--out", "queue", "--device", "cpu", *words]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == code, printed
    return printed


def states(folder: Path) -> dict[str, str]:
    runs = json.loads((folder / "queue" / "queue.json").read_text())["runs"]
    return {name: run["state"] for name, run in runs.items()}


def wait_for(path: Path) -> None:
    end = time.monotonic() + 600
    while not (path.exists() and any(path.iterdir())):
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.02)


def test_the_queue_has_every_row_with_a_configuration() -> None:
    jobs = list_jobs(read_queue())
    assert len({job.key for job in jobs}) == len(jobs)
    power = {job.row.name for job in jobs if job.table.name == "power"}
    ablation, splines = {"cif-id-1", "cif-id-2", "cif-id-3"}, {"nsf", "cif-nsf-1", "cif-nsf-2"}
    assert power >= {"maf", "cif-maf", "resflow-10", "cif-resflow-10"} | splines | ablation
    assert {job.data for job in jobs} >= {
        "annulus",
        "rings",
        "power",
        "bsds300",
        "mnist",
        "fashion-mnist",
    }
    for job in jobs:
        assert job.config().seed == job.seed
        pair = next((one for one in jobs if one.row.name == job.row.pair and one.data == job.data), None)
        if pair is not None:  # the plain flow never trains for fewer steps, and on the same schedule
            ours, plain = (one.config().training for one in (job, pair._replace(table=job.table)))
            assert ours.steps <= plain.steps
            assert (ours.max_minutes, ours.schedule) == (plain.max_minutes, plain.schedule)


def test_commands_train_what_the_queue_trains() -> None:
    jobs = list_jobs(read_queue())
    first = {(job.table.name, job.row.name): job for job in reversed(jobs)}
    for job in first.values():
        words = shlex.split(job.command())
        pairs = list(itertools.pairwise(words))
        layers = [read_config(value) for name, value in pairs if name == "-c"]
        model = next((value for name, value in pairs if name == "--model"), None) or layers[0]["model"]
        layers.append(read_overrides(model, [value for name, value in pairs if name == "--set"]))
        seed = int(words[words.index("--seed") + 1])
        assert resolve(words[2], model, seed, layers) == job.config()


def test_runs_are_chosen_by_words() -> None:
    jobs = list_jobs(read_queue(), quick=True)
    assert {job.table.name for job in choose(jobs, ["mnist/"])} == {"mnist", "fashion-mnist"}
    with pytest.raises(UserError, match="Tables: "):
        choose(jobs, ["nonsense"])


def test_a_pair_has_to_be_there(tmp_path: Path) -> None:
    row = ROW.format(name="cif-maf", label="CIF-MAF", model="cif-maf")
    (tmp_path / "queue.toml").write_text(TABLE.format(data='["rings"]') + row + 'pair = "mafia"\n')
    with pytest.raises(UserError, match="no row 'mafia'"):
        read_queue(tmp_path / "queue.toml")


def test_a_killed_queue_goes_on(tmp_path: Path) -> None:
    rows = ROW.format(name="maf", label="MAF", model="maf") + LONG
    (tmp_path / "some.toml").write_text(TABLE.format(data='["rings", "annulus"]') + rows)
    killed = run_queue(tmp_path, "--queue", "some.toml")
    folder = tmp_path / "queue" / "some" / "maf-annulus-0"
    wait_for(folder / "checkpoints")
    killed.kill()
    killed.communicate()
    first = folder.with_name("maf-rings-0") / "metrics.json"
    before = first.stat().st_mtime_ns
    assert states(tmp_path) == {"some/maf-rings-0": "finished", "some/maf-annulus-0": "running"}
    assert not (folder / "metrics.json").exists()

    printed = finish(run_queue(tmp_path, "--queue", "some.toml"))
    assert "2 of 2 runs are finished" in printed
    assert first.stat().st_mtime_ns == before
    assert json.loads((folder / "metrics.json").read_text())["steps"] == 400
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_quick_runs_end_in_a_page(tmp_path: Path) -> None:
    """Every kind of data and of row once, two at a time, and one that fails."""
    text = (ROOT / "benchmarks" / "paper" / "queue.toml").read_text()
    missing = TABLE.format(data='["gas"]') + ROW.format(name="maf", label="MAF", model="maf")
    (tmp_path / "some.toml").write_text(f"{text}\n{missing}")
    only = ["power/maf-power-0", "power/cif-maf-power-0", "bsds300/resflow-10-bsds300-0", "some/"]
    words = [word for one in [*only, "fashion-mnist/realnvp-4"] for word in ("--only", one)]
    printed = finish(run_queue(tmp_path, "--quick", "--jobs", "2", "--queue", "some.toml", *words))
    found = states(tmp_path)
    assert {name for name, state in found.items() if state != "finished"} == {"some/maf-gas-0"}
    assert found["some/maf-gas-0"] == "failed"
    assert "gas is not in" in printed
    page = (tmp_path / "queue" / "page" / "results.md").read_text()
    assert "tiny runs on made-up data" in page
    assert "| CIF-MAF |" in page
    assert "| +0.290 |" in page  # what the paper's index gains on POWER
    assert (tmp_path / "queue" / "page" / "figures" / "results.png").stat().st_size > 10_000
    runs = (tmp_path / "queue" / "page" / "results" / "power.md").read_text()
    assert "ciflows fit power -c cif-maf --seed 0" in runs
    assert "Machine: CPU, 1 thread" in runs

    jobs = [job for job in list_jobs(read_queue(), quick=True) if job.table.name == "power"]
    pack(jobs, tmp_path / "queue", tmp_path / "small.zip")
    with zipfile.ZipFile(tmp_path / "small.zip") as file:
        file.extractall(tmp_path)
    folder = tmp_path / "small" / "power" / "cif-maf-power-0"
    assert {path.name for path in folder.iterdir()} == set(KEPT)
    run = ciflows.load_run(folder)
    assert run.flow.shape == (6,)
    assert run.metrics["steps"] == 20


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["--quick", "--document", "docs"], "leave --document out"),
        (["--queue", "none.toml"], "There is no file none.toml"),
        (["--quick", "--release", "small.zip"], "no finished run"),
        (["--figures", "none.toml"], "There is no file none.toml"),
    ):
        with pytest.raises(UserError, match=message):
            CliRunner().invoke(app, words, catch_exceptions=False)
    listed = CliRunner().invoke(app, ["--list", "--only", "figure-1/"], catch_exceptions=False)
    assert "18 runs, about 1 hours one by one" in listed.output
    assert list(tmp_path.glob("docs")) == []


def figures() -> list[Figure]:
    rows = [
        {"row": "MAF", "value": 0.4, "error": 0.01, "seeds": 3, "paper": 0.19},
        {"row": "CIF-MAF", "value": 0.5, "seeds": 3, "paper": 0.48, "pair": "MAF", "cif": True},
        {"row": "CIF-Id-1", "cif": True, "note": "It was not run."},
        {"row": "Other", "value": -2.5, "paper": 1.6, "comparable": False},
    ]
    return [Figure(table="power", data="power", **row) for row in rows]


def test_the_table_of_figures(tmp_path: Path) -> None:
    text = figures_table(figures())
    assert "| [power](results/power.md) | MAF | 0.400 ± 0.010 | 3 | – | – | 0.190 | – |" in text
    assert "|  | CIF-MAF | 0.500 | 3 | – | +0.100 | 0.480 | +0.290 |" in text
    assert "|  | CIF-Id-1 | – | – | – | – | – | – |" in text
    assert "| (1.600: not comparable) | – |" in text
    assert "- power, CIF-Id-1: It was not run." in text
    write_figures(tmp_path / "figures.toml", figures())
    assert read_figures(tmp_path / "figures.toml") == figures()


def test_a_line_of_the_chart_is_a_pair() -> None:
    found = [(line.label, line.plain is not None, line.cif is not None) for line in lines(figures())]
    assert found == [("CIF-MAF", True, True), ("CIF-Id-1", False, True), ("Other", True, False)]


def test_a_page_keeps_its_text(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Mine\n\n<!-- results: begin -->\nold\n<!-- results: end -->\n\nAfter.\n")
    write_pages(tmp_path, figures())
    first = page.read_text()
    assert first.startswith("# Mine\n")
    assert first.endswith("\nAfter.\n")
    assert "old" not in first
    write_pages(tmp_path, figures())
    assert page.read_text() == first


def test_the_documents_show_the_figures_of_their_file() -> None:
    found = read_figures(ROOT / "docs" / "results.toml")
    page = (ROOT / "docs" / "results.md").read_text()
    assert "(figures/results.png)" in page.split("## ")[0]  # the page opens with the chart
    shown = page.split("<!-- results: begin -->")[1].split("<!-- results: end -->")[0]
    assert shown.strip() == figures_table(found).strip()
    rows = {(job.table.name, job.data, job.row.label): job for job in list_jobs(read_queue())}
    for figure in found:
        row = rows[figure.table, figure.data, figure.row].row
        published = row.published(figure.data)
        assert figure.paper == (published.bits_per_dim if figure.bits else published.log_prob)
        assert figure.comparable == row.comparable
        assert (ROOT / "docs" / "results" / f"{figure.table}.md").exists()
