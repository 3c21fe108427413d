"""A Russian-roulette estimator of infinite variance (the paper's supplement gives the proof).

One feature, g(x) = a x, so log det(I + Dg) = log(1 + a) = Σ (−1)^(j+1) a^j / j. The estimator draws
N ~ Geom(p) and returns the first N terms, each divided by P(N >= j) = (1 − p)^(j−1). Its mean is right.
Its variance is infinite once a² > 1 − p.

    python docs/examples/roulette.py docs/figures/roulette.png        # seconds
"""

import sys

import torch
from matplotlib.figure import Figure
from torch import Tensor

BLUE, ORANGE = "#1f5fa8", "#d9702b"
TERMS = 400  # nobody draws an N above it: P(N > 400) is 0.5^400


def estimates(a: float, p: float, n: int) -> Tensor:
    """n draws of the estimator (n,)."""
    j = torch.arange(1, TERMS + 1, dtype=torch.float64)
    weighted = (-1) ** (j + 1) * a**j / j / (1 - p) ** (j - 1)
    count = torch.distributions.Geometric(torch.tensor(p, dtype=torch.float64)).sample((n,)).long() + 1
    return weighted.cumsum(0)[count.clamp(max=TERMS) - 1]


def main(out: str, p: float = 0.5, n: int = 1_000_000) -> None:
    torch.manual_seed(0)
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    draws = torch.arange(1, n + 1)
    print("   a   a²/(1 − p)   log(1 + a)   mean      standard deviation of 10³, 10⁴, 10⁵, 10⁶ draws")
    for a, color in ((0.6, BLUE), (-0.9, ORANGE)):
        drawn = estimates(a, p, n)
        spread = [drawn[:k].std().item() for k in (10**3, 10**4, 10**5, 10**6)]
        truth = torch.tensor(1 + a).log().item()
        spreads = "   ".join(f"{one:8.2f}" for one in spread)
        print(f"{a:4.1f}   {a * a / (1 - p):10.2f}   {truth:10.3f}   {drawn.mean():7.3f}   {spreads}")
        running = (
            ((drawn.square().cumsum(0) / draws) - (drawn.cumsum(0) / draws) ** 2).clamp(min=0).sqrt()
        )
        axes.plot(
            draws[99::100],
            running[99::100],
            color=color,
            label=f"a = {a}: a²/(1 − p) = {a * a / (1 - p):.2f}",
        )
    axes.set(xscale="log", yscale="log", xlabel="draws", ylabel="standard deviation so far")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1])
