"""Scores: one core for every engine."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import ciflows
from ciflows.errors import UserError
from ciflows.runs.run import Run
from ciflows.runs.score import ScoreSettings, score_frame


def people(rows: int = 300, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], rows)
    height = rng.normal(170, 6, rows) + 12 * (sex == "m")
    sizes = {f"size{i}": rng.gamma(20, 3.5, rows) * height for i in range(4)}
    return pl.DataFrame({"id": np.arange(rows), "height": height, "sex": sex, **sizes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    small = {"layers": 2, "hidden": [16], "steps": 30, "staged": False}
    return ciflows.fit(
        people().drop("id"), "cif-nsf", out=tmp_path_factory.mktemp("runs") / "people", **small
    )


def test_the_core_scores_as_a_run_does(run: Run) -> None:
    scores = score_frame(run, people(50, seed=1), ScoreSettings(samples=20, seed=3))
    assert scores.equals(run.scores(people(50, seed=1), 20, seed=3))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"samples": 0}, "one draw"), ({"max_samples": 0}, "one draw"), ({"std_error": 0.0}, "above 0")],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ScoreSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{"samples": 40}, {"std_error": 0.2, "max_samples": 60}])
@pytest.mark.filterwarnings("ignore:.*standard error above")
def test_scores_do_not_depend_on_how_the_table_is_cut(run: Run, limits: dict[str, float]) -> None:
    """To the last bit: in any order, in pieces of any size, and alone."""
    settings, frame = ScoreSettings(**limits), people(400, seed=1)  # type: ignore[arg-type]
    whole = score_frame(run, frame, settings)
    order = np.random.default_rng(0).permutation(len(frame))
    for piece in (order, order[:130], order[:64], order[:3], order[7:8]):
        assert score_frame(run, frame[piece], settings).equals(whole[piece])


def test_scores_of_no_rows_have_the_types_of_others(run: Run) -> None:
    settings = ScoreSettings(samples=2)
    some = score_frame(run, people(3), settings)
    assert score_frame(run, people(0), settings).schema == some.schema
    assert run.scores(people(0), 2).schema == some.schema
