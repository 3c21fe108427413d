"""Train on more points of a 2-D set than it comes with: points.py DATA [--points N] [--set KEY=VALUE]

python points.py annulus --points 100000 --seed 0 --set steps=11000 --set average=0.999
"""

import argparse

from ciflows import build_model
from ciflows.config import read_overrides, resolve
from ciflows.data import SYNTHETIC, load_dataset
from ciflows.devices import find_device
from ciflows.estimate import summarise
from ciflows.networks import converge_norms
from ciflows.training import fit_flow

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "data", choices=[name for name, truth in SYNTHETIC.items() if truth.limit is not None]
)
parser.add_argument("--model", default="cif-resflow")
parser.add_argument("--points", type=int, default=100_000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--set", action="append", default=[])
given = parser.parse_args()

device = find_device("auto")
config = resolve(given.data, given.model, layers=[read_overrides(given.model, given.set)])
flow = build_model(given.model, features=2, seed=given.seed, **config.architecture).to(device)
data, truth = load_dataset(given.data), SYNTHETIC[given.data]
train = truth.sample(given.points, seed=1)  # the set's own points, its test among them, have another one
outcome = fit_flow(flow, train, data.validation, config.training, seed=given.seed)
converge_norms(flow)
samples, seed = config.evaluation.samples, config.evaluation.seed
tested, trained = (
    summarise(flow.estimate(part.to(device, flow.dtype), samples, seed=seed), samples)
    for part in (data.test, train[:10_000])
)
print(
    f"{given.data}, {given.points} points, seed {given.seed}, {outcome.steps} steps, "
    f"{outcome.seconds:.0f} s: log p(x) {tested.log_prob:.4f} ± {tested.std_error:.4f}, "
    f"gap {truth.limit - tested.log_prob:.4f}; "
    f"{trained.points} of the training points: {trained.log_prob:.4f}"
)
