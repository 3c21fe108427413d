"""The first layer of a table's flow for rows with gaps: it draws the scores of what is missing.

With O the observed columns and M the missing ones the density of the observed values is

    p(x_O) = ∫ p(z_O, z_M) dz_M · Π_O exp(log_weight_j),

for each column's scores fill the whole line, whatever its kind: the sum over the levels of a missing
category is an integral over its score too. One draw z_M ~ r(z_M | z_O) of a proposal estimates it
without bias. The proposal is a mixture of multivariate t distributions: the conditional mixture of
Gaussians that was fitted to samples of the model, with heavier tails.
"""

from __future__ import annotations

__all__ = ["Completion", "Conditional", "GapProposal"]

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ciflows.core.layer import Layer
from ciflows.core.noise import Noise
from ciflows.layers.gaussian_mixture import GaussianMixture
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.marginals import log_normal

FREEDOM = 6  # degrees of freedom of t, an even number
DEFENSIVE = 0.1  # share of draws whose component does not depend on the observed scores


class Conditional(NamedTuple):
    """A mixture of t distributions of some scores, given the others.

    Attributes:
        log_share: Log-probability of each component (rows, K).
        means: (rows, K, missing).
        factors: Lower triangular L with scale matrix L Lᵀ (K, missing, missing).
    """

    log_share: Tensor
    means: Tensor
    factors: Tensor

    def draw(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """A draw for each row, from uniform (rows, 1 + FREEDOM / 2) and normal numbers (rows, gaps)."""
        below = torch.exp(self.log_share).cumsum(-1)
        which = (uniform[:, :1] >= below).sum(-1).clamp(max=below.shape[-1] - 1)
        chi_square = -2 * torch.log(uniform[:, 1:].clamp(min=2.0**-30)).sum(-1)
        scaled = normal * torch.sqrt(FREEDOM / chi_square)[:, None]
        mean = self.means[torch.arange(len(which), device=which.device), which]
        return mean + torch.einsum("nij,nj->ni", self.factors[which], scaled)

    def log_prob(self, z: Tensor) -> Tensor:
        """Its log-density at z (rows, missing) -> (rows,)."""
        size = z.shape[-1]
        away = (z[:, None] - self.means).permute(1, 2, 0)
        squares = torch.linalg.solve_triangular(self.factors, away, upper=False).square().sum(1).T
        log_scale = torch.diagonal(self.factors, dim1=-2, dim2=-1).log().sum(-1)
        constant = math.lgamma((FREEDOM + size) / 2) - math.lgamma(FREEDOM / 2)
        constant -= 0.5 * size * math.log(FREEDOM * math.pi)
        log_t = constant - log_scale - 0.5 * (FREEDOM + size) * torch.log1p(squares / FREEDOM)
        return torch.logsumexp(self.log_share + log_t, dim=-1)


class GapProposal:
    """Proposals for any missing scores, given the others, from one mixture of Gaussians over all.

    Arguments:
        shares: Probabilities of the components (K,).
        means: Their means (K, features).
        covariances: Their covariances (K, features, features).
    """

    def __init__(self, shares: Tensor, means: Tensor, covariances: Tensor) -> None:
        self.log_shares, self.means, self.covariances = shares.log(), means, covariances

    @classmethod
    def of(cls, mixture: GaussianMixture) -> GapProposal:
        """The proposals from a fitted mixture."""
        mixture = mixture.double()
        inverse = torch.linalg.inv(mixture._factors().detach())
        shares = torch.softmax(mixture.logits.detach(), -1)
        return cls(shares, mixture.means.detach(), inverse @ inverse.mT)

    def conditional(self, z: Tensor, missing: Tensor) -> Conditional:
        """The proposal for scores that are `missing` (features,), given others of z (rows, features)."""
        gaps, there = missing.nonzero()[:, 0], (~missing).nonzero()[:, 0]
        cross = self.covariances[:, gaps][:, :, there]
        root = torch.linalg.cholesky(self.covariances[:, there][:, :, there])
        weights = torch.cholesky_solve(cross.mT, root).mT
        away = z[:, None, there] - self.means[:, there]
        means = self.means[:, gaps] + torch.einsum("kij,nkj->nki", weights, away)
        rest = self.covariances[:, gaps][:, :, gaps] - weights @ cross.mT
        scaled = torch.linalg.solve_triangular(root, away.permute(1, 2, 0), upper=False)
        log_scale = torch.diagonal(root, dim1=-2, dim2=-1).log().sum(-1)
        log_share = self.log_shares + log_normal(scaled).sum(1).T - log_scale
        log_share = torch.log_softmax(log_share, dim=-1) + math.log(1 - DEFENSIVE)
        log_share = torch.logaddexp(log_share, self.log_shares + math.log(DEFENSIVE))
        return Conditional(log_share, means, torch.linalg.cholesky(rest))


class Completion(Layer):
    """A table's first layer for rows with gaps: missing values are NaN, and their scores are drawn.

        z_M ~ r(z_M | z_O),   log_weight = Σ_O log_weight_j - log r(z_M | z_O)

    Example:
        >>> from ciflows.tables.marginals import Smooth
        >>> smooth = Smooth(torch.full((2,), -math.inf), torch.full((2,), math.inf))
        >>> columns = ColumnLayer(2, [([0, 1], smooth)])
        >>> proposal = GapProposal.of(GaussianMixture(1, 2))
        >>> x = torch.tensor([[1.0, math.nan]]).double()
        >>> z, log_weight = Completion(columns, proposal).encode(x)
        >>> z[0, 0].item(), bool(z.isfinite().all())
        (1.0, True)
    """

    input_dtype = torch.float64

    def __init__(self, columns: ColumnLayer, proposal: GapProposal) -> None:
        super().__init__(columns.shape)
        self.columns, self.proposal = columns, proposal
        like = columns.like
        noise = Noise.seeded(0, like.device)
        # any value that a column can have, in place of a missing one
        self.inside = columns.decode(like.new_zeros(columns.shape), noise=noise)

    @property
    def discrete(self) -> bool:
        return self.columns.discrete

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        missing, like = x.isnan(), self.columns.like
        z, log_weight = self.columns.log_weights(torch.where(missing, self.inside, x), noise)
        normal = noise.normal(x.shape, like=z)
        uniform = noise.uniform((*x.shape[:-1], 1 + FREEDOM // 2), like=z)
        z, log_proposal = self._fill(z, missing, uniform, normal)
        total = torch.where(missing, 0.0, log_weight).sum(-1) - log_proposal
        return z.to(like.dtype), total.to(like.dtype)

    def _fill(
        self, z: Tensor, missing: Tensor, uniform: Tensor, normal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores z (*, features) with the missing ones drawn, and log r (*), pattern by pattern."""
        flat, gaps = z.reshape(-1, z.shape[-1]).clone(), missing.reshape(-1, z.shape[-1])
        uniform, normal = uniform.reshape(len(flat), -1), normal.reshape(flat.shape)
        log_proposal = flat.new_zeros(len(flat))
        patterns, which = torch.unique(gaps, dim=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            rows = (which == number).nonzero()[:, 0]
            if not bool(pattern.any()):
                continue
            proposal = self.proposal.conditional(flat[rows], pattern)
            drawn = proposal.draw(uniform[rows], normal[rows][:, pattern])
            flat[rows[:, None], pattern.nonzero()[:, 0]] = drawn
            log_proposal[rows] = proposal.log_prob(drawn)
        return flat.reshape(z.shape), log_proposal.reshape(z.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return self.columns.decode(z, noise=noise)
