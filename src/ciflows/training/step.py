"""One optimiser step: the plain way, and captured whole as a CUDA graph."""

from __future__ import annotations

__all__ = ["CapturedStep", "Step", "make_step"]

import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from ciflows.bijections import Residual, Roulette
from ciflows.bijections.log_det import ELIMINATION_LIMIT
from ciflows.concurrency import two_lines
from ciflows.flow import Flow
from ciflows.kernels.ahead import compiled_ahead
from ciflows.layers import Layer
from ciflows.networks import ResNet
from ciflows.networks.lipschitz import iterate_norms, spectral_maps
from ciflows.noise import Noise
from ciflows.objectives import Objective
from ciflows.precision import float32_products
from ciflows.prepared import prepared
from ciflows.rows import Rows
from ciflows.training.optimizer import Optimizer
from ciflows.training.settings import TrainingSettings

WARM_UPS = 3
TOLERANCE = 0.01


class Step:
    """Forward, backward, clipping, the optimiser and power iterations.

    Arguments:
        flow: The flow to train.
        settings: How it is trained.
        noise: Where its draws come from.

    Attributes:
        has_kernels: Whether some networks are known to be kernels of ours, which take time to compile.
    """

    has_kernels = False

    def __init__(self, flow: Flow, settings: TrainingSettings, noise: Noise) -> None:
        self.flow = flow
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
        self.optimizer = Optimizer(
            self.parameters,
            settings.learning_rate,
            settings.weight_decay,
            muon=settings.optimizer == "muon",
            in_a_row=flow.device.type == "cuda",
        )
        self.averages = [p.detach().clone() for p in self.parameters] if self.decay else []

    def state(self) -> dict[str, Tensor]:
        """What a step changes beside the flow: the optimiser's moments and the averages, by name."""
        averages = {f"average.{index}": value for index, value in enumerate(self.averages)}
        return self.optimizer.state() | averages

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.set_rate(rate)

    def __call__(self, batch: Rows) -> Tensor:
        """Take the step; the loss (), or NaN where the loss or the gradient is not finite."""
        self._spin()
        return self._take(batch)

    def _spin(self) -> tuple[int, ...]:
        """Draw how many terms a series that ends at random has in this step: as many in all blocks."""
        self.noise.counts.clear()
        self.noise.counts.update({p: self.noise.geometric(p) for p in self.rates})
        return tuple(self.noise.counts.values())

    def _take(self, batch: Rows) -> Tensor:
        with float32_products(self.exact_products):
            self.optimizer.zero_grad()
            with prepared(self.flow):
                loss = self._loss(batch)
                loss.backward()
            norm = self.optimizer.step(self.clip)
        if self.averages:
            torch._foreach_lerp_(self.averages, self._values(), 1 - self.decay)
        for maps in self.spectral:
            iterate_norms(maps, self.power_iterations)
        return torch.where(norm.isfinite(), loss.detach(), math.nan)

    def _loss(self, batch: Rows) -> Tensor:
        return -self.objective(self.flow, batch, noise=self.noise).mean()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the flow the averaged weights for a while, where weights are averaged."""
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


class CapturedStep(Step):
    """The same step, recorded once as a CUDA graph and replayed: its kernels run without Python.

    Where series end at random there is one graph for each number of terms, recorded at its first use.

    Arguments:
        batch: A batch of the shape that every step will have.
    """

    def __init__(self, flow: Flow, settings: TrainingSettings, noise: Noise, batch: Rows) -> None:
        super().__init__(flow, settings, noise)
        self.batch = batch.clone()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream, self.second = (torch.cuda.Stream(flow.device) for _ in range(2))
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        with noise.rewound():
            self._record(self._spin())

    def _record(self, terms: tuple[int, ...]) -> None:
        """Record the step; the warm-ups that capture needs leave no trace, even where it fails.

        All is done on one stream and the one beside it, and nothing of an earlier gradient is left: what
        is left remembers the stream of its own, which a recording must not wait for.
        """
        changed = [*self.flow.parameters(), *self.flow.buffers(), *self.state().values()]
        tensors = [tensor.detach() for tensor in changed]
        kept = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        if self.noise.generator is not None:
            graph.register_generator_state(self.noise.generator)
        try:
            with self.noise.rewound(), _capturable_linalg(self.flow), torch.cuda.stream(self.stream):
                self.stream.wait_stream(torch.cuda.default_stream(self.flow.device))
                with self._compiled():
                    for _ in range(WARM_UPS):
                        self._take(self.batch)
                    gc.collect()
                    with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                        loss = self._take(self.batch)
        finally:
            for stream in (self.stream, self.second):
                torch.cuda.current_stream().wait_stream(stream)
            torch._foreach_copy_(tensors, kept)
        self.graphs[terms] = graph, loss

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        """Have kernels compiled, and for a while layers that are none.

        Those not where that would change the gradient: a compiler's mistakes are silent, and some
        releases of torch get that of zuko's splines wrong. The large convolutions of images gain little,
        and would take minutes.
        """
        if len(self.flow.shape) > 1:
            yield
            return
        parts = [part for part in self.flow.modules() if isinstance(part, Layer)]
        pure = [(part, name) for part in parts for name in part.pure]
        with compiled_ahead() as compiler:
            with suppress(Exception):  # what is really wrong will be told below
                self._gradient()
            # torch's compiler loads here, while kernels compile
            compiled = [torch.compile(getattr(part, name)) for part, name in pure]
        self.has_kernels = compiler.used
        if not pure:
            yield
            return
        plain = self._gradient()
        try:
            for (part, name), method in zip(pure, compiled, strict=True):
                part.__dict__[name] = method  # those of one class and shape share what is compiled
            if not self._agrees(plain, self._gradient()):
                warnings.warn("Compiled layers give another gradient: training without.", stacklevel=2)
                _restore(pure)
            yield
        finally:
            _restore(pure)

    def _take(self, batch: Rows) -> Tensor:
        with two_lines(self.second):
            return super()._take(batch)

    def _loss(self, batch: Rows) -> Tensor:
        """The loss; the first compiled layer passes a gradient on, so that it is of the others' kind."""
        x = batch.x.detach().requires_grad_(len(self.flow.shape) == 1)
        return super()._loss(replace(batch, x=x))

    def _gradient(self) -> Tensor:
        """The loss and its whole gradient in one vector, from the same draws each time."""
        lines = two_lines(self.second)
        with lines, self.noise.rewound(), float32_products(self.exact_products), prepared(self.flow):
            loss = self._loss(self.batch)
            parts = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return torch.cat([loss.detach().flatten(), *(p.flatten() for p in parts if p is not None)])

    @staticmethod
    def _agrees(plain: Tensor, compiled: Tensor) -> bool:
        return bool((plain - compiled).norm() <= TOLERANCE * plain.norm())

    def __call__(self, batch: Rows) -> Tensor:
        self.batch.copy_(batch)
        terms = self._spin()
        if terms not in self.graphs:
            self._record(terms)
        graph, loss = self.graphs[terms]
        graph.replay()
        return loss.clone()


@contextmanager
def _capturable_linalg(flow: Flow) -> Iterator[None]:
    """Take large determinants with cuSOLVER, whose calls can be captured; those of MAGMA cannot."""
    if math.prod(flow.shape) <= ELIMINATION_LIMIT:
        yield
        return
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library("cusolver")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)


def _restore(pure: Sequence[tuple[nn.Module, str]]) -> None:
    """Uncover the methods that compiled ones were put over."""
    for part, name in pure:
        part.__dict__.pop(name, None)


def _roulette_rates(flow: Flow) -> list[float]:
    """The p of all blocks whose series end at random in training."""
    blocks = [part for part in flow.modules() if isinstance(part, Residual)]
    in_training = [block.training_log_det for block in blocks]
    return sorted({each.p for each in in_training if isinstance(each, Roulette) and each.p < 1})


def make_step(flow: Flow, settings: TrainingSettings, noise: Noise, batch: Rows) -> Step:
    """The fastest step that works for this flow here; says so once where that is the plain one."""
    if flow.device.type != "cuda":
        return Step(flow, settings, noise)
    state = None if noise.generator is None else noise.generator.get_state()
    try:
        return CapturedStep(flow, settings, noise, batch)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"Training without a CUDA graph: {reason}", stacklevel=2)
        if state is not None:  # the generator that was registered still waits for its graph
            noise.generator = torch.Generator(flow.device)
            noise.generator.set_state(state)
        return Step(flow, settings, noise)
