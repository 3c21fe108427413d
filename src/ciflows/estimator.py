"""`ciflows.fit` as a scikit-learn estimator, like KernelDensity and GaussianMixture."""

from __future__ import annotations

__all__ = ["CIFDensity"]

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.runs.api import fit, in_temporary_folder
from ciflows.runs.folder import TABLE
from ciflows.runs.run import Run, load_run
from ciflows.tables.categorical import Categorical
from ciflows.tables.prepare import FEWEST_ROWS
from ciflows.tables.read import own_names
from ciflows.training.settings import EvaluationSettings

try:
    from sklearn.base import BaseEstimator, DensityMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    message = "CIFDensity needs scikit-learn 1.6 or newer: pip install 'ciflows[sklearn]'."
    raise ImportError(message) from error

Array = NDArray[np.float64]


class CIFDensity(DensityMixin, BaseEstimator):
    """A continuously indexed flow as a scikit-learn estimator of densities.

    Log-densities are in the units of X. Those of a model with an index are estimates from `samples`
    draws. The draws depend on the row and `random_state` alone, so a row's score is the same in every
    call, batch and order. A tenth of the rows is held out to choose the weights, another to test them.

    Arguments:
        model: Name of a model; the default for tables if None.
        max_steps: Largest number of training steps; the default for tables if None.
        max_minutes: Longest time to train, in minutes.
        settings: More settings of the model and of training, such as {"layers": 5}.
        bounds: Bounds of columns by name, such as {"age": (0, 120)}; an array's are x1, x2, ...
        categorical: Names of columns of numbers that are category labels.
        samples: Draws of the index for each row that is scored; by default as many as a standard error
            of 0.1 nats takes, at most 100.
        device: auto, cpu, cuda or cuda:N.
        random_state: Seed of parameters, data order and draws.

    Attributes:
        run_: The trained run, with its flow, metrics and folder.
        seed_: The seed that `random_state` gave.
        n_features_in_: Number of columns of X.
        feature_names_in_: Their names, if X had any.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(100, 2))
        >>> density = CIFDensity(max_steps=20, random_state=0).fit(X)
        >>> density.score_samples(X).shape, density.sample(5).shape
        ((100,), (5, 2))
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        max_steps: int | None = None,
        max_minutes: float | None = None,
        settings: Mapping[str, Any] | None = None,
        bounds: Mapping[str, tuple[float | None, float | None]] | None = None,
        categorical: Sequence[str] = (),
        samples: int | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.model = model
        self.max_steps = max_steps
        self.max_minutes = max_minutes
        self.settings = settings
        self.bounds = bounds
        self.categorical = categorical
        self.samples = samples
        self.device = device
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None, sample_weight: ArrayLike | None = None) -> CIFDensity:
        """Fit the density to X (rows, columns).

        Arguments:
            X: The rows.
            y: Ignored.
            sample_weight: How much each row counts (rows,).
        """
        values = validate_data(self, X, dtype=np.float64, ensure_min_samples=FEWEST_ROWS)
        weights = None
        if sample_weight is not None:
            options = {"dtype": np.float64, "ensure_non_negative": True}
            weights = _check_sample_weight(sample_weight, values, **options)
        self.seed_ = _seed(self.random_state)
        some = {"steps": self.max_steps, "evaluation.samples": self.samples}
        some = {name: value for name, value in some.items() if value is not None}
        with _value_errors():
            run = fit(
                self._frame(values),
                self.model,
                weights=weights,
                bounds=self.bounds,
                categorical=self.categorical,
                seed=self.seed_,
                device=self.device,
                max_minutes=self.max_minutes,
                **{**some, **(self.settings or {})},
            )
        return self._take(run)

    def score_samples(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:
        """The log-density of each row of X: (rows, columns) -> (rows,).

        Arguments:
            X: The rows.
            return_std: Also return the standard errors (rows,) of the log-densities; 0 if exact.
        """
        check_is_fitted(self)
        values = validate_data(self, X, dtype=np.float64, reset=False)
        with _value_errors():
            estimate = self.run_.estimate(self._frame(values), self.samples, self.seed_)
        log_prob, std_error = (part.cpu().numpy() for part in (estimate.log_prob, estimate.std_error))
        return (log_prob, std_error) if return_std else log_prob

    def score(self, X: ArrayLike, y: object = None) -> float:
        """The mean log-density of the rows of X, like GaussianMixture."""
        return float(np.mean(self.score_samples(X)))

    def sample(
        self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None
    ) -> Array:
        """Draw new rows (n_samples, columns).

        Arguments:
            n_samples: How many.
            random_state: Seed of the draws.
        """
        check_is_fitted(self)
        frame = self.run_.sample(n_samples, seed=_seed(random_state))
        return np.asarray(frame.to_numpy(), dtype=np.float64)

    def save(self, path: Path | str) -> None:
        """Write a run folder, for `load`, `ciflows.load_run` and the command line."""
        check_is_fitted(self)
        self.run_.save(path)

    @classmethod
    def load(cls, path: Path | str, device: str = "auto") -> CIFDensity:
        """Load a run folder: one that `save` wrote, or the run of any table of numbers.

        Arguments:
            path: The run folder.
            device: Where to put the flow.
        """
        run = load_run(path, device)
        schema, config = run.schema, run.config
        if schema is None or schema.given:
            raise UserError(f"{path}: expected the run of a table of numbers, without given columns.")
        words = [
            column.name
            for column in schema.columns
            if isinstance(column, Categorical) and any(isinstance(v, str) for v in column.categories)
        ]
        if words:
            raise UserError(f"{path}: arrays cannot hold columns of words: {', '.join(words)}.")
        samples = config.evaluation.samples
        training = config.training.model_dump(exclude={"steps", "max_minutes"})
        kinds = {"architecture": config.architecture, "training": training}
        settings = {
            f"{kind}.{key}": value for kind, part in kinds.items() for key, value in part.items()
        }
        bounds = {name: config.table.limits(name) for name in config.table.bounds}
        estimator = cls(
            config.model,
            max_steps=config.training.steps,
            max_minutes=config.training.max_minutes,
            settings=settings,
            bounds=bounds or None,
            categorical=tuple(config.table.categorical),
            samples=None if samples == EvaluationSettings.model_fields["samples"].default else samples,
            device=device,
            random_state=config.seed,
        )
        estimator.seed_, estimator.n_features_in_ = config.seed, len(schema.order)
        if list(schema.order) != estimator._columns():
            estimator.feature_names_in_ = np.asarray(schema.order, dtype=object)
        return estimator._take(run)

    def __getstate__(self) -> dict[str, Any]:
        """All attributes; the run as the files of its folder, without the training data."""
        state = dict(super().__getstate__())
        if "run_" in state:
            files = [file for file in self.run_.path.iterdir() if file.is_file() and file.name != TABLE]
            state["run_"] = {file.name: file.read_bytes() for file in files}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.pop("run_", None)
        super().__setstate__(state)
        if files is not None:
            self._take(in_temporary_folder(lambda folder: self._unpack(files, folder)))

    def _unpack(self, files: Mapping[str, bytes], folder: Path) -> Run:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return load_run(folder, self.device)

    def _take(self, run: Run) -> CIFDensity:
        # in double precision, like scikit-learn's arrays: rounding depends on the size of a batch, and a
        # row's score should not
        run.flow.double()
        self.run_ = run
        return self

    def _frame(self, values: Array) -> pl.DataFrame:
        return pl.DataFrame(values, schema=self._columns(), orient="row")

    def _columns(self) -> list[str]:
        names = getattr(self, "feature_names_in_", None)
        return list(own_names(self.n_features_in_) if names is None else names)


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """The seed itself, or one drawn from a generator."""
    if random_state is None or isinstance(random_state, np.random.RandomState):
        return int(check_random_state(random_state).randint(2**31 - 1))
    return int(random_state)


@contextmanager
def _value_errors() -> Iterator[None]:
    """Raise users' mistakes as ValueError, like scikit-learn."""
    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from None
