"""Does a model overfit? Bits per dimension of training, validation and test images: parts.py RUN ...

One draw for each image; the images of a part are the same for all runs.
"""

import argparse
import math

import torch

import ciflows
from ciflows.core.noise import Noise

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("runs", nargs="+")
parser.add_argument("--images", type=int, default=2000, help="images of each part, evenly spread")
given = parser.parse_args()

for folder in given.runs:
    run = ciflows.load_run(folder)
    data, found = run.dataset(), []
    for part in (data.train, data.validation, data.test):
        images = part[torch.linspace(0, len(part) - 1, given.images).long()].to(run.flow.device).float()
        noise = Noise.seeded(0, run.flow.device)
        with torch.no_grad():
            bounds = torch.cat([run.flow.log_weight(some, noise=noise) for some in images.split(250)])
        found.append(-bounds.mean().item() / data.features / math.log(2))
    print(
        f"{folder}: training {found[0]:.3f}, validation {found[1]:.3f}, test {found[2]:.3f}", flush=True
    )
