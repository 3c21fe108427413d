"""Bits per dimension over time, of several runs on images: curves.py OUT.png RUN ... [--paper BITS ...]

The dots on the right are the test results, with their standard errors; dashed lines, in the order of the
runs, what the paper's models came to in the end.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from ciflows.files import read_json
from ciflows.pixels import bits_per_dim
from ciflows.runs.folder import read_description
from ciflows.training.monitor import read_history

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("out", type=Path)
parser.add_argument("runs", type=Path, nargs="+")
parser.add_argument("--paper", type=float, nargs="*", default=[])
given = parser.parse_args()

figure = Figure(figsize=(7.5, 4.2), layout="constrained")
axes = figure.add_subplot()
for index, folder in enumerate(given.runs):
    config, about = read_description(folder)
    metrics = read_json(folder / "metrics.json")
    channels, height, width = about["shape"]
    size = channels * height * width
    rows = [row for row in read_history(folder / "metrics.jsonl") if "validation" in row]
    minutes = [row["seconds"] / 60 for row in rows]
    bits = [bits_per_dim(row["validation"], size) for row in rows]
    label = f"{folder.name}, {metrics['parameters'] / 1e6:.2f}M weights, {metrics['steps']:,} steps"
    (line,) = axes.plot(minutes, bits, marker="o", ms=3, label=label)
    error = metrics["bits_per_dim_std_error"]
    axes.errorbar(
        1.02 * minutes[-1], metrics["bits_per_dim"], error, fmt="s", ms=4, color=line.get_color()
    )
    if index < len(given.paper):
        axes.axhline(given.paper[index], ls=(0, (4, 3)), lw=1, color=line.get_color())
axes.set_xlabel(f"minutes on an {metrics['device']}, side by side")
axes.set_ylabel("bits per dimension")
axes.set_title(f"{config.data}: validation while training, and test")
axes.legend(frameon=False)
figure.savefig(given.out, dpi=110)
