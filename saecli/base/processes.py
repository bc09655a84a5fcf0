"""Processes of one command, started by torchrun. All must make the same calls in the same order; when one has ended,
the calls of the others raise `PeerError`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import PeerError

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
# Others wait while rank 0 solves; one that has ended is noticed at once.
PATIENCE = timedelta(days=1)
STOPPING = (signal.SIGINT, signal.SIGTERM)
_joined = False


@dataclass(frozen=True)
class Communicator:
    """The processes of a command, seen from one of them; alone, operations return their arguments."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether it prints, writes files, and solves."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Replace a contiguous tensor by its `sum` or `min` over all processes; returns it."""
        if self.world_size > 1:
            with _peers() as dist:
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes; a new tensor unless there is one process."""
        return tensor if self.world_size == 1 else self.all_reduce(tensor.clone()) / self.world_size

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous tensor by rank 0's; returns it."""
        if self.world_size > 1:
            with _peers() as dist:
                dist.broadcast(tensor, 0)
        return tensor

    def broadcast_rows(self, rows: Tensor) -> Tensor:
        """Rank 0's rows, (n, ...), of which the others need not know the number."""
        count = self.broadcast_object(lambda: len(rows))
        if not self.is_main:
            rows = rows.new_empty(count, *rows.shape[1:])
        return self.broadcast(rows.contiguous())

    def gather(self, rows: Tensor) -> Tensor:
        """All processes' rows, (n, ...), by rank, on rank 0; the others get back their own."""
        if self.world_size == 1:
            return rows
        parts: list[Any] | None = [None] * self.world_size if self.is_main else None
        with _peers() as dist:
            dist.gather_object(rows.cpu(), parts)
        if parts is None:
            return rows
        import torch

        return torch.cat(parts).to(rows.device)

    def all_gather_object(self, value: Value) -> list[Value]:
        """Values, which are pickled, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _peers() as dist:
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, find: Callable[[], Value]) -> Value:
        """Call `find` on rank 0 only, and return its value on every process."""
        if self.world_size == 1:
            return find()
        values: list[Any] = [find() if self.is_main else None]
        with _peers() as dist:
            dist.broadcast_object_list(values, 0)
        return values[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            with _peers() as dist:
                dist.barrier()

    def main_first(self, find: Callable[[], Value]) -> Value:
        """Call `find` on every process, on rank 0 first: it caches checks that the others then need not make."""
        if self.is_main:
            value = find()
            self.barrier()
            return value
        self.barrier()
        return find()


ALONE = Communicator()


def communicator() -> Communicator:
    """Of all processes of this command; `ALONE` unless `join` was called."""
    return Communicator(rank(), world()) if _joined else ALONE


def join_processes() -> None:
    """After this SIGTERM, which torchrun sends when a process has failed, raises `PeerError`."""
    import torch

    global _joined
    signal.signal(signal.SIGTERM, _terminated)
    gpu_each = torch.cuda.is_available() and local_world() <= torch.cuda.device_count()
    if gpu_each:
        torch.cuda.set_device(local_rank())
    # Loads torch's compiler, as optimisers do: loaded after the group was made, it aborts the process at its exit.
    torch.compiler.reset()
    with _peers() as dist:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        backend = "cpu:gloo,cuda:nccl" if gpu_each else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("sae", store),
            rank=rank(),
            world_size=world(),
            timeout=PATIENCE,
        )
    _joined = True


def leave() -> None:
    """Leave the process group; not after a failure, since it waits for the others."""
    with _peers() as dist:
        dist.destroy_process_group()


@contextmanager
def signals_handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals by a handler; does nothing outside of the main thread, which alone can."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier or signal.SIG_DFL)  # None: not set by Python


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block."""
    received: list[int] = []
    with signals_handled(lambda number, frame: received.append(number), *STOPPING):
        yield
    for number in received[:1]:
        signal.raise_signal(number)


@contextmanager
def writing_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that writes stores; the block ends after it, also on a second Ctrl-C, so that none is closed while it is
    written."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="sae-write")
    try:
        yield pool
    finally:
        with signals_deferred():
            pool.shutdown()


def _terminated(number: int, frame: Any) -> None:
    raise PeerError(
        "terminated by torchrun, since another process failed or was stopped; run the same command "
        "again to go on from what was saved (`sae train` with --resume)"
    )


@contextmanager
def _peers() -> Iterator[Any]:
    import torch.distributed as dist  # a second, which help pages and commands alone need not wait

    try:
        yield dist
    except RuntimeError as error:  # the base class of torch.distributed's errors
        raise PeerError(
            f"lost the others of {world()} processes, one of which has ended; run the same command "
            f"again to go on from what was saved (`sae train` with --resume)"
        ) from error


LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # all needed to join the processes


def world() -> int:
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHED) else 1


def rank() -> int:
    return int(os.environ["RANK"]) if world() > 1 else 0


def local_world() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0)) if world() > 1 else 0
