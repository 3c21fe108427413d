"""Time a training step on random data: step.py DATA MODEL SHAPE [-c EXPERIMENT.toml] [--set KEY=VALUE]

python step.py two-uniforms cif-resflow 2 --set objective=elbo --draws 100
python step.py fashion-mnist cif-realnvp-image 1 28 28 -c cif-realnvp-image
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ciflows import build_model
from ciflows.core.hook import plain
from ciflows.core.noise import Noise
from ciflows.core.rows import Rows
from ciflows.devices import find_device
from ciflows.runs.config import read_config, read_overrides, resolve
from ciflows.training.step import Step, make_step

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data", help="whose settings are taken")
parser.add_argument("model")
parser.add_argument("shape", type=int, nargs="+")
parser.add_argument("-c", "--config", action="append", default=[])
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--eager", action="store_true", help="without a graph and compiled layers")
parser.add_argument("--plain", action="store_true", help="without all of ciflows.speed")
parser.add_argument("--kernels", action="store_true", help="count a step's kernels on a GPU too")
parser.add_argument("--draws", type=int, help="time likelihoods of 1000 points with so many draws too")
options = parser.parse_args()

device = find_device("auto")
without_speed = ExitStack()
if options.plain:
    without_speed.enter_context(plain())
if options.kernels and device.type != "cuda":
    parser.error("--kernels needs a GPU.")
layers = [*map(read_config, options.config), read_overrides(options.model, options.set)]
config = resolve(options.data, options.model, layers=layers)
flow = build_model(options.model, shape=tuple(options.shape), **config.architecture).to(device).train()
images = len(options.shape) > 1
shape = (config.training.batch_size, *options.shape)
batch = torch.randint(256, shape, device=device).float() if images else torch.randn(shape, device=device)
flow.initialise(batch, noise=Noise.seeded(0, device))
batch = Rows(batch)


def milliseconds(work: Callable[[], Tensor], repeats: int) -> float:
    """Time of one call among many, which waits for the last one alone, as training does."""
    work().sum().item()
    begun = time.perf_counter()
    for _ in range(repeats):
        result = work()
    result.sum().item()
    return 1e3 * (time.perf_counter() - begun) / repeats


def list_kernels(work: Callable[[], Tensor]) -> None:
    """Count the kernels of one call; print those that take most of its time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work().sum().item()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    times: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        times[event.name].append(event.device_time_total / 1e3)
    total = sum(map(sum, times.values()))
    print(f"{len(kernels)} kernels, {total:.2f} ms of them; those that take most:")
    for name, each in sorted(times.items(), key=lambda pair: -sum(pair[1]))[:20]:
        print(f"{sum(each):8.3f} ms in {len(each):4d}: {name[:80]}")


begun = time.perf_counter()
noise = Noise.seeded(0, device)
if options.eager:
    step = Step(flow, config.training, noise)
else:
    step = make_step(flow, config.training, noise, batch)
step(batch).item()
first = time.perf_counter() - begun
then = milliseconds(lambda: step(batch), options.steps)
print(f"{type(step).__name__}: first step after {first:.1f} s, then {then:.2f} ms each")

if options.kernels:
    list_kernels(lambda: step(batch))
if options.draws:
    flow.eval()
    points = torch.randn(1000, *options.shape, device=device)

    @torch.no_grad()
    def likelihoods() -> Tensor:
        return flow.log_prob(points, options.draws, seed=0)

    then = milliseconds(likelihoods, 5)
    print(f"likelihoods of 1000 points, m = {options.draws}: {then:.1f} ms")
    if options.kernels:
        list_kernels(likelihoods)
