"""The processes that train one flow together: this one alone, or all that torchrun started.

Each process takes its rows of every batch. Gradients are added up after the backward pass, in one vector
for each type of number, and every process takes the same step with them. There is no wrapper around the
flow, as DistributedDataParallel is one: that sees calls of `forward` alone, and a flow has none.
"""

from __future__ import annotations

__all__ = ["ALONE", "Processes", "here", "join_processes", "uninterrupted"]

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from ciflows.core.groups import grouped
from ciflows.devices import find_device
from ciflows.errors import LostProcessError, UserError

T = TypeVar("T")
BUCKET = 2**24  # numbers that are sent at once
PATIENCE = timedelta(days=1)  # the first process may prepare a large table, while the others wait


class Processes:
    """One process on its own: it has all rows, and nothing to wait for.

    Attributes:
        rank: The number of this process; 0 writes the run folder and prints.
        size: How many there are.
    """

    rank, size = 0, 1

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this process."""
        return find_device(name)

    def share(self, rows: int) -> slice:
        """This process's share of `rows` rows.

        Example:
            >>> ALONE.share(10)
            slice(0, 10, None)
        """
        return slice(self.rank * rows // self.size, (self.rank + 1) * rows // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, differentiably."""
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors (k,) of all processes, differentiably: (processes, k)."""
        return tensor[None]

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients by their sums over all processes."""

    def whole(self, part: Tensor, rows: int) -> Tensor:
        """All rows, of which each process has its share (own rows, *)."""
        return part

    def from_main(self, make: Callable[[], T]) -> T:
        """What the main process makes, for all."""
        return make()

    def seconds(self, clock: Callable[[], float]) -> float:
        """The time of the main process, for all."""
        return clock()

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Copy the main process's numbers into tensors of all."""

    @contextmanager
    def one_first(self) -> Iterator[None]:
        """Let one process of each machine go first, to prepare what the others then find."""
        yield

    def check_same(self, value: str, message: str) -> None:
        """Refuse, with this message, a value that is not the same in all processes."""

    def command(self, words: str) -> str:
        """A command as these processes were started."""
        return words


ALONE = Processes()


class _Group(Processes):
    """The processes of `torch.distributed`'s default group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

    def device(self, name: str) -> torch.device:
        if ":" in name:
            raise UserError(f"device {name}: each process takes its own GPU: give cuda, cpu or auto.")
        device = find_device(name)
        if device.type != "cuda":
            return device
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"There are {torch.cuda.device_count()} GPUs for more processes than that: start one "
                "process for each GPU."
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def sum(self, tensor: Tensor) -> Tensor:
        return _Sum.apply(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        own = torch.eye(self.size, dtype=tensor.dtype, device=tensor.device)[self.rank]
        return self.sum(own[:, None] * tensor)

    @torch.no_grad()
    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for some in grouped(parameters, lambda p: p.dtype):
            grads = [p.grad for p in some if p.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            for bucket in flat.split(BUCKET):
                _all_reduce(bucket)
            _spread(flat, grads)

    @torch.no_grad()
    def whole(self, part: Tensor, rows: int) -> Tensor:
        result = part.new_zeros(rows, *part.shape[1:])
        result[self.share(rows)] = part
        return _all_reduce(result)

    def from_main(self, make: Callable[[], T]) -> T:
        box: list[Any] = [make() if self.main else None]
        with _watched():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def seconds(self, clock: Callable[[], float]) -> float:
        # a number alone: it is asked for at every step
        box = torch.tensor(clock() if self.main else 0.0, dtype=torch.float64)
        with _watched():
            dist.broadcast(box, src=0)
        return box.item()

    @torch.no_grad()
    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        for some in grouped(tensors, lambda tensor: tensor.dtype):
            flat = torch.cat([tensor.flatten() for tensor in some])
            with _watched():
                dist.broadcast(flat.view(torch.uint8), src=0)
            _spread(flat, [tensor.detach() for tensor in some])

    @contextmanager
    def one_first(self) -> Iterator[None]:
        if self.local_rank:
            self._wait()
        yield
        if not self.local_rank:
            self._wait()

    def _wait(self) -> None:
        """Wait until all are here."""
        _all_reduce(torch.zeros(()))

    def check_same(self, value: str, message: str) -> None:
        if _all_reduce(torch.tensor(float(value != self.from_main(lambda: value)))):
            raise UserError(message)

    def command(self, words: str) -> str:
        count = os.environ.get("LOCAL_WORLD_SIZE", self.size)
        return f"torchrun --nproc-per-node={count} -m {words}"


class _Sum(torch.autograd.Function):
    """Σ x over all processes, whose gradient is the sum of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduce(grad.clone(memory_format=torch.contiguous_format))


def _spread(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy a vector of all numbers back into the tensors that it was made from."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _all_reduce(tensor: Tensor) -> Tensor:
    with _watched():
        dist.all_reduce(tensor)
    return tensor


@contextmanager
def _watched() -> Iterator[None]:
    """Raise an error of torch's as one that says that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        _ignore_requests_to_end()
        raise LostProcessError("Another process of this run has ended, and so has the run.") from error


def _end_on_request(*_: Any) -> None:
    """What SIGTERM does: torchrun sends it when another process is gone, maybe before torch knows."""
    _ignore_requests_to_end()
    raise LostProcessError(
        "torchrun has ended this process: another process of this run has ended, or the run was stopped."
    )


def _ignore_requests_to_end() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def here() -> Processes:
    """The processes that `join_processes` joined; this one alone without it."""
    return _Group() if dist.is_available() and dist.is_initialized() else ALONE


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the other processes that torchrun started, for a while; without torchrun there are none.

    If one fails, the first of them to know raises the reason; the others end without a word. SIGTERM,
    which torchrun then sends to the rest, raises a LostProcessError.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    store, rank, size = next(rendezvous("env://"))
    mixed = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if mixed else "gloo",
        store=store, rank=rank, world_size=size, timeout=PATIENCE,
    )  # fmt: skip
    before = signal.signal(signal.SIGTERM, _end_on_request)
    try:
        yield here()
        signal.signal(signal.SIGTERM, before)
    except BaseException as error:
        _ignore_requests_to_end()  # for good: the reason is yet to be printed
        if isinstance(error, Exception) and not _is_first(store, rank):
            raise SystemExit(1) from None
        raise
    finally:
        dist.destroy_process_group()


def _is_first(store: Any, rank: int) -> bool:
    try:
        return store.add("ciflows/failed", 1) == 1
    except RuntimeError:  # the machine with the store is gone
        return rank == 0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM to the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: held.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    for caught in held:
        signal.raise_signal(caught)
