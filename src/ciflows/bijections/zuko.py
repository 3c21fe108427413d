"""Transforms of the zuko library as bijections: autoregressive, coupling, spline and others."""

from __future__ import annotations

__all__ = ["ZukoBijection"]

import warnings

from torch import Tensor
from zuko.lazy import LazyTransform

from ciflows.layers import Bijection
from ciflows.noise import Noise

TOLERANCE = 0.01


class ZukoBijection(Bijection):
    """A zuko transform of vectors, data to noise in its own direction.

    Its inverse is as good and as quick as zuko's: an autoregressive one takes as many passes as there
    are features.

    Arguments:
        transform: A lazy transform that was built for `features` and `context_features`.
        features: Size of x. (Zuko itself would accept a wrong one in silence.)
        context_features: Size of the context; 0 for none.
        compiles: Whether torch compiles the transform well: where it has no loops or solvers of its own.

    Example:
        >>> import torch
        >>> from zuko.flows import MaskedAutoregressiveTransform
        >>> layer = ZukoBijection(MaskedAutoregressiveTransform(3), features=3).double()
        >>> x = torch.randn(5, 3).double()
        >>> z, log_det = layer.encode(x)
        >>> bool(((layer.decode(z) - x).abs() < 1e-12).all())
        True
    """

    def __init__(
        self,
        transform: LazyTransform,
        features: int,
        context_features: int = 0,
        compiles: bool = False,
    ) -> None:
        super().__init__((features,), context_shape=(context_features,) if context_features else None)
        self.transform = transform
        self.compiles = compiles

    @property
    def pure(self) -> tuple[str, ...]:
        return ("_encode",) if self.compiles else ()

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        transform = self.transform(context)
        z, log_det = transform.call_and_ladj(x)
        if transform.domain.event_dim == 0:  # feature by feature: a term for each
            log_det = log_det.sum(-1)
        return z, log_det.expand(z.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        transform = self.transform(context)
        x = transform.inv(z)
        if not self.compiles:
            self._check_inverse(transform(x), z)
        return x

    def _check_inverse(self, back: Tensor, z: Tensor) -> None:
        """Count what a numerical inverse missed: zuko leaves it at the end of its range in silence."""
        off = ((back - z).abs() > TOLERANCE * (1 + z.abs())).any(-1)
        if bool(off.any()):
            name, share = type(self.transform).__name__, off.double().mean().item()
            warnings.warn(
                f"{share:.2%} of the points could not be inverted by zuko's {name}.", stacklevel=4
            )
