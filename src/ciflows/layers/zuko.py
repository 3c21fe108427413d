"""Transforms of the zuko library as bijections: autoregressive, coupling, spline and others."""

from __future__ import annotations

__all__ = ["MaskedBijection", "ZukoBijection"]

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Transform
from zuko.flows import FFJTransform, MaskedAutoregressiveTransform
from zuko.flows.neural import MNN, UMNN
from zuko.flows.spline import CircularRQSTransform
from zuko.lazy import LazyComposedTransform, LazyTransform
from zuko.utils import unpack

from ciflows.core.layer import Bijection, Shape, as_shape, join, leading_shape
from ciflows.core.noise import Noise

if TYPE_CHECKING:
    from typing_extensions import Self

TOLERANCE = 0.01


class ZukoBijection(Bijection):
    """A zuko transform, data to noise in its own direction.

    Its inverse is zuko's: as many passes as features for an autoregressive one.

    Arguments:
        transform: A lazy transform that was built for `features` and `context_features`.
        features: Size of x, or its shape. (Zuko itself accepts a wrong size without an error.)
        context_features: Size of the context; 0 for none.
        compiles: Whether torch compiles the transform well: it has no loops or solvers of its own.

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
        features: int | Shape,
        context_features: int = 0,
        compiles: bool = False,
    ) -> None:
        context_shape = (context_features,) if context_features else None
        super().__init__(as_shape(features), context_shape=context_shape)
        self.transform = transform
        self.compiles = compiles
        self._keep_gradients()

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as of any module."""
        super().train(mode)
        self._keep_gradients()
        return self

    def _keep_gradients(self) -> None:
        """Let no part leave its parameters out of gradients in eval mode, as zuko would."""
        for part in self.transform.modules():
            if isinstance(part, MNN | UMNN | FFJTransform):
                part.training = True  # the parts within it, such as dropout, keep their mode

    @property
    def reparameterised(self) -> bool:
        # zuko's gradient of their inverse counts twice what earlier passes gave: it is up to 70 % off
        return not any(isinstance(part, MNN | UMNN) for part in self.transform.modules())

    @property
    def noise_range(self) -> str | None:
        return (
            "[-π, π] (circular splines, whose base is uniform)" if _is_circular(self.transform) else None
        )

    @property
    def pure(self) -> tuple[str, ...]:
        return ("_encode",) if self.compiles else ()

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        transform = self.transform(context)
        z, log_det = transform.call_and_ladj(x)
        separate = len(self.shape) - transform.domain.event_dim  # dimensions with a term for each entry
        if separate:
            log_det = log_det.sum(tuple(range(-separate, 0)))
        return z, log_det.expand(leading_shape(z, self.shape))

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        transform = self.transform(context)
        x = transform.inv(z)
        if not self.compiles:
            self._check_inverse(transform, x, z)
        return x

    def _check_inverse(self, transform: Transform, x: Tensor, z: Tensor) -> None:
        """Count the points that a numerical inverse missed: zuko leaves them at the end of its range."""
        off = ~((transform(x) - z).abs() <= TOLERANCE * (1 + z.abs()))  # NaN is off too
        off = off.flatten(z.ndim - len(self.shape)).any(-1)
        if bool(off.any()):
            name, share = type(transform).__name__, off.double().mean().item()
            warnings.warn(f"{share:.2%} of the points could not be inverted by {name}.", stacklevel=4)


class MaskedBijection(ZukoBijection):
    """Zuko's masked transform, autoregressive or coupling, with an inverse that takes features in turn.

    Zuko computes all of x in each pass, and features found before once more. Here a pass adds those
    features alone that depend on nothing still to come; and without a context the first of them need
    one row of the network, since its input is 0 in all.

    Example:
        >>> transform = MaskedAutoregressiveTransform(3)
        >>> layer = MaskedBijection(transform, features=3).double()
        >>> z = torch.randn(5, 3).double()
        >>> bool(((layer.decode(z) - transform().inv(z)).abs() < 1e-12).all())
        True
    """

    transform: MaskedAutoregressiveTransform

    def __init__(
        self, transform: MaskedAutoregressiveTransform, features: int, context_features: int = 0
    ) -> None:
        super().__init__(transform, features, context_features, compiles=True)
        turns = transform.order.sort(stable=True)
        sizes = turns.values.unique_consecutive(return_counts=True)[1]
        self.turns = [indices.tolist() for indices in turns.indices.split(sizes.tolist())]

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        x = torch.zeros_like(z)
        known = x if context is not None else z.new_zeros(self.shape)
        for turn in self.turns:
            here = torch.tensor(turn, device=z.device)
            maps = self._maps(known, context, here, leading_shape(z, self.shape))
            x = known = x.index_copy(-1, here, maps.inv(z.index_select(-1, here)))
        return x

    def _maps(self, x: Tensor, context: Tensor | None, here: Tensor, leading: torch.Size) -> Transform:
        """The scalar maps of some features, given those before them."""
        numbers = self.transform.hyper(join(x, context)).unflatten(-1, (-1, self.transform.total))
        numbers = numbers.index_select(-2, here).expand(*leading, len(here), -1)
        return self.transform.univariate(*unpack(numbers, self.transform.shapes))


def _is_circular(transform: LazyTransform) -> bool:
    """Whether a transform ends in zuko's circular splines."""
    last = transform.transforms[-1] if isinstance(transform, LazyComposedTransform) else transform
    univariate = getattr(last, "univariate", None)
    return getattr(univariate, "func", univariate) is CircularRQSTransform
