"""Training: settings, the loop, checkpoints and what can be watched."""

from ciflows.training.loop import Outcome, fit_flow
from ciflows.training.settings import EvaluationSettings, TrainingSettings

__all__ = ["EvaluationSettings", "Outcome", "TrainingSettings", "fit_flow"]
