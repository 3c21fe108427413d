"""What you can measure of a flow beside its likelihood.

Can you trust a likelihood (`sandwich`, `level_test`, `draws_curve`)? Is one model better than another
(`paired`)? Do its intervals hold what they should (`calibrate`)? Does mass leak out of the support
(`leaked_mass`)? How far does the map stretch, and does it invert exactly (`lipschitz`, `round_trip`)?

All take a flow in eval() mode and points x (rows, shape), for a conditional density with their context
(rows, context_shape); `samples` is the number m of draws of the index for each point, `seed` theirs.
"""

from __future__ import annotations

__all__ = [
    "Check",
    "Coverage",
    "CurvePoint",
    "IndexUse",
    "IndexWorth",
    "IndicesUse",
    "LevelTest",
    "Lipschitz",
    "LogDetError",
    "Paired",
    "RoundTrip",
    "Sandwich",
    "Share",
    "Stretch",
    "calibrate",
    "draws_curve",
    "index_use",
    "index_worth",
    "is_chain",
    "leaked_mass",
    "level_test",
    "lipschitz",
    "log_det_error",
    "paired",
    "paper_log_prob",
    "reconstruction_error",
    "round_trip",
    "sandwich",
]

from ciflows.diagnostics.bounds import Paired, Sandwich, Share, leaked_mass, paired, sandwich
from ciflows.diagnostics.calibration import Check, Coverage, calibrate
from ciflows.diagnostics.draws import CurvePoint, LevelTest, draws_curve, level_test
from ciflows.diagnostics.index_use import IndexUse, IndexWorth, IndicesUse, index_use, index_worth
from ciflows.diagnostics.jacobians import (
    Lipschitz,
    RoundTrip,
    Stretch,
    is_chain,
    lipschitz,
    reconstruction_error,
    round_trip,
)
from ciflows.diagnostics.log_dets import LogDetError, log_det_error, paper_log_prob
