"""Time a training step, the log-likelihood of 1000 points and 1000 samples, for each model.

    make bench                                     # one CPU thread
    python benchmarks/speed.py --device cuda       # the captured step on a GPU

Prints a table and writes runs/bench.json. Compare rows of one run with each other: absolute times vary
from machine to machine, and on shared machines from minute to minute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ciflows import Flow, build_model
from ciflows.files import write_json
from ciflows.noise import Noise
from ciflows.run import device_name
from ciflows.training import TrainingSettings
from ciflows.training.step import make_step

CASES = {
    "resflow, 2-D": ("resflow", 2, {}),
    "cif-resflow, 2-D": ("cif-resflow", 2, {}),
    "resflow, POWER's shape": ("resflow", 6, {}),
    "cif-resflow, POWER's shape": ("cif-resflow", 6, {"index_features": 2}),
}
POINTS = 1000
DRAWS = 10


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Times of repeated calls, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return times[1:]


def measure(flow: Flow, device: torch.device, repeats: int) -> dict[str, list[float]]:
    x = torch.randn(POINTS, *flow.shape, device=device)
    settings = TrainingSettings(objective="elbo")
    generator = torch.Generator(device).manual_seed(0)
    step = make_step(flow.train(), settings, Noise(generator), x)
    times = {"step": milliseconds(lambda: step(x), device, repeats)}
    flow.eval()
    times["log_prob"] = milliseconds(lambda: flow.log_prob(x, DRAWS, seed=0), device, repeats)
    times["sample"] = milliseconds(lambda: flow.sample(POINTS, seed=0), device, repeats)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    title = f"median ms (spread) for {POINTS} points, m = {DRAWS}; {device_name(device)}"
    table = Table("model", "training step", "log-likelihood", "sampling", title=title)
    results = {}
    for name, (model, features, settings) in CASES.items():
        flow = build_model(model, features=features, **settings).to(device)
        results[name] = measure(flow, device, options.repeats)
        cells = [f"{statistics.median(t):.1f} ({max(t) - min(t):.1f})" for t in results[name].values()]
        table.add_row(name, *cells)
    Console().print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, {"device": device_name(device), "torch": torch.__version__, "ms": results})


if __name__ == "__main__":
    main()
