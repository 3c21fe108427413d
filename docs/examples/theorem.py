"""Theorem 2.1 in numbers: the bi-Lipschitz constant of a residual flow against the mass that it leaks.

python docs/examples/theorem.py docs/figures/theorem.png        # two minutes on one core
"""

import sys
from typing import NamedTuple

from matplotlib.figure import Figure

import ciflows
from ciflows.datasets import load_dataset
from ciflows.diagnostics import leaked_mass, lipschitz
from ciflows.training import TrainingSettings, fit_flow

BLUE, ORANGE = "#1f5fa8", "#d9702b"
LAYERS = (1, 2, 4, 8, 16)
SMALL = {"hidden": [32, 32]}
INDEX = {f"{part}_hidden": [16, 16] for part in ("affine", "prior", "posterior")}


class Measured(NamedTuple):
    """The bi-Lipschitz constant at the test points, its bound, and the share of mass that leaks."""

    constant: float
    bound: float | None
    leak: float


def measure(name: str, layers: int, steps: int) -> Measured:
    data = load_dataset("two-uniforms")
    settings = SMALL | (INDEX if name.startswith("cif-") else {})
    flow = ciflows.build_model(name, features=2, layers=layers, seed=0, **settings)
    how = {"optimizer": "muon", "learning_rate": 0.01, "clip": 5.0, "draws": 2}
    few = {"steps": steps, "batch_size": 500, "validate_every": 250, "validation_points": 1000}
    fit_flow(flow, data.train, data.validation, TrainingSettings(**how, **few))
    whole = lipschitz(flow.eval(), data.test[:2000]).whole
    return Measured(whole.constant, whole.bound, leaked_mass(flow, data.truth.contains).share)


def draw(plain: list[Measured], indexed: list[Measured]) -> Figure:
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(LAYERS, [one.constant for one in plain], "o-", color=BLUE, label="plain flow")
    left.set(xscale="log", title="bi-Lipschitz constant", xlabel="layers", ylim=(0, None))
    right.plot(LAYERS, [100 * one.leak for one in plain], "o-", color=BLUE, label="plain flow")
    right.plot(LAYERS, [100 * one.leak for one in indexed], "s-", color=ORANGE, label="with an index")
    right.set(xscale="log", title="leaked mass, %", xlabel="layers", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(LAYERS, map(str, LAYERS))
        axes.minorticks_off()
        axes.legend(frameon=False)
    return figure


def main(out: str, steps: int = 1000) -> None:
    print("layers  constant     bound    leak   leak with an index", flush=True)
    plain, indexed = [], []
    for layers in LAYERS:
        plain.append(measure("resflow", layers, steps))
        indexed.append(measure("cif-resflow", layers, steps))
        constant, bound, leak = plain[-1]
        print(
            f"{layers:6d}  {constant:8.1f}  {bound:8.0e}  {leak:6.1%}  {indexed[-1].leak:6.1%}",
            flush=True,
        )
    draw(plain, indexed).savefig(out, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1])
