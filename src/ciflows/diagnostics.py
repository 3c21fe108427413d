"""What can be measured of a flow beside its likelihood.

The bi-Lipschitz constant of a map f (section 2) is the least M with

    |x - x'| / M <= |f(x) - f(x')| <= M |x - x'|,    M = max(sup σ_max(Df), 1 / inf σ_min(Df)),

and a bijection that carries a Gaussian to data of another topology needs an ever larger one. Here the
singular values of Jacobians are taken at given points, so that what comes out bounds M from below; for
residual blocks the bound from above stands beside it. Where M is too small, mass leaks out of the data's
support, and where it is too large, the inverse is lost to rounding: both are measured too.
"""

from __future__ import annotations

__all__ = [
    "CurvePoint",
    "Lipschitz",
    "LogDetError",
    "RoundTrip",
    "Share",
    "Stretch",
    "draws_curve",
    "is_chain",
    "leaked_mass",
    "lipschitz",
    "log_det_error",
    "paper_log_prob",
    "reconstruction_error",
    "round_trip",
]

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ciflows.bijections import LogDet, Residual, Roulette, Series, Standardise
from ciflows.densities import StandardNormal
from ciflows.estimate import RunningEstimate, log_mean_exp
from ciflows.flow import Flow
from ciflows.indexed import Indexed
from ciflows.layers import Bijection, Layer, check_shape, join, leading_shape
from ciflows.multiscale import Split
from ciflows.networks.lipschitz import LipschitzNetwork
from ciflows.noise import Noise
from ciflows.precision import float32_products

ROWS = 2**12


class Share(NamedTuple):
    """A share of samples, with its binomial standard error."""

    share: float
    std_error: float


class Stretch(NamedTuple):
    """How much a map from data to noise stretches and shrinks distances, seen at some points.

    Attributes:
        layer: Which map it is.
        largest: The largest singular value of its Jacobian.
        smallest: The smallest one.
        constant: max(largest, 1 / smallest), a lower bound on the bi-Lipschitz constant.
        bound: An upper bound on it that holds everywhere; None where none is known.
    """

    layer: str
    largest: float
    smallest: float
    constant: float
    bound: float | None


class Lipschitz(NamedTuple):
    """Bi-Lipschitz constants of each layer, data side first, and of the whole map."""

    layers: tuple[Stretch, ...]
    whole: Stretch


class RoundTrip(NamedTuple):
    """Largest |decode(encode(x)) - x| of each layer, data side first, and of the whole map."""

    layers: tuple[float, ...]
    whole: float


class CurvePoint(NamedTuple):
    """The mean estimate of log p(x) from some number of draws.

    Attributes:
        samples: Draws for each point, m.
        log_prob: Mean over the data of log (1/m) Σ exp w_k, in nats.
        std_error: Standard error of that mean over the data, nearly the same for every m.
        monte_carlo_error: What the finite number of draws adds to it.
    """

    samples: int
    log_prob: float
    std_error: float
    monte_carlo_error: float


class LogDetError(NamedTuple):
    """What the probes of estimated log-determinants do to a data set's mean log_prob, in nats.

    Attributes:
        std_error: Standard error of the mean that the choice of probes causes.
        bias: Estimate of how much too high the mean is, since their error is not quite the same in all
            copies of a row, and a log-mean-exp is raised by what differs. Take it off the mean.
        bias_error: Standard error of that estimate.
        truncation: Bound on what cutting off the power series can do to the mean.
    """

    std_error: float
    bias: float
    bias_error: float
    truncation: float


def is_chain(flow: Flow) -> bool:
    """Whether a flow maps data to noise, layer by layer, once its indices are drawn.

    A mixture does not, nor does a flow that leaves part of the data behind on the way.
    """
    layers = _layers(flow)
    ends = flow
    while isinstance(ends.base, Flow):
        ends = ends.base
    known = all(isinstance(layer, Bijection | Indexed) for layer in layers)
    return bool(layers) and known and isinstance(ends.base, StandardNormal)


def leaked_mass(
    flow: Flow, contains: Callable[[Tensor], Tensor], n: int = 20_000, seed: int | None = 0
) -> Share:
    """The share of a model's samples that fall outside the true support.

    Arguments:
        flow: The model.
        contains: Tells for points (n, shape) whether they lie in the support (n,).
        n: Number of samples.
        seed: Seed of the samples.

    Example:
        >>> from ciflows.bijections import Standardise
        >>> flow = Flow([Standardise(torch.zeros(2), torch.ones(2))])
        >>> leaked_mass(flow, lambda x: x[:, 0] > 0, n=1000).std_error < 0.02
        True
    """
    share = 1 - contains(flow.sample(n, seed=seed)).double().mean().item()
    return Share(share, math.sqrt(share * (1 - share) / n))


@float32_products()
def lipschitz(flow: Flow, x: Tensor, context: Tensor | None = None, seed: int | None = 0) -> Lipschitz:
    """Bi-Lipschitz constants seen at points x (rows, shape), from the Jacobians' singular values.

    An indexed layer is one bijection for each u: it is taken at a draw u ~ q(u | x) that is then held
    fixed. The whole map's Jacobian is the product of the layers', its bound the product of theirs.

    Arguments:
        flow: The model, in eval() mode; its layers are bijections and indexed ones.
        x: Points (rows, shape).
        context: Context (rows, context_shape) of a conditional density.
        seed: Seed of the draws of u.

    Example:
        >>> from ciflows.bijections import Standardise
        >>> flow = Flow([Standardise(torch.zeros(2), torch.tensor([0.5, 4.0]))])
        >>> lipschitz(flow, torch.zeros(1, 2)).whole
        Stretch(layer='whole map', largest=2.0, smallest=0.25, constant=4.0, bound=4.0)
    """
    with _log_dets(flow, _Omitted()):
        steps = _trace(flow, x, context, seed)
        jacobians = [_jacobian(step) for step in steps]
    layers = []
    product = torch.eye(x[0].numel(), dtype=torch.float64, device=x.device)
    for step, jacobian in zip(steps, jacobians, strict=True):
        layers.append(_stretch(step.name, jacobian, _bound(step.bijection)))
        product = jacobian @ product
    bounds = [layer.bound for layer in layers if layer.bound is not None]
    bound = math.prod(bounds) if len(bounds) == len(layers) else None
    return Lipschitz(tuple(layers), _stretch("whole map", product, bound))


@torch.no_grad()
@float32_products()
def round_trip(flow: Flow, x: Tensor, context: Tensor | None = None, seed: int | None = 0) -> RoundTrip:
    """How exactly points x (rows, shape) come back from the noise side, with every u held fixed.

    Arguments:
        flow: The model, in eval() mode; its layers are bijections and indexed ones.
        x: Points (rows, shape).
        context: Context (rows, context_shape) of a conditional density.
        seed: Seed of the draws of u.
    """
    with _log_dets(flow, _Omitted()):
        steps = _trace(flow, x, context, seed)
        back = steps[-1].z
        layers = []
        for step in reversed(steps):
            layers.append(_largest(step.bijection.decode(step.z, step.context) - step.x))
            back = step.bijection.decode(back, step.context)
    return RoundTrip(tuple(reversed(layers)), _largest(back - x))


@torch.no_grad()
@float32_products()
def reconstruction_error(flow: Flow, x: Tensor, seed: int = 0) -> float:
    """The largest |x' - x| of a pixel of images x (n, C, H, W) that go to the noise and come back as x'.

    Every index and all that leaves early is kept for the way back. It begins after the first layer, the
    dequantisation: rounding down would hide an error, or make a whole level of it.
    """
    noise = Noise.seeded(seed, x.device)
    first, *layers = cast(Sequence[Layer], flow.layers)
    x = start = first.encode(x, noise=noise)[0]
    back: list[Callable[[Tensor], Tensor]] = []
    for layer in layers:
        x, inverse = _there_and_back(layer, x, noise)
        back.append(inverse)
    for inverse in reversed(back):
        x = inverse(x)
    return (x - start).abs().max().item()


def _there_and_back(layer: Layer, x: Tensor, noise: Noise) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What a layer makes of x, and the way back from there with the same draws."""
    if isinstance(layer, Split):
        channels = layer.noise_shape[0]
        z, leaving = x[:, :channels], x[:, channels:]
        return z, lambda z: torch.cat([z, leaving], dim=1)
    bijection, given = _at_draw(layer, x, None, noise)
    return bijection.encode(x, given, noise)[0], lambda z: bijection.decode(z, given)


@torch.no_grad()
@float32_products()
def log_det_error(
    flow: Flow,
    x: Tensor,
    samples: int = 100,
    context: Tensor | None = None,
    seed: int = 0,
    groups: int = 4,
) -> LogDetError:
    """What the probes of `Series` log-determinants still contribute to the mean of log_prob over rows.

    log_prob L is taken from all N probes and from each of G groups of N / G of them, with the same draws
    of u. Rows have independent probes, and to first order the groups' mean is L: their spread in each
    row gives the variance of its L. The bias of a log-mean-exp falls as 1 / N, so that

        E[L_group] = L + b G / N,    E[L] = L + b / N,    b / N = (E[L_group] - E[L]) / (G - 1).

    It takes twice as long as `flow.estimate` of the same points; some of the data will do. A flow
    without such log-determinants has no such error.

    Arguments:
        flow: The model, in eval() mode.
        x: Points (rows, shape).
        samples: Draws for each point, m.
        context: Context (rows, context_shape) of a conditional density.
        seed: Seed of the draws of u.
        groups: G, at least 2; it has to divide the number of probes.
    """
    blocks = [block for block in flow.modules() if isinstance(block, Residual)]
    blocks = [block for block in blocks if isinstance(block.log_det, Series)]
    series = [cast(Series, block.log_det) for block in blocks]
    if not series or not len(x):
        return LogDetError(0.0, 0.0, 0.0, 0.0)
    whole = flow.estimate(x, samples, context=context, seed=seed).log_prob.double()
    parts = []
    for some in zip(*(one.split(groups) for one in series), strict=True):
        with _given_log_dets(blocks, some):
            parts.append(flow.estimate(x, samples, context=context, seed=seed).log_prob.double())
    variance, mean = torch.var_mean(torch.stack(parts), dim=0)
    bias = (mean - whole) / (groups - 1)
    return LogDetError(
        std_error=(variance / groups).sum().sqrt().item() / len(x),
        bias=bias.mean().item(),
        bias_error=bias.std().item() / math.sqrt(len(x)) if len(x) > 1 else math.nan,
        truncation=sum(one.tolerance for one in series),
    )


@torch.no_grad()
@float32_products()
def paper_log_prob(
    flow: Flow,
    x: Tensor,
    samples: int = 100,
    seed: int | None = None,
    exact_terms: int = 20,
    p: float = 0.5,
) -> Tensor:
    """The estimate of log p(x) as the paper describes it: biased UPWARD, only for comparison.

    Log-determinants of residual blocks are estimated by the roulette, with a probe of its own in each
    of the m copies of x, inside the log-mean-exp. By Jensen's inequality their noise raises the result,
    the more so the larger m; even the likelihood of a plain residual flow, which needs no draws, rises
    with m. `Flow.log_prob` has no such bias. See docs/likelihoods.md.

    Arguments:
        flow: The model.
        x: Points (rows, shape).
        samples: Draws for each point, m.
        seed: Seed of the draws and of the roulette.
        exact_terms: Terms of the series that are always computed.
        p: Parameter of the geometric number of further terms.
    """
    check_shape(x, flow.shape, "paper_log_prob")
    noise = Noise.seeded(seed, x.device)
    with _log_dets(flow, Roulette(exact_terms, p)):
        parts = [
            log_mean_exp(flow.log_weights(x[start : start + ROWS], samples, noise=noise))
            for start in range(0, max(1, len(x)), ROWS)
        ]
    return torch.cat(parts)


@torch.no_grad()
@float32_products()
def draws_curve(
    flow: Flow,
    x: Tensor,
    counts: Sequence[int] = (1, 2, 5, 10, 20, 50, 100),
    context: Tensor | None = None,
    seed: int | None = 0,
) -> list[CurvePoint]:
    """The mean of log_prob over points x (rows, shape) for a growing number of draws.

    One set of draws serves all counts: m at a time, in as many disjoint groups as there are, so that
    small counts are averaged over many groups. The curve climbs from the ELBO and is level where more
    draws would change nothing.

    Arguments:
        flow: The model, with exact log-determinants.
        x: Points (rows, shape).
        counts: Numbers of draws.
        context: Context (rows, context_shape) of a conditional density.
        seed: Seed of the draws.
    """
    if flow.noisy:
        raise ValueError("draws_curve: log-determinants must be exact; call flow.eval() first.")
    noise = Noise.seeded(seed, x.device)
    log_weights = flow.log_weights(x, max(counts), context, noise).double()
    return [_curve_point(log_weights, m) for m in counts]


# -- inside ------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One layer as a plain bijection, with the rows x that come to it and what it makes of them."""

    name: str
    bijection: Bijection
    context: Tensor | None
    x: Tensor
    z: Tensor


class _Omitted:
    """Stands in for a log-determinant that nobody asks for."""

    noisy = False

    def __call__(
        self, network: LipschitzNetwork, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        return network(x, context=context)[0], x.new_zeros(leading_shape(x, network.shape))


def _log_dets(flow: Flow, strategy: LogDet) -> AbstractContextManager[None]:
    """Give every residual block this strategy for a while."""
    blocks = [module for module in flow.modules() if isinstance(module, Residual)]
    return _given_log_dets(blocks, [strategy] * len(blocks))


@contextmanager
def _given_log_dets(blocks: Sequence[Residual], strategies: Sequence[LogDet]) -> Iterator[None]:
    """Give each block a strategy of its own for a while."""
    before = [(block.log_det, block.training_log_det) for block in blocks]
    try:
        for block, strategy in zip(blocks, strategies, strict=True):
            block.log_det = block.training_log_det = strategy
        yield
    finally:
        for block, (log_det, training_log_det) in zip(blocks, before, strict=True):
            block.log_det, block.training_log_det = log_det, training_log_det


@torch.no_grad()
def _trace(flow: Flow, x: Tensor, context: Tensor | None, seed: int | None) -> list[_Step]:
    """Pass rows x through the layers, and draw a u for each row of each indexed one."""
    check_shape(x, flow.shape, "diagnostics")
    if x.ndim != len(flow.shape) + 1 or len(x) == 0:
        raise ValueError(f"diagnostics: expected at least one row; got shape {tuple(x.shape)}.")
    noise, steps = Noise.seeded(seed, x.device), []
    if not _layers(flow):
        raise ValueError("diagnostics: the flow has no layers whose Jacobian could be measured.")
    for index, layer in enumerate(_layers(flow)):
        bijection, given = _at_draw(layer, x, context, noise)
        name = f"{index} {type(layer).__name__}"
        if isinstance(layer, Indexed):
            name += f" {type(bijection).__name__}"
        z = bijection.encode(x, given, noise)[0]
        steps.append(_Step(name, bijection, given, x, z))
        x = z
    return steps


def _layers(flow: Flow) -> list[Layer]:
    below = _layers(flow.base) if isinstance(flow.base, Flow) else []
    return [*cast(Sequence[Layer], flow.layers), *below]


def _at_draw(
    layer: Layer, x: Tensor, context: Tensor | None, noise: Noise
) -> tuple[Bijection, Tensor | None]:
    """The bijection that a layer is at a draw of u, and the context that makes it so."""
    given = context if layer.context_shape is not None else None
    if isinstance(layer, Indexed):
        dims = len(layer.shape)
        u = layer.posterior.draw((len(x),), join(x, given, dims), noise)
        return layer.family, join(u, given, dims)
    if isinstance(layer, Bijection):
        return layer, given
    raise ValueError(
        f"diagnostics: {type(layer).__name__} is neither a bijection nor an indexed family of them, "
        "so that it has no Jacobian and no inverse to measure."
    )


def _jacobian(step: _Step) -> Tensor:
    """Dz/Dx (rows, d, d) in double precision; rows are independent, so d backward passes do."""
    with torch.enable_grad():
        x = step.x.detach().requires_grad_()
        z = step.bijection.encode(x, step.context)[0].flatten(1)
        gradients = [
            torch.autograd.grad(column.sum(), x, retain_graph=True)[0].flatten(1)
            for column in z.unbind(1)
        ]
    return torch.stack(gradients, dim=1).double()


def _stretch(name: str, jacobian: Tensor, bound: float | None) -> Stretch:
    values = torch.linalg.svdvals(jacobian)
    largest, smallest = values.max().item(), values.min().item()
    constant = max(largest, 1 / smallest) if smallest > 0 else math.inf
    return Stretch(name, largest, smallest, constant, bound)


def _bound(bijection: Bijection) -> float | None:
    """What the bi-Lipschitz constant can be at most, where it is known."""
    if isinstance(bijection, Residual):
        kappa = bijection.network.kappa
        return max(1 + kappa, 1 / (1 - kappa))
    if isinstance(bijection, Standardise):
        return max(1 / bijection.scale.min().item(), bijection.scale.max().item())
    return None


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def _curve_point(log_weights: Tensor, samples: int) -> CurvePoint:
    """Average (draws, rows) log-weights in disjoint groups of `samples`."""
    draws, rows = log_weights.shape
    groups = draws // samples
    grouped = log_weights[: groups * samples].reshape(samples, groups, rows)
    estimates = log_mean_exp(grouped)
    if groups > 1:
        variance = estimates.var(0) / groups
    else:
        running = RunningEstimate()
        running.add(log_weights[:samples])
        variance = running.result().std_error.square().nan_to_num()
    mean = estimates.mean(0)
    return CurvePoint(
        samples=samples,
        log_prob=mean.mean().item(),
        std_error=mean.std().item() / math.sqrt(rows) if rows > 1 else math.nan,
        monte_carlo_error=variance.sum().sqrt().item() / rows,
    )
