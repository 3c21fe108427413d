"""One optimiser step: the plain way, and captured whole as a CUDA graph."""

from __future__ import annotations

__all__ = ["CapturedStep", "Step", "make_step"]

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ciflows.flow import Flow
from ciflows.networks import LipschitzMLP, update_norms
from ciflows.noise import Noise
from ciflows.objectives import Objective
from ciflows.training.settings import TrainingSettings

WARM_UPS = 3


class Step:
    """Forward, backward, clipping, Adam and power iterations.

    Arguments:
        flow: The flow to train.
        settings: How it is trained.
        noise: Where its draws come from.
    """

    def __init__(self, flow: Flow, settings: TrainingSettings, noise: Noise) -> None:
        self.flow = flow
        self.noise = noise
        self.objective: Objective = settings.make_objective()
        self.clip = settings.clip
        self.power_iterations = settings.power_iterations
        self.matmul = "high" if settings.precision == "tf32" else "highest"
        self.parameters = [p for p in flow.parameters() if p.requires_grad]
        rate = torch.tensor(settings.learning_rate, device=flow.device)
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=rate, fused=True, capturable=flow.device.type == "cuda"
        )

        for p in self.parameters:  # made here, not at the first step, so that they can be restored
            self.optimizer.state[p] = {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's tensors by name."""
        return {
            f"{index}.{name}": value
            for index, p in enumerate(self.parameters)
            for name, value in self.optimizer.state[p].items()
        }

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.param_groups[0]["lr"].fill_(rate)

    def __call__(self, batch: Tensor) -> Tensor:
        """Take the step; the loss (), or NaN where the loss or the gradient is not finite."""
        with _matmul_precision(self.matmul):
            loss = -self.objective(self.flow, batch, noise=self.noise).mean()
            self.optimizer.zero_grad()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        update_norms(self.flow, self.power_iterations)
        return torch.where(norm.isfinite(), loss.detach(), math.nan)


class CapturedStep(Step):
    """The same step, recorded once as a CUDA graph and replayed: its kernels run without Python.

    Arguments:
        batch: A batch of the shape that every step will have.
    """

    def __init__(self, flow: Flow, settings: TrainingSettings, noise: Noise, batch: Tensor) -> None:
        super().__init__(flow, settings, noise)
        self.batch = batch.clone()
        self.graph = torch.cuda.CUDAGraph()
        if noise.generator is not None:
            self.graph.register_generator_state(noise.generator)
        self._record()

    def _record(self) -> None:
        """Record the step; the warm-ups that capture needs leave no trace, even where it fails."""
        tensors = [*self.flow.parameters(), *self.flow.buffers()]
        kept = [tensor.detach().clone() for tensor in tensors]
        generator = self.noise.generator
        state = None if generator is None else generator.get_state()
        networks = [part for part in self.flow.modules() if isinstance(part, LipschitzMLP)]
        try:
            for network in networks:  # of one class and shape: compiled once for all
                network.compile()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    super().__call__(self.batch)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.graph):
                self.loss = super().__call__(self.batch)
        finally:
            for network in networks:
                network._compiled_call_impl = None
            with torch.no_grad():
                torch._foreach_copy_(tensors, kept)
                torch._foreach_zero_(list(self.moments().values()))
            if generator is not None and state is not None:
                generator.set_state(state)

    def __call__(self, batch: Tensor) -> Tensor:
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone()


@contextmanager
def _matmul_precision(kind: str) -> Iterator[None]:
    """Multiply matrices in this precision, in training alone: evaluation keeps all bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(kind)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_step(flow: Flow, settings: TrainingSettings, noise: Noise, batch: Tensor) -> Step:
    """The fastest step that works for this flow here; says so once where that is the plain one."""
    if flow.device.type != "cuda":
        return Step(flow, settings, noise)
    try:
        return CapturedStep(flow, settings, noise, batch)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"Training without a CUDA graph: {reason}", stacklevel=2)
        return Step(flow, settings, noise)
