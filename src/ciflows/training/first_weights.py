"""The weights of a flow before training."""

from __future__ import annotations

__all__ = ["Start"]

import copy

from ciflows.core.flow import Flow
from ciflows.core.rows import Rows
from ciflows.training.loop import validation_score
from ciflows.training.processes import Processes
from ciflows.training.settings import TrainingSettings


class Start:
    """The weights before training, and how good they are: they may be better than what follows."""

    def __init__(
        self, flow: Flow, validation: Rows, settings: TrainingSettings, processes: Processes
    ) -> None:
        rows = validation[: settings.validation_points].on(flow)
        self.state = copy.deepcopy(flow.state_dict())
        self.score = validation_score(flow.eval(), rows, settings, processes)

    def better_of(self, flow: Flow, score: float) -> float:
        """The better of two scores, that of the start and another; the flow's weights go with it."""
        if score >= self.score:
            return score
        flow.load_state_dict(self.state)
        return self.score
