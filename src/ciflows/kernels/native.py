"""`silu_chain` in C: a tile of points goes through the whole chain while it stays in a core's cache.

`chain.c` is compiled for this very machine when it is first needed, and kept in the user's folder for
caches. Where there is no compiler, torch's operations do the work.
"""

from __future__ import annotations

__all__ = ["back", "fits", "forth", "switched_off", "threads"]

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ciflows.files import cache_folder
from ciflows.kernels.memory import thread_memory

SOURCE = Path(__file__).with_name("chain.c")
FLAGS = (  # none that lets NaN and infinities get lost
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
OPENMP = "-fopenmp"  # threads are torch's own, where it brings libgomp: others would wait for those
WIDEST = 512  # units of a layer whose weights still fit a core's cache
LEAST_ROWS = 64  # that are worth a thread
SECONDS = 60  # to compile


def fits(stack: Tensor, maps: Sequence[Tensor]) -> bool:
    """Whether `forth` and `back` take these: weights, then as many shifts, of one dimension."""
    alike = all(part.dtype == torch.float32 and part.is_cpu for part in (stack, *maps))
    shifts = maps[len(maps) // 2 :]
    narrow = max(stack.shape[-1], *(len(shift) for shift in shifts)) <= WIDEST
    flat = all(shift.ndim == 1 for shift in shifts)
    return _switch.get() and alike and narrow and flat and _library() is not None


_switch: ContextVar[bool] = ContextVar("switch", default=True)


@contextmanager
def switched_off() -> Iterator[None]:
    """Leave the work to torch for a while, which can count it."""
    token = _switch.set(False)
    try:
        yield
    finally:
        _switch.reset(token)


def threads(stack: Tensor) -> int:
    """How many threads share the rows."""
    return max(1, min(torch.get_num_threads(), stack.shape[1] // LEAST_ROWS))


def forth(stack: Tensor, maps: Sequence[Tensor], parts: int, keep: bool) -> list[Tensor]:
    """What a chain makes of a stack; and, where it is to be kept, what `back` needs."""
    chain, stack = _Chain(stack, maps), stack.contiguous()
    result = stack.new_empty(*stack.shape[:2], chain.widths[chain.layers])
    kept = [stack.new_empty(_library().chain_kept(chain))] if keep else []
    places = map(_at, (stack, result, kept[0] if keep else None, _memory(chain, parts)))
    _library().chain_forth(chain, parts, *places)
    return [result, *kept]


def back(
    stack: Tensor,
    maps: Sequence[Tensor],
    parts: int,
    kept: Tensor,
    grad: Tensor,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients by the stack and by each of the maps.

    Arguments:
        parts: As many as the way forth had.
        kept: What it kept.
        grad: The gradient by its result.
        wanted: Whether that by the stack is; and whether those by the maps are.
    """
    chain, stack, grad = _Chain(stack, maps), stack.contiguous(), grad.contiguous()
    half = len(maps) // 2
    pairs = [part for pair in zip(maps[:half], maps[half:], strict=True) for part in pair]
    sizes = [part.numel() for part in pairs]
    by_stack = torch.empty_like(stack) if wanted[0] else None
    by_maps = stack.new_empty(sum(sizes)) if wanted[1] else None
    places = map(_at, (stack, kept, grad, by_stack, by_maps, _memory(chain, parts)))
    _library().chain_back(chain, parts, *places)
    if by_maps is None:
        return by_stack, *[None] * len(maps)
    by_each = [by.view_as(part) for by, part in zip(by_maps.split(sizes), pairs, strict=True)]
    return by_stack, *by_each[::2], *by_each[1::2]


class _Chain(ctypes.Structure):
    """What a chain is, for C."""

    _fields_ = (
        ("rows", ctypes.c_long),
        ("tangents", ctypes.c_int),
        ("layers", ctypes.c_int),
        ("widths", ctypes.POINTER(ctypes.c_int)),
        ("weights", ctypes.POINTER(ctypes.c_void_p)),
        ("shifts", ctypes.POINTER(ctypes.c_void_p)),
    )

    def __init__(self, stack: Tensor, maps: Sequence[Tensor]) -> None:
        self.held = [part.contiguous() for part in maps]  # as long as C may read them
        layers = len(maps) // 2
        weights, shifts = self.held[:layers], self.held[layers:]
        widths = [stack.shape[2], *map(len, shifts)]
        super().__init__(
            stack.shape[1],
            len(stack) - 1,
            layers,
            (ctypes.c_int * len(widths))(*widths),
            (ctypes.c_void_p * layers)(*map(_at, weights)),
            (ctypes.c_void_p * layers)(*map(_at, shifts)),
        )


def _at(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr() or None


def _memory(chain: _Chain, parts: int) -> Tensor:
    return thread_memory.get(parts * _library().chain_memory(chain), torch.float32)


@lru_cache(maxsize=1)
def _library() -> Any:
    """The compiled `chain.c`, or None where that does not work."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):
        return None
    chain, place = ctypes.POINTER(_Chain), ctypes.c_void_p
    library.chain_memory.argtypes = library.chain_kept.argtypes = [chain]
    library.chain_memory.restype = library.chain_kept.restype = ctypes.c_long
    library.chain_forth.argtypes = [chain, ctypes.c_int, *[place] * 4]
    library.chain_back.argtypes = [chain, ctypes.c_int, *[place] * 6]
    library.chain_forth.restype = library.chain_back.restype = None
    return library


def _compiled() -> Path:
    """The path of the library; it is compiled where nobody has done so on such a machine."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("There is no C compiler.")
    facts = [SOURCE.read_text(), *FLAGS, OPENMP, os.path.realpath(compiler), _processor()]
    folder = cache_folder() / "kernels"
    path = folder / f"chain-{hashlib.sha256(chr(10).join(facts).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-fPIC", "-shared", str(SOURCE), "-o", str(made)]
            if subprocess.run([*command, OPENMP], capture_output=True, timeout=SECONDS).returncode:
                subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)  # one thread
            os.replace(made, path)  # at once, for whoever else compiles it now
    return path


def _processor() -> str:
    """What tells apart processors that do not run each other's code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = (line for line in lines if line.lower().startswith(("flags", "features")))
    return next(told, platform.machine())
