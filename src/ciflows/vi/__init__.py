"""Variational inference: fit a flow to a density that you know up to its constant.

For π(x) with an unknown constant Z = ∫ π(x) dx, and a flow's samples x with log-weights W
(`Flow.rsample_with_log_weight`),

    E[log π(x) - W]  <=  E[log (1/K) Σ_k exp(log π(x_k) - W_k)]  <=  log Z,

with equality where the flow is π / Z (Caterini et al., 2021, for flows with indices). `fit` maximises
the second with K = `draws`, `evaluate` reports the first, and log Z with its error.
"""

from __future__ import annotations

__all__ = ["Bound", "Evidence", "evaluate", "fit"]

from ciflows.vi.bound import Bound
from ciflows.vi.inference import Evidence, evaluate, fit
