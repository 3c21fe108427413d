"""What makes a plain residual flow on POWER good: fair.py STEPS [SEED ...], with POWER in CIFLOWS_DATA.

Ten blocks of 4×128 with exact log-determinants, trained for as many steps in every line on the first
200,000 training rows; mean log-likelihood of the first 20,000 test rows (CIFs: 2,000, with 20 draws).
"""

import math
import sys
import time

import torch

import ciflows
from ciflows.datasets import load_dataset
from ciflows.training import TrainingSettings, fit_flow

ADAM = {"optimizer": "adam", "learning_rate": 3e-3}
MUON = {"optimizer": "muon", "learning_rate": 1e-2}
CASES = [
    ("resflow", {"kappa": 0.59049}, ADAM),
    ("resflow", {"kappa": 0.9}, ADAM),
    ("resflow", {"kappa": 0.99}, ADAM),
    ("resflow", {"kappa": 0.9}, MUON),
    ("resflow", {"kappa": 0.9, "act_norm": True}, ADAM),
    ("resflow", {"kappa": 0.99, "act_norm": True}, ADAM),
    ("resflow", {"kappa": 0.9, "act_norm": True}, MUON),
    ("resflow", {"kappa": 0.99, "act_norm": True}, MUON),
    ("cif-resflow", {"kappa": 0.9}, MUON),
    ("cif-resflow", {"kappa": 0.9, "act_norm": True}, MUON),
]

steps, seeds = int(sys.argv[1]), [int(word) for word in sys.argv[2:]] or [0]
torch.set_num_threads(1)
data = load_dataset("power")
train, validation, test = (
    data.train[:200_000].clone(),
    data.validation[:5000].clone(),
    data.test[:20_000],
)
for seed in seeds:
    for model, settings, optimizer in CASES:
        flow = ciflows.build_model(model, features=6, seed=seed, **settings)
        training = TrainingSettings(
            steps=steps,
            batch_size=500,
            clip=5.0,
            objective="elbo",
            validate_every=steps // 4,
            **optimizer,
        )
        start = time.process_time()
        fit_flow(flow, train, validation, training, seed=seed)
        with torch.no_grad():
            x = test.clone() if flow.exact else test[:2000].clone()
            log_prob = flow.estimate(x, 20, seed=0).log_prob
        error = log_prob.std().item() / math.sqrt(len(log_prob))
        seconds = time.process_time() - start
        print(model, settings, optimizer["optimizer"], f"seed {seed}:", end=" ")
        print(f"{log_prob.mean():.3f} ± {error:.3f}, {seconds:.0f} s", flush=True)
