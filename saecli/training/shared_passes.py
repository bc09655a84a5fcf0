"""Several trainings that go through the same rows and read them once.

Each training runs in a thread of its own, one at a time: it runs until it asks for the next batch of a pass. When all
that share the pass ask for it, the pass moves on by one batch, which each of them is handed in turn. Each training
therefore does what it does alone, and at most one batch a pass is held. Who is ahead waits for the others, so that
those who make a pass of their own are in step with them again when the next epoch begins.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
END = object()  # told in place of a batch after the last


class Share(Protocol):
    """Goes through a pass over rows, alone or with others."""

    def __call__(self, kind: str, begin: Callable[[], Iterator[T]], epoch: int | None = None) -> Iterator[T]:
        """A pass over rows.

        Args:
            kind: names it; passes of one kind in one epoch have the same batches.
            begin: starts it.
            epoch: the epoch that it begins; None for a pass within the epoch begun last.

        Yields:
            Its batches, each valid until the next is asked for; nobody may write to them.
        """


def alone(kind: str, begin: Callable[[], Iterator[T]], epoch: int | None = None) -> Iterator[T]:
    """The `Share` of a training that has its rows to itself."""
    return begin()


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Args:
        result: what it returned.
        error: what it raised, if it did.
    """

    result: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class _Pass:
    """A pass that some trainings share."""

    batches: Iterator[Any]
    members: set["_Member"] = field(default_factory=set)

    def leave(self, member: "_Member") -> None:
        self.members.discard(member)
        if not self.members and hasattr(self.batches, "close"):
            self.batches.close()


@dataclass(frozen=True)
class _Begin:
    """What a training asks for that wants a pass to begin; keys are ordered by epoch first."""

    key: tuple[int, str]
    begin: Callable[[], Iterator[Any]]


class _Member:
    """One training: its thread, and what it asks for while it waits."""

    def __init__(self, action: Callable[[Share], Any]) -> None:
        self.asks: _Begin | _Pass | Outcome | None = None
        self._action = action
        self._epoch = -1
        self._told: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._asked: SimpleQueue[_Begin | _Pass | Outcome] = SimpleQueue()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Let it run until it asks for something."""
        self._thread.start()
        self.asks = self._asked.get()

    def tell(self, answer: Callable[[], Any]) -> None:
        """Answer what it asks, by a function that returns or raises it, and let it run until it asks again."""
        self._told.put(answer)
        self.asks = self._asked.get()

    def _ask(self, what: _Begin | _Pass) -> Any:
        self._asked.put(what)
        return self._told.get()()

    def _run(self) -> None:
        try:
            outcome = Outcome(self._action(self._share))
        except BaseException as error:  # none is lost: `in_step` hands it on
            outcome = Outcome(error=error)
        self._asked.put(outcome)

    def _share(self, kind: str, begin: Callable[[], Iterator[T]], epoch: int | None = None) -> Iterator[T]:
        if epoch is not None:
            self._epoch = epoch
        shared = self._ask(_Begin((self._epoch, kind), begin))
        try:
            while (batch := self._ask(shared)) is not END:
                yield batch
        finally:
            shared.leave(self)


def in_step(actions: Sequence[Callable[[Share], Any]]) -> list[Outcome]:
    """Run several trainings that share their passes.

    Args:
        actions: the trainings; each goes through its passes by the share that it is handed.

    Returns:
        How each ended. One that fails leaves the others to go on. An interrupt reaches all of them, as they ask for a
        batch.
    """
    members = [_Member(action) for action in actions]
    with _noticing_interrupts() as interrupted:
        for member in members:
            member.start()
        while waiting := [member for member in members if not isinstance(member.asks, Outcome)]:
            if interrupted:
                waiting[0].tell(_interrupt)
            else:
                _move_on(waiting)
    return [member.asks for member in members]


def _move_on(waiting: list[_Member]) -> None:
    """Move a pass on for which all that share it wait; where there is none, begin the one of the earliest epoch."""
    for member in waiting:
        shared = member.asks
        if isinstance(shared, _Pass) and all(other.asks is shared or isinstance(other.asks, Outcome)
                                             for other in shared.members):
            answer = _answer(partial(next, shared.batches, END))
            for other in [other for other in waiting if other.asks is shared]:
                other.tell(answer)
            return
    begun = [member for member in waiting if isinstance(member.asks, _Begin)]
    key = min(member.asks.key for member in begun)
    members = [member for member in begun if member.asks.key == key]
    answer = _answer(lambda: _Pass(members[0].asks.begin(), set(members)))
    for member in members:
        member.tell(answer)


def _answer(work: Callable[[], Any]) -> Callable[[], Any]:
    """A function that returns what the work, done now and once, returned, or raises what it raised."""
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except Exception as error:  # raised in each of those that asked
        done.set_exception(error)
    return done.result


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def _noticing_interrupts() -> Iterator[list[int]]:
    """A list that an interrupt fills; where another thread than the main one trains, interrupts are not its matter."""
    interrupted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
