"""The pictures of docs/what-is-a-cif.md, each by models of a minute or less on one core.

python docs/examples/cif_pictures.py docs/figures
"""

import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import ciflows
from ciflows import Flow, Indexed
from ciflows.core.density import ConditionalNormal
from ciflows.core.evaluate import log_mean_exp
from ciflows.core.noise import Noise
from ciflows.datasets import load_dataset
from ciflows.layers import Affine
from ciflows.networks import MLP
from ciflows.training import TrainingSettings, fit_flow

BLUE, ORANGE, GREY = "#1f5fa8", "#d9702b", "0.75"
BLOCKS = {"layers": 5, "hidden": [64, 64, 64]}
INDEX = {f"{part}_hidden": [32, 32] for part in ("affine", "prior", "posterior")}
HOW = TrainingSettings(
    steps=1500,
    batch_size=500,
    optimizer="muon",
    learning_rate=0.01,
    clip=5.0,
    draws=2,
    validate_every=500,
)


def boxes(name: str) -> Flow:
    """A flow fitted to two boxes, as `make demo` does."""
    data = load_dataset("two-uniforms")
    settings = BLOCKS | (INDEX if name.startswith("cif-") else {})
    flow = ciflows.build_model(name, features=2, seed=0, **settings)
    fit_flow(flow, data.train, data.validation, HOW)
    return flow.eval()


def circles() -> list[Tensor]:
    """Circles of the noise that hold 10 % to 90 % of its mass."""
    angle = torch.linspace(0, 2 * torch.pi, 2000)
    shares = torch.linspace(0.1, 0.9, 5)
    radii = (-2 * (1 - shares).log()).sqrt()
    return [r * torch.stack([angle.cos(), angle.sin()], -1) for r in radii]


def decode(flow: Flow, z: Tensor) -> Tensor:
    for layer in reversed(flow.layers):
        z = layer.decode(z)
    return z


@torch.no_grad()
def tear(plain: Flow, indexed: Flow) -> Figure:
    """Where the same circles of noise go: through one bijection, and through a family of them."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for share, z in zip((1.0, 0.8, 0.6, 0.4, 0.25), circles(), strict=True):
        axes[0].plot(*z.T, color=BLUE, alpha=share, lw=1.2)
        axes[1].plot(*decode(plain, z).T, color=BLUE, alpha=share, lw=1.2)
        axes[2].plot(*decode(indexed, z).T, ".", color=ORANGE, alpha=share, ms=1.5)
    titles = ("circles of noise", "through one bijection", "through a family of bijections")
    for place, title in zip(axes, titles, strict=True):
        place.set(title=title, xlim=(-2.9, 2.9), ylim=(-2.9, 2.9), aspect="equal", xticks=[], yticks=[])
    for place in axes[1:]:
        _outline(place)
    return figure


def _outline(axes: Axes) -> None:
    data = load_dataset("two-uniforms").train
    for side in (data[data[:, 0] < 0], data[data[:, 0] > 0]):
        (left, low), (right, high) = side.min(0).values.tolist(), side.max(0).values.tolist()
        edge = ([left, right, right, left, left], [low, low, high, high, low])
        axes.plot(*edge, color="black", lw=0.8)


def one_index() -> Flow:
    """One indexed layer over one number, and nothing else: F(z; u) = e^(−s(u)) z − t(u)."""
    prior, posterior = (
        ConditionalNormal(MLP(1, 2, [32, 32]), features=1, context_features=1) for _ in "pq"
    )
    return Flow([Indexed(Affine(1, MLP(1, 2, [32, 32]), context_features=1), prior, posterior)])


def bumps(n: int) -> Tensor:
    return torch.where(torch.rand(n, 1) < 0.3, -2 + 0.3 * torch.randn(n, 1), 1 + 0.6 * torch.randn(n, 1))


@torch.no_grad()
def relaxed_mixture(flow: Flow) -> Figure:
    """Samples (x, u) of a one-layer CIF, and the density of x that is left when u is summed out."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    (layer,) = flow.layers
    z = torch.randn(4000, 1)
    u = layer.prior.draw((len(z),), z)
    x = layer.family.decode(z, u)
    points = left.scatter(x, u, c=z, s=3, cmap="coolwarm", vmin=-2.5, vmax=2.5)
    figure.colorbar(points, ax=left, label="noise z")
    left.set(xlabel="data x", ylabel="index u", title="each u is a bijection x = F(z; u)", xlim=(-4, 4))
    grid = torch.linspace(-4, 4, 400)[:, None]
    right.hist(bumps(20_000)[:, 0].numpy(), 80, density=True, color=GREY, label="data")
    density = flow.log_prob(grid, samples=500, seed=0).exp()
    right.plot(grid[:, 0], density, color=ORANGE, label="p(x), u summed out")
    right.set(xlabel="data x", title="together they are a mixture", xlim=(-4, 4), yticks=[])
    right.legend(frameon=False)
    return figure


@torch.no_grad()
def draws(flow: Flow) -> Figure:
    """How the estimate of log p(x) rises from the ELBO with the number of draws."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = load_dataset("two-uniforms").test[:500]
    counts = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    log_weights = flow.log_weights(x, 1000, noise=Noise.seeded(0))
    means = [log_mean_exp(log_weights.reshape(m, -1)).mean() for m in counts]
    left.plot(counts, means, "o-", color=ORANGE, label="mean of log p(x), m draws")
    left.axhline(means[0], color=BLUE, ls="--", label="ELBO: one draw")
    left.set(xscale="log", xlabel="draws m", ylabel="nats", title="more draws, tighter bound")
    left.legend(frameon=False)
    right.hist(flow.estimate(x, 100, seed=0).effective_samples, 40, color=BLUE)
    right.set(
        xlabel="effective draws of m = 100", ylabel="test points", title="what 100 draws are worth"
    )
    return figure


def main(folder: Path) -> None:
    torch.manual_seed(0)
    plain, indexed = boxes("resflow"), boxes("cif-resflow")
    tear(plain, indexed).savefig(folder / "tear.png", dpi=130)
    draws(indexed).savefig(folder / "draws.png", dpi=130)
    flow = one_index()
    how = TrainingSettings(steps=3000, batch_size=500, draws=5, validate_every=1000)
    fit_flow(flow, bumps(10_000), bumps(1000), how)
    relaxed_mixture(flow).savefig(folder / "relaxed-mixture.png", dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
