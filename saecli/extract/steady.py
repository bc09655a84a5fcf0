"""Retrying after network failures, a bounded number of times."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from ..base.errors import one_line

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each retry
NETWORK_LIBRARIES = {"aiohttp", "httpx", "httpx2", "requests", "urllib3"}
PASSING_STATUSES = {408, 425, 429}  # HTTP statuses, beside those from 500 on

Mark = dict[str, Any]  # {"document": number, "state": the library's state before that document}


class Document(NamedTuple):
    """One text.

    Args:
        number: its number within the source.
        text: its text, which may be empty.
        mark: from where a later pass can read to reach it; None for the source's beginning.
    """

    number: int
    text: str
    mark: Mark | None


def may_pass(error: BaseException) -> bool:
    """Whether a retry may succeed: the error is, or was caused by, a lost connection, a timeout or a busy hub."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    link: BaseException | None = error
    while link is not None and not HF_HUB_OFFLINE:
        if _is_passing(link):
            return True
        # `datasets` reports files that it could not fetch as not found.
        link = link.__cause__ or link.__context__
    return False


def _is_passing(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status in PASSING_STATUSES or status >= 500
    library = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or not library.isdisjoint(NETWORK_LIBRARIES)


class Patience:
    """Counts consecutive failures, and waits after each.

    Args:
        note: called with a message before each wait.
        pauses: seconds before each retry.
    """

    def __init__(self, note: Callable[[str], None], pauses: Sequence[float] = PAUSES) -> None:
        self._note, self._pauses, self.tried = note, pauses, 0

    def waits(self, error: BaseException) -> bool:
        """Wait if the error may pass and a retry is left; returns whether to retry."""
        if not may_pass(error) or self.tried == len(self._pauses):
            return False
        pause, left = self._pauses[self.tried], len(self._pauses) - self.tried
        self._note(f"the connection failed ({one_line(error)}); trying again in {pause:g} s, "
                   f"{left} more {'time' if left == 1 else 'times'} at most")
        self.tried += 1
        time.sleep(pause)
        return True


def steadily(open_at: Callable[[int, Mark | None], Iterator[Document]], start: int, mark: Mark | None,
             failures: tuple[type[Exception], ...], patience: Patience) -> Iterator[Document]:
    """Documents of a source that may fail, reopened where it failed.

    Args:
        open_at: the documents from a number on, read from a mark at or before it.
        start: number of the first document.
        mark: the newest mark at or before it.
        failures: errors that may be worth a retry.
        patience: waits before each retry; every document resets its count.

    Raises:
        The last error, if no retry is left or it will not pass.
    """
    while True:
        try:
            with closing(open_at(start, mark)) as documents:
                for document in documents:
                    start, mark, patience.tried = document.number + 1, document.mark, 0
                    yield document
            return
        except failures as error:
            if not patience.waits(error):
                raise
