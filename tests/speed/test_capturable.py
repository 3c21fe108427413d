"""A CUDA graph can hold a training step only if no operation waits for the GPU or copies from the CPU.

No GPU is needed to see that: on the meta device nothing has a value to wait for, and numbers that come
from the CPU stand out.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ciflows.core.flow import Flow
from ciflows.layers.gaussian_mixture import GaussianMixture
from ciflows.tables.column_layer import ColumnLayer
from constructors import LAYERS, Case, atoms, cells, circles, lattice, smooth, spline

# Layers whose training steps are never captured, and why.
PLAIN = {
    "residual, series": "its terms go on until they are small; training draws their number",
    "residual, images, series": "the same",
    "indexed, flow as posterior": "draws through a residual inverse, which goes on until it is exact",
    "torch transform": "its transform keeps tensors that are no buffers",
    "torch transform, images": "the same",
}


class _NoCopies(TorchDispatchMode):
    """Refuses operations between the meta device and numbers on the CPU, but for single ones."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.is_meta}
        assert len(devices) < 2, f"{func} takes numbers from the CPU to the device."
        return result


class _NoLists(TorchFunctionMode):
    """Refuses lists that would have to be copied to the device: as indices, or to make tensors of."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in index), f"A list is the index: {index}"
        made = func in (torch.tensor, torch.as_tensor) and isinstance(args[0], list | tuple)
        assert not made or str((kwargs or {}).get("device", "cpu")) == "cpu", "A list becomes a tensor."
        return func(*args, **(kwargs or {}))


def check_capturable(make: Callable[[], Iterable[Tensor]]) -> None:
    """Run a forward and a backward pass as a captured step would."""
    with _NoCopies(), _NoLists(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [part.sum() for part in make() if part.requires_grad]
        if parts:
            torch.stack(parts).sum().backward()


def on_device(case: Case) -> Callable[[], Iterable[Tensor]]:
    layer = case.make().to("meta").train()
    dtype = layer.input_dtype or torch.get_default_dtype()
    x = torch.empty(8, *case.shape, dtype=dtype, device="meta", requires_grad=not layer.discrete)
    shape = case.context_shape
    context = None if shape is None else torch.empty(8, *shape, device="meta")
    return lambda: layer.encode(x, context)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in PLAIN])
def test_a_layers_step_needs_nothing_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # none on meta
    check_capturable(on_device(LAYERS[name]))


def test_a_tables_step_needs_nothing_of_the_cpu() -> None:
    """All kinds of columns at once, a spline and a mixture, as a table's default flow has them."""
    places = iter(range(14))
    kinds = [(4, smooth()), (4, atoms()), (2, cells()), (2, lattice()), (2, circles())]
    parts = [([next(places) for _ in range(size)], marginal) for size, marginal in kinds]
    flow = Flow([ColumnLayer(14, parts), spline(14)], GaussianMixture(3, 14)).to("meta").train()
    x = torch.empty(8, 14, dtype=torch.float64, device="meta")
    check_capturable(lambda: [flow.log_weight(x)])


@pytest.mark.parametrize(
    "careless",
    [
        lambda x: x[..., [0, 1]],
        lambda x: x + torch.ones(2),
        lambda x: x * torch.tensor([1.0, 2.0], device=x.device),
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.index_select(-1, torch.arange(2).to(x.device)),
    ],
)
def test_careless_steps_are_found_out(careless: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(8, 2, device="meta", requires_grad=True)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        check_capturable(lambda: [careless(x)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tables_step_is_captured() -> None:
    from ciflows.core.noise import Noise
    from ciflows.core.rows import Rows
    from ciflows.speed.capture import CapturedStep
    from ciflows.training import TrainingSettings
    from ciflows.training.step import make_step

    flow = Flow([ColumnLayer(4, [([3, 1, 0, 2], smooth())]), spline(4)], GaussianMixture(3, 4))
    flow, rows = flow.cuda().train(), Rows(torch.rand(64, 4, dtype=torch.float64, device="cuda"))
    for optimizer in ("adam", "muon"):
        settings = TrainingSettings(objective="elbo", optimizer=optimizer)
        step = make_step(flow, settings, Noise.seeded(0, flow.device), rows)
        assert isinstance(step, CapturedStep)
        assert step(rows).isfinite()
