"""Kernels compiled before their first use, several at once.

Triton compiles a kernel where it is first started, one after the other. Most of that time is spent
outside of Python, so that threads share it well.
"""

from __future__ import annotations

__all__ = ["Compiler", "compiled_ahead", "launch"]

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor


class Compiler:
    """Threads that compile; each kernel once for each kind of arguments."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(thread_name_prefix="ciflows-compile")
        self.begun: dict[Hashable, Future[None]] = {}

    @property
    def used(self) -> bool:
        """Whether there was anything to compile."""
        return bool(self.begun)

    def add(self, kernel: Any, given: Sequence[Tensor | int], options: dict[str, Any]) -> None:
        key = kernel, *map(_kind, given), *options.items()
        if key not in self.begun:
            self.begun[key] = self.threads.submit(_compile, kernel, given, options)

    def finish(self) -> None:
        """Wait for all; what did not compile says so where it is started."""
        wait(self.begun.values())
        self.threads.shutdown()


_compiler: ContextVar[Compiler | None] = ContextVar("compiler", default=None)


@contextmanager
def compiled_ahead() -> Iterator[Compiler]:
    """Have kernels compiled for a while, several at once, and start none; at the end all are ready.

    What they would compute is zero meanwhile: what is computed here serves for its kernels alone, and an
    error in it may be due to those zeros. It holds for this thread alone, so the way back stays in it.
    """
    compiler = Compiler()
    token = _compiler.set(compiler)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield compiler
    finally:
        _compiler.reset(token)
        compiler.finish()


def launch(
    kernel: Any, grid: tuple[int, ...], *given: Tensor | int, results: Sequence[Tensor], **options: Any
) -> None:
    """Start a kernel of triton's, or have it compiled where that is done ahead.

    Arguments:
        kernel: The kernel.
        grid: How many programs, in up to three dimensions.
        given: Its arguments, a tensor first.
        results: Those that it fills and that are read by more than other kernels started here.
        options: Its constants, and how it is to be compiled.
    """
    compiler = _compiler.get()
    if compiler is None:
        kernel[grid](*given, **options)
        return
    for result in results:
        result.zero_()
    compiler.add(kernel, given, options)


def _kind(given: Tensor | int) -> Hashable:
    """What triton tells apart: where a tensor lies; of a number if it is 1, even by 16, or large."""
    if isinstance(given, Tensor):
        return given.dtype, given.device, given.data_ptr() % 16
    return given == 1, given % 16 == 0, given < 2**31


def _compile(kernel: Any, given: Sequence[Any], options: dict[str, Any]) -> None:
    with torch.cuda.device_of(given[0]):
        kernel.warmup(*given, grid=(1,), **options)
