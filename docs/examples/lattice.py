"""Variational inference on lattices of Gaussians: a plain spline flow and one with indices.

The target is a mixture of K Gaussians of standard deviation 0.25 on a square lattice, 2 apart, and is
normalised: the best ELBO is 0, and k of the K modes give -log(K / k). Both flows have five spline layers
of 8 bins and networks of 2 x 32; the index has one number, its networks 2 x 10. Bases are normal with
standard deviations of 0.1, 1 and 10.

All of docs/variational-modes.md, ten minutes for each seed on a core:

    python docs/examples/lattice.py --steps 4000 --seeds 3 --out lattice.png

A part of it:

    python docs/examples/lattice.py --modes 16 --scales 1 --models cif-nsf --steps 4000

In the first fifth of the steps the target is flattened (`--anneal 0` leaves that out). The last three
quarters balance the masses of the modes (`--balance 0`).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import ciflows
from ciflows import Flow, vi
from ciflows.layers import Scale

STD = 0.25
SPLINES = {"layers": 5, "hidden": [32, 32], "bins": 8, "bound": 4.0}
INDEX = {"index_features": 1} | {f"{part}_hidden": [10, 10] for part in ("affine", "prior", "posterior")}


def lattice(modes: int) -> Callable[[Tensor], Tensor]:
    """log π of K = modes Gaussians on a square lattice, 2 apart, around 0."""
    side = round(modes**0.5)
    places = 2 * torch.arange(side) - (side - 1.0)
    means = torch.cartesian_prod(places, places)

    def log_density(x: Tensor) -> Tensor:
        normal = torch.distributions.Normal(means.to(x), STD)
        return (
            torch.logsumexp(normal.log_prob(x[:, None]).sum(-1), -1) - torch.tensor(float(modes)).log()
        )

    return log_density


def build(name: str, scale: float, seed: int) -> Flow:
    """The flow over a base of that standard deviation: what is last divides by it."""
    settings = SPLINES | (INDEX if name.startswith("cif-") else {})
    flow = ciflows.build_model(name, features=2, seed=seed, **settings)
    return Flow([*flow.layers, Scale((2,), 1 / scale)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--modes", type=int, nargs="+", default=[9, 16])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--models", nargs="+", default=["nsf", "cif-nsf"])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--index-rate", type=float, default=0.3)
    parser.add_argument("--anneal", type=float, default=0.2)
    parser.add_argument("--first-power", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.75)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="where to draw samples of the first seed")
    given = parser.parse_args()
    rows = [(modes, scale) for modes in given.modes for scale in given.scales]
    figure, axes = plt.subplots(
        len(rows), len(given.models), squeeze=False, figsize=(3 * len(given.models), 3 * len(rows))
    )
    print("  K  base sd  model     seed   ELBO (error)      log Z (error)     CPU seconds", flush=True)
    names = "steps", "batch", "index_rate", "anneal", "first_power", "balance"
    how = {name: getattr(given, name) for name in names} | {"learning_rate": given.rate}
    runs = itertools.product(range(given.seeds), enumerate(rows), enumerate(given.models))
    for seed, (place, (modes, scale)), (column, name) in runs:
        flow, log_density = build(name, scale, seed).to(given.device), lattice(modes)
        start = time.process_time()
        vi.fit(log_density, flow, **how, seed=seed)
        found = vi.evaluate(log_density, flow, 100_000)
        print(
            f"{modes:3d}  {scale:7g}  {name:8s}  {seed:4d}  {found.elbo:7.4f} "
            f"({found.std_error:.4f})  {found.log_z:7.4f} ({found.log_z_error:.4f})  "
            f"{time.process_time() - start:7.0f}",
            flush=True,
        )
        if given.out and seed == 0:
            x, axis = flow.sample(20_000, seed=0).cpu(), axes[place, column]
            axis.hist2d(x[:, 0].numpy(), x[:, 1].numpy(), 150, range=[[-5, 5], [-5, 5]])
            axis.set_title(f"{name}, K = {modes}, base {scale:g}: {found.elbo:.3f}", fontsize=8)
            figure.savefig(given.out, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    main()
