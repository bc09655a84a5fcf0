"""Where documents come from.

A source is a numbered sequence of texts. Every document has a number, including blank ones, so that a later pass
resumes exactly where an earlier one stopped.
"""

import glob
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from ..base.errors import ModelError
from ..base.files import NotAFile, file_sha256, regular
from ..base.network import why_unreachable
from .local_texts import jsonl_texts, stdlib_docstrings, txt_texts
from .steady import Document, Mark
from .streamed_texts import Streamed, commit_of, unreachable

STDLIB_DOCS = "stdlib-docs"
LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
DEFAULT_CONFIGS = {"Salesforce/wikitext": "wikitext-103-raw-v1"}  # if the user names none


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Args:
        dataset: `stdlib-docs`, the path of a .txt, .jsonl or .parquet file, or a Hugging Face dataset id.
        config: the dataset's configuration, for dataset ids.
        split: the dataset's split, for dataset ids.
        column: the column that holds the text; .txt files and `stdlib-docs` have none.
        revision: the dataset's commit, branch or tag, for dataset ids; None for its newest state.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None

    def pinned(self, note: Callable[[str], None]) -> Self:
        """The source with its revision resolved to a commit, if the hub can be reached; `note` is called before each
        retry. ModelError if the hub has no such dataset or revision."""
        if self.dataset == STDLIB_DOCS or _is_local(self.dataset):
            return self
        return replace(self, revision=commit_of(self.dataset, self.revision, note))

    def identity(self) -> dict[str, Any]:
        """The part of a request's hash that determines the documents.

        Returns:
            A JSON-able dictionary: for a local file its resolved name, size and SHA-256, for `stdlib-docs`
            the Python version, for a dataset id the id, configuration, split and revision; with the column, if any.

        Raises:
            ModelError: the local file does not exist or is of an unknown kind.
        """
        if self.dataset == STDLIB_DOCS:
            return {"dataset": STDLIB_DOCS, "python": platform.python_version()}
        if not _is_local(self.dataset):
            return {"dataset": self.dataset, "config": self._config, "split": self.split, "column": self.column,
                    "dataset_revision": self.revision}
        path = _local_file(self.dataset)
        identity = {"dataset": str(path.resolve()), "bytes": path.stat().st_size, "sha256": file_sha256(path)}
        return identity if path.suffix.lower() == ".txt" else {**identity, "column": self.column}

    def documents(self, start: int = 0, mark: Mark | None = None,
                  note: Callable[[str], None] = lambda _: None) -> Iterator[Document]:
        """The documents from number `start` on, including blank ones.

        Args:
            start: number of the first document, from 0.
            mark: the mark of an earlier pass's document at or before `start`, from which to read.
            note: called with a message before each retry of the network, and on skipped lines of a .jsonl file.

        Raises:
            ModelError: the source cannot be found, reached or read as text.
        """
        found = self._documents(start, mark, note)
        if start == 0:
            if (first := next(found, None)) is None:
                raise ModelError(f"there is no text in {self.dataset}; expected at least one, got none; name another "
                                 "file or dataset")
            yield first
        yield from found

    def _documents(self, start: int, mark: Mark | None, note: Callable[[str], None]) -> Iterator[Document]:
        if self.dataset == STDLIB_DOCS:
            texts = stdlib_docstrings()
        elif not _is_local(self.dataset):
            return self._on_hub().documents(start, mark, note)
        else:
            path = _local_file(self.dataset)
            if path.suffix.lower() == ".parquet":
                return _parquet(path, self.column).documents(start, mark, note) if _has_rows(path) else iter(())
            texts = txt_texts(path) if path.suffix.lower() == ".txt" else jsonl_texts(path, self.column, note)
        return (Document(number, text, None) for number, text in enumerate(islice(texts, start, None), start))

    @property
    def _config(self) -> str | None:
        return self.config or DEFAULT_CONFIGS.get(self.dataset)

    def _on_hub(self) -> Streamed:
        what = f"the dataset {self.dataset}"
        # Without a network `datasets` fails too, but only after half a minute. With HF_HUB_OFFLINE set it does not try,
        # and may still find the dataset in its cache.
        from huggingface_hub.constants import HF_HUB_OFFLINE

        if not HF_HUB_OFFLINE and (reason := why_unreachable()):
            raise unreachable(what, reason)
        request = {"path": self.dataset, "name": self._config, "split": self.split, "revision": self.revision}
        return Streamed(what, request, self.column, "check its id, configuration and split")


def _has_rows(path: Path) -> bool:
    """Whether a Parquet file has rows, at whose lack the library fails; true of one that cannot be read, which it then
    says."""
    from pyarrow.parquet import read_metadata

    try:
        return read_metadata(path).num_rows > 0
    except (OSError, ValueError):
        return True


def _parquet(path: Path, column: str) -> Streamed:
    # load_dataset treats file names as glob patterns.
    request = {"path": "parquet", "data_files": glob.escape(str(path)), "split": "train"}
    return Streamed(f"the text file {path}", request, column, "write it as Parquet again")


def _is_local(dataset: str) -> bool:
    path = Path(dataset).expanduser()
    return path.suffix.lower() in LOCAL_SUFFIXES or path.exists() or path.is_absolute() or dataset.startswith(".")


def _local_file(dataset: str) -> Path:
    path = Path(dataset).expanduser()
    if not path.exists():
        raise ModelError(
            f"the text file {dataset} does not exist; expected a .txt, .jsonl or .parquet file, a Hugging Face "
            f"dataset id, or {STDLIB_DOCS}; check the name"
        )
    try:
        if regular(path).suffix.lower() not in LOCAL_SUFFIXES:
            raise NotAFile("expected a .txt, .jsonl or .parquet file, got a file of another kind")
    except OSError as error:
        raise ModelError(f"the text source {dataset} cannot be read: {error}; convert it or name another") from error
    return path
