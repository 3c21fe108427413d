"""One side of a comparison: builds a model, then times it on request.

Each side runs this file in its own environment, so that the libraries need not be compatible. It needs
only torch and the library it measures. It reads one JSON object per line and answers each with another:
first the job, then the requests,

    {"work": "step", "calls": 3}     ->  {"ms": [...]}
    {"work": "step", "weigh": true}  ->  {"mib": ..., "gflop": ...}
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

CLIP = 1.0
POWER_ITERATIONS = 5
MIB = 2**20


class Subject(NamedTuple):
    """The operations of one side.

    Attributes:
        step: Take one training step on a batch.
        log_prob: Evaluate the log-likelihood of `points` points.
        sample: Draw as many.
        parameters: Number of parameters.
        plain_step: The same step without a captured graph, if `step` replays one.
        round_trip: The largest error after mapping a sample to noise and back, if known.
    """

    step: Callable[[], object]
    log_prob: Callable[[], object]
    sample: Callable[[], object]
    parameters: int
    plain_step: Callable[[], object] | None = None
    round_trip: Callable[[], float] | None = None


def ours(job: dict[str, Any]) -> Subject:
    """A model of ciflows: one copy to train, one to evaluate."""
    from ciflows.core.noise import Noise
    from ciflows.core.rows import Rows
    from ciflows.models import build_model
    from ciflows.networks import LipschitzMLP, converge_norms
    from ciflows.settings import parse_settings
    from ciflows.training.settings import TrainingSettings
    from ciflows.training.step import Step, make_step

    def build() -> Any:
        flow = build_model(job["model"], features=job["features"], **job["settings"]).to(job["device"])
        for part in flow.modules():
            if isinstance(part, LipschitzMLP):  # near its bound, where inverting is work
                nn.init.orthogonal_(part.linears[-1].get_parameter("weight"))
        converge_norms(flow)
        return flow

    batch, points = _data(job)
    trained, flow = build().train(), build().eval()
    values = {"objective": "elbo", "clip": CLIP, "power_iterations": POWER_ITERATIONS}
    settings = parse_settings(TrainingSettings, values, "training")
    noise = Noise.seeded(0, job["device"])
    rows = Rows(batch)
    step = make_step(trained, settings, noise, rows)

    @torch.no_grad()
    def round_trip() -> float:
        error = 0.0
        for layer in (part for part in flow.layers if part.exact):  # an index layer draws a new u
            z = torch.randn_like(points)
            error = max(error, float((layer.encode(layer.decode(z))[0] - z).abs().max()))
        return error

    return Subject(
        step=lambda: step(rows),
        log_prob=torch.no_grad()(lambda: flow.log_prob(points, job["draws"], seed=0)),
        sample=lambda: flow.sample(job["points"], seed=0),
        parameters=_count(flow),
        plain_step=lambda: Step.__call__(step, rows),
        round_trip=round_trip,
    )


def zuko(job: dict[str, Any]) -> Subject:
    """The same architecture in zuko."""
    from zuko import flows

    settings = dict(job["settings"])
    kind = {"maf": flows.MAF, "nsf": flows.NSF}[job["model"]]
    sizes = {"transforms": settings.pop("layers"), "hidden_features": settings.pop("hidden")}
    flow = kind(job["features"], **sizes, **settings).to(job["device"])
    batch, points = _data(job)
    step = _optimised(flow, lambda: -flow().log_prob(batch).mean())
    return Subject(
        step,
        torch.no_grad()(lambda: flow().log_prob(points)),
        torch.no_grad()(lambda: flow().sample((job["points"],))),
        _count(flow),
    )


def normflows(job: dict[str, Any]) -> Subject:
    """A residual flow of the same size in normflows, with its default log-determinants: estimated in
    training; in evaluation exact for two features and estimated for more."""
    import normflows as nf

    features, settings = job["features"], job["settings"]
    channels = [features, *settings.get("hidden", [128] * 4), features]
    bound = settings.get("kappa", 0.9) ** (1 / (len(channels) - 1))  # theirs bounds each linear map in g
    blocks = [
        nf.flows.Residual(nf.nets.LipschitzMLP(channels, lipschitz_const=bound, init_zeros=False))
        for _ in range(settings.get("layers", 10))
    ]
    for name, parameter in nn.ModuleList(blocks).named_parameters():
        if name.endswith("weight"):
            nn.init.orthogonal_(parameter)  # as in ciflows
    base = nf.distributions.base.DiagGaussian(features, trainable=False)
    flow = nf.NormalizingFlow(base, blocks).to(job["device"])
    evaluated = nf.NormalizingFlow(base, blocks).to(job["device"])
    batch, points = _data(job)
    nf.utils.update_lipschitz(flow, 100)

    def after() -> None:
        nf.utils.update_lipschitz(flow, POWER_ITERATIONS)

    def loss() -> Tensor:
        flow.train()
        return flow.forward_kld(batch.clone())  # it changes requires_grad of its input

    def log_prob() -> Tensor:
        evaluated.eval()
        return evaluated.log_prob(points.clone()).detach()

    @torch.no_grad()
    def sample() -> Tensor:
        evaluated.eval()
        return evaluated.sample(job["points"])[0]

    @torch.no_grad()
    def round_trip() -> float:
        evaluated.eval()
        error = 0.0
        for block in blocks:
            z = torch.randn_like(points)
            inner = block.iresblock
            error = max(error, float((inner(inner.inverse(z)) - z).abs().max()))
        return error

    return Subject(_optimised(flow, loss, after), log_prob, sample, _count(flow), None, round_trip)


def authors(job: dict[str, Any]) -> Subject:
    """The authors' code, from a checkout, with its configuration for one data set."""
    sys.path.insert(0, job["checkout"])
    from cif.models import get_density
    from config import expand_grid, get_config, get_schema

    plain = job["model"].removeprefix("cif-")
    names = {"dataset": job["dataset"], "model": {"nsf": "nsf-ar"}.get(plain, plain)}
    choices = expand_grid(get_config(**names, use_baseline=plain == job["model"]))
    batch, points = _data(job)
    density = get_density(schema=get_schema(config=choices[0] | names), x_train=batch)
    density.to(job["device"])

    def loss() -> Tensor:
        density.train()
        return -density.elbo(batch, num_importance_samples=1)["log-w"].mean()

    @torch.no_grad()
    def log_prob() -> Tensor:
        density.eval()
        return density.elbo(points, num_importance_samples=job["draws"])["log-w"].logsumexp(1)

    @torch.no_grad()
    def sample() -> Tensor:
        density.eval()
        return density.sample(job["points"])

    return Subject(_optimised(density, loss), log_prob, sample, _count(density))


def _optimised(
    flow: nn.Module, loss: Callable[[], Tensor], after: Callable[[], None] | None = None
) -> Callable[[], None]:
    """A training step with the optimiser that ciflows uses."""
    parameters = [p for p in flow.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        if after is not None:
            after()

    return step


def _data(job: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A batch to train on and points to evaluate."""
    rows = torch.randn(max(job["batch"], job["points"]), job["features"]).to(job["device"])
    return rows[: job["batch"]], rows[: job["points"]]


def _count(flow: nn.Module) -> int:
    return sum(p.numel() for p in flow.parameters())


# -- requests -----------------------------------------------------------------------------------------


class _Rate(NamedTuple):
    """A matrix product, to measure the arithmetic rate of the device."""

    product: Callable[[], Tensor]
    flop: float


def _rate(device: torch.device) -> _Rate:
    """Products of the residual blocks' size on a CPU, large ones on a GPU."""
    rows, width = (8192, 8192) if device.type == "cuda" else (1500, 128)
    left, right = torch.randn(rows, width, device=device), torch.randn(width, width, device=device)
    return _Rate(lambda: left @ right, 2.0 * rows * width * width)


def _time(work: Callable[[], object], calls: int, device: torch.device) -> list[float]:
    """Milliseconds of each call; on one CPU thread by the process clock."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    times = []
    for _ in range(calls):
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (clock() - started))
    return times


def _weigh(work: Callable[[], object], device: torch.device, recorded: bool) -> float | None:
    """Peak MiB of a call beyond what was allocated before; None where the system does not say.

    A captured graph allocated its memory at capture: then the peak of the whole process counts.
    """
    gc.collect()
    if device.type == "cuda":
        before = 0 if recorded else torch.cuda.memory_allocated()
        if not recorded:
            torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    try:
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # reset the peak
        before = _status("VmRSS")
        work()
        return (_status("VmHWM") - before) / MIB
    except OSError:
        return None


def _status(name: str) -> int:
    """A size in bytes from Linux's status of this process."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name + ":"))


def _gflop(work: Callable[[], object]) -> float:
    """10⁹ operations in the matrix products of one call."""
    from ciflows.core.hook import plain

    with plain(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 1e9


def describe_device(device: torch.device) -> str:
    """The name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _serve(job: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    device = torch.device(job["device"])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    rate, started = _rate(device), time.perf_counter()
    subject: Subject = SIDES[job["side"]](job)
    _time(subject.step, 1, device)
    start = time.perf_counter() - started
    answer({"parameters": subject.parameters, "start_s": start, "torch": torch.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["work"] == "rate":
            ms = _time(rate.product, asked["calls"], device)
            answer({"gflops": [rate.flop / 1e6 / one for one in ms]})
        elif asked["work"] == "round_trip":
            answer({"error": None if subject.round_trip is None else subject.round_trip()})
        elif asked.get("weigh"):
            work, step = getattr(subject, asked["work"]), asked["work"] == "step"
            plain = subject.plain_step if step else work
            counted = _gflop(plain) if plain is not None and job["side"] == "ours" else None
            mib = _weigh(work, device, recorded=step)
            answer({"mib": mib, "gflop": counted})
        else:
            answer({"ms": _time(getattr(subject, asked["work"]), asked["calls"], device)})


SIDES = {"ours": ours, "zuko": zuko, "normflows": normflows, "authors": authors}


def main() -> None:
    """Answer on standard output; redirect what libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    _serve(json.loads(sys.stdin.readline()), answer)


if __name__ == "__main__":
    main()
