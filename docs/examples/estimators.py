"""One trained flow under two estimators of log p(x): exact log-determinants, and the paper's noisy ones.

    python docs/examples/estimators.py RUN

RUN is a finished run of a (continuously indexed) residual flow. The weights are the same in all columns.
See docs/likelihoods.md for why the last column may not be believed.
"""

from __future__ import annotations

import sys

import torch

import ciflows
from ciflows.diagnostics import paper_log_prob

POINTS = 20_000
DRAWS = (1, 5, 10, 100)


def main(folder: str) -> None:
    """Print the mean test log-likelihood for a growing number of draws, both ways."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = ciflows.load_run(folder, device)
    x = run.dataset().test[:POINTS].to(run.flow.device, run.flow.dtype)
    print(f"{run.config.model} on {run.config.data}, {len(x)} test points\n")
    print("| draws | exact | the paper's estimator |\n|---|---|---|")
    for samples in DRAWS:
        exact = run.log_prob(x, samples, seed=0).mean().item()
        noisy = paper_log_prob(run.flow, x, samples, seed=0).mean().item()
        print(f"| {samples} | {exact:.3f} | {noisy:.3f} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
