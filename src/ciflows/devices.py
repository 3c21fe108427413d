"""Names of devices."""

from __future__ import annotations

__all__ = ["device_name", "find_device"]

import torch

from ciflows.errors import UserError


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
