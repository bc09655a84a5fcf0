"""Texts streamed by the `datasets` library, from the Hugging Face hub or from a Parquet file.

The library can save its position in the files, and resume there without reading or downloading what came before. Such a
mark is taken every `MARK_EVERY` rows; rows between a mark and the row wanted are read and skipped.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..base.errors import ModelError, SaeError, one_line
from ..base.network import why_unreachable
from .local_texts import text_of
from .steady import Document, Mark, Patience, may_pass, steadily

MARK_EVERY = 256
WITHOUT_NETWORK = "use --dataset stdlib-docs or a local .txt, .jsonl or .parquet file instead"
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Streamed:
    """A dataset to stream.

    Args:
        what: its name in messages.
        request: arguments of `datasets.load_dataset`.
        column: the column that holds the text.
        advice: what to do if it cannot be read.
    """

    what: str
    request: dict[str, Any]
    column: str
    advice: str

    def documents(self, start: int, mark: Mark | None, note: Callable[[str], None]) -> Iterator[Document]:
        """The documents from number `start` on, with a few retries if the network fails; ModelError if the dataset
        cannot be found, reached or read as text."""
        failures = _failures()
        try:
            yield from steadily(self._open, start, mark, failures, Patience(note))
        except SaeError:
            raise
        except failures as error:
            raise explained(self.what, error, self.advice) from error

    def _open(self, start: int, mark: Mark | None) -> Iterator[Document]:
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also raises what it logs on damaged files
        # Its own twenty retries, of up to a minute each, are silent; `steadily` reports its own.
        datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
        data = datasets.load_dataset(**self.request, streaming=True)
        number = 0
        if mark is not None:
            data.load_state_dict(mark["state"])
            number = mark["document"]
        with closing(iter(data)) as rows:  # else the library's readers print errors at interpreter exit
            for row in rows:
                if number >= start:
                    yield Document(number, text_of(row, self.column, f"row {number} of {self.what}"), mark)
                number += 1
                if number % MARK_EVERY == 0:
                    mark = {"document": number, "state": data.state_dict()}


def commit_of(dataset: str, revision: str | None, note: Callable[[str], None]) -> str | None:
    """The commit of a hub dataset's revision.

    Args:
        dataset: its id.
        revision: a branch, tag or commit; None for the newest state.
        note: called with a message before each retry.

    Returns:
        The commit; `revision` itself if the hub cannot be reached.

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
    """The exceptions that `datasets` and the hub's client raise by design."""
    import datasets  # takes seconds to import, and most sources do not need it
    from huggingface_hub.errors import HTTPError  # from whichever HTTP library the client uses

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
    """The error for a dataset when there is no network."""
    return ModelError(f"{what} cannot be fetched; expected a network connection to the Hugging Face Hub, got: {got}; "
                      f"connect, or {WITHOUT_NETWORK}")
