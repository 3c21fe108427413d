"""Chains in C: a tile of points goes through all maps while it stays in a core's cache.

`chain.c` is compiled for this very machine when it is first needed, and kept in the user's folder for
caches. Where there is no compiler, torch's operations do the work.
"""

from __future__ import annotations

__all__ = ["chain", "fits", "switched_off"]

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ciflows.files import atomic_path, cache_folder
from ciflows.kernels.memory import thread_memory
from ciflows.kernels.plain import halves, plain_chain, plain_gradients

SOURCE = Path(__file__).with_name("chain.c")
ACTIVATIONS = ("identity", "silu", "tanh", "relu")  # as they are numbered there
FLAGS = (  # none that lets NaN and infinities get lost
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
WIDEST = 512  # units of a layer whose weights still fit a core's cache
LEAST_ROWS = 64  # that are worth a thread
SECONDS = 60  # to compile


def chain(activation: str, stack: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """`plain_chain`, of what `fits`."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in (stack, *maps)):
        return _NativeChain.apply(activation, stack, *maps)
    return _forth(_Chain(activation, stack, maps), stack, None)


def fits(stack: Tensor, maps: Sequence[Tensor]) -> bool:
    """Whether `chain` takes these: ordinary tensors of floats, and shifts that all rows share."""
    if _is_watched() or not all(map(_is_plain, (stack, *maps))) or stack.ndim not in (2, 3):
        return False
    weights, shifts = halves(maps)
    widths = [stack.shape[-1], *(shift.shape[-1] for shift in shifts)]
    shapes = zip(widths[1:], widths[:-1], strict=True)
    agree = all(weight.shape == shape for weight, shape in zip(weights, shapes, strict=True))
    flat = all(shift.ndim == 1 for shift in shifts)
    library = _library() if agree and flat and max(widths) <= WIDEST else None
    return library is not None and (library.has_threads or torch.get_num_threads() == 1)


def _is_watched() -> bool:
    """Whether torch has to see each operation: it compiles, transforms or counts them, or casts."""
    return (
        torch.compiler.is_compiling()
        or not _switch.get()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    )


def _is_plain(part: Tensor) -> bool:
    """Whether its memory holds just its numbers, and these are floats."""
    ordinary = type(part) is Tensor or type(part) is nn.Parameter
    return ordinary and part.dtype == torch.float32 and part.is_cpu and not part.is_neg()


_switch: ContextVar[bool] = ContextVar("switch", default=True)


@contextmanager
def switched_off() -> Iterator[None]:
    """Leave the work to torch for a while, which can count it."""
    token = _switch.set(False)
    try:
        yield
    finally:
        _switch.reset(token)


class _NativeChain(torch.autograd.Function):
    """What comes out of each layer but the first is kept for the way back, in a layout of C's own."""

    @staticmethod
    def forward(ctx: Any, activation: str, stack: Tensor, *maps: Tensor) -> Tensor:
        chain = _Chain(activation, stack, maps)
        kept = stack.new_empty(_library().chain_kept(chain))
        ctx.activation, ctx.parts = activation, chain.parts
        ctx.save_for_backward(stack, *maps, kept)
        return _forth(chain, stack, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stack, *maps, kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = partial(plain_chain, ctx.activation)
            return None, *plain_gradients(plain, [stack, *maps], grads)
        chain = _Chain(ctx.activation, stack, maps)
        chain.parts = ctx.parts  # as many as on the way forth
        stack, grad = stack.contiguous(), grads[0].contiguous()
        sizes = [part.numel() for part in maps]
        by_stack = torch.empty_like(stack) if ctx.needs_input_grad[1] else None
        by_maps = stack.new_empty(sum(sizes)) if any(ctx.needs_input_grad[2:]) else None
        places = map(_at, (stack, kept, grad, by_stack, by_maps, chain.memory()))
        _library().chain_back(chain, *places)
        if by_maps is None:
            return None, by_stack, *[None] * len(maps)
        by_each = zip(by_maps.split(sizes), maps, strict=True)
        return None, by_stack, *(by.view_as(part) for by, part in by_each)


def _forth(chain: _Chain, stack: Tensor, kept: Tensor | None) -> Tensor:
    """What a chain makes of a stack; what the way back needs goes to `kept`."""
    stack = stack.contiguous()
    result = stack.new_empty(*stack.shape[:-1], chain.widths[chain.layers])
    _library().chain_forth(chain, *map(_at, (stack, result, kept, chain.memory())))
    return result


class _Chain(ctypes.Structure):
    """What a chain is, for C; and in how many parts its rows are shared among threads."""

    _fields_ = (
        ("rows", ctypes.c_long),
        ("parts", ctypes.c_int),
        ("tangents", ctypes.c_int),
        ("layers", ctypes.c_int),
        ("activations", ctypes.POINTER(ctypes.c_int)),
        ("widths", ctypes.POINTER(ctypes.c_int)),
        ("weights", ctypes.POINTER(ctypes.c_void_p)),
        ("shifts", ctypes.POINTER(ctypes.c_void_p)),
    )

    def __init__(self, activation: str, stack: Tensor, maps: Sequence[Tensor]) -> None:
        self.held = [part.contiguous() for part in maps]  # as long as C may read them
        weights, shifts = halves(self.held)
        layers, rows = len(weights), stack.shape[-2]
        widths = [stack.shape[-1], *map(len, shifts)]
        kinds = [ACTIVATIONS.index(activation)] * layers
        if activation != "silu":
            kinds[0] = ACTIVATIONS.index("identity")
        super().__init__(
            rows,
            max(1, min(torch.get_num_threads(), rows // LEAST_ROWS)),
            len(stack) - 1 if stack.ndim == 3 else 0,
            layers,
            (ctypes.c_int * layers)(*kinds),
            (ctypes.c_int * len(widths))(*widths),
            (ctypes.c_void_p * layers)(*map(_at, weights)),
            (ctypes.c_void_p * layers)(*map(_at, shifts)),
        )

    def memory(self) -> Tensor:
        """What all parts work in."""
        return thread_memory.get(_library().chain_memory(self), torch.float32)


def _at(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr() or None


_lock = threading.Lock()


def _library() -> Any:
    """The compiled `chain.c`, or None where that does not work."""
    with _lock:
        return _load()


@lru_cache(maxsize=1)
def _load() -> Any:
    if os.name != "posix":
        return None
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        version = _run([*compiler, "--version"])
        threads = _has_gomp() and "clang" not in version  # whose threads would not be torch's
        flags = (*FLAGS, "-fopenmp") if threads else FLAGS
        path = _path(version, flags)
        try:
            library = ctypes.CDLL(str(_compiled(path, compiler, flags)))
        except OSError:
            path.unlink()  # damaged
            library = ctypes.CDLL(str(_compiled(path, compiler, flags)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
        return None
    library.__dict__["has_threads"] = threads
    chain, place = ctypes.POINTER(_Chain), ctypes.c_void_p
    library.chain_memory.argtypes = library.chain_kept.argtypes = [chain]
    library.chain_memory.restype = library.chain_kept.restype = ctypes.c_long
    library.chain_forth.argtypes = [chain, *[place] * 4]
    library.chain_back.argtypes = [chain, *[place] * 6]
    library.chain_forth.restype = library.chain_back.restype = None
    return library


def _has_gomp() -> bool:
    """Whether torch's threads are those that -fopenmp asks for: others would wait for these."""
    try:
        return "/libgomp.so.1\n" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _path(version: str, flags: Sequence[str]) -> Path:
    """Where the library is kept that this compiler makes for this processor."""
    facts = "\n".join([SOURCE.read_text(), version, *flags, _processor()])
    return cache_folder() / "kernels" / f"chain-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"


def _compiled(path: Path, compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """The library at its path, which is made where it is not there; nobody else may have written it."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_path(path) as made:
            _run([*compiler, *flags, "-fPIC", "-shared", str(SOURCE), "-o", str(made)])
            made.chmod(0o700)
    for place in (path, path.parent):
        facts = place.stat()
        if facts.st_uid not in (0, os.getuid()) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RuntimeError(f"{place} may have been written by others.")
    return path


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS
    )
    return done.stdout


def _processor() -> str:
    """What tells apart processors that do not run each other's code."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = "flags", "features", "model name", "cpu\t"
    told = {line for line in lines if line.lower().startswith(names)}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])
