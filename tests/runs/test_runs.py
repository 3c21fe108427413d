"""Runs: one unit everywhere, one score for a row, whole files, paired comparisons."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

import ciflows
from ciflows import CIFDensity
from ciflows.core.objectives import ELBO, OBJECTIVES
from ciflows.core.rows import Rows
from ciflows.datasets import dataset as datasets
from ciflows.errors import UserError
from ciflows.report.page import set_number
from ciflows.runs import assemble
from ciflows.runs import fit as fitting
from ciflows.runs import run as run_module
from ciflows.runs import score as scoring
from ciflows.runs.compare import comparison_row, paired_difference, report_runs
from ciflows.runs.config import resolve
from ciflows.runs.folder import RowScores, read_test_scores
from ciflows.training import TrainingSettings

TINY: dict[str, Any] = {"layers": 1, "hidden": [8], "steps": 20, "validate_every": 20}
WORDS = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]


def people(rows: int = 200, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    born = 1.7e9 + 20 * rng.normal(size=rows)
    return pl.DataFrame({"born": born, "size": rng.normal(1.7, 0.1, rows)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ciflows.Run:
    return ciflows.fit(people(), "cif-nsf", out=tmp_path_factory.mktemp("runs") / "people", **TINY)


# -- a run of calls ----------------------------------------------------------------------------------


def test_a_fit_builds_its_flow_and_loads_its_data_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow that was trained is the run's, with the weights that are in the folder."""
    people().write_csv(tmp_path / "people.csv")
    calls = {"build": 0, "rebuild": 0, "load": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*words, **options)

        return call

    monkeypatch.setattr(assemble, "build_flow", counted("build", assemble.build_flow))
    monkeypatch.setattr(run_module, "rebuild_flow", counted("rebuild", run_module.rebuild_flow))
    monkeypatch.setattr(datasets, "prepare_table", counted("load", datasets.prepare_table))
    run = ciflows.fit(tmp_path / "people.csv", out=tmp_path / "run", **TINY)
    report_runs([run], tmp_path / "report.html")
    assert calls == {"build": 1, "rebuild": 0, "load": 1}
    assert not run.flow.training
    loaded = ciflows.load_run(tmp_path / "run")
    assert torch.equal(run.log_prob(people(), seed=0), loaded.log_prob(people(), seed=0))
    assert run.metrics == loaded.metrics
    assert run.about == loaded.about
    assert run.history == loaded.history


@pytest.mark.parametrize(
    ("race", "precision", "found"),
    [
        (False, "float32", "a mixture of 4 flows"),
        (False, "float64", "a mixture of 4 flows"),
        (True, "float32", "and was kept"),
    ],
)
def test_what_was_chosen_is_loaded_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, race: bool, precision: str, found: str
) -> None:
    for name in ("LEAST_NATS", "LEAST_BY_MIXTURE", "LEAST_GAIN", "LEAST_SHARE"):
        monkeypatch.setattr(f"ciflows.training.staged.{name}", -math.inf)
    monkeypatch.setattr("ciflows.training.staged.STILL_LEARNING", math.inf if race else -math.inf)
    settings = {**TINY, "steps": 80, "precision": precision}
    run = ciflows.fit(people(), "cif-nsf", out=tmp_path / "run", **settings)
    assert found in run.metrics["story"]
    assert len(run.metrics["members"]) == (1 if race else 4)
    loaded = ciflows.load_run(tmp_path / "run")
    assert loaded.flow.state_dict().keys() == run.flow.state_dict().keys()
    before, after = (a_run.estimate(people(), samples=5, seed=0).log_prob for a_run in (run, loaded))
    assert torch.equal(before, after)
    assert loaded.sample(10, seed=0).equals(run.sample(10, seed=0))


def test_a_run_is_told_in_five_lines(run: ciflows.Run, tmp_path: Path) -> None:
    lines = repr(run).splitlines()
    assert len(lines) == 5
    assert "cif-nsf" in lines[0]
    assert "born, size" in lines[1]
    assert f"{run.metrics['test']['log_prob']:.4f}" in lines[3]
    ten = ciflows.fit(np.arange(10.0) ** 1.5, **TINY)  # one test point: its error is unknown
    assert len(repr(ten).splitlines()) == 5


def test_a_new_objective_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(ELBO):
        several_draws = False

    monkeypatch.setitem(OBJECTIVES, "mine", Mine)
    assert isinstance(TrainingSettings(objective="mine").make_objective(), Mine)
    roulette = {"architecture": {"log_det": "roulette"}}
    resolve("annulus", "resflow", layers=[roulette, {"training": {"objective": "mine"}}])
    monkeypatch.setattr(Mine, "several_draws", True)
    with pytest.raises(UserError, match="needs exact log-determinants"):
        resolve("annulus", "resflow", layers=[roulette, {"training": {"objective": "mine"}}])
    with pytest.raises(UserError, match=r"objective = 'elbow'.*Did you mean elbo"):
        resolve("annulus", "maf", layers=[{"training": {"objective": "elbow"}}])


# -- units and scores --------------------------------------------------------------------------------


def test_all_kinds_of_tables_are_in_the_units_of_the_file(run: ciflows.Run, tmp_path: Path) -> None:
    """Times of 1.7e9 as a tensor were taken for codes once: a log-density of -1e9."""
    frame = people(30, seed=1)
    frame.write_parquet(tmp_path / "new.parquet")
    expected = run.log_prob(frame, seed=0)
    array = frame.to_numpy()
    swapped = pd.DataFrame({name: frame[name].to_numpy() for name in ("size", "born")})
    path = tmp_path / "new.parquet"
    for same in (array, torch.tensor(array), swapped, frame.to_dict(), path, str(path)):
        assert torch.equal(run.log_prob(same, seed=0), expected)
    values = run.rows(frame).x
    assert torch.equal(values, torch.tensor(array))
    with pytest.raises(UserError, match="reads tables without gradients"):
        run.log_prob(torch.tensor(array).requires_grad_())
    points = run.rows(array).x.requires_grad_()
    run.flow.log_prob(points).sum().backward()
    assert points.grad is not None
    assert torch.allclose(run.flow.log_prob(values, 2000), expected, atol=0.2)


def test_runs_of_built_in_sets_refuse_gradients_as_tables_do() -> None:
    run = ciflows.fit("two-uniforms", "maf", **TINY)
    x = torch.rand(5, 2)
    with pytest.raises(UserError, match="reads tables without gradients"):
        run.log_prob(x.requires_grad_())
    points = run.rows(x.detach()).x.requires_grad_()
    run.flow.log_prob(points).sum().backward()
    assert points.grad is not None


def test_tables_of_another_width_are_refused(
    run: ciflows.Run, tmp_path: Path, command: Callable[..., str]
) -> None:
    wide = np.column_stack([people().to_numpy(), np.zeros(200)])
    for data in (wide, torch.tensor(wide), wide[:, :1]):
        with pytest.raises(UserError, match=r"columns without names; .* trained on 2: born, size"):
            run.log_prob(data)
    ciflows.fit(wide[:, :2], out=tmp_path / "two", **TINY)
    np.save(tmp_path / "three.npy", wide)
    text = command("score", "two", "three.npy", code=1)
    assert "three.npy: has 3 columns without names; the run was trained on 2: x1, x2" in text
    assert not (tmp_path / "scores.csv").exists()
    ciflows.fit(tmp_path / "three.npy", columns=["x1", "x2"], out=tmp_path / "chosen", **TINY)
    command("score", "chosen", "three.npy", "-m", "2")


def test_points_of_a_built_in_set_may_be_of_any_kind(tmp_path: Path) -> None:
    config = resolve(
        "annulus", "maf", layers=[{"training": {"steps": 2}, "architecture": {"layers": 1}}]
    )
    run = fitting.fit(config, tmp_path / "run")
    x = run.dataset().test[:5]
    frame = pl.DataFrame({"x2": x[:, 1].numpy(), "x1": x[:, 0].numpy(), "z": ["u"] * 5})
    frame.write_csv(tmp_path / "x.csv")
    for same in (x, x.numpy(), frame, tmp_path / "x.csv"):
        assert torch.allclose(run.log_prob(same), run.flow.log_prob(x), atol=1e-5)
    with pytest.raises(UserError, match="lacks x2"):
        run.log_prob(frame.drop("x2"))
    with pytest.raises(UserError, match=r"shape \(2,\).*got shape \(5, 3\)"):
        run.log_prob(torch.zeros(5, 3))


def test_the_command_a_run_and_scikit_learn_score_alike(
    tmp_path: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed, one score for a row: in any batch, order and precision."""
    frame = people()
    run = ciflows.fit(frame, out=tmp_path / "run", seed=3, staged=False, **TINY)
    expected = run.estimate(frame, 20, seed=3)
    assert expected.std_error.max() > 0
    frame.write_csv(tmp_path / "people.csv")
    monkeypatch.setattr(scoring, "ROWS", 64)
    command("score", "run", "people.csv", "--seed", "3", "-m", "20")
    scores = pl.read_csv(tmp_path / "scores.csv")
    assert scores["row"].to_list() == list(range(200))
    for name in scores.columns[1:]:
        np.testing.assert_allclose(scores[name], getattr(expected, name), atol=2e-4, rtol=1e-4)
    order = np.random.default_rng(0).permutation(len(frame))
    shuffled = run.log_prob(frame[order], 20, seed=3)
    assert torch.allclose(shuffled, expected.log_prob[order], atol=1e-5)
    table = run.scores(frame, 20, seed=3)
    assert torch.equal(torch.tensor(table["log_prob"]), expected.log_prob)
    density = CIFDensity.load(tmp_path / "run").set_params(samples=20)
    assert density.seed_ == 3
    values = pd.DataFrame({name: frame[name].to_numpy() for name in frame.columns})
    np.testing.assert_allclose(density.score_samples(values), expected.log_prob, atol=1e-4)


def test_the_reported_likelihood_is_that_of_the_test_rows(run: ciflows.Run) -> None:
    rows = run.dataset().rows("test")
    estimate = run.estimate(rows, run.config.evaluation.samples, seed=run.config.evaluation.seed)
    assert estimate.log_prob.double().mean() == pytest.approx(run.metrics["test"]["log_prob"])
    saved = read_test_scores(run.path)
    assert saved is not None
    assert torch.equal(saved.log_prob, estimate.log_prob)


def test_scores_are_weighted_where_the_weights_are(tmp_path: Path, command: Callable[..., str]) -> None:
    frame = people().with_columns(w=pl.Series(np.linspace(0.1, 3, 200)))
    run = ciflows.fit(frame, weights="w", out=tmp_path / "run", **TINY)
    log_prob = run.log_prob(frame, 20, seed=0).numpy()
    assert run.score(frame, 20, seed=0) == pytest.approx(np.average(log_prob, weights=frame["w"]))
    assert run.score(frame.drop("w"), 20, seed=0) == pytest.approx(log_prob.mean())
    assert "weighted by w" in repr(run)
    frame.write_csv(tmp_path / "with.csv")
    frame.drop("w").write_csv(tmp_path / "without.csv")
    text = command("score", "run", "with.csv", "-m", "20")
    assert "weighted by w" in text
    assert f"{np.average(log_prob, weights=frame['w']):.4f} ±" in text
    text = command("score", "run", "without.csv", "-m", "20", "--out", "b.csv")
    assert "not weighted: without.csv has no column w" in text
    assert f"{log_prob.mean():.4f} ±" in text


@pytest.mark.parametrize(
    ("weight", "answer"),
    [
        (pl.lit(0.0), "weights w: all are 0"),
        (pl.lit("x"), "weights w: weights have to be numbers."),
        (-pl.col("w"), "weights w: weights have to be positive numbers, or 0."),
    ],
)
def test_scores_by_weights_that_mean_nothing_are_refused(
    weight: pl.Expr, answer: str, tmp_path: Path, command: Callable[..., str]
) -> None:
    frame = people().with_columns(w=pl.Series(np.linspace(0.1, 3, 200)))
    run = ciflows.fit(frame, "cif-nsf", weights="w", out=tmp_path / "run", **TINY)
    table = frame.with_columns(weight.alias("w"))
    with pytest.raises(UserError, match=answer):
        run.score(table, 2, seed=0)
    table.write_parquet(tmp_path / "new.parquet")
    assert f"new.parquet: {answer}" in command("score", "run", "new.parquet", "-m", "2", code=1)
    assert not (tmp_path / "scores.csv").exists()
    said = command("score", "run", "new.parquet", "-m", "2", "--key", "w", "--out", "folder")
    assert "not weighted" in said


def test_the_mean_of_one_row_has_no_error(
    run: ciflows.Run, tmp_path: Path, command: Callable[..., str]
) -> None:
    people(1).write_parquet(tmp_path / "one.parquet")
    words = ["score", str(run.path), "one.parquet", "-m", "20"]
    for out in ("a.csv", "a"):
        assert re.match(
            r"Mean log-likelihood -?[0-9.]+(, not| nats over 1)", command(*words, "--out", out)
        )
    result = json.loads(command(*words, "--out", "b.csv", "--json"))
    assert result["summary"]["std_error"] is None
    assert json.loads(command(*words, "--out", "b", "--json"))["std_error"] is None


def test_pandas_in_gives_pandas_out() -> None:
    frame = pd.DataFrame(
        {"y": np.random.default_rng(0).normal(size=100), "g": ["a", "b"] * 50},
        index=[f"r{i}" for i in range(100)],
    )
    run = ciflows.fit(frame, given=["g"], **TINY)
    drawn = run.sample(2, given=frame[["g"]].head(3), seed=0)
    assert isinstance(drawn, pd.DataFrame)
    assert list(drawn.index) == ["r0", "r0", "r1", "r1", "r2", "r2"]
    assert list(drawn["g"]) == ["a", "a", "b", "b", "a", "a"]
    scores = run.scores(frame, 5, seed=0)
    assert list(scores.index) == list(frame.index)
    assert list(frame.join(scores).columns) == ["y", "g", "log_prob", "std_error", "effective_samples"]
    assert isinstance(run.sample(2, given={"g": ["a"]}), pl.DataFrame)
    assert isinstance(run.rows(frame), Rows)


# -- comparisons -------------------------------------------------------------------------------------


def test_paired_errors_are_those_of_the_differences_of_rows() -> None:
    """What rows have in common cancels: here all of it but noise of 0.1."""
    rng = np.random.default_rng(0)
    hard, noise = 5 * rng.normal(size=4000), 0.1 * rng.normal(size=4000)
    one, other = (RowScores(torch.tensor(values), None) for values in (hard, hard + 0.02 + noise))
    difference = paired_difference("one", one, other)
    assert difference.log_prob == pytest.approx(0.02, abs=4 * difference.std_error)
    assert difference.std_error == pytest.approx(0.1 / math.sqrt(4000), rel=0.05)
    twice = torch.cat([torch.full((2000,), 2.0), torch.zeros(2000)])
    halved = paired_difference("one", one, other._replace(weight=twice))
    first = paired_difference("one", *(RowScores(s.log_prob[:2000], None) for s in (one, other)))
    assert halved.log_prob == pytest.approx(first.log_prob)
    assert halved.std_error == pytest.approx(first.std_error, rel=1e-3)


def test_compare_shows_differences_to_the_first_model(
    tmp_path: Path, command: Callable[..., str]
) -> None:
    people().write_csv(tmp_path / "people.csv")
    text = command(
        "compare", "people.csv", "nsf", "cif-nsf", "--out", "both", *WORDS, "--set", "staged=false"
    )
    rows = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert rows[0]["difference"] is None
    difference = rows[1]["difference"]
    assert difference["reference"] == "nsf"
    gain = rows[1]["log_prob"] - rows[0]["log_prob"]
    assert difference["log_prob"] == pytest.approx(gain, abs=1e-5)
    assert 0 < difference["std_error"] < math.hypot(rows[0]["std_error"], rows[1]["std_error"])
    words = f"difference to nsf: {gain:+.4f} ± {difference['std_error']:.4f} nats"
    assert words in text
    assert "leak" not in text
    page = (tmp_path / "both" / "report.html").read_text()
    assert f">{set_number(gain, '{:+.3f}')} ± {difference['std_error']:.3f}</td>" in page
    assert f"± {difference['std_error']:.3f} nats a row" in page
    assert "m = 100" in text


def test_runs_of_older_versions_are_compared_without_differences(
    run: ciflows.Run, tmp_path: Path
) -> None:
    older = run.save(tmp_path / "older")
    difference = comparison_row(older, run)["difference"]
    assert difference == {"reference": "cif-nsf", "log_prob": 0.0, "std_error": 0.0}
    (older.path / "test_scores.safetensors").unlink()
    assert comparison_row(older, run)["difference"] is None


# -- scripts and users -------------------------------------------------------------------------------


def test_fit_names_three_commands_that_work(tmp_path: Path, command: Callable[..., str]) -> None:
    frame = people().with_columns(city=pl.Series(["Bonn", "Oslo"] * 100), w=pl.lit(1.5))
    frame.write_csv(tmp_path / "my people.csv")
    options = ["--given", "city", "--weights", "w", "--bounds", "size=0:", "--missing", "drop"]
    text = command("fit", "my people.csv", "--out", "run", "--no-report", *options, *WORDS)
    commands = [line.strip() for line in text.split("Next:\n")[1].splitlines()]
    assert commands == [
        "ciflows score run 'my people.csv'",
        "ciflows sample run -n 1000 --given city=Bonn",
        f"ciflows compare 'my people.csv' nsf cif-nsf {' '.join(options)}",
    ]
    for line in commands:
        _, *pasted = shlex.split(line)
        command(*pasted, *(WORDS if pasted[0] == "compare" else []))
    assert (tmp_path / "runs" / "my people-compared-0" / "compare.json").exists()
    assert set(pl.read_csv(tmp_path / "samples.csv")["city"]) == {"Bonn"}


def test_scripts_get_json_or_silence(tmp_path: Path, command: Callable[..., str]) -> None:
    people().write_csv(tmp_path / "people.csv")
    result = json.loads(command("fit", "people.csv", "--out", "run", "--no-report", "--json", *WORDS))
    assert result["run"] == "run"
    assert result["test"] == json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
    scored = json.loads(command("score", "run", "people.csv", "--json"))
    assert scored["summary"]["points"] == 200
    assert scored["out"] == "scores.csv"
    assert command("score", "run", "people.csv", "--out", "b.csv", "--quiet") == ""
    assert len(pl.read_csv(tmp_path / "b.csv")) == 200
    rows = json.loads(command("compare", "people.csv", "maf", "--out", "all", "--json", *WORDS))
    assert [row["model"] for row in rows] == ["maf"]
    assert command("fit", "people.csv", "--out", "again", "--no-report", "--quiet", *WORDS) == ""
    assert "exists already" in command("score", "run", "people.csv", "--json", code=1)
    drawn = json.loads(command("sample", "run", "-n", "7", "--json"))
    assert drawn == {"out": "samples.csv", "points": 7}
    assert command("sample", "run", "-n", "7", "--out", "c.csv", "--quiet") == ""
    filled = json.loads(command("impute", "run", "people.csv", "--json"))
    assert filled == {"out": "imputed.csv", "rows": 200, "gaps": {}}
    assert command("impute", "run", "people.csv", "--out", "d.csv", "--quiet") == ""
    written = json.loads(command("report", "run", "--json"))
    assert written["out"] == "run/report.html"
    assert written["verdicts"][0].startswith("people: cif-nsf: ")
    assert command("report", "run", "--quiet") == ""
    lists = json.loads(command("models", "--json"))
    assert lists["models"]["maf"].startswith("masked autoregressive flow")
    assert json.loads(command("models", "maf", "--json"))["architecture"]["layers"]["default"] > 0
    assert json.loads(command("data", "--json"))["drawn"]["two-uniforms"]["limit"] < 0


def test_the_list_of_models_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from ciflows.cli import app\n"
        "app(['models'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cif-nsf" in done.stdout


def test_the_catalogue_is_that_of_the_models() -> None:
    from ciflows.models import MODELS
    from ciflows.models.catalogue import SUMMARIES

    assert {name: model.summary for name, model in MODELS.items()} == SUMMARIES


def test_every_command_shows_an_example_and_completes(command: Callable[..., str]) -> None:
    for name in ("fit", "compare", "search", "score", "sample", "report", "models", "data"):
        assert f"ciflows {name}" in command(name, "--help").split("Options")[0].split("Usage")[1]
    assert "--install-completion" in command("--help")
    assert command("--version").startswith("ciflows 0.")


# -- whole files -------------------------------------------------------------------------------------


def test_a_score_that_is_killed_leaves_no_file_of_that_name(run: ciflows.Run, tmp_path: Path) -> None:
    """It scores six pieces, and is killed after the first."""
    people(60_000).write_csv(tmp_path / "people.csv")
    words = [sys.executable, "-m", "ciflows", "score", str(run.path), "people.csv", "-m", "50"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob(".scores.csv.*/*.parquet")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "the command ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "scores.csv").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "run", "-n", "5", "--out", "out.csv"],
        ["sample", "run", "-n", "5", "--out", "out.parquet"],
        ["score", "run", "people.csv", "--out", "out.csv"],
        ["score", "run", "people.csv", "--out", "out.parquet"],
        ["report", "run", "--out", "out.html"],
        ["report", "run", "--out", "out.png"],
    ],
)
def test_a_write_that_fails_leaves_no_file(
    words: list[str],
    run: ciflows.Run,
    tmp_path: Path,
    command: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The moment between the last byte and the final name is the only one at which a kill could show."""
    run.save(tmp_path / "run")
    people().write_csv(tmp_path / "people.csv")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert "No space left" in command(*words, code=1)
    assert not list(tmp_path.glob("*out.*"))
