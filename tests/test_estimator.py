"""The scikit-learn face: its own checks, a Pipeline, a search, weights, files."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import ciflows
from ciflows import CIFDensity
from ciflows.errors import UserError

TINY: dict[str, Any] = {
    "max_steps": 3,
    "samples": 10,
    "settings": {"layers": 1, "hidden": [8]},
    "random_state": 0,
}


def rows(n: int = 60, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal([1.0, 20.0], [1.0, 5.0], size=(n, 2))


@pytest.fixture(scope="module")
def fitted() -> CIFDensity:
    return CIFDensity(**TINY).fit(rows())


@parametrize_with_checks([CIFDensity(**TINY)])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_is_content(estimator: CIFDensity, check: Any) -> None:
    check(estimator)


def test_scores_are_those_of_the_run(fitted: CIFDensity) -> None:
    x, density = rows(), copy.deepcopy(fitted).set_params(samples=1000)
    log_prob, std_error = density.score_samples(x, return_std=True)
    estimate = fitted.run_.estimate(x, samples=1000, seed=0)
    z = (log_prob - estimate.log_prob.numpy()) / np.hypot(std_error, estimate.std_error.numpy())
    assert np.abs(z).max() < 5
    assert density.score(x) == pytest.approx(log_prob.mean())


def test_a_seed_decides_everything(fitted: CIFDensity) -> None:
    x = rows()
    again = CIFDensity(**TINY).fit(x)
    np.testing.assert_array_equal(again.score_samples(x), fitted.score_samples(x))
    np.testing.assert_array_equal(again.sample(5, random_state=1), fitted.sample(5, random_state=1))
    other = CIFDensity(**TINY | {"random_state": 1}).fit(x)
    assert not np.array_equal(other.score_samples(x), fitted.score_samples(x))
    drawn = CIFDensity(**TINY | {"random_state": np.random.RandomState(0)}).fit(x)
    assert drawn.seed_ == np.random.RandomState(0).randint(2**31 - 1)


def test_the_density_is_fitted() -> None:
    x = rows(1000)
    density = CIFDensity(max_steps=300, settings={"layers": 1}, random_state=0).fit(x)
    fresh = rows(1000, seed=1)
    truth = norm([1.0, 20.0], [1.0, 5.0]).logpdf(fresh).sum(1).mean()
    assert density.score(fresh) == pytest.approx(truth, abs=0.1)
    samples = density.sample(2000, random_state=0)
    np.testing.assert_allclose(samples.mean(0), [1, 20], atol=0.7)
    np.testing.assert_allclose(samples.std(0), [1, 5], rtol=0.15)


def test_weights_count() -> None:
    """Two clusters, one of which counts for nothing."""
    left, right = rows(300), rows(300, seed=1) + np.array([20.0, 0.0])
    x, weight = np.concatenate([left, right]), np.repeat([1.0, 0.0], 300)
    settings = {"max_steps": 200, "settings": {"layers": 1}, "random_state": 0}
    density = CIFDensity(**settings).fit(x, sample_weight=weight)
    assert density.score(left) > density.score(right) + 10
    assert CIFDensity(**settings).fit(x).score(right) > density.score(right) + 10


def test_names_of_columns_are_kept(fitted: CIFDensity) -> None:
    frame = pd.DataFrame(rows(), columns=["mass", "age"])
    density = CIFDensity(**TINY, bounds={"age": (-100, 100)}).fit(frame)
    assert list(density.feature_names_in_) == ["mass", "age"]
    assert density.run_.sample(2).columns == ["mass", "age"]
    assert density.sample(500, random_state=0)[:, 1].max() <= 100
    with pytest.raises(ValueError, match="feature names"):
        density.score_samples(frame[["age", "mass"]])
    assert not hasattr(fitted, "feature_names_in_")


def test_runs_in_a_pipeline_and_a_search() -> None:
    pipeline = make_pipeline(StandardScaler(), CIFDensity(**TINY))
    grid = {"cifdensity__model": ["maf", "cif-maf"], "cifdensity__max_steps": [1, 4]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(rows())
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_score_ == max(search.cv_results_["mean_test_score"])
    assert search.score(rows(seed=1)) == pytest.approx(search.score_samples(rows(seed=1)).mean())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda density: pickle.loads(pickle.dumps(density))])
def test_copies_outlive_what_they_are_copies_of(way: Any, tmp_path: Path) -> None:
    original = CIFDensity(**TINY).fit(rows())
    scores, folder = original.score_samples(rows()), original.run_.path
    twin = way(original)
    del original
    assert not folder.exists()
    np.testing.assert_array_equal(twin.score_samples(rows()), scores)
    twin.save(tmp_path / "run")
    np.testing.assert_array_equal(CIFDensity.load(tmp_path / "run").score_samples(rows()), scores)


def test_saves_a_run_folder(fitted: CIFDensity, tmp_path: Path) -> None:
    fitted.save(tmp_path / "run")
    loaded = CIFDensity.load(tmp_path / "run")
    np.testing.assert_array_equal(loaded.score_samples(rows()), fitted.score_samples(rows()))
    assert loaded.n_features_in_ == 2
    assert not hasattr(loaded, "feature_names_in_")
    again = clone(loaded).fit(rows())
    np.testing.assert_array_equal(again.score_samples(rows()), fitted.score_samples(rows()))
    assert ciflows.load_run(tmp_path / "run").metrics == fitted.run_.metrics
    with pytest.raises(UserError, match="exists already"):
        fitted.save(tmp_path / "run")


def test_loads_the_run_of_a_table(tmp_path: Path) -> None:
    frame = pd.DataFrame(rows(), columns=["mass", "age"])
    ciflows.fit(frame, out=tmp_path / "plain", steps=3, layers=1)
    loaded = CIFDensity.load(tmp_path / "plain")
    assert list(loaded.feature_names_in_) == ["mass", "age"]
    assert loaded.set_params(max_steps=2).fit(frame).run_.metrics["steps"] == 2
    ciflows.fit(frame, out=tmp_path / "given", given=["age"], steps=3, layers=1)
    with pytest.raises(UserError, match="without given columns"):
        CIFDensity.load(tmp_path / "given")
    ciflows.fit(frame.assign(city=["Oslo", "Rome"] * (len(frame) // 2)), out=tmp_path / "words", steps=3)
    with pytest.raises(UserError, match=r"columns of words.*city"):
        CIFDensity.load(tmp_path / "words")


def test_the_package_does_not_need_scikit_learn() -> None:
    code = "import sys; sys.modules['sklearn'] = None; import ciflows; ciflows.fit; ciflows.CIFDensity"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("pip install 'ciflows[sklearn]'.")


def test_mistakes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="model"):
        CIFDensity("no-such-model").fit(rows())
    with pytest.raises(ValueError, match="layerz"):
        CIFDensity(settings={"layerz": 3}).fit(rows())
    with pytest.raises(ValueError, match="minimum of 10"):
        CIFDensity().fit(rows(5))
