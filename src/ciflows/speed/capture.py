"""A training step captured whole as a CUDA graph."""

from __future__ import annotations

__all__ = ["CapturedStep", "make_step"]

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ciflows.core.flow import Flow
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise
from ciflows.core.precision import float32_products
from ciflows.core.rows import Rows
from ciflows.layers import Residual
from ciflows.speed.row_optimizer import RowOptimizer
from ciflows.speed.stacked import is_kernel, on
from ciflows.speed.streams import two_streams
from ciflows.training.settings import TrainingSettings
from ciflows.training.step import Step

WARM_UPS = 3
TOLERANCE = 0.01


class CapturedStep(Step):
    """A training step, captured once as a CUDA graph and replayed: its kernels run without Python.

    Where series end at random there is one graph for each number of terms, captured at its first use.

    Arguments:
        batch: A batch of the shape that every step will have.
    """

    make_optimizer = RowOptimizer

    def __init__(self, flow: Flow, settings: TrainingSettings, noise: Noise, batch: Rows) -> None:
        super().__init__(flow, settings, noise)
        self.batch = batch.clone()
        self.pool = torch.cuda.graph_pool_handle()
        self.stream, self.second = (torch.cuda.Stream(flow.device) for _ in range(2))
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        with noise.rewound():
            self._capture(self._spin())

    def _capture(self, terms: tuple[int, ...]) -> None:
        """Capture the step; the warm-ups that this needs leave no trace, even where it fails.

        All work is on two streams of its own, and no earlier gradient is left: that would remember its
        own stream, which a capture must not wait for.
        """
        changed = [*self.flow.parameters(), *self.flow.buffers(), *self.state().values()]
        tensors = [tensor.detach() for tensor in changed]
        kept = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        if self.noise.generator is not None:
            graph.register_generator_state(self.noise.generator)
        try:
            with self.noise.rewound(), _capturable_linalg(), torch.cuda.stream(self.stream):
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
        """Let torch compile, for a while, the layers that are no kernels.

        Not where that would change the gradient: a compiler's mistakes are silent, and some releases of
        torch get that of zuko's splines wrong. The large convolutions of images gain little, and would
        take minutes.
        """
        pure = _pure_methods(self.flow)
        if not pure:
            yield
            return
        compiled = [torch.compile(getattr(part, name)) for part, name in pure]
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
        with two_streams(self.second):
            return super()._take(batch)

    def _loss(self, batch: Rows) -> Tensor:
        """The loss; x takes a gradient so that the first compiled layer is like the others."""
        x = batch.x.detach().requires_grad_(len(self.flow.shape) == 1)
        return super()._loss(replace(batch, x=x))

    def _gradient(self) -> Tensor:
        """The loss and its whole gradient in one vector, from the same draws each time."""
        streams = two_streams(self.second)
        with streams, self.noise.rewound(), float32_products(self.exact_products), on(self.flow):
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
            self._capture(terms)
        graph, loss = self.graphs[terms]
        graph.replay()
        return loss.clone()


@contextmanager
def _capturable_linalg() -> Iterator[None]:
    """Compute determinants with cuSOLVER, whose calls can be captured; those of MAGMA cannot."""
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library("cusolver")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)


def _pure_methods(flow: Flow) -> list[tuple[Layer, str]]:
    """The methods to compile: those of arithmetic alone, but for blocks that are kernels already."""
    if len(flow.shape) > 1:
        return []
    parts = [part for part in flow.modules() if isinstance(part, Layer)]
    parts = [part for part in parts if not (isinstance(part, Residual) and is_kernel(part.network))]
    return [(part, name) for part in parts for name in part.pure]


def _restore(pure: Sequence[tuple[nn.Module, str]]) -> None:
    """Remove compiled methods."""
    for part, name in pure:
        part.__dict__.pop(name, None)


def make_step(
    plain: Callable[..., Step], flow: Flow, settings: TrainingSettings, noise: Noise, batch: Rows
) -> Step:
    """A captured step; warns and takes the plain one if capture fails."""
    state = None if noise.generator is None else noise.generator.get_state()
    try:
        return CapturedStep(flow, settings, noise, batch)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"Training without a CUDA graph: {reason}", stacklevel=2)
        if state is not None:  # the generator that was registered still waits for its graph
            noise.generator = torch.Generator(flow.device)
            noise.generator.set_state(state)
        return plain(flow, settings, noise, batch)
