"""The command line as a user meets it: runs, files, and what bad input gets."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import ciflows
from ciflows import cli
from ciflows.errors import UserError
from ciflows.files import write_json
from ciflows.models import MODELS
from ciflows.progress import sparkline
from ciflows.runs.config import RunConfig, read_config, resolve
from ciflows.runs.folder import read_description
from ciflows.runs.presets import presets

TINY = [
    *("--set", "layers=2"),
    *("--set", "hidden=[8, 8]"),
    *("--set", "objective=elbo"),
    *("--set", "batch_size=200"),
    *("--set", "validate_every=20"),
    *("--set", "evaluation.samples=10"),
]


@pytest.fixture
def fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in this process and an empty folder, where it must end with code 1."""
    monkeypatch.chdir(tmp_path)

    def main(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ciflows", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        printed = capsys.readouterr()
        return printed.out + printed.err

    return main


def run(*words: str, cwd: Path | None = None, code: int = 0) -> str:
    """Run the command in a process of its own; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ciflows", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"},
    )
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    assert "Traceback" not in text
    return text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    run("fit", "two-uniforms", "--out", str(folder), *TINY, "--set", "steps=40", "--no-report")
    return folder


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, ciflows.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_folder_tells_everything(finished: Path) -> None:
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["test"].keys() >= {"log_prob", "std_error", "elbo", "samples"}
    assert metrics["test"]["samples"] == 10
    assert metrics["limit"] == pytest.approx(-np.log(4))
    assert metrics["gap"] == pytest.approx(metrics["limit"] - metrics["test"]["log_prob"])
    about = json.loads((finished / "about.json").read_text())
    assert about["packages"]["torch"] == torch.__version__
    assert len(about["fingerprint"]) == 64
    text = (finished / "config.toml").read_text()
    assert RunConfig.from_toml(text, "config.toml").training.batch_size == 200
    assert set(load_file(finished / "weights.safetensors"))
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 40
    assert "validation" in rows[-1]
    assert list((finished / "tensorboard").glob("events*"))
    assert not list(finished.rglob("*.pkl")) + list(finished.rglob("*.pt"))


def test_loaded_run_gives_the_reported_likelihood(finished: Path) -> None:
    loaded = ciflows.load_run(finished)
    data = loaded.dataset()
    value = loaded.log_prob(data.test, samples=10, seed=0).double().mean().item()
    assert value == pytest.approx(loaded.metrics["test"]["log_prob"], abs=1e-5)
    assert loaded.sample(7, seed=0).shape == (7, 2)


def test_killed_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    words = [*TINY, "--set", "steps=800", "--set", "validate_every=400"]
    words += ["--set", "checkpoint_seconds=0.05", "--no-report"]
    run("fit", "annulus", "--out", "whole", *words, cwd=tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "ciflows", "fit", "annulus", "--out", "cut", *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while len(list(tmp_path.glob("cut/checkpoints/*.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "metrics.json").exists()
    run("score", "cut", "annulus", cwd=tmp_path, code=1)
    run("fit", "--resume", "cut", "--no-report", cwd=tmp_path)
    whole, cut = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())
    files = [tmp_path / name / "weights.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    histories = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    for rows in histories:
        for row in rows:
            del row["seconds"]
    assert histories[0] == histories[1]


def test_compare_writes_table_picture_and_report(tmp_path: Path) -> None:
    words = ["compare", "two-uniforms", "resflow", "cif-resflow", "--out", "both", *TINY]
    words += ["--set", "steps=40", "--set", "index_features=2"]
    text = run(*words, cwd=tmp_path)
    assert "cif-resflow" in text
    rows = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert [row["model"] for row in rows] == ["resflow", "cif-resflow"]
    wanted = {"model", "parameters", "log_prob", "std_error", "elbo", "samples", "limit", "gap"}
    assert all(row.keys() >= wanted | {"leaked_mass", "seconds"} for row in rows)
    assert rows[0]["samples"] == 1
    assert rows[1]["samples"] == 10
    assert (tmp_path / "both" / "compare.png").stat().st_size > 10_000
    assert "<html" in (tmp_path / "both" / "report.html").read_text()[:500]
    before = (tmp_path / "both" / "resflow" / "weights.safetensors").stat().st_mtime_ns
    assert "exists already" in run(*words, cwd=tmp_path, code=1)
    changed = run(*words, "--resume", "--set", "steps=41", cwd=tmp_path, code=1)
    assert "other settings" in changed
    run(*words, "--resume", cwd=tmp_path)
    after = (tmp_path / "both" / "resflow" / "weights.safetensors").stat().st_mtime_ns
    assert before == after


def test_own_table_from_file_to_scores_and_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pl.DataFrame({"height": rng.normal(170, 10, 500), "weight": rng.normal(70, 5, 500)})
    table.write_csv(tmp_path / "people.csv")
    run("fit", "people.csv", *TINY, "--set", "steps=100", "--out", "people", cwd=tmp_path)
    run("score", "people", "people.csv", "--out", "scores.parquet", cwd=tmp_path)
    scores = pl.read_parquet(tmp_path / "scores.parquet")
    assert scores.columns == ["row", "log_prob", "std_error", "effective_samples"]
    assert len(scores) == 500
    # a Gaussian of these two spreads has mean log-density -(log 2π + 1 + log 10 + log 5)
    truth = -(np.log(2 * np.pi) + 1 + np.log(50))
    assert abs(scores["log_prob"].mean() - truth) < 0.5
    run("sample", "people", "-n", "300", "--out", "new.csv", cwd=tmp_path)
    new = pl.read_csv(tmp_path / "new.csv")
    assert new.columns == ["height", "weight"]
    assert abs(new["height"].mean() - 170) < 5
    table.select("height").write_csv(tmp_path / "narrow.csv")
    text = run("score", "people", "narrow.csv", "--out", "x.csv", cwd=tmp_path, code=1)
    assert "lacks the column weight" in text
    assert "<html" in (tmp_path / "people" / "report.html").read_text()[:500]
    run("report", "people", "--out", "people.png", cwd=tmp_path)
    assert (tmp_path / "people.png").read_bytes().startswith(b"\x89PNG")
    assert "does not exist yet" in run("report", "people", "--out", "people.png", cwd=tmp_path, code=1)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fit", "two-uniform"], "Did you mean two-uniforms"),
        (["fit", "two-uniforms", "--model", "cif-resflw"], "cif-resflow"),
        (["fit", "two-uniforms", "--set", "layrs=3"], "Did you mean layers"),
        (["fit", "two-uniforms", "--set", "layers"], "key=value"),
        (["fit", "two-uniforms", "--set", "layers=-1"], "layers"),
        (["fit", "two-uniforms", "--set", "learning_rate=fast"], "learning_rate"),
        (["fit", "two-uniforms", "--set", "log_det=roulette"], "objective=elbo"),
        (["fit", "two-uniforms", "--config", "papr"], "Did you mean paper"),
        (["fit", "two-uniforms", "--device", "tpu9"], "tpu9"),
        (["fit", "two-uniforms", "--device", "meta"], "meta"),
        (["fit", "two-uniforms", "--set", "hidden=[0]"], "hidden"),
        (["fit", "two-uniforms", "--set", "hidden=[a]"], "hidden = '[a]'"),
        (["fit", "two-uniforms", "--set", "seed=3"], "evaluation.seed"),
        (["fit", "two-uniforms", "--model", "resflow", "--set", "index_features=2"], "index_features"),
        (["fit", "d[/x]/q.csv"], "d[/x]/q.csv"),
        (["fit", "missing.csv"], "missing.csv"),
        (["fit"], "Name the data to fit"),
        (["fit", "--resume", "nowhere"], "not a run folder"),
        (["fit", "--resume", "nowhere", "--set", "steps=3"], "uses the data and settings of the run"),
        (["score", "nowhere", "two-uniforms"], "not a run folder"),
        (["sample", "nowhere"], "not a run folder"),
        (["report", "nowhere"], "not a run folder"),
        (["models", "mafia"], "no model"),
    ],
)
def test_mistakes_get_one_sentence(
    words: list[str], expected: str, tmp_path: Path, fail: Callable[..., str]
) -> None:
    text = fail(*words)
    assert expected in text
    assert text.count("Error:") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_one_is_refused(tmp_path: Path) -> None:
    assert "no CUDA device" in run("fit", "annulus", "--device", "cuda", cwd=tmp_path, code=1)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_left_alone(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert "exists already" in run("fit", "annulus", "--out", str(finished), code=1)
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}


def test_existing_scores_are_left_alone(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("mine")
    text = run("score", str(finished), "two-uniforms", cwd=tmp_path, code=1)
    assert "exists already" in text
    assert (tmp_path / "scores.csv").read_text() == "mine"


def test_run_of_another_format_is_refused(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    about = json.loads((copy / "about.json").read_text()) | {"format": 99}
    (copy / "about.json").write_text(json.dumps(about))
    assert "format 99" in run("score", str(copy), "two-uniforms", cwd=tmp_path, code=1)


def test_damaged_weights_are_named(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    weights = (copy / "weights.safetensors").read_bytes()
    (copy / "weights.safetensors").write_bytes(weights[:-50])
    assert "weights.safetensors" in run("sample", str(copy), cwd=tmp_path, code=1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n" + "1,2\n,4\n" * 9, "values in a (9)"),
        ("a,b\n" + "".join(f"{i},w{i}\n" for i in range(30)), "b has 24 different values in 24 rows"),
        ("a,b\n", "empty"),
        ("a,b\n1,2\n3,4\n", "too few"),
        ("a,b\n" + "1,inf\n" * 20, "b (20)"),
        ("a,b\n" + "1,2\n" * 20, "constant"),
    ],
)
def test_bad_tables_are_refused(
    content: str, expected: str, tmp_path: Path, fail: Callable[..., str]
) -> None:
    (tmp_path / "bad.csv").write_text(content)
    text = fail("fit", "bad.csv", *TINY)
    assert expected in text
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


def test_help_and_lists_teach() -> None:
    assert "ciflows compare two-uniforms" in run("--help")
    assert "--resume" in run("fit", "--help")
    assert "continues it to the same result" in run("fit", "--help")  # a paragraph fills its line
    text = run("models")
    assert all(name in text for name in [*MODELS, *presets()])
    assert "kappa" in run("models", "resflow")
    assert "-1.3863" in run("data")


@pytest.mark.parametrize("preset", sorted(presets()))
@pytest.mark.parametrize("model", ["resflow", "cif-resflow"])
def test_every_preset_resolves(preset: str, model: str) -> None:
    config = resolve("two-uniforms", model, 0, [read_config(preset)])
    assert RunConfig.from_toml(config.to_toml(), preset) == config


def test_unknown_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[trainning]\nsteps = 3\n")
    with pytest.raises(UserError, match=r"trainning.*Did you mean training"):
        read_config(str(path))


def test_a_runs_own_configuration_can_be_used_again(finished: Path) -> None:
    again = read_config(str(finished / "config.toml"))
    assert (again["data"], again["model"], again["seed"]) == ("two-uniforms", "cif-resflow", 0)
    config = resolve("annulus", again["model"], 1, [again])
    assert config.training.batch_size == 200


def test_configuration_with_a_setting_missing_is_refused(finished: Path) -> None:
    text = (finished / "config.toml").read_text().replace("batch_size = 200\n", "")
    with pytest.raises(UserError, match="another version"):
        RunConfig.from_toml(text, "config.toml")


def test_configuration_without_later_settings_means_what_it_meant(finished: Path) -> None:
    lines = (finished / "config.toml").read_text().splitlines()
    old = "\n".join(line for line in lines if not line.startswith(("flips", "muon_step")))
    assert len(old.splitlines()) == len(lines) - 2
    assert RunConfig.from_toml(old, "config.toml") == read_description(finished)[0]


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.argv = ["ciflows", *sys.argv[1:]]
from ciflows.cli import main
main()
"""


def test_full_disk_gets_one_sentence(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails with an OSError just so."""
    words = ["fit", "two-uniforms", "--out", "run", *TINY, "--set", "hidden=[64, 64]"]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *words, "--set", "steps=40"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("*.safetensors"))
    run("fit", "--resume", "run", "--no-report", cwd=tmp_path)


def test_interruption_tells_how_to_go_on(tmp_path: Path) -> None:
    words = [*TINY, "--set", "steps=100000", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ciflows", "fit", "annulus", *words],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 600
    history = tmp_path / "run" / "metrics.jsonl"
    while not (history.exists() and history.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "ciflows fit --resume run" in text
    assert list((tmp_path / "run" / "checkpoints").glob("*.safetensors"))


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1.5, float("nan")], "y": float("-inf")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1.5, None], "y": None}


def test_sparklines_show_the_course_and_not_the_start() -> None:
    assert sparkline([-100.0, -3.0, -2.0, -1.0, 0.0]) == "▁▁▃▆█"
    assert sparkline([float(k) for k in range(1000)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0]) == "██"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
