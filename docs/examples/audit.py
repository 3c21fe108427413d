"""The audit of docs/audit.md: the same weights under two estimators of log p(x), and why they differ.

    python docs/examples/audit.py --data-dir DIR --document docs/audit.md     # minutes on one CPU core
    python docs/examples/audit.py --measure --document docs/audit.md          # measures nothing

What is measured goes to docs/figures/audit.json; picture and tables are made from that file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ciflows
from ciflows import Flow
from ciflows.core.evaluate import log_mean_exp
from ciflows.datasets import load_dataset
from ciflows.diagnostics import paper_log_prob
from ciflows.training import TrainingSettings, fit_flow

FIGURES = Path(__file__).parents[1] / "figures"
DRAWS = (1, 2, 5, 10, 20, 50, 100)
SHOWN = (1, 5, 10, 100)
DIMENSIONS = (2, 6, 12, 21, 43, 63)
# The paper's CIF-ResFlow: ten blocks of 4×128, each linear map bounded by 0.9, index networks of 2×10.
SIZES: dict[str, Any] = {"layers": 10, "hidden": [128] * 4, "kappa": 0.59049}
INDEX: dict[str, Any] = {key: [10, 10] for key in ("affine_hidden", "prior_hidden", "posterior_hidden")}


def main() -> None:
    """Measure, or read what was measured; then draw the picture and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="folder with the files of POWER and BSDS300")
    parser.add_argument("--measure", nargs="*", default=list(MEASURE), choices=list(MEASURE))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps and rows")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of audit.json and audit.png")
    parser.add_argument("--document", type=Path, help="page to write the tables into")
    given = parser.parse_args()
    path = given.out / "audit.json"
    if given.data_dir:
        os.environ["CIFLOWS_DATA"] = given.data_dir
    torch.set_num_threads(1)
    found = json.loads(path.read_text()) if path.exists() else {}
    for part in given.measure:
        found[part] = MEASURE[part](given.scale)
        path.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(path.read_text())  # with texts for keys
    draw(found, given.out / "audit.png")
    print("\n\n".join(tables(found).values()))
    if given.document is not None:
        given.document.write_text(fill(given.document.read_text(), found))


def measure_real(scale: float = 1.0) -> list[dict[str, Any]]:
    """Train three flows on real data; both likelihoods of each."""
    some, few = (max(2, round(scale * whole)) for whole in (1500, 400))
    rows, fewer = (max(2, round(scale * whole)) for whole in (500, 100))
    return [
        on_table("power", "cif-resflow", some, rows, index_features=2, **INDEX),
        on_table("power", "resflow", some, rows),
        on_table("bsds300", "cif-resflow", few, fewer, index_features=15, **INDEX),
    ]


def measure_made_up(scale: float = 1.0) -> list[dict[str, Any]]:
    """Train six plain flows on made-up data; both likelihoods of each."""
    size = max(2, round(scale * 100))
    return [on_modes(d, steps=size, rows=size) for d in DIMENSIONS]


def on_table(data: str, model: str, steps: int, rows: int, **settings: Any) -> dict[str, Any]:
    """A flow trained for some steps, and the likelihoods of the first test rows."""
    dataset, features = load_dataset(data), {"power": 6, "bsds300": 63}[data]
    log_det = "exact" if features < 10 else "roulette"
    flow = ciflows.build_model(model, features=features, seed=0, log_det=log_det, **SIZES, **settings)
    training = TrainingSettings(
        steps=steps, batch_size=500, learning_rate=3e-3, clip=5.0, objective="elbo",
        validate_every=max(1, steps // 2), validation_points=500, validation_samples=5,
    )  # fmt: skip
    start = time.process_time()
    fit_flow(flow, dataset.train[:200_000].clone(), dataset.validation[:500].clone(), training)
    seconds = time.process_time() - start
    x = dataset.test[:rows].clone()
    exact = {m: ours(flow, x, m) for m in SHOWN}
    noisy = {m: paper_log_prob(flow, x, m, seed=0) for m in SHOWN}
    return {
        "data": data,
        "model": model,
        "steps": steps,
        "seconds": round(seconds),
        "rows": rows,
        "exact": {m: mean(value)[0] for m, value in exact.items()},
        "noisy": {m: mean(value)[0] for m, value in noisy.items()},
        "bias": {m: mean(noisy[m] - exact[m]) for m in SHOWN},
    }


@torch.no_grad()
def ours(flow: Flow, x: Tensor, samples: int) -> Tensor:
    """log p(x) with exact log-determinants."""
    return flow.estimate(x, samples, seed=0).log_prob


def on_modes(features: int, steps: int, rows: int) -> dict[str, Any]:
    """A plain flow on eight narrow modes, and the noise of its estimated log-determinants."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randint(0, 2, (8, features), generator=generator) * 2.0 - 1
    points = centres.repeat(700, 1) + 0.1 * torch.randn(5600, features, generator=generator)
    flow = ciflows.build_model("resflow", features=features, layers=6, hidden=[64, 64], seed=0)
    training = TrainingSettings(steps=steps, batch_size=200, learning_rate=0.01, validate_every=steps)
    fit_flow(flow, points[:4800], points[4800:5000], training)
    x = points[5000 : 5000 + rows]
    exact = ours(flow, x, 1)
    # an estimate a call, 100 times: it is exact but for the noise of the log-determinants
    noise = torch.stack([paper_log_prob(flow, x, 1, seed=k) - exact for k in range(max(DRAWS))])
    biases = {m: averaged(noise, m) for m in DRAWS}
    return {
        "features": features,
        "bias": {m: mean(value) for m, value in biases.items()},
        "variance": noise.var(0).tolist(),
        "row bias": biases[max(DRAWS)].tolist(),
    }


def averaged(noise: Tensor, m: int) -> Tensor:
    """log (1/m) Σ exp ε of noise (draws, rows), averaged over all groups of m draws: (rows,)."""
    groups = noise[: len(noise) // m * m].unflatten(0, (-1, m))
    return log_mean_exp(groups.movedim(1, 0)).mean(0)


def mean(values: Tensor) -> tuple[float, float]:
    """A mean over rows, and its standard error."""
    return values.mean().item(), values.std().item() / math.sqrt(len(values))


def gaussian_bias(variance: Tensor, m: int) -> Tensor:
    """E log (1/m) Σ exp ε for m Gaussian ε of some variances, by simulation: (variances,)."""
    draws = torch.randn(2000, m, generator=torch.Generator().manual_seed(0))
    return log_mean_exp((variance.sqrt()[:, None, None] * draws).movedim(-1, 0)).mean(-1)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The page's two tables, by the names of their marks."""
    real = ["data", "model", "draws", "exact", "the paper's estimator", "difference"]
    made_up = ["dimensions", "σ², mean over rows", "σ²/2", "bias, m = 10", "bias, m = 100"]
    return {
        "real": _table(real, [row for one in found["real"] for row in _real_rows(one)]),
        "made up": _table(made_up, [_made_up_row(one) for one in found["made up"]]),
    }


def _real_rows(one: dict[str, Any]) -> list[list[str]]:
    features, digits = (6, 3) if one["data"] == "power" else (63, 2)
    names = [f"{one['data']}, d = {features}", f"`{one['model']}`, {one['steps']:,} steps"]
    rows = []
    for m in map(str, SHOWN):
        values = [f"{one[key][m]:.{digits}f}" for key in ("exact", "noisy")]
        bias, error = one["bias"][m]
        rows.append([*names, m, *values, f"{bias:+.{digits}f} ± {error:.{digits}f}"])
        names = ["", ""]
    return rows


def _made_up_row(one: dict[str, Any]) -> list[str]:
    variance = torch.tensor(one["variance"]).mean().item()
    biases = ["{:+.2f} ± {:.2f}".format(*one["bias"][m]) for m in ("10", "100")]
    return [str(one["features"]), f"{variance:.2f}", f"{variance / 2:.2f}", *biases]


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return re.sub(r"-(?=\d)", "−", "\n".join(f"| {' | '.join(line)} |" for line in lines))


def fill(page: str, found: dict[str, Any]) -> str:
    """A page with the tables between its marks."""
    for name, table in tables(found).items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return page


def draw(found: dict[str, Any], path: Path) -> None:
    """Bias against the number of draws, the dimension, and the variance of the log-determinant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.5), layout="constrained")
    draws, dimension, variance = figure.subplots(1, 3)
    for one in found["real"]:
        values, errors = zip(*(one["bias"][str(m)] for m in SHOWN), strict=True)
        name = f"{one['model']} on {one['data']}"
        draws.errorbar(SHOWN, values, errors, marker="o", ms=4, capsize=2, label=name)
    for one in found["made up"][1::2]:
        values, errors = zip(*(one["bias"][str(m)] for m in DRAWS), strict=True)
        draws.errorbar(
            DRAWS, values, errors, ls=":", ms=3, label=f"plain, made up, d = {one['features']}"
        )
    draws.set(xscale="log", xlabel="draws m", ylabel="nats too high", title="against draws")
    draws.legend(frameon=False, fontsize=7)
    for m in (10, 100):
        values, errors = zip(*(one["bias"][str(m)] for one in found["made up"]), strict=True)
        dimension.errorbar(DIMENSIONS, values, errors, marker="o", ms=4, capsize=2, label=f"m = {m}")
    dimension.set(xlabel="dimensions d", title="against dimension: plain flows")
    dimension.legend(frameon=False)
    for one in found["made up"]:
        variance.plot(one["variance"], one["row bias"], ".", ms=3, label=f"d = {one['features']}")
    largest = max(max(one["variance"]) for one in found["made up"])
    grid = torch.logspace(-2, math.log10(largest), 50)
    variance.plot(grid, grid / 2, "k--", lw=1, label="σ²/2")
    variance.plot(grid, gaussian_bias(grid, max(DRAWS)), "k-", lw=1, label="Gaussian noise, m = 100")
    variance.set(xscale="log", yscale="log", xlabel="variance σ² of a row's log-determinant")
    variance.set(xlim=(0.01, largest), ylim=(0.003, largest), title="against variance, m = 100")
    variance.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)


MEASURE = {"real": measure_real, "made up": measure_made_up}

if __name__ == "__main__":
    main()
