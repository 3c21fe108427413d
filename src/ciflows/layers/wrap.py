"""Your own maps as bijections: torch transforms, zuko transforms and modules."""

from __future__ import annotations

__all__ = ["ModuleBijection", "as_bijection"]

from typing import Any

import torch
import zuko.lazy
from torch import Tensor, nn
from torch.distributions import Transform
from zuko.lazy import LazyTransform

from ciflows.core.layer import Bijection, Shape, as_shape, leading_shape
from ciflows.core.noise import Noise
from ciflows.layers.zuko import ZukoBijection

EXPECTED = (
    "a torch.distributions.Transform, a zuko lazy transform, or an nn.Module with "
    "forward(x) -> (z, log_det) and inverse(z) -> x"
)


def as_bijection(yours: object, features: int | Shape, context_features: int = 0) -> Bijection:
    """Make a bijection of a map of your own, which takes the data side x to the noise side z.

    Arguments:
        yours: A module with `forward(x) -> (z, log_det)` and `inverse(z) -> x`, see `ModuleBijection`;
            a lazy transform of zuko's; or a `torch.distributions.Transform`, used as it is: its numbers
            are not trained, and stay on their device. Where z meets a base N(0, I) it must range over
            all real numbers, so `ExpTransform().inv` is for positive data.
        features: Size of x, or its shape.
        context_features: Size of the context that the map takes; 0 for none.

    Example:
        >>> from torch.distributions.transforms import ExpTransform
        >>> z, log_det = as_bijection(ExpTransform().inv, features=2).encode(torch.ones(5, 2))
        >>> z.shape, log_det.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    if isinstance(yours, Bijection):
        return yours
    if isinstance(yours, zuko.lazy.Flow):
        raise TypeError(
            f"as_bijection: {type(yours).__name__} is a transform and a base: give its transform. The "
            "base is then that of your Flow, N(0, I) if you name none."
        )
    if isinstance(yours, LazyTransform):
        _check_lazy(yours, as_shape(features), context_features)
        return ZukoBijection(yours, features, context_features)
    if isinstance(yours, Transform):
        _check_transform(yours, as_shape(features), context_features)
        return _TransformBijection(_Constant(yours), features)
    if isinstance(yours, nn.Module):
        return ModuleBijection(yours, features, context_features)
    raise TypeError(f"as_bijection: expected {EXPECTED}; got a {type(yours).__name__}.")


class ModuleBijection(Bijection):
    """A module with `forward(x) -> (z, log_det)` and `inverse(z) -> x` as a bijection.

    The module sees rows: x and z (rows, shape), log_det (rows,). With a context its methods are
    `forward(x, context)` and `inverse(z, context)`. Where `inverse` returns a tuple, x comes first.

    Arguments:
        module: The module.
        features: Size of x, or its shape.
        context_features: Size of the context; 0 for none.
    """

    def __init__(
        self, module: nn.Module, features: int | Shape, context_features: int | Shape = 0
    ) -> None:
        context_shape = as_shape(context_features) if context_features else None
        super().__init__(as_shape(features), context_shape=context_shape)
        self.name = type(module).__name__
        methods = {"forward": "forward(x) -> (z, log_det)", "inverse": "inverse(z)"}
        unset = nn.Module.forward  # torch's placeholder
        missing = [m for name, m in methods.items() if getattr(type(module), name, unset) is unset]
        if missing:
            raise TypeError(
                f"as_bijection: {self.name} has no {' and no '.join(missing)}; expected {EXPECTED}."
            )
        self.module = module

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        rows, leading = self._rows(x, context)
        result = self.module(*rows)
        if not isinstance(result, tuple) or len(result) != 2:
            kind = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise TypeError(f"{self.name}.forward: expected (z, log_det); got {kind}.")
        z, log_det = result
        self._check_result(z, rows[0].shape, "forward's z")
        self._check_result(log_det, rows[0].shape[:1], "forward's log_det")
        return z.reshape(*leading, *self.shape), log_det.reshape(leading)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        rows, leading = self._rows(z, context)
        result = self.module.inverse(*rows)  # type: ignore[operator]
        x = result[0] if isinstance(result, tuple) else result
        self._check_result(x, rows[0].shape, "inverse's x")
        return x.reshape(*leading, *self.shape)

    def _rows(self, value: Tensor, context: Tensor | None) -> tuple[list[Tensor], torch.Size]:
        """The value and the context as rows, and the leading dimensions that they share."""
        parts = [(value, self.shape)]
        if context is not None and self.context_shape is not None:
            parts.append((context, self.context_shape))
        leading = torch.broadcast_shapes(*(leading_shape(part, shape) for part, shape in parts))
        rows = [part.expand(*leading, *shape).reshape(-1, *shape) for part, shape in parts]
        return rows, leading

    def _check_result(self, value: Any, shape: torch.Size, what: str) -> None:
        """Refuse a result of another shape, which might broadcast to a wrong likelihood."""
        if not isinstance(value, Tensor) or value.shape != shape:
            came = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{self.name}, {what}: expected shape {tuple(shape)}; got {came}.")


class _Constant(LazyTransform):  # type: ignore[misc]
    """A transform that depends on no context."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, context: Any = None) -> Transform:
        return self.transform


class _TransformBijection(ZukoBijection):
    """A torch transform, as it is."""

    @property
    def noise_range(self) -> str | None:
        codomain = self.transform().codomain
        far = torch.full(self.shape, 1e3)
        return None if all(bool(codomain.check(z).all()) for z in (far, -far)) else str(codomain)


@torch.no_grad()
def _check_lazy(transform: LazyTransform, shape: Shape, context_features: int) -> None:
    """Refuse a transform that was built for other features or another context."""
    tensor = next(transform.parameters(), torch.zeros(()))
    x = torch.full((2, *shape), 0.5, dtype=tensor.dtype, device=tensor.device)
    try:
        transform(x.new_zeros(2, context_features) if context_features else None)(x)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        given = f"with a context of {context_features}" if context_features else "without a context"
        raise ValueError(
            f"as_bijection: {type(transform).__name__} does not take x of shape {shape} {given}; was it "
            f"built for that? ({error})"
        ) from None


def _check_transform(transform: Transform, shape: Shape, context_features: int) -> None:
    name = type(transform).__name__
    if context_features:
        raise ValueError(f"as_bijection: {name} takes no context; a module or zuko transform can.")
    if not transform.bijective:
        raise ValueError(f"as_bijection: {name} is not bijective.")
    own = {n for n in ("log_abs_det_jacobian", "_inverse", "inv") if _defines(transform, n)}
    missing = [] if "log_abs_det_jacobian" in own else ["log_abs_det_jacobian(x, z)"]
    missing += [] if own & {"_inverse", "inv"} else ["_inverse(z)"]
    missing += [n for n in ("domain", "codomain") if not hasattr(transform, n)]
    if missing:
        raise TypeError(f"as_bijection: {name} has no {' and no '.join(missing)}.")
    try:
        fits = transform.domain.event_dim <= len(shape) and transform.forward_shape(shape) == shape
        x = torch.full((2, *shape), 0.5)
        z = _TransformBijection(_Constant(transform), shape).encode(x)[0] if fits else x
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"as_bijection: {name} does not take x of shape {shape} ({error}).") from None
    if not fits:
        raise ValueError(f"as_bijection: {name} does not map shape {shape} to itself.")
    if z.requires_grad:
        raise ValueError(
            f"as_bijection: {name} holds tensors that require a gradient, which would not be trained: "
            "write an nn.Module, or use zuko's UnconditionalTransform."
        )


def _defines(transform: Transform, name: str) -> bool:
    """Whether a transform has a method of its own in place of the base class's."""
    return getattr(type(transform), name) is not getattr(Transform, name)
