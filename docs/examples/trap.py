"""The trap of docs/likelihoods.md: noisy log-determinants inside a log-mean-exp raise it."""

import torch

import ciflows
from ciflows.diagnostics import paper_log_prob
from ciflows.training import TrainingSettings, fit_flow

generator = torch.Generator().manual_seed(0)
modes = torch.randint(0, 2, (6000, 6), generator=generator) * 2.0 - 1
points = modes + 0.1 * torch.randn(6000, 6, generator=generator)
train, validation, test = points[:5000], points[5000:5500], points[5500:]

flow = ciflows.build_model("resflow", features=6, layers=6, hidden=[64, 64], seed=0)
fit_flow(flow, train, validation, TrainingSettings(steps=500, batch_size=500, learning_rate=0.01))

print("draws    exact   the paper's estimator")
for samples in (1, 10, 100):
    with torch.no_grad():
        exact = flow.log_prob(test, samples).mean()
    noisy = paper_log_prob(flow, test, samples, seed=0).mean()
    print(f"{samples:5d}  {exact:7.3f}   {noisy:7.3f}")
