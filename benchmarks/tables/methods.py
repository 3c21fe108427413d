"""What is compared: methods that get the same rows and as many seconds of one core.

All choose what they choose (weights, components, bandwidths) by the validation rows.
"""

from __future__ import annotations

__all__ = ["METHODS", "Score", "score"]

import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import zuko
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity
from torch import Tensor

from benchmarks.tables.data import Table
from benchmarks.tables.ours import fit_default, fit_indexed, fit_informative, fit_muon, fit_plain

LAYERS, HIDDEN = 3, (64, 64)
BATCH, RATE, AVERAGE, VALIDATE_EVERY = 256, 1e-3, 0.98, 50
COMPONENTS = (1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120)
RIDGES = (1e-6, 1e-4, 1e-2)
BANDWIDTHS = np.geomspace(0.03, 1.5, 14)
CHOSEN_BY = 1000  # validation rows that a bandwidth is chosen by

LogProb = Callable[[np.ndarray], np.ndarray]


class Score(NamedTuple):
    """How a method did.

    Attributes:
        log_prob: Mean log-likelihood of the test rows, in nats and units of standardised columns.
        std_error: Its standard error over those rows.
        seconds: CPU seconds that fitting took.
        note: What it says of itself.
    """

    log_prob: float
    std_error: float
    seconds: float
    note: str


def score(method: str, table: Table, seconds: float, seed: int) -> Score:
    """Fit a method to a table and score its test rows.

    Arguments:
        method: A name in `METHODS`.
        table: The table.
        seconds: CPU seconds that it may take.
        seed: Seed of all that is random in it.
    """
    torch.set_num_threads(1)
    start = time.process_time()
    log_prob, note = METHODS[method](table, seconds, seed)
    spent = time.process_time() - start
    values = log_prob(table.test)
    return Score(float(values.mean()), float(values.std() / math.sqrt(len(values))), spent, note)


def _zuko(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """Zuko's NSF with as many layers and our way to train: averaged weights, a cosine, the best kept."""
    torch.manual_seed(seed)
    flow = zuko.flows.NSF(table.train.shape[1], transforms=LAYERS, hidden_features=HIDDEN)
    average = copy.deepcopy(flow)
    optimizer = torch.optim.AdamW(flow.parameters(), lr=RATE, weight_decay=0.01)
    optimizer.step()  # without gradients: it loads torch's compiler, which takes a second of its own
    start = time.process_time()
    train, validation = _tensor(table.train), _tensor(table.validation)[:CHOSEN_BY]
    best, best_state, done, step = -math.inf, flow.state_dict(), 0.0, 0
    for batch in _batches(train):
        optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * done))
        loss = -flow().log_prob(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimizer.step()
        step += 1
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), flow.parameters(), strict=True):
                slow.lerp_(fast, 1 - AVERAGE)
            if step % VALIDATE_EVERY == 0:
                value = average().log_prob(validation).mean().item()
                if value > best:
                    best, best_state = value, copy.deepcopy(average.state_dict())
        done = (time.process_time() - start) / seconds
        if done >= 1:
            break
    flow.load_state_dict(best_state)

    def log_prob(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return flow().log_prob(_tensor(x)).numpy().astype(np.float64)

    return log_prob, f"{step} steps"


def _mixture(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """A mixture of Gaussians: its components, their shape and a ridge chosen by validation."""
    start, best, kept, note = time.process_time(), -math.inf, None, ""
    for components in COMPONENTS:
        if 2 * components > len(table.train) or time.process_time() - start > seconds:
            break
        for shape in ("full", "diag"):
            for ridge in RIDGES:
                model = GaussianMixture(
                    components, covariance_type=shape, reg_covar=ridge, random_state=seed
                )
                value = model.fit(table.train).score(table.validation)
                if value > best:
                    best, kept, note = value, model, f"{components} {shape}, ridge {ridge:g}"
                if time.process_time() - start > seconds:
                    break
    assert kept is not None
    return kept.score_samples, note


def _kernels(table: Table, seconds: float, seed: int) -> tuple[LogProb, str]:
    """A kernel density estimate in whitened coordinates, with a bandwidth chosen by validation."""
    start, best, kept = time.process_time(), -math.inf, None
    covariance = np.cov(table.train, rowvar=False) + 1e-6 * np.eye(table.train.shape[1])
    whiten = np.linalg.inv(np.linalg.cholesky(covariance)).T
    log_det = np.linalg.slogdet(whiten)[1]
    held_out = table.validation[:CHOSEN_BY] @ whiten
    for bandwidth in BANDWIDTHS:
        model = KernelDensity(bandwidth=bandwidth, rtol=1e-4).fit(table.train @ whiten)
        value = model.score_samples(held_out).mean()
        if value > best:
            best, kept = value, model
        if time.process_time() - start > seconds:
            break
    assert kept is not None
    return lambda x: kept.score_samples(x @ whiten) + log_det, f"bandwidth {kept.bandwidth:.2f}"


def _batches(rows: Tensor) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(len(rows))
        yield from (rows[some] for some in order.split(BATCH) if len(some) == min(BATCH, len(rows)))


def _tensor(x: np.ndarray) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float32)


METHODS: dict[str, Callable[[Table, float, int], tuple[LogProb, Any]]] = {
    "default": fit_default,
    "nsf": fit_plain,
    "cif-nsf": fit_indexed,
    "informative": fit_informative,
    "muon": fit_muon,
    "zuko": _zuko,
    "mixture": _mixture,
    "kde": _kernels,
}
