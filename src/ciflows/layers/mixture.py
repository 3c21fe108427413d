"""Discretely indexed flows: a mixture of bijections, summed exactly (section 4.2)."""

from __future__ import annotations

__all__ = ["Mixture"]

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ciflows.core.density import Density, StandardNormal
from ciflows.core.layer import Bijection, Shape, check_shape, common_context, join
from ciflows.core.noise import Noise


class Mixture(Density):
    """x = f_i(z) with z from the base and i ~ p(i | z) (Duan, 2019): the paper's model with discrete u.

        p(x) = Σ_i p(z_i) |det Df_i⁻¹(x)| p(i | z_i),    z_i = f_i⁻¹(x)

    Exact, in one pass through each component. (Several such layers would need a pass for each path.)

    Arguments:
        components: The bijections f_i, each a list of layers, data side first.
        gate: Maps z (*, features), joined with the context, to the log-odds (*, components) of i.
        base: The density of z; N(0, I) by default.

    Example:
        >>> from ciflows.layers import Standardise
        >>> shifts = [[Standardise(torch.tensor([m]), torch.ones(1))] for m in (-3.0, 3.0)]
        >>> mixture = Mixture(shifts, gate=nn.Linear(1, 2))
        >>> mixture.log_weight(torch.zeros(5, 1)).shape
        torch.Size([5])
    """

    reparameterised = False  # a draw chooses a component, which no gradient passes

    def __init__(
        self, components: Sequence[Sequence[Bijection]], gate: nn.Module, base: Density | None = None
    ) -> None:
        base = StandardNormal(components[0][0].shape) if base is None else base
        parts = [part for layers in components for part in layers]
        super().__init__(components[0][0].shape, common_context(parts, "Mixture: its bijections"))
        self.components = nn.ModuleList(nn.ModuleList(layers) for layers in components)
        self.gate = gate
        self.base = base

    @property
    def exact(self) -> bool:
        return self.base.exact and not self.noisy

    @property
    def noisy(self) -> bool:
        bijections = [part for part in self.components.modules() if isinstance(part, Bijection)]
        return self.base.noisy or any(part.noisy for part in bijections)

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        check_shape(x, self.shape, "Mixture")
        terms = []
        for index, layers in enumerate(self.components):
            z, log_det = x, x.new_zeros(())
            for layer in cast(Sequence[Bijection], layers):
                z, more = layer.encode(z, context, noise)
                log_det = log_det + more
            log_odds = torch.log_softmax(self.gate(self._joined(z, context)), dim=-1)[..., index]
            terms.append(self.base.log_weight(z, context, noise) + log_det + log_odds)
        return torch.logsumexp(torch.stack(terms), dim=0)

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        noise = noise or Noise()
        z = self.base.draw(leading, context, noise)
        shares = torch.softmax(self.gate(self._joined(z, context)), dim=-1).cumsum(-1)
        chosen = (noise.uniform((*leading, 1), like=shares) > shares[..., :-1]).sum(-1, keepdim=True)
        x = z
        for index, layers in enumerate(self.components):
            y = z
            for layer in reversed(cast(Sequence[Bijection], layers)):
                y = layer.decode(y, context, noise)
            x = torch.where(chosen == index, y, x)
        return x

    def _joined(self, z: Tensor, context: Tensor | None) -> Tensor:
        return join(z, context if self.context_shape is not None else None)
