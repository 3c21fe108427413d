"""Fitting a flow to a density that is known up to its constant, and how well it fits."""

from __future__ import annotations

__all__ = ["Evidence", "evaluate", "fit"]

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ciflows.core.evaluate import RunningEstimate
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.noise import Noise
from ciflows.devices import few_threads
from ciflows.errors import UserError
from ciflows.networks.lipschitz import converge_norms, iterate_norms, spectral_maps
from ciflows.training.checkpoint import load_tensors, save_tensors
from ciflows.vi.bound import Bound, LogDensity, call_log_density

CLIP = 10.0
POWER_ITERATIONS = 5
SKIPS = 100  # steps in a row without a finite gradient before giving up
CHUNK = 10_000


class Evidence(NamedTuple):
    """What samples of a flow say of a density and of its constant Z.

    Attributes:
        elbo: Mean of log π(x) - W: at most log Z on average.
        std_error: Its standard error.
        log_z: log of the mean of exp(log π(x) - W): log Z by importance sampling.
        log_z_error: Its standard error (delta method); too small where `pareto_k` is above 0.7.
        effective_draws: Effective number of draws, at most n.
        pareto_k: Shape of the weights' tail (Vehtari et al., 2024): trust `log_z` up to 0.7.
    """

    elbo: float
    std_error: float
    log_z: float
    log_z_error: float
    effective_draws: float
    pareto_k: float


def fit(
    log_density: LogDensity,
    flow: Flow,
    *,
    steps: int = 5000,
    batch: int = 256,
    draws: int = 1,
    inner: int = 1,
    learning_rate: float = 1e-3,
    index_rate: float = 1.0,
    anneal: float = 0.0,
    first_power: float = 0.01,
    balance: float = 0.0,
    context: Tensor | None = None,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
    checkpoint: str | Path | None = None,
    every: int = 1000,
) -> Tensor:
    """Train a flow to be π / Z, and give the mean bound of each step (steps,).

    Arguments:
        log_density: log π, as in `Bound`.
        flow: The flow; afterwards it is in evaluation mode.
        steps: Steps of Adam.
        batch: Bounds in a step, each from samples of its own.
        draws: Samples of x in a bound: more make it tighter, and cover more of π.
        inner: Draws of u for each x.
        learning_rate: Of the first step; it falls to 0 along a cosine.
        index_rate: Factor of it for the networks of indices.
        anneal: Share of the steps in which π is flattened, for a π of several modes: its power rises
            from `first_power` to 1 by equal factors (after Rezende and Mohamed, 2015).
        first_power: The lower it is, the flatter π is at first: valleys of d nats have about
            first_power * d then.
        balance: Share of the steps, the last ones, that take `Bound.by_weights`: the modes that are
            found then get their right shares of the mass. Not for amortised flows.
        context: All contexts (rows, context_shape) of an amortised flow: each step takes some of them.
        seed: Seed of all draws but those of log_density itself.
        progress: Called with the number of steps done and the last bound.
        checkpoint: A file to keep the state in; if it is there, training goes on from it.
        every: Steps between two states, and between two calls of `progress`.
    """
    _check_context(flow, context)
    for name, share in (("anneal", anneal), ("balance", balance)):
        if not 0 <= share <= 1:
            raise UserError(f"{name} is a share of the steps, from 0 to 1; got {share}.")
    if not (0 < first_power <= 1 and 0 < learning_rate < math.inf):
        raise UserError(f"0 < first_power <= 1, 0 < learning_rate; got {first_power}, {learning_rate}.")
    if min(steps, batch, every) < 1:
        raise UserError(f"steps, batch and every are at least 1; got {steps}, {batch} and {every}.")
    if not any(p.requires_grad for p in flow.parameters()):
        raise UserError("The flow has no parameters to train.")
    facts: dict[str, Any] = {"steps": steps, "batch": batch, "draws": draws, "inner": inner}
    facts["parameters"] = sum(p.numel() for p in flow.parameters())
    facts |= {"learning_rate": learning_rate, "index_rate": index_rate, "anneal": anneal}
    facts |= {"first_power": first_power, "balance": balance, "seed": seed}
    state = _State(flow, steps, (learning_rate, learning_rate * index_rate), seed)
    if checkpoint is not None and Path(checkpoint).exists():
        state.load(Path(checkpoint), facts)
    bound, maps, skipped = Bound(log_density, flow.train(), draws, inner), spectral_maps(flow), 0
    if balance:
        bound.check_by_weights()
    with few_threads(flow, batch * draws):
        while state.done < steps:
            bound.power = _power(state.done / steps, anneal, first_power)
            if state.done >= steps * (1 - balance):
                values = bound.by_weights(batch, state.noise)
            else:
                values = bound(batch, _some(context, batch, state.noise), state.noise)
            skipped = 0 if state.take(values.mean()) else skipped + 1
            if skipped == SKIPS:
                raise UserError(
                    f"The bound's gradient was not finite in {SKIPS} steps: is log_density finite?"
                )
            for some in maps:
                iterate_norms(some, POWER_ITERATIONS)
            if state.done % every == 0 or state.done == steps:
                if checkpoint is not None:
                    state.save(Path(checkpoint), facts)
                if progress is not None:
                    progress(state.done, state.history[state.done - 1].item())
    converge_norms(flow.eval())
    return state.history


def _power(done: float, anneal: float, first: float) -> float:
    """The power of π after a share of the steps."""
    return first ** (1 - done / anneal) if done < anneal else 1.0


class _State:
    """All that a step changes: the flow, Adam's moments, the generator and the bounds so far."""

    def __init__(self, flow: Flow, steps: int, rates: tuple[float, float], seed: int) -> None:
        self.flow, self.rates, self.done = flow, rates, 0
        self.history = torch.full((steps,), math.nan)
        self.noise = Noise.seeded(seed, flow.device)
        self.parameters = [p for p in flow.parameters() if p.requires_grad]
        indexed = [part for part in flow.modules() if isinstance(part, Indexed)]
        inside = {id(p) for part in indexed for p in part.parameters()}
        groups = [[p for p in self.parameters if (id(p) in inside) is last] for last in (False, True)]
        self.adam = torch.optim.Adam([{"params": group} for group in groups], fused=True)

    def take(self, value: Tensor) -> bool:
        """Step up a value's gradient; False, and no step, where it is not finite."""
        fallen = 0.5 * (1 + math.cos(math.pi * self.done / len(self.history)))
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * fallen
        self.adam.zero_grad()
        (-value).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, CLIP)
        finite = bool(norm.isfinite() & value.isfinite())
        if finite:
            self.adam.step()
        self.history[self.done] = value.detach()
        self.done += 1
        return finite

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        tensors = {f"flow.{name}": value for name, value in self.flow.state_dict().items()}
        for index, moments in self.adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": value for name, value in moments.items()}
        assert self.noise.generator is not None
        tensors |= {"generator": self.noise.generator.get_state(), "history": self.history}
        save_tensors(path, tensors, facts | {"done": self.done})

    def load(self, path: Path, facts: dict[str, Any]) -> None:
        tensors, kept = load_tensors(path)
        done = kept.pop("done", None)
        if kept != facts:
            others = [f"{key} {kept.get(key)}" for key in facts if kept.get(key) != facts[key]]
            raise UserError(
                f"{path} is of a fit with other settings ({', '.join(others)}): remove it, or name "
                "another."
            )
        self.flow.load_state_dict(_below("flow.", tensors))
        whole = self.adam.state_dict()
        for name, value in _below("adam.", tensors).items():
            index, key = name.split(".")
            whole["state"].setdefault(int(index), {})[key] = value
        self.adam.load_state_dict(whole)
        assert self.noise.generator is not None
        self.noise.generator.set_state(tensors["generator"])
        self.history, self.done = tensors["history"], int(done)


def _below(start: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def _some(context: Tensor | None, batch: int, noise: Noise) -> Tensor | None:
    if context is None:
        return None
    rows = torch.randint(len(context), (batch,), generator=noise.generator, device=context.device)
    return context[rows]


def _check_context(flow: Flow, context: Tensor | None) -> None:
    wanted = flow.context_shape
    if (wanted is None) != (context is None):
        raise UserError("Give contexts to a flow that takes them, and to no other.")
    if context is not None and wanted is not None and (not len(context) or context.shape[1:] != wanted):
        raise UserError(f"Contexts: expected rows of shape {wanted}; got {tuple(context.shape)}.")


@torch.no_grad()
def evaluate(
    log_density: LogDensity,
    flow: Flow,
    n: int = 10_000,
    *,
    inner: int = 1,
    context: Tensor | None = None,
    seed: int | None = 0,
) -> Evidence:
    """Compare a flow with π by n samples: the bound, log Z, and how far to trust it.

    Arguments:
        log_density: log π, as in `Bound`; exact here.
        flow: The flow.
        n: Number of samples.
        inner: Draws of u for each x.
        context: The one context (context_shape) of an amortised flow to look at.
        seed: Seed of the samples.
    """
    if n < 2:
        raise UserError(f"An error needs at least two samples; got n = {n}.")
    if context is not None and context.shape != flow.context_shape and flow.context_shape:
        raise UserError(
            f"evaluate takes one context, of shape {flow.context_shape}; got {tuple(context.shape)}."
        )
    _check_context(flow, None if context is None else context[None])
    noise, parts, running = Noise.seeded(seed, flow.device), [], RunningEstimate(n)
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        x, log_weight = flow.rsample_with_log_weight(size, context, inner=inner, noise=noise)
        parts.append((call_log_density(log_density, x, flow, context) - log_weight).double())
        running.add(parts[-1][:, None])
    found, std_error = running.result(), torch.cat(parts).std() / math.sqrt(n)
    numbers = found.elbo, std_error, found.log_prob, found.std_error, found.effective_samples
    return Evidence(*(number.item() for number in (*numbers, found.pareto_k)))
