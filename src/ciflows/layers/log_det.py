"""Log-determinants log|det(I + J)| of residual blocks x + g(x), J = Dg(x): exact, and estimated.

All need of g only the products J v that it carries along with its value (networks/lipschitz.py). The
estimates rest on the power series

    log det(I + J) = Σ_k (-1)^(k+1) tr(J^k) / k        and        tr(A) = E[vᵀ A v] for probes v

with independent entries of mean 0 and variance 1.
"""

from __future__ import annotations

__all__ = ["Exact", "LogDet", "Roulette", "Series", "default_log_det", "with_jacobian"]

import copy
import math
from typing import Protocol

import torch
from torch import Tensor

from ciflows.core.hook import replaceable
from ciflows.core.layer import Shape, beside_event, leading_shape, sum_event
from ciflows.core.noise import Noise
from ciflows.networks.lipschitz import LipschitzNetwork

EXACT_LIMIT = 100
PROBES_AT_ONCE = 4
MAX_TERMS = 10_000


class LogDet(Protocol):
    """A way to get g(x) (*, shape) together with log|det(I + Dg(x))| (*)."""

    @property
    def noisy(self) -> bool:
        """Whether the values carry noise of their own in each copy of a row."""
        ...

    def __call__(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]: ...


class Exact:
    """The determinant of the whole Jacobian, from d products; for d up to about a hundred."""

    noisy = False

    def __call__(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        g, matrix = with_jacobian(network, x, context)
        return g, log_det(matrix)


class Roulette:
    """The power series, cut off at random without bias (Chen et al., 2019); for training.

    The first `exact_terms` terms are always computed; further ones with a geometric number, each
    divided by the probability of being reached; traces by one Gaussian probe.

    Gradients come from the Neumann series of the same terms, d log det = Σ (-1)^j tr(dJ J^j): all powers
    J^j v are taken without a graph, and one product J w is differentiated, so memory does not grow with
    the terms. That is what gradients taken in the forward pass are for (Chen et al., eq. 9); but those
    are summed over rows before rows can be weighted, where here each row's gradient is its own.

    Arguments:
        exact_terms: Number of terms always computed (the paper: 2 in training, 20 in testing).
        p: Parameter of the geometric distribution. With 1 nothing is drawn, and the series ends after
            `exact_terms`: biased by what is left out, but a step that can be captured as a CUDA graph.
    """

    noisy = True

    def __init__(self, exact_terms: int = 2, p: float = 0.5) -> None:
        self.exact_terms = exact_terms
        self.p = p

    def __call__(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        probe = noise.normal(x.shape, like=x)
        terms = self.exact_terms + (noise.geometric(self.p) if self.p < 1 else 0)
        value, series, power = x.new_zeros(()), torch.zeros_like(x), probe
        with torch.no_grad():
            for k in range(1, terms + 1):
                coefficient = (-1) ** (k + 1) / self._survival(k)
                series = series + coefficient * power
                power = network(x, power[None], context)[1][0]
                value = value + coefficient / k * sum_event(probe * power, network.shape)
        g, slope = _with_slope(network, x, context, probe[None], series[None])
        return g, value + slope[0]

    def _survival(self, k: int) -> float:
        """P(term k is computed): 1 up to the first random one, then falling geometrically."""
        return float((1 - self.p) ** max(0, k - self.exact_terms - 1))


class Series:
    """The power series to a tolerance, with probes that belong to the rows; for evaluation.

    Each probe's series is cut off after the first n terms for which what is left out,

        |Σ_{k>n} (-1)^(k+1) vᵀ J^k v / k| <= |v| |J^n v| κ / ((n + 1)(1 - κ)),    κ = Lip g,

    cannot exceed the tolerance: this holds for every row, and needs far fewer terms than κ^n alone says.

    Probes are signs ±1, whose error comes from the entries off the diagonal of log(I + J) alone: less
    than with Gaussian ones. They are a hash of the seed and of the row that is evaluated
    (`Noise.signs`): all copies of a row in a log-mean-exp share them, so that their error is common to
    the weights and does not raise the result as independent noise would; different rows have
    independent ones, so that the error of a mean over rows falls with their number. How much of it is
    left: `diagnostics.log_det_error`.

    Arguments:
        probes: Number of probes to average over.
        tolerance: Bound on the truncation error of each log-determinant, in nats.
        seed: Seed of the probes. Blocks with different ones have independent errors.
    """

    noisy = False

    def __init__(self, probes: int = 16, tolerance: float = 1e-3, seed: int = 0) -> None:
        if probes < 1 or not tolerance > 0:
            raise ValueError(
                "Series: at least one probe and a tolerance above 0 are needed; "
                f"got {probes} and {tolerance}."
            )
        self.numbers = range(probes)
        self.tolerance = tolerance
        self.seed = seed

    def split(self, groups: int) -> list[Series]:
        """This series with only some of its probes: a share of the same size for each group."""
        if groups < 2 or len(self.numbers) % groups:
            raise ValueError(f"Series: {len(self.numbers)} probes do not make {groups} groups.")
        parts = [copy.copy(self) for _ in range(groups)]
        for first, part in enumerate(parts):
            part.numbers = self.numbers[first::groups]
        return parts

    def __call__(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(())
        for start in range(0, len(self.numbers), PROBES_AT_ONCE):
            numbers = self.numbers[start : start + PROBES_AT_ONCE]
            probes = noise.signs(x, network.shape, numbers, self.seed)
            with torch.no_grad():
                values, series = self._sum(network, x, context, probes)
            if torch.is_grad_enabled():
                values = values + _with_slope(network, x, context, probes, series)[1]
            total = total + values.sum(0)
        return network(x, context=context)[0], total / len(self.numbers)

    def _sum(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, probes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The series of each probe (k, *) and the Neumann series applied to it (k, *, shape)."""
        shape, kappa = network.shape, network.kappa
        value, series, power = x.new_zeros(()), torch.zeros_like(probes), probes
        going = x.new_ones(leading_shape(probes, shape))
        for k in range(1, MAX_TERMS + 1):
            sign = going * (-1) ** (k + 1)
            series = torch.addcmul(series, beside_event(sign, shape), power)
            power = network(x, power, context)[1]
            value = value + sign / k * sum_event(probes * power, shape)
            size = sum_event(power.square(), shape).sqrt() * math.prod(shape) ** 0.5
            going = going * (size * kappa / ((k + 1) * (1 - kappa)) > self.tolerance)
            if not bool(going.any()):
                return value, series
        raise RuntimeError(
            f"Series: not converged after {MAX_TERMS} terms. Is the Lipschitz constant below 1? "
            "Call networks.converge_norms before an evaluation."
        )


def default_log_det(shape: Shape, layer: int = 0) -> Exact | Series:
    """How a block's log-determinant is evaluated: exactly up to about a hundred dimensions.

    Arguments:
        shape: Shape of one x.
        layer: The block's number in its flow, so that each has probes of its own.
    """
    return Exact() if math.prod(shape) <= EXACT_LIMIT else Series(seed=layer)


def _with_slope(
    network: LipschitzNetwork, x: Tensor, context: Tensor | None, probes: Tensor, series: Tensor
) -> tuple[Tensor, Tensor]:
    """g(x), and zeros (k, *) with the gradient of the log-determinant that a Neumann series gives."""
    g, products = network(x, series, context)
    slope = sum_event(probes * products, network.shape)
    return g, slope - slope.detach()


def with_jacobian(network: LipschitzNetwork, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    """g(x) (*, shape) and the Jacobian I + J of x + g(x), as (d, *, d) with the inputs first."""
    shape, leading = network.shape, leading_shape(x, network.shape)
    d = math.prod(shape)
    identity = torch.eye(d, dtype=x.dtype, device=x.device).reshape(d, *[1] * len(leading), *shape)
    g, jacobian = network(x, identity.expand(d, *x.shape), context)
    return g, (identity + jacobian).flatten(1 + len(leading))


@replaceable
def log_det(matrix: Tensor) -> Tensor:
    """log|det A| (*) for A (d, *, d), rows first."""
    return torch.linalg.slogdet(matrix.movedim(0, -2)).logabsdet
