"""Continuously indexed layers: the paper's replacement of a bijection by a family of them."""

from __future__ import annotations

__all__ = ["Indexed", "interleave"]

from collections.abc import Callable, Sequence

from torch import Tensor

from ciflows.core.density import Density
from ciflows.core.hook import replaceable
from ciflows.core.layer import Bijection, Layer, Shape, check_layer, join, leading_shape
from ciflows.core.noise import Noise


class Indexed(Layer):
    """A family of bijections F(·; u) with a continuous index u ~ p(u | z) (section 3).

    Noise to data: u ~ p(u | z), x = F(z; u). Data to noise, one step of Algorithm 1:

        u ~ q(u | x),  z = F⁻¹(x; u),  log_weight = log|det DF⁻¹(x; u)| + log p(u | z) - log q(u | x)

    A sample, with u ~ p(u | z), has the same log_weight: q is then the auxiliary model of its u.

    With F(z; u) = e^{-s(u)} z - t(u) after a plain bijection f this is the paper's own family:
    q is then conditioned on f⁻¹(x) in place of x, which is the same family of posteriors.

    Arguments:
        family: A bijection that takes u as its context (u joined with the context, if there is one).
        prior: p(u | z), with z (and the context) as its context. A `Flow` will do.
        posterior: q(u | x), with x (and the context) as its context; its density has to be exact.
        context_shape: Shape of the outer context of a conditional density: a vector with vectors, an
            image with images.

    Example:
        >>> import torch
        >>> from ciflows.layers import Affine
        >>> from ciflows.core.density import ConditionalNormal
        >>> from ciflows.networks import MLP
        >>> layer = Indexed(
        ...     Affine(2, MLP(1, 2 * 2), context_features=1),
        ...     prior=ConditionalNormal(MLP(2, 2), features=1, context_features=2),
        ...     posterior=ConditionalNormal(MLP(2, 2), features=1, context_features=2),
        ... )
        >>> z, log_weight = layer.encode(torch.randn(5, 2))
        >>> z.shape, log_weight.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """

    def __init__(
        self,
        family: Bijection,
        prior: Density,
        posterior: Density,
        context_shape: Shape | None = None,
    ) -> None:
        check_layer(family, "Indexed, family")
        super().__init__(family.shape, family.noise_shape, context_shape)
        if not posterior.exact:
            raise ValueError(
                "Indexed: the posterior's density must be exact, since the weight divides by it; "
                f"{type(posterior).__name__} only estimates it."
            )
        if context_shape is not None and len(context_shape) != len(family.shape):
            raise ValueError(
                f"Indexed: a context of shape {context_shape} cannot be joined with x of shape "
                f"{family.shape}; give it as many dimensions."
            )
        self.family = family
        self.prior = prior
        self.posterior = posterior

    @property
    def noisy(self) -> bool:
        return self.family.noisy or self.prior.noisy or self.posterior.noisy

    @property
    def reparameterised(self) -> bool:
        return self.family.reparameterised and self.prior.reparameterised

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        dims, leading = len(self.shape), leading_shape(x, self.shape)
        u, log_q = noise.posterior(self.posterior, leading, join(x, context, dims))
        z, log_det = self.family.encode(x, join(u, context, dims), noise)
        return z, self._log_weight(u, z, context, log_det, log_q, noise)

    @replaceable
    def _log_weight(
        self, u: Tensor, z: Tensor, context: Tensor | None, log_det: Tensor, log_q: Tensor, noise: Noise
    ) -> Tensor:
        log_p = self.prior.log_weight(u, join(z, context, len(self.shape)), noise)
        return log_det + log_p - log_q

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        dims, leading = len(self.shape), leading_shape(z, self.noise_shape)
        u = self.prior.draw(leading, join(z, context, dims), noise)
        x = self.family.decode(z, join(u, context, dims), noise)
        noise.record(self.posterior, u, join(x, context, dims))
        return x

    def _decode_with_log_weight(
        self, z: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        dims, leading = len(self.shape), leading_shape(z, self.noise_shape)
        u, log_p = self.prior.draw_with_log_weight(leading, join(z, context, dims), noise)
        x, log_det = self.family.decode_with_log_weight(z, join(u, context, dims), noise)
        q_context = join(x, context, dims)
        noise.record(self.posterior, u, q_context)
        return x, log_det + log_p - self.posterior.log_weight(u, q_context, noise)


def interleave(
    bijections: Sequence[Bijection], make_indexed: Callable[[Bijection], Layer]
) -> list[Layer]:
    """Turn a flow's bijections, data side first, into a CIF's layers: an index after each.

    Arguments:
        bijections: The layers of a plain flow.
        make_indexed: Makes the indexed layer that follows a bijection on the way to the noise.
    """
    return [layer for f in bijections for layer in (f, make_indexed(f))]
