"""Tables of one's own: default settings beside scikit-learn's densities and a spline flow of zuko's.

    python docs/examples/tables.py --seeds 3 --data-dir DIR --out runs/tables.json

Each seed is another split of the same rows, and another start. All are given the same training,
validation and test rows, and are judged by the mean test log-likelihood in the units of the file; of a
discrete value, by its probability, estimated from draws inside its cell (ours from 100).

GaussianMixture and KernelDensity are tuned by validation: the number of components and the kind of
covariance, the bandwidth; on the standardised columns and on our transformed ones, whichever is better.
The spline flow has as many layers, of the same size, on the transformed columns; it is trained for as
long as ours, and keeps the weights that are best in validation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import torch
import zuko
from sklearn import datasets
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity

import ciflows
from ciflows.data import Dataset, load_dataset
from ciflows.estimate import log_mean_exp
from ciflows.noise import Noise
from ciflows.rows import Rows
from ciflows.table_flow import column_layers

COMPONENTS = (1, 2, 3, 5, 8, 12, 20, 40)
COVARIANCES = ("full", "tied", "diag")
BANDWIDTHS = np.geomspace(0.05, 1.5, 15)
ROWS, JUDGED, DRAWS = 20_000, 2000, 20  # that peers are fitted to, that are judged, draws inside cells
Score = Callable[[torch.Tensor], torch.Tensor]


def bundled(name: str) -> pl.DataFrame:
    found = getattr(datasets, f"load_{name}")()
    return pl.DataFrame(found.data, schema=[str(c) for c in found.feature_names], orient="row")


def power() -> pl.DataFrame:
    """The first 50,000 rows of POWER, as the literature prepares it (its files: see `ciflows data`)."""
    dataset = load_dataset("power")
    return pl.DataFrame(dataset.train[:50_000].numpy(), schema=list(dataset.columns), orient="row")


def mixed(rows: int = 5000) -> pl.DataFrame:
    """Bounds, integers and categories that depend on each other: households, from a made-up town."""
    rng = np.random.default_rng(0)
    tenure = rng.choice(["owner", "tenant", "other"], rows, p=[0.5, 0.4, 0.1])
    owner = tenure == "owner"
    age = np.clip(np.where(owner, 55, 38) + 13 * rng.standard_normal(rows), 18, 99).astype(int)
    kids = rng.poisson(np.where((age > 25) & (age < 50), 1.4, 0.2))
    income = np.exp(10 + 0.4 * owner + 0.5 * rng.standard_normal(rows)) * rng.gamma(9, 1 / 9, rows)
    share = rng.beta(np.where(owner, 2, 6), np.where(owner, 6, 4))
    moved = rng.exponential(np.where(owner, 15, 3))
    return pl.DataFrame(
        {
            "tenure": tenure,
            "age": age,
            "kids": kids,
            "income": income,
            "rent_share": share,
            "years": moved,
        }
    )


TABLES: dict[str, Callable[[], pl.DataFrame]] = {
    "iris": lambda: bundled("iris"),
    "wine": lambda: bundled("wine"),
    "diabetes": lambda: bundled("diabetes"),
    "breast cancer": lambda: bundled("breast_cancer"),
    "households": mixed,
    "power": power,
}


# -- what the peers see ------------------------------------------------------------------------------


class View:
    """Columns as a peer sees them, with what belongs to the log-likelihood: (z, log_weight) of rows."""

    def __init__(self, data: Dataset, transformed: bool) -> None:
        assert data.schema is not None
        self.layers = column_layers(data.schema, data.rows("train"))
        self.transformed = transformed
        columns = data.schema.columns
        self.discrete = torch.tensor([c.levels is not None or c.dequantised for c in columns])
        spread = data.train[:ROWS].float() + 0.5 * self.discrete
        self.mean, self.scale = spread.mean(0), spread.std(0).clamp(min=1e-3)

    def __call__(self, x: torch.Tensor, noise: Noise) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.transformed:
            units = self.layers[0].encode(x)[1]
            x = x + noise.uniform(x.shape, like=x) * self.discrete
            return (x - self.mean) / self.scale, units - self.scale.log().sum()
        total = x.new_zeros(len(x))
        for layer in self.layers:
            x, log_weight = layer.encode(x, noise=noise)
            total = total + log_weight
        return x, total

    def log_prob(self, score: Score, x: torch.Tensor) -> float:
        """Mean log-likelihood of rows under a density of z."""
        draws = DRAWS if bool(self.discrete.any()) else 1
        weights = []
        for seed in range(draws):
            z, log_weight = self(x, Noise.seeded(seed))
            weights.append(score(z) + log_weight)
        return float(log_mean_exp(torch.stack(weights).double()).mean())


def tuned(data: Dataset, fits: Callable[[np.ndarray], Iterator[Score]]) -> float:
    """The test log-likelihood of the peer that is best in validation."""
    validation, test = (part[:JUDGED].float() for part in (data.validation, data.test))
    best, result = -math.inf, -math.inf
    for transformed in (False, True):
        view = View(data, transformed)
        z, _ = view(data.train[:ROWS].float(), Noise.seeded(99))
        for score in fits(z.double().numpy()):
            found = view.log_prob(score, validation)
            if found > best:
                best, result = found, view.log_prob(score, test)
    return result


def mixtures(z: np.ndarray) -> Iterator[Score]:
    for kind in COVARIANCES:
        for components in COMPONENTS:
            if 5 * components <= len(z):
                model = GaussianMixture(components, covariance_type=kind, reg_covar=1e-3, random_state=0)
                fitted = model.fit(z)
                yield lambda x, fitted=fitted: torch.from_numpy(fitted.score_samples(x.double().numpy()))


def kernels(z: np.ndarray) -> Iterator[Score]:
    for bandwidth in BANDWIDTHS:
        fitted = KernelDensity(bandwidth=bandwidth).fit(z)
        yield lambda x, fitted=fitted: torch.from_numpy(fitted.score_samples(x.double().numpy()))


def spline_flow(data: Dataset, seconds: float, seed: int) -> float:
    """Zuko's NSF of the size of ours, trained for so many seconds."""
    torch.manual_seed(seed)
    view, noise = View(data, transformed=True), Noise.seeded(seed)
    flow = zuko.flows.NSF(len(data.columns), transforms=3, hidden_features=(64, 64))
    optimiser = torch.optim.AdamW(flow.parameters(), lr=1e-3, weight_decay=0.01)
    validation, test = (part[:JUDGED].float() for part in (data.validation, data.test))

    def score(z: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return flow().log_prob(z)

    best, result, begun, step = -math.inf, -math.inf, time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        rows = data.train[torch.randint(len(data.train), (256,))].float()
        z, _ = view(rows, noise)
        loss = -flow().log_prob(z).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 0:
            found = view.log_prob(score, validation)
            if found > best:
                best, result = found, view.log_prob(score, test)
    return result


# -- the comparison ----------------------------------------------------------------------------------


def compare(frame: pl.DataFrame, seed: int) -> dict[str, float]:
    frame = frame.sample(fraction=1.0, shuffle=True, seed=seed)
    run = ciflows.fit(frame, seed=seed)
    data = run.dataset()
    rows = Rows(data.test[:JUDGED].float())
    ours = run.flow.estimate(rows.x, 100, seed=0).log_prob.double().mean().item()
    return {
        "cif-nsf": ours,
        "GaussianMixture": tuned(data, mixtures),
        "KernelDensity": tuned(data, kernels),
        "zuko NSF": spline_flow(data, run.metrics["seconds"], seed),
        "seconds": run.metrics["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-dir", type=Path, help="the files of POWER; CIFLOWS_DATA if not given")
    parser.add_argument("--out", type=Path, default=Path("runs/tables.json"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.data_dir:
        os.environ["CIFLOWS_DATA"] = str(options.data_dir)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.tables:
        frame = TABLES[name]()
        results[name] = []
        for seed in range(options.seeds):
            results[name].append(compare(frame, seed))
            options.out.write_text(json.dumps(results, indent=2) + "\n")
        columns = {key: np.array([row[key] for row in results[name]]) for key in results[name][0]}
        cells = [
            f"{values.mean():.2f} ± {values.std(ddof=1) / math.sqrt(len(values)):.2f}"
            if len(values) > 1
            else f"{values.mean():.2f}"
            for values in columns.values()
        ]
        print(f"| {name} | {len(frame):,} × {frame.width} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
