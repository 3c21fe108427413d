"""A mixture of Gaussians: a base to start from when data are few or in clusters.

Fitted by expectation-maximisation (Dempster et al., 1977), with covariances shrunk to a common one,

    Σ_k = (Σ_i r_ik (x_i - μ_k)(x_i - μ_k)ᵀ + ν Σ) / (N_k + ν),

as if each component had ν more rows with the common covariance.
"""

from __future__ import annotations

__all__ = ["GaussianMixture", "fit_mixture"]

import math

import torch
from torch import Tensor, nn

from ciflows.core.density import LOG_2_PI, Density
from ciflows.core.layer import Shape, check_shape
from ciflows.core.noise import Noise

ITERATIONS = 60
TOLERANCE = 1e-4  # nats per row
RIDGE = 1e-4  # variance added to each feature; data have variance 1


class GaussianMixture(Density):
    """Σ_k π_k N(x; μ_k, (Lᵀ_k L_k)⁻¹), with L_k lower triangular.

    Example:
        >>> GaussianMixture(3, 2).log_weight(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    reparameterised = False  # a draw chooses a component, which no gradient passes

    def __init__(self, components: int, features: int) -> None:
        super().__init__((features,))
        self.logits = nn.Parameter(torch.zeros(components))
        self.means = nn.Parameter(torch.zeros(components, features))
        self.log_diagonal = nn.Parameter(torch.zeros(components, features))
        self.lower = nn.Parameter(torch.zeros(components, features, features))

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        check_shape(x, self.shape, "GaussianMixture")
        return torch.logsumexp(self.log_parts(x), dim=-1)

    def log_parts(self, x: Tensor) -> Tensor:
        """log π_k N(x; k) of each component: (*, features) -> (*, K)."""
        centred = (x[..., None, :] - self.means).movedim(-2, 0)
        factors = self._factors().mT
        scaled = (centred.flatten(1, -2) @ factors).reshape(centred.shape).movedim(0, -2)
        log_normal = -0.5 * (scaled.square() + LOG_2_PI).sum(-1) + self.log_diagonal.sum(-1)
        return log_normal + torch.log_softmax(self.logits, dim=-1)

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        noise = noise or Noise()
        shares = torch.softmax(self.logits, dim=-1).cumsum(-1)
        uniform = noise.uniform(tuple(leading), like=self.means)
        which = torch.searchsorted(shares, uniform).clamp(max=len(shares) - 1)
        z = noise.normal((*leading, *self.shape), like=self.means)
        solved = torch.linalg.solve_triangular(self._factors()[which], z[..., None], upper=False)
        return self.means[which] + solved[..., 0]

    def _factors(self) -> Tensor:
        """L_k (K, features, features)."""
        return torch.tril(self.lower, -1) + torch.diag_embed(torch.exp(self.log_diagonal))

    @torch.no_grad()
    def set(self, shares: Tensor, means: Tensor, covariances: Tensor) -> None:
        """Set the components' weights (K,), means (K, d) and covariances (K, d, d)."""
        factors = torch.linalg.inv(torch.linalg.cholesky(covariances))
        self.logits.copy_(shares.log())
        self.means.copy_(means)
        self.lower.copy_(torch.tril(factors, -1))
        self.log_diagonal.copy_(torch.diagonal(factors, dim1=-2, dim2=-1).log())


@torch.no_grad()
def fit_mixture(
    x: Tensor, components: int, prior: float, weight: Tensor | None = None
) -> GaussianMixture:
    """Fit a mixture to rows x (rows, features) of variance about 1.

    Arguments:
        prior: ν, the strength of the common covariance in rows.
        weight: Weight of each row (rows,).
    """
    x, n = x.double(), len(x)
    weight = torch.ones(n, dtype=torch.float64) if weight is None else weight.double()
    weight = weight * (n / weight.sum())
    ridge = RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
    mixture = GaussianMixture(components, x.shape[1]).double()
    nearest = torch.cdist(x, _spread_out(x, components)).argmin(1)
    shares = nn.functional.one_hot(nearest, components).double()
    before = -math.inf
    for _ in range(ITERATIONS):
        counts = weight[:, None] * shares
        sizes = counts.sum(0) + 1e-9
        means = counts.T @ x / sizes[:, None]
        scatter = torch.stack([(each[:, None] * x).T @ x for each in counts.T])
        scatter -= sizes[:, None, None] * means[:, :, None] * means[:, None, :]
        common = scatter.sum(0) / n + ridge
        covariances = (scatter + prior * common) / (sizes[:, None, None] + prior) + ridge
        mixture.set(sizes / sizes.sum(), means, covariances)
        log_parts = mixture.log_parts(x)
        score = (weight * torch.logsumexp(log_parts, -1)).mean().item()
        shares = torch.softmax(log_parts, -1)
        if score - before < TOLERANCE:
            break
        before = score
    return mixture.float()


def _spread_out(x: Tensor, count: int) -> Tensor:
    """Initial means by k-means++: rows drawn by their squared distance to those before."""
    generator = torch.Generator().manual_seed(0)
    chosen = [x[int(torch.randint(len(x), (), generator=generator))]]
    while len(chosen) < count:
        distance = torch.cdist(x, torch.stack(chosen)).square().amin(1) + 1e-12
        chosen.append(x[int(torch.multinomial(distance, 1, generator=generator))])
    return torch.stack(chosen)
