"""The verdict of a report, and the measures behind it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import ciflows
from ciflows import Flow
from ciflows.core.rows import Rows
from ciflows.datasets import Dataset, get_synthetic
from ciflows.layers import Standardise
from ciflows.report import Entry, write_report
from ciflows.report.column_plots import Feature, Part, _edges, _mass_level, draw_pair
from ciflows.report.columns import chance, compare_columns, cramers_v, kolmogorov, resampled
from ciflows.report.plots import LIGHT, PANEL, draw_panel
from ciflows.report.scores import score_rows
from ciflows.report.verdict import Verdict, judge

PARTS = ("train", "validation", "test")


def normal_entry(test: Tensor, weight: Tensor | None = None, scale: float = 1.0, **facts: Any) -> Entry:
    """A model of two independent normal columns, beside some test rows."""
    flow = Flow([Standardise(torch.zeros(2), torch.full((2,), scale))]).eval()
    weights = None if weight is None else (weight, weight, weight)
    columns = ("first", "second")
    dataset = Dataset("set", test, test, test, columns, 0, "0", None, weights=weights)
    metrics = {"test": {"log_prob": -2.8, "std_error": 0.1}}
    return Entry("maf", flow, dataset, metrics | facts, [], "")


def verdict(entry: Entry) -> Verdict:
    return judge([entry], compare_columns([entry], 0), [score_rows(entry, 0)])


def rows(count: int = 1000) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(1))


def test_a_model_of_the_data_fits() -> None:
    found = verdict(normal_entry(rows()))
    assert found.headline == "maf: fits; no suspicious rows."
    assert found.good
    assert [step for step, _ in found.next_block().steps] == ["See what an index is worth here:"]
    assert found.next_block().steps[0][1] == "ciflows compare set maf cif-maf"


def test_what_is_wrong_is_named() -> None:
    data = rows()
    data[:, 1] += 0.5
    data[[3, 5]] = 40.0
    found = verdict(normal_entry(data))
    assert found.headline == "maf: does not fit; 1 of 2 columns does not; 2 suspicious rows."
    assert not found.good
    assert any(finding.words.endswith("test rows: second.") for finding in found.findings)
    wide = verdict(normal_entry(rows(), scale=3.0))
    assert wide.headline.startswith("maf: does not fit; 2 of 2 columns do not")
    assert any("too wide" in finding.advice for finding in wide.findings)


def test_a_single_column_that_does_not_fit_is_not_counted() -> None:
    dataset = normal_entry(rows()).dataset
    alone = dataset._replace(**{part: getattr(dataset, part)[:, :1] for part in PARTS}, columns=("a",))
    flow = Flow([Standardise(torch.zeros(1), torch.full((1,), 3.0))]).eval()
    found = verdict(normal_entry(rows())._replace(flow=flow, dataset=alone))
    assert found.headline == "maf: does not fit; no suspicious rows."
    assert "The column does not match the test rows: a." in [f.words for f in found.findings]


def test_weights_count() -> None:
    """Rows above 0 are twice too many, and have half the weight: the model of all rows fits."""
    data = torch.cat([rows(800), rows(800).abs(), rows(800).abs()])
    data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]
    positive = (data > 0).all(1)
    expected = 0.25 / positive.double().mean()
    weight = torch.where(positive, expected, (1 - 0.25) / (1 - positive.double().mean()))
    assert verdict(normal_entry(data, weight)).headline.startswith("maf: fits; no")
    assert verdict(normal_entry(data)).headline.startswith("maf: does not fit; 2 of 2 columns do not")
    assert verdict(normal_entry(data, torch.zeros_like(weight))).headline.startswith("maf: not tested")
    even = resampled(Rows(torch.arange(4.0)[:, None], weight=torch.tensor([0.0, 1, 0, 3])))
    assert even.x[:, 0].tolist() == [1, 3, 3, 3]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([-3.0, -2.5, -2.0, -1.5, -1.4, -1.0, -0.5, 0.0], "still rising"),
        ([-3.0, -2.0, -1.0, -1.2, -1.4, -1.5, -1.6, -1.7], "peaked at step 30 of 80"),
        ([-3.0, -2.0, -1.5, -1.1, -1.02, -1.01, -1.0, -1.0], "Training settled"),
    ],
)
def test_training_is_judged_by_its_validation(values: list[float], words: str) -> None:
    history = [{"step": 10 * (k + 1), "validation": value} for k, value in enumerate(values)]
    entry = normal_entry(rows(100))._replace(history=history)
    found = judge([entry], None, []).findings
    assert any(words in finding.words for finding in found)
    assert any("steps=160" in finding.command for finding in found) == ("rising" in words)


@pytest.mark.parametrize(
    ("config", "limit"), [("", ""), ("[training]\nmax_minutes = 1.5\n", "--max-minutes 3 ")]
)
def test_longer_training_keeps_the_settings_and_takes_a_new_folder(config: str, limit: str) -> None:
    history = [{"step": 10 * (k + 1), "validation": float(k)} for k in range(8)]
    entry = normal_entry(rows(100))._replace(history=history, folder="runs/a", config=config)
    commands = [finding.command for finding in judge([entry], None, []).findings]
    longer = "ciflows fit set --config runs/a/config.toml --set steps=160"
    assert f"{longer} {limit}--out runs/a-longer" in commands


def test_gaps_leaks_and_loose_bounds_are_named() -> None:
    facts = {"gap": 0.3, "leaked_mass": 0.05, "sandwich": {"gap": 0.5, "std_error": 0.01}}
    found = judge([normal_entry(rows(50), **facts)], None, [])
    assert (
        found.headline
        == "maf: does not fit yet, 0.300 nats below the best possible; 5.0% of its mass leaks."
    )
    commands = [command for _, command in found.next_block().steps]
    assert "ciflows fit set --model cif-maf" in commands
    assert "ciflows score RUN set --samples 1000" in commands


def test_commands_name_the_run_the_data_and_the_options() -> None:
    entry = normal_entry(rows(50))._replace(folder="runs/a", options="--given b")
    assert entry.score_command("-m 5") == "ciflows score runs/a set -m 5"
    assert entry.command("fit", "--seed 1") == "ciflows fit set --seed 1 --given b"


def test_the_index_is_told_once_it_is_known() -> None:
    entry = normal_entry(rows(50))._replace(name="cif-maf")
    worth = {"indexed": True, "index_worth": {"nats": 0.5, "std_error": 0.1}}
    known = judge([entry._replace(metrics=entry.metrics | worth)], None, [])
    assert any("worth 0.50 ± 0.10 nats a row" in finding.words for finding in known.findings)
    assert not any("compare" in finding.command for finding in known.findings)
    assert any("compare" in finding.command for finding in judge([entry], None, []).findings)
    assert judge([entry._replace(name="vae")], None, []).findings[1:] == []


def test_chance_rarely_exceeds_its_limit() -> None:
    rng = np.random.default_rng(0)
    limit = chance(150, 600, tests=4)
    worst = [
        max(kolmogorov(rng.normal(size=150), rng.normal(size=600)) for _ in range(4)) for _ in range(200)
    ]
    assert 0.0 < np.mean(np.array(worst) > limit) < 0.09
    assert kolmogorov(np.array([0.0, np.nan, 1.0]), np.array([1.0, 0.0])) == 0
    assert kolmogorov(np.array([0.0]), np.array([1.0])) == 1


def test_dependence_goes_from_nothing_to_one() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, (2, 2000))
    assert cramers_v(a, b) < 0.05
    assert cramers_v(a, 3 - a) == pytest.approx(1, abs=0.01)
    assert 0.3 < cramers_v(a, np.where(rng.random(2000) < 0.5, a, b)) < 0.7
    assert cramers_v(a, np.zeros_like(a)) == 0


def test_contours_hold_their_share_and_bins_whole_steps() -> None:
    density = np.array([[4.0, 3.0], [2.0, 1.0]])
    assert [_mass_level(density, share) for share in (0.3, 0.5, 0.9)] == [4, 3, 2]
    ages = np.random.default_rng(0).integers(18, 90, 1000).astype(float)
    edges = _edges(ages, step=1.0)
    assert np.allclose(np.diff(edges), np.diff(edges)[0])
    assert np.allclose(edges % 1, 0.5)
    assert edges[0] < 18
    assert edges[-1] > 89


@pytest.mark.parametrize("kinds", ["nn", "nc", "cn", "cc"])
def test_every_kind_of_pair_is_drawn(kinds: str) -> None:
    rng = np.random.default_rng(0)
    columns = {"n": rng.normal(size=(2, 300)), "c": rng.integers(0, 2, (2, 300)).astype(float)}
    features = [Feature(kind, ("a", "b") if kind == "c" else (), kind == "c") for kind in kinds]
    parts = [
        Part(name, np.stack([columns[kind][(k + index) % 2] for index, kind in enumerate(kinds)], 1))
        for k, name in enumerate(("data", "model"))
    ]
    pair = (features[0], features[1])
    blank = draw_panel(lambda axes, theme: None, LIGHT, PANEL)
    shown = draw_panel(lambda axes, theme: draw_pair(axes, theme, pair, parts), LIGHT, PANEL)
    data = draw_panel(lambda axes, theme: draw_pair(axes, theme, pair, parts[:1]), LIGHT, PANEL)
    assert len({blank, shown, data}) == 3


def test_a_table_with_a_planted_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"size": rng.normal(1.7, 0.1, 400), "city": ["Bonn", "Oslo"] * 200})
    run = ciflows.fit(frame, "nsf", out=tmp_path / "run", steps=20, layers=1, hidden=[8])
    dataset = run.dataset()
    dataset.test[7, 0] = 9.0
    entry = Entry("nsf", run.flow, dataset, run.metrics, run.history, run.config.to_toml())
    write_report(tmp_path / "report.html", [entry], "t")
    page = (tmp_path / "report.html").read_text()
    assert "1 suspicious row" in page.split("</h2>")[0]
    assert '<th scope="row">suspicious</th>' in page
    assert '<td data-name="size">9</td>' in page
    assert math.isfinite(score_rows(entry, 0).limit)
    assert not re.search(r'<th scope="row">(gap|limit|leaked mass)', page)


def test_a_set_with_a_truth_has_no_suspicious_rows(tmp_path: Path) -> None:
    truth = get_synthetic("two-uniforms")
    points = truth.sample(300, seed=0)
    entry = normal_entry(points)
    entry = entry._replace(dataset=entry.dataset._replace(truth=truth))
    write_report(tmp_path / "report.html", [entry], "t")
    assert "uspicious" not in (tmp_path / "report.html").read_text()


def test_numbers_that_are_null_are_no_obstacle() -> None:
    nulls: dict[str, Any] = {
        "sandwich": {"gap": None, "std_error": None},
        "index_worth": {"nats": None, "std_error": None},
        "difference": {"reference": "maf", "log_prob": None, "std_error": None},
    }
    entry = normal_entry(rows(50), **nulls)._replace(name="cif-maf")
    assert judge([entry], None, []).headline == ""
    entry.metrics["sandwich"] = {"gap": 0.01, "std_error": None}
    assert any("less than 0.01 nats" in finding.words for finding in judge([entry], None, []).findings)


def test_few_effective_draws_are_named() -> None:
    entry = normal_entry(rows())
    test = {"log_prob": -2.8, "std_error": 0.1, "samples": 5, "effective_samples": 1.3}
    few = verdict(entry._replace(metrics={"test": test}))
    assert not few.good
    assert any(finding.words.startswith("Only 1.3 of 5 draws are effective") for finding in few.findings)
    assert verdict(entry._replace(metrics={"test": test | {"effective_samples": 4.0}})).good
