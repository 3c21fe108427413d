"""Chains of activations and linear maps in C: a tile of points goes through all maps within the cache.

`chain.c` and `spline.c` are compiled for this machine at their first use, and kept in the user's cache
folder. Without a compiler the plain functions run.
"""

from __future__ import annotations

__all__ = ["address", "chain", "fits", "is_plain", "library", "plain_gradients"]

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ciflows.files import atomic_path, cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("chain.c", "spline.c"))
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
    """`plain_chain` in C, for arguments that fit."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in (stack, *maps)):
        return _Chained.apply(activation, stack, *maps)
    return _forward(_Chain(activation, stack, maps), stack, None)


def fits(stack: Tensor, maps: Sequence[Tensor]) -> bool:
    """Whether `chain` takes these: ordinary tensors of floats, and biases that all rows share."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or stack.ndim not in (2, 3):
        return False
    if not all(map(is_plain, (stack, *maps))):
        return False
    weights, biases = halves(maps)
    widths = [stack.shape[-1], *(bias.shape[-1] for bias in biases)]
    shapes = zip(widths[1:], widths[:-1], strict=True)
    agree = all(weight.shape == shape for weight, shape in zip(weights, shapes, strict=True))
    flat = all(bias.ndim == 1 for bias in biases)
    found = library() if agree and flat and max(widths) <= WIDEST else None
    return found is not None and (found.has_threads or torch.get_num_threads() == 1)


def is_plain(part: Tensor) -> bool:
    """Whether this is an ordinary tensor of floats in memory, and torch need not see each operation."""
    if type(part) not in (Tensor, nn.Parameter) or part.dtype != torch.float32 or not part.is_cpu:
        return False
    if part.is_neg() or forward_ad.unpack_dual(part).tangent is not None:
        return False
    try:
        part.data_ptr()
    except RuntimeError:  # wrapped by one of torch.func's transforms
        return False
    return True


class _Memory(threading.local):
    """Memory that a thread uses again and again: fresh pages take as long as a product."""

    def __init__(self) -> None:
        self.held = torch.empty(0)

    def get(self, size: int) -> Tensor:
        """Floats, with values left over from their last use."""
        if len(self.held) < size:
            with torch.inference_mode(False):  # usable outside of it too
                self.held = torch.empty(size)
        return self.held[:size]


thread_memory = _Memory()


class _Chained(torch.autograd.Function):
    """The outputs of each layer but the first are saved for the backward pass, in C's own layout."""

    @staticmethod
    def forward(ctx: Any, activation: str, stack: Tensor, *maps: Tensor) -> Tensor:
        chain = _Chain(activation, stack, maps)
        saved = stack.new_empty(library().chain_saved(chain))
        ctx.activation, ctx.parts = activation, chain.parts
        ctx.save_for_backward(stack, *maps, saved)
        return _forward(chain, stack, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        stack, *maps, saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return None, *plain_gradients(partial(plain_chain, ctx.activation), [stack, *maps], grads)
        chain = _Chain(ctx.activation, stack, maps)
        chain.parts = ctx.parts  # as many as in the forward pass
        stack, grad = stack.contiguous(), grads[0].contiguous()
        sizes = [part.numel() for part in maps]
        by_stack = torch.empty_like(stack) if ctx.needs_input_grad[1] else None
        by_maps = stack.new_empty(sum(sizes)) if any(ctx.needs_input_grad[2:]) else None
        places = map(address, (stack, saved, grad, by_stack, by_maps, chain.memory()))
        library().chain_backward(chain, *places)
        if by_maps is None:
            return None, by_stack, *[None] * len(maps)
        by_each = zip(by_maps.split(sizes), maps, strict=True)
        return None, by_stack, *(by.view_as(part) for by, part in by_each)


def halves(maps: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The weights of a chain, and its biases."""
    return maps[: len(maps) // 2], maps[len(maps) // 2 :]


def plain_chain(activation: str, stack: Tensor, *maps: Tensor) -> Tensor:
    """y ← V a(y) + c for each weight V and bias c, with tangents T ← V (a'(y) ⊙ T) carried along.

    Arguments:
        activation: "silu" before each map; "tanh" or "relu" between maps.
        stack: The value y and k tangents T, (1 + k, rows, features); or the value alone.
        maps: V of each layer, (out, in); then c of each, (out,).
    """
    if stack.ndim == 2:
        return plain_chain(activation, stack[None], *maps)[0]
    for index, (weight, bias) in enumerate(zip(*halves(maps), strict=True)):
        if index or activation == "silu":
            value, slope = _activated(activation, stack[:1])
            stack = torch.cat([value, stack[1:] * slope])
        stack = stack @ weight.mT
        stack = torch.cat([stack[:1] + bias, stack[1:]])
    return stack


def _activated(activation: str, y: Tensor) -> tuple[Tensor, Tensor]:
    """a(y) and a'(y)."""
    if activation == "silu":
        s = torch.sigmoid(y)
        return F.silu(y), s * (1 + y * (1 - s))
    if activation == "tanh":
        value = torch.tanh(y)
        return value, 1 - value * value
    return torch.relu(y), (y > 0).to(y.dtype)


def plain_gradients(
    plain: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of a plain function that can be differentiated again.

    They are taken in views of the inputs, of which one may have been computed from another.

    Arguments:
        plain: The function.
        inputs: Its arguments.
        grads: Gradients by its outputs.
    """
    views = [part.view_as(part) for part in inputs]
    needed = [part for part in views if part.requires_grad]
    outputs = plain(*views)
    made = iter(torch.autograd.grad(outputs, needed, grads, create_graph=True, allow_unused=True))
    return tuple(next(made) if part.requires_grad else None for part in views)


def _forward(chain: _Chain, stack: Tensor, saved: Tensor | None) -> Tensor:
    """A chain's outputs; what the backward pass needs goes to `saved`."""
    stack = stack.contiguous()
    result = stack.new_empty(*stack.shape[:-1], chain.widths[chain.layers])
    library().chain_forward(chain, *map(address, (stack, result, saved, chain.memory())))
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
        ("biases", ctypes.POINTER(ctypes.c_void_p)),
    )

    def __init__(self, activation: str, stack: Tensor, maps: Sequence[Tensor]) -> None:
        self.held = [part.contiguous() for part in maps]  # as long as C may read them
        weights, biases = halves(self.held)
        layers, rows = len(weights), stack.shape[-2]
        widths = [stack.shape[-1], *map(len, biases)]
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
            (ctypes.c_void_p * layers)(*map(address, weights)),
            (ctypes.c_void_p * layers)(*map(address, biases)),
        )

    def memory(self) -> Tensor:
        """What all parts work in."""
        return thread_memory.get(library().chain_memory(self))


def address(part: Tensor | None) -> int | None:
    """Where a tensor's numbers are, for C."""
    return None if part is None else part.data_ptr() or None


_lock = threading.Lock()


def library() -> Any:
    """The compiled C, or None if that does not work."""
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
            found = ctypes.CDLL(str(_compiled(path, compiler, flags)))
        except OSError:
            path.unlink()  # damaged
            found = ctypes.CDLL(str(_compiled(path, compiler, flags)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
        return None
    found.__dict__["has_threads"] = threads
    chain, place = ctypes.POINTER(_Chain), ctypes.c_void_p
    found.chain_memory.argtypes = found.chain_saved.argtypes = [chain]
    found.chain_memory.restype = found.chain_saved.restype = ctypes.c_long
    found.chain_forward.argtypes = [chain, *[place] * 4]
    found.chain_backward.argtypes = [chain, *[place] * 6]
    found.chain_forward.restype = found.chain_backward.restype = None
    found.spline_forward.argtypes = found.spline_inverse.argtypes = [place] * 3
    found.spline_backward.argtypes = [place] * 7
    for function in (found.spline_forward, found.spline_inverse, found.spline_backward):
        function.restype = None
    return found


def _has_gomp() -> bool:
    """Whether torch's threads are those that -fopenmp asks for: others would wait for these."""
    try:
        return "/libgomp.so.1\n" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _path(version: str, flags: Sequence[str]) -> Path:
    """Where the library is saved that this compiler makes for this processor."""
    sources = (source.read_text() for source in SOURCES)
    facts = "\n".join([*sources, version, *flags, _processor()])
    return cache_folder() / "kernels" / f"chain-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"


def _compiled(path: Path, compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """The library at its path, which is made where it is not there; nobody else may have written it."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_path(path) as made:
            sources = map(str, SOURCES)
            _run([*compiler, *flags, "-fPIC", "-shared", *sources, "-lm", "-o", str(made)])
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
