"""Preparing what comes next while the last is used."""

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Runs an iterator in a thread, a little ahead of its consumer; its error is raised where it would have been.

    A context manager; leaving it early stops the thread at the next item. It does not wait for one: the iterator may
    be waiting for a network, and the thread ends with the process.

    Args:
        items: what to run.
        count: items under way at most.
    """

    def __init__(self, items: Iterator[Item], count: int = 1) -> None:
        self._items = items
        self._queue: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(count)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sae-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def __iter__(self) -> Iterator[Item]:
        while True:
            item, error = self._queue.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item

    def _run(self) -> None:
        try:
            for item in self._items:
                self._put(item, None)
                if self._stopped.is_set():
                    break
            self._put(None, None)
        except BaseException as error:  # raised again in the consumer's thread
            self._put(None, error)
        finally:
            self._items.close()

    def _put(self, item: Item | None, error: BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put((item, error), timeout=0.1)
                return
            except queue.Full:
                continue
