"""Texts streamed by the `datasets` library, from the Hugging Face hub or from a Parquet file.

The library can say where in its files it stands, and go on from there without reading, or downloading, what came
before. Such a mark is taken every `MARK_EVERY` rows; from a mark to the row wanted, rows are read and skipped.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError, SaeError, one_line
from ..network import why_unreachable
from .local import text_of
from .steady import Document, Mark, Patience, may_pass, steadily

MARK_EVERY = 256
WITHOUT_NETWORK = "use --dataset stdlib-docs or a local .txt, .jsonl or .parquet file instead"
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Streamed:
    """A dataset to stream.

    Args:
        what: what it is called in messages.
        request: arguments of `datasets.load_dataset`.
        column: the column that holds the text.
        advice: what to do where it cannot be read.
    """

    what: str
    request: dict[str, Any]
    column: str
    advice: str

    def documents(self, start: int, mark: Mark | None, note: Callable[[str], None]) -> Iterator[Document]:
        """The documents from number `start` on; where the network fails, tried again a few times. Raises ModelError
        where the dataset cannot be found, reached or read as text."""
        failures = _failures()
        try:
            yield from steadily(self._open, start, mark, failures, Patience(note))
        except SaeError:
            raise
        except failures as error:
            raise explained(self.what, error, self.advice) from error

    def _open(self, start: int, mark: Mark | None) -> Iterator[Document]:
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs of a damaged file, it raises as well
        # Its own tries are silent, twenty of up to a minute each; `steadily` says what it waits for.
        datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
        data = datasets.load_dataset(**self.request, streaming=True)
        number = 0
        if mark is not None:
            data.load_state_dict(mark["state"])
            number = mark["document"]
        with closing(iter(data)) as rows:  # left to the interpreter's end, the library's readers complain there
            for row in rows:
                if number >= start:
                    yield Document(number, text_of(row, self.column, f"row {number} of {self.what}"), mark)
                number += 1
                if number % MARK_EVERY == 0:
                    mark = {"document": number, "state": data.state_dict()}


def commit_of(dataset: str, revision: str | None, note: Callable[[str], None]) -> str | None:
    """The commit of a hub dataset that a branch, a tag or, where None is given, its newest state stands for.

    Args:
        dataset: its id.
        revision: a branch, tag or commit; None for the newest state.
        note: told where the network fails and another try is made.

    Returns:
        The commit; what was given where the hub cannot be reached.

    Raises:
        ModelError: the hub has no such dataset or revision, or fails.
    """
    if (revision is not None and COMMIT.fullmatch(revision)) or why_unreachable():
        return revision
    from huggingface_hub import HfApi

    failures, patience = _failures(), Patience(note)
    while True:
        try:
            return HfApi().dataset_info(dataset, revision=revision, timeout=30).sha
        except failures as error:
            if not patience.waits(error):
                raise explained(f"the dataset {dataset}", error, "check its id and --dataset-revision") from error


def _failures() -> tuple[type[Exception], ...]:
    """What `datasets` and the hub's client raise by design."""
    import datasets  # takes seconds, and most sources do without
    from huggingface_hub.errors import HTTPError  # of whichever library the client stands on

    return (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, HTTPError)


def explained(what: str, error: Exception, advice: str) -> ModelError:
    """Why a dataset could not be read, and what to do."""
    from huggingface_hub.errors import RepositoryNotFoundError

    if may_pass(error) or isinstance(error, ConnectionError):
        return unreachable(what, one_line(error))
    if isinstance(error, FileNotFoundError | RepositoryNotFoundError):
        return ModelError(f"{what} cannot be found; expected a dataset on the Hugging Face Hub that you may read, "
                          f"got: {one_line(error)}; check the id, log in with `hf auth login`, or {WITHOUT_NETWORK}")
    return ModelError(f"{what} cannot be read; expected rows of text, got: {one_line(error)}; {advice}")


def unreachable(what: str, got: str) -> ModelError:
    """What to say of a dataset behind a network that is not there."""
    return ModelError(f"{what} cannot be fetched; expected a network connection to the Hugging Face Hub, got: {got}; "
                      f"connect, or {WITHOUT_NETWORK}")
