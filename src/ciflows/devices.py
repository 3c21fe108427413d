"""Names of devices, and threads of a CPU."""

from __future__ import annotations

__all__ = ["device_name", "few_threads", "find_device"]

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ciflows.errors import UserError

PRODUCTS = 2e7  # in a step, to keep a thread busy


def find_device(name: str) -> torch.device:
    """The device with a name on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (index or "0").isdigit()):
        raise UserError(f"There is no device {name!r}: use auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(f"There is no CUDA device for {name!r} here; use cpu.")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """A readable name of a device, for tables of results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


@contextmanager
def few_threads(module: nn.Module, rows: int) -> Iterator[None]:
    """Use no more threads of the CPU than a module's steps with so many rows keep busy, for a while.

    Threads that wait for each other after every small operation gain nothing, and lose much where
    others use the machine too.

    Arguments:
        module: What is trained.
        rows: Uses of each weight in a step: the rows of a batch, or their pixels.
    """
    before, products = torch.get_num_threads(), rows * sum(p.numel() for p in module.parameters())
    torch.set_num_threads(min(before, max(1, round(products / PRODUCTS))))
    try:
        yield
    finally:
        torch.set_num_threads(before)
