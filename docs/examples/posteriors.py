"""Variational inference on three posteriors whose moments are known by other means.

- a funnel: v ~ N(0, 1.5²), x_i | v ~ N(0, e^v) for i = 1, 2; moments in closed form;
- eight schools (Rubin, 1981), not centred: μ ~ N(0, 5²), τ ~ half-Cauchy(5), θ_j = μ + τ η_j; moments
  by quadrature over (μ, log τ), for θ is Gaussian given both;
- a logistic regression with four coefficients, N(0, 2²), on 100 rows; moments by importance sampling
  with 200,000 draws of a t distribution around the mode.

A flow is fitted to each, and its samples are weighted by π(x) / exp(W). `z` is the difference to the
reference in standard errors of the weighted mean:

    python docs/examples/posteriors.py --model cif-nsf --steps 2000
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, MultivariateNormal, Normal

import ciflows
from ciflows import Flow, vi
from ciflows.layers import Scale

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
FUNNEL = 1.5


class Posterior(NamedTuple):
    """A density known up to its constant, and what is known of it.

    Attributes:
        features: Size of x.
        log_density: log π(x) of x (rows, features).
        values: What moments are of, as functions of x (rows, features) -> (rows, values).
        names: Their names.
        mean: Their means (values,).
        std: Their standard deviations (values,).
        unit: What x is divided by: splines bend within 8 units of 0.
    """

    features: int
    log_density: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    names: list[str]
    mean: Tensor
    std: Tensor
    unit: float = 1.0


def funnel() -> Posterior:
    def log_density(x: Tensor) -> Tensor:
        v = x[:, 0]
        rest = Normal(0.0, torch.exp(0.5 * v)[:, None]).log_prob(x[:, 1:]).sum(-1)
        return Normal(0.0, FUNNEL).log_prob(v) + rest

    wide = math.exp(FUNNEL**2 / 4)  # sqrt(E[e^v])
    names, std = ["v", "x1", "x2"], torch.tensor([FUNNEL, wide, wide])
    return Posterior(3, log_density, lambda x: x, names, torch.zeros(3), std, unit=4.0)


def eight_schools() -> Posterior:
    def log_density(x: Tensor) -> Tensor:
        mu, tau, eta = x[:, 0], torch.exp(x[:, 1]), x[:, 2:]
        prior = Normal(0.0, 5.0).log_prob(mu) + _log_half_cauchy(tau) + x[:, 1]
        theta = mu[:, None] + tau[:, None] * eta
        return prior + (Normal(0.0, 1.0).log_prob(eta) + Normal(theta, ERRORS).log_prob(EFFECTS)).sum(-1)

    def values(x: Tensor) -> Tensor:
        theta = x[:, :1] + torch.exp(x[:, 1:2]) * x[:, 2:]
        return torch.cat([x[:, :2], theta], dim=1)

    names = ["mu", "log tau", *(f"theta{j}" for j in range(1, 9))]
    return Posterior(10, log_density, values, names, *_schools_by_quadrature())


def _log_half_cauchy(tau: Tensor) -> Tensor:
    return math.log(2 / (5 * math.pi)) - torch.log1p((tau / 5) ** 2)


def _schools_by_quadrature() -> tuple[Tensor, Tensor]:
    """Means and standard deviations of μ, log τ and θ, on a grid of μ and log τ."""
    mu = torch.linspace(-25, 35, 1201).double()[:, None, None]
    log_tau = torch.linspace(-12, 6, 1801).double()[None, :, None]
    tau2, noise2 = torch.exp(2 * log_tau), ERRORS.double() ** 2
    marginal = Normal(mu, (tau2 + noise2).sqrt()).log_prob(EFFECTS.double()).sum(-1)
    prior = Normal(0.0, 5.0).log_prob(mu) + _log_half_cauchy(tau2.sqrt()) + log_tau
    p = torch.softmax((marginal + prior[..., 0]).flatten(), 0).reshape(marginal.shape)[..., None]
    pull = tau2 / (tau2 + noise2)
    theta = mu + pull * (EFFECTS.double() - mu)
    parts = [(mu, mu**2), (log_tau, log_tau**2), (theta, theta**2 + pull * noise2)]
    first, second = (torch.cat([(p * part[k]).sum((0, 1)) for part in parts]) for k in (0, 1))
    return first.float(), (second - first**2).sqrt().float()


def logistic() -> Posterior:
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([torch.ones(100, 1), torch.randn(100, 3, generator=generator)], dim=1)
    truth = torch.tensor([-0.5, 2.0, -1.0, 0.3])
    y = (torch.rand(100, generator=generator) < torch.sigmoid(rows @ truth)).float()

    def log_density(x: Tensor) -> Tensor:
        logits = x @ rows.to(x).T
        return Normal(0.0, 2.0).log_prob(x).sum(-1) + Bernoulli(logits=logits).log_prob(y.to(x)).sum(-1)

    names = [f"beta{j}" for j in range(4)]
    return Posterior(4, log_density, lambda x: x, names, *_by_importance(log_density))


def _by_importance(
    log_density: Callable[[Tensor], Tensor], draws: int = 200_000
) -> tuple[Tensor, Tensor]:
    """Moments from draws of a t distribution around the mode, which Newton's method finds."""
    mode = torch.zeros(4).double()

    def loss(x: Tensor) -> Tensor:
        return -log_density(x[None])[0]

    for _ in range(20):
        hessian = torch.autograd.functional.hessian(loss, mode)
        mode = mode - torch.linalg.solve(hessian, torch.autograd.functional.jacobian(loss, mode))
    generator = torch.Generator().manual_seed(1)
    root = torch.linalg.cholesky(torch.linalg.inv(hessian))
    normal = torch.randn(draws, 4, generator=generator).double() @ root.T
    scale = torch.randn(draws, 8, generator=generator).double().square().mean(1)
    x = mode + normal / scale.sqrt()[:, None]
    squares = MultivariateNormal(mode, scale_tril=root).log_prob(x) - MultivariateNormal(
        mode, scale_tril=root
    ).log_prob(mode)
    log_t = -0.5 * (8 + 4) * torch.log1p(-2 * squares / 8)
    weight = torch.softmax(log_density(x) - log_t, 0)[:, None]
    mean = (weight * x).sum(0)
    return mean.float(), (weight * (x - mean) ** 2).sum(0).sqrt().float()


POSTERIORS = {"funnel": funnel, "eight schools": eight_schools, "logistic regression": logistic}


class Moments(NamedTuple):
    """Weighted means of samples (values,), their standard errors, and weighted standard deviations."""

    mean: Tensor
    error: Tensor
    std: Tensor


@torch.no_grad()
def weighted_moments(flow: Flow, posterior: Posterior, draws: int, seed: int = 0) -> Moments:
    """Moments from samples of the flow, weighted by π(x) / exp(W)."""
    x, log_weight = flow.rsample_with_log_weight(draws, seed=seed)
    weight = torch.softmax((posterior.log_density(x) - log_weight).double(), 0)[:, None]
    values = posterior.values(x).double()
    mean = (weight * values).sum(0)
    away = (values - mean).square()
    return Moments(mean, (weight.square() * away).sum(0).sqrt(), (weight * away).sum(0).sqrt())


def fit(posterior: Posterior, model: str, steps: int, batch: int, seed: int = 0) -> Flow:
    """A flow fitted to the posterior."""
    features = posterior.features
    inner = ciflows.build_model(
        model, features=features, layers=3, hidden=[32, 32], bound=8.0, seed=seed
    )
    flow = Flow([Scale((features,), 1 / posterior.unit), *inner.layers])
    vi.fit(posterior.log_density, flow, steps=steps, batch=batch, learning_rate=5e-3, seed=seed)
    return flow.eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--posteriors", nargs="+", default=list(POSTERIORS), choices=list(POSTERIORS))
    parser.add_argument("--model", default="cif-nsf")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--draws", type=int, default=20_000)
    args = parser.parse_args()
    for name in args.posteriors:
        posterior = POSTERIORS[name]()
        flow = fit(posterior, args.model, args.steps, args.batch)
        print(f"{name}: {vi.evaluate(posterior.log_density, flow, args.draws, seed=1)}", flush=True)
        moments = weighted_moments(flow, posterior, args.draws)
        rows = zip(posterior.names, posterior.mean, posterior.std, *moments, strict=True)
        for label, mean, std, found, error, spread in rows:
            print(
                f"  {label:8} mean {found:7.3f} ± {error:.3f} (reference {mean:7.3f}, "
                f"z {(found - mean) / error:5.1f}), std {spread:6.3f} (reference {std:6.3f})"
            )


if __name__ == "__main__":
    main()
