"""One optimiser step."""

from __future__ import annotations

__all__ = ["Step", "make_step"]

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ciflows.core.flow import Flow
from ciflows.core.hook import on, replaceable
from ciflows.core.noise import Noise
from ciflows.core.objectives import Objective
from ciflows.core.precision import float32_products
from ciflows.core.rows import Rows
from ciflows.errors import UserError
from ciflows.layers import BatchNorm, Residual, Roulette
from ciflows.networks import ResNet
from ciflows.networks.batch_norm import BatchNorm2d
from ciflows.networks.lipschitz import iterate_norms, spectral_maps
from ciflows.training.optimizer import Optimizer
from ciflows.training.processes import ALONE, Processes
from ciflows.training.settings import TrainingSettings


class Step:
    """Forward, backward, clipping, the optimiser and power iterations.

    Arguments:
        processes: Those that take the step together, each with some rows of the batch.
        total: Number of rows in the whole batch; None if this process has them all.
    """

    make_optimizer: ClassVar[type[Optimizer]] = Optimizer

    def __init__(
        self,
        flow: Flow,
        settings: TrainingSettings,
        noise: Noise,
        processes: Processes = ALONE,
        total: int | None = None,
    ) -> None:
        self.flow = flow
        self.processes, self.total = processes, total
        if total is not None:
            _share_batch_norms(flow, processes)
        self.noise = noise
        self.objective: Objective = settings.make_objective()
        self.clip = settings.clip
        self.power_iterations = settings.power_iterations
        self.decay = settings.average
        self.exact_products = settings.precision in ("float32", "float64")
        self.rates = _roulette_rates(flow)
        self.spectral = spectral_maps(flow)
        for part in flow.modules():
            if isinstance(part, ResNet):
                part.mixed = settings.precision == "mixed"
        self.parameters = [p for p in flow.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer(
            self.parameters,
            settings.learning_rate,
            settings.weight_decay,
            muon=settings.optimizer == "muon",
            muon_step=settings.muon_step,
        )
        self.averages = [p.detach().clone() for p in self.parameters] if self.decay else []

    def state(self) -> dict[str, Tensor]:
        """What a step changes beside the flow: the optimiser's moments and the averages, by name."""
        averages = {f"average.{index}": value for index, value in enumerate(self.averages)}
        return self.optimizer.state() | averages

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.set_rate(rate)

    def __call__(self, batch: Rows) -> Tensor:
        """Take the step; the loss (), or NaN if the loss or the gradient is not finite.

        With several processes it is this one's part of the loss: the sum over all is the whole.
        """
        self._spin()
        return self._take(batch)

    def _spin(self) -> tuple[int, ...]:
        """Draw the number of terms of random series in this step: the same for all blocks."""
        self.noise.counts.clear()
        self.noise.counts.update({p: self.noise.geometric(p) for p in self.rates})
        return tuple(self.noise.counts.values())

    def _take(self, batch: Rows) -> Tensor:
        with float32_products(self.exact_products):
            self.optimizer.zero_grad()
            with on(self.flow):
                loss = self._loss(batch)
                loss.backward()
            self.processes.add_gradients(self.parameters)
            norm = self.optimizer.step(self.clip)
        if self.averages:
            torch._foreach_lerp_(self.averages, self._values(), 1 - self.decay)
        for maps in self.spectral:
            iterate_norms(maps, self.power_iterations)
        return torch.where(norm.isfinite(), loss.detach(), math.nan)

    def _loss(self, batch: Rows) -> Tensor:
        values = self.objective(self.flow, batch, noise=self.noise)
        return -values.mean() if self.total is None else -values.sum() / self.total

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averaged weights for a while, if weights are averaged."""
        if not self.averages:
            yield
            return
        tensors = [*self._values(), *self.flow.buffers()]
        kept = [tensor.clone() for tensor in tensors]
        try:
            torch._foreach_copy_(self._values(), self.averages)
            yield
        finally:
            torch._foreach_copy_(tensors, kept)

    def _values(self) -> list[Tensor]:
        return [p.detach() for p in self.parameters]


def _roulette_rates(flow: Flow) -> list[float]:
    """The p of all blocks whose series end at random in training."""
    blocks = [part for part in flow.modules() if isinstance(part, Residual)]
    in_training = [block.training_log_det for block in blocks]
    return sorted({each.p for each in in_training if isinstance(each, Roulette) and each.p < 1})


def _share_batch_norms(flow: Flow, processes: Processes) -> None:
    """Let batch norms take the whole batch, of which this process has some rows."""
    for part in flow.modules():
        if isinstance(part, BatchNorm | BatchNorm2d):
            part.gather = processes.gather
        elif isinstance(part, _BatchNorm) or getattr(part, "batchwise", False):
            raise UserError(
                f"{type(part).__name__} takes the mean over a batch, of which each process has a part: "
                "use ciflows.layers.BatchNorm, or one process."
            )


@replaceable
def make_step(flow: Flow, settings: TrainingSettings, noise: Noise, batch: Rows) -> Step:
    """The fastest step that works for this flow here.

    Arguments:
        batch: A batch of the shape that every step will have.
    """
    return Step(flow, settings, noise)
