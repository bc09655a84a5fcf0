"""Several processes that run one command together, started by torchrun: torch.distributed, as far as it is needed.

In a world of one process every function here gives back what it was given. All processes must come to the same calls in
the same order. Objects go by gloo. Where a process has ended, the calls of the others raise `PeerError`.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import ConfigError, PeerError
from ..torchrun import local_rank, local_world, rank, world

Value = TypeVar("Value")

PATIENCE = timedelta(days=1)  # others wait in silence while one solves; one that has ended is noticed at once
STORE_PATIENCE = timedelta(seconds=10)
BLAME_SECONDS = 3.0  # that a process which lost another waits for it to say why
SAID = "sae-said"
_launcher: list[Any] = []  # the key-value store that torchrun keeps, once this process has joined


def join() -> None:
    """Join the processes of this command; from then on SIGTERM, which torchrun sends where one has failed, raises
    `PeerError`.

    Raises:
        ConfigError: this machine has fewer GPUs than processes.
        PeerError: the others cannot be reached.
    """
    signal.signal(signal.SIGTERM, _terminated)
    if torch.cuda.is_available():
        if local_world() > torch.cuda.device_count():
            raise ConfigError(f"there are {local_world()} processes on a machine of {torch.cuda.device_count()} GPUs: "
                              f"expected a GPU for each; lower --nproc-per-node, or hide the GPUs by "
                              f"CUDA_VISIBLE_DEVICES= to compute on the CPU")
        torch.cuda.set_device(local_rank())
    with reaching():
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        _launcher.append(store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore("sae", store), rank=rank(), world_size=world(),
                                timeout=PATIENCE)


def processes() -> int:
    """How many processes run this command together; 1 where this one has not joined any."""
    return world() if _launcher else 1


def own_rank() -> int:
    """The number of this process among them, from 0."""
    return rank() if _launcher else 0


def is_main() -> bool:
    """Whether this process is the one that prints, writes what there is one of, and solves."""
    return own_rank() == 0


def gathered(value: Value) -> list[Value]:
    """Each process' value, by rank; values can be pickled."""
    if processes() == 1:
        return [value]
    values: list[Any] = [None] * processes()
    with reaching():
        dist.all_gather_object(values, value)
    return values


def agreed(find: Callable[[], Value]) -> Value:
    """What the main process finds, on all; the others do not look."""
    if processes() == 1:
        return find()
    values = [find() if is_main() else None]
    with reaching():
        dist.broadcast_object_list(values, 0)
    return values[0]


def main_first(find: Callable[[], Value]) -> Value:
    """What each process finds, the others once the main one has: what it remembers of a check they need not make."""
    if is_main():
        value = find()
        gathered(None)
        return value
    gathered(None)
    return find()


def is_first_to_say(sentence: str, blames_another: bool) -> bool:
    """Whether no other process has said this sentence; one that `blames_another` also yields to any other sentence.

    Where all fail alike one says so, and where one fails the others, which lose it, leave the word to it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is being said is why
    if not _launcher:
        return True
    try:
        _launcher[0].set_timeout(STORE_PATIENCE)
        if blames_another:
            waited_until = time.monotonic() + BLAME_SECONDS
            while time.monotonic() < waited_until:
                if _launcher[0].check([SAID]):
                    return False
                time.sleep(0.1)
        first = _launcher[0].add(f"{SAID}-{sentence}", 1) == 1
        _launcher[0].add(SAID, 1)
        return first
    except RuntimeError:  # the launcher is gone, and with it who could know
        return True


def _terminated(number: int, frame: Any) -> None:
    raise PeerError("told to end, as torchrun does where another process failed or was stopped; run the same command "
                    "again to go on from what was saved (`sae train` with --resume)")


@contextmanager
def reaching() -> Iterator[None]:
    """Around calls of torch.distributed: that another process has ended is a `PeerError`."""
    try:
        yield
    except RuntimeError as error:  # which torch's own errors of distribution are
        raise PeerError(f"lost the others of {processes()} processes, one of which has ended; run the same command "
                        f"again to go on from what was saved (`sae train` with --resume)") from error
