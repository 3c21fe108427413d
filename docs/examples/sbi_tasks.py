"""Posteriors of simulators in sbi: its own NSF and MAF, and flows with indices, at equal simulations.

Two tasks with a prior on a box and a posterior that is known: two moons (Greenberg et al., 2019) and a
mixture of a wide and a narrow Gaussian around theta (Sisson et al., 2007). For each estimator: C2ST, the
accuracy of a classifier that tells its samples from true ones (0.5 is best), and leakage, the share of
its mass outside the box. Needs sbi (pip install sbi).

    python docs/examples/sbi_tasks.py --simulations 2000 --seeds 3
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from sbi.inference import NPE
from sbi.utils import BoxUniform
from sbi.utils.metrics import c2st
from torch import Tensor

from ciflows.bridges.sbi import posterior_nn


class Task(NamedTuple):
    """A simulator with its prior's bound, an observation and the log-likelihood there."""

    bound: float
    simulate: Callable[[Tensor], Tensor]
    observed: Tensor
    log_likelihood: Callable[[Tensor], Tensor]


def simulate_moons(theta: Tensor) -> Tensor:
    angle = math.pi * (torch.rand(len(theta)) - 0.5)
    radius = 0.1 + 0.01 * torch.randn(len(theta))
    crescent = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1)
    return crescent + moved(theta)


def moved(theta: Tensor) -> Tensor:
    first, second = theta.unbind(-1)
    return torch.stack([-(first + second).abs(), second - first], -1) / math.sqrt(2)


def moons_at_zero(theta: Tensor) -> Tensor:
    """log p(x = 0 | θ) of the crescent, whose points have radius N(0.1, 0.01) and a uniform angle."""
    off = -moved(theta) - torch.tensor([0.25, 0.0])
    radius = off.norm(dim=-1)
    log_p = torch.distributions.Normal(0.1, 0.01).log_prob(radius) - torch.log(math.pi * radius)
    return torch.where(off[:, 0] > 0, log_p, -torch.inf)


def simulate_mixture(theta: Tensor) -> Tensor:
    scale = torch.where(torch.rand(len(theta), 1) < 0.5, 1.0, 0.1)
    return theta + scale * torch.randn_like(theta)


def mixture_at(observed: Tensor) -> Callable[[Tensor], Tensor]:
    def log_likelihood(theta: Tensor) -> Tensor:
        parts = [
            torch.distributions.Normal(observed, scale).log_prob(theta).sum(-1) for scale in (1.0, 0.1)
        ]
        return torch.logsumexp(torch.stack(parts), 0) - math.log(2)

    return log_likelihood


NEAR_EDGE = torch.tensor([1.8, 0.5])
TASKS = {
    "two moons": Task(1.0, simulate_moons, torch.zeros(2), moons_at_zero),
    "mixture": Task(2.0, simulate_mixture, NEAR_EDGE, mixture_at(NEAR_EDGE)),
}


def true_samples(task: Task, n: int) -> Tensor:
    """Draw from the posterior by a fine grid, jittered inside its cells."""
    axis = (torch.arange(1500) + 0.5) / 1500 * 2 * task.bound - task.bound
    grid = torch.cartesian_prod(axis, axis)
    chosen = torch.multinomial(torch.softmax(task.log_likelihood(grid).double(), 0).float(), n, True)
    return grid[chosen] + (torch.rand(n, 2) - 0.5) * 2 * task.bound / 1500


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--estimators", nargs="+", default=["maf", "nsf", "cif-nsf", "cif-nsf, bounded"])
    given = parser.parse_args()
    print("task        estimator          seed   C2ST   leakage  seconds", flush=True)
    for name in given.tasks:
        task = TASKS[name]
        low, high = torch.full((2,), -task.bound), torch.full((2,), task.bound)
        for estimator in given.estimators:
            for seed in range(given.seeds):
                torch.manual_seed(seed)
                prior = BoxUniform(low, high)
                theta = prior.sample((given.simulations,))
                kind: object = estimator
                if estimator.startswith("cif-"):
                    bounds = (low, high) if estimator.endswith("bounded") else None
                    kind = posterior_nn(estimator.split(",")[0], bounds=bounds)
                start = time.perf_counter()
                trainer = NPE(prior, density_estimator=kind, show_progress_bars=False)
                net = trainer.append_simulations(theta, task.simulate(theta)).train()
                seconds = time.perf_counter() - start
                raw = net.sample(torch.Size((10_000,)), task.observed[None])[:, 0].detach()
                inside = ((raw >= low) & (raw <= high)).all(-1)
                kept = raw[inside][: given.samples]
                score = float(c2st(kept, true_samples(task, len(kept)), seed=seed))
                leakage = 1 - inside.float().mean().item()
                print(
                    f"{name:10s}  {estimator:18s} {seed:3d}  {score:6.3f}   "
                    f"{leakage:6.4f}  {seconds:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
