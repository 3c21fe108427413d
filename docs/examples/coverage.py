"""How often the stated 95 % interval of a mean log-likelihood holds the truth, and when flags fire.

The first models are linear and Gaussian, x = z - u, so that log p(x) is known; their q has a width and a
shift relative to the exact posterior. The last is trained on a 2-D set, with 20,000 draws as the truth.

    python docs/examples/coverage.py
"""

import math

import torch
from torch import Tensor, nn

from ciflows import Flow, Indexed, build_model
from ciflows.core.density import ConditionalNormal
from ciflows.core.evaluate import Estimate, Summary, summarise
from ciflows.datasets import get_synthetic
from ciflows.diagnostics import sandwich
from ciflows.layers import Affine
from ciflows.training import TrainingSettings, fit_flow

ROWS, RUNS, DRAWS = 500, 400, 100


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight, bias
    return layer


def gaussian_cif(width: float, shift: float) -> Flow:
    """x = z - u with z, u ~ N(0, I); q(u | x) = N(-x/2 + shift σ, (width σ)²) with σ² = 1/2."""
    one, flat, std = torch.eye(2), torch.zeros(2, 2), math.sqrt(0.5)
    moments = torch.tensor([shift * std] * 2 + [math.log(width * std)] * 2)
    layer = Indexed(
        Affine(2, linear(torch.cat([flat, one]), torch.zeros(4)), 2),
        prior=ConditionalNormal(linear(torch.cat([flat, flat]), torch.zeros(4)), 2, 2),
        posterior=ConditionalNormal(linear(torch.cat([-one / 2, flat]), moments), 2, 2),
    )
    return Flow([layer]).double().eval()


def trained_cif(points: Tensor) -> Flow:
    flow = build_model("cif-maf", features=2, layers=2, hidden=[16], seed=0)
    settings = TrainingSettings(steps=1000, batch_size=200, learning_rate=0.005)
    with torch.enable_grad():
        fit_flow(flow, points[:10_000], points[10_000:11_000], settings)
    return flow.eval()


def report(name: str, flow: Flow, summaries: list[Summary], truths: list[float]) -> None:
    pairs = list(zip(summaries, truths, strict=True))
    covered = sum(s.interval[0] < truth < s.interval[1] for s, truth in pairs) / len(pairs)
    plain = sum(abs(s.log_prob - truth) < 1.96 * s.monte_carlo_error for s, truth in pairs) / len(pairs)
    flagged = sum(summary.doubtful for summary in summaries) / len(pairs)
    gaps = [sandwich(flow, 200, DRAWS, seed=seed) for seed in range(20)]
    wide = sum(gap.is_wide() for gap in gaps) / len(gaps)
    print(
        f"{name:28s} {covered:7.1%}  {plain:7.1%}  {flagged:7.1%}  {wide:7.1%}  "
        f"{gaps[0].gap:8.4f}  {sum(s.pareto_share for s in summaries) / len(pairs):7.1%}"
    )


torch.set_grad_enabled(False)  # with gradients, estimates would keep all of their draws in memory
print(f"{RUNS} runs of {ROWS} rows, {DRAWS} draws each")
print(f"{'q':28s} covered  no bias   doubtful  wide gap  gap   k > 0.7")
for name, width, shift in [
    ("good: width 1.1, shift 0.1", 1.1, 0.1),
    ("fair: width 1.3, shift 0.3", 1.3, 0.3),
    ("fair: width 0.9, shift 0.2", 0.9, 0.2),
    ("fair: width 0.85, shift 0.3", 0.85, 0.3),
    ("narrow: width 0.5", 0.5, 0.0),
    ("narrow: width 0.3", 0.3, 0.0),
]:
    flow = gaussian_cif(width, shift)
    x = flow.sample(ROWS * RUNS, seed=1)
    truth = -0.25 * x.square().sum(-1) - math.log(4 * math.pi)
    parts = zip(*(column.split(ROWS) for column in flow.estimate(x, DRAWS, seed=0)), strict=True)
    summaries = [summarise(Estimate(*part)) for part in parts]
    report(name, flow, summaries, [part.mean().item() for part in truth.split(ROWS)])

points = get_synthetic("two-uniforms").sample(11_000 + ROWS, seed=0)
flow, rows = trained_cif(points), points[-ROWS:]
reference = summarise(flow.estimate(rows, 20_000, seed=10_000))
summaries = [summarise(flow.estimate(rows, DRAWS, seed=seed)) for seed in range(RUNS // 4)]
truths = [reference.log_prob - reference.bias] * len(summaries)
report("trained on two-uniforms", flow, summaries, truths)
