"""Documents from a text source: the standard library's docstrings, a local file, or a Hugging Face dataset.

A source is a numbered sequence of texts. The numbers count every document, also the blank ones that are
never yielded, so that `documents(start)` continues an earlier pass exactly where it stopped.
"""

import ast
import glob
import hashlib
import inspect
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from saecli.errors import ModelError
from saecli.hub import why_unreachable

STDLIB_DOCS = "stdlib-docs"
LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
DEFAULT_CONFIGS = {"Salesforce/wikitext": "wikitext-103-raw-v1"}  # used where the user names none

_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
_DOCSTRING_MIN_CHARS = 40
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_WITHOUT_NETWORK = f"use --dataset {STDLIB_DOCS} or a local .txt, .jsonl or .parquet file instead"


@dataclass(frozen=True)
class TextSource:
    """Where documents come from.

    Args:
        dataset: `stdlib-docs`, the path of a .txt, .jsonl or .parquet file, or a Hugging Face dataset id.
        config: The dataset's configuration, for dataset ids.
        split: The dataset's split, for dataset ids.
        column: The column that holds the text; .txt files and `stdlib-docs` have none.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    column: str = "text"

    def identity(self) -> dict[str, Any]:
        """What decides the documents, as part of a request's hash.

        Returns:
            A JSON-able dictionary: for a local file its resolved name, size and SHA-256, for `stdlib-docs`
            the Python version, for a dataset id the id, configuration and split; with the column, if any.

        Raises:
            ModelError: The local file does not exist or is of an unknown kind.
        """
        if self.dataset == STDLIB_DOCS:
            return {"dataset": STDLIB_DOCS, "python": platform.python_version()}
        if not _is_local(self.dataset):
            config = self.config or DEFAULT_CONFIGS.get(self.dataset)
            return {"dataset": self.dataset, "config": config, "split": self.split, "column": self.column}
        path = _local_file(self.dataset)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        identity = {"dataset": str(path.resolve()), "bytes": path.stat().st_size, "sha256": sha256}
        return identity if path.suffix.lower() == ".txt" else {**identity, "column": self.column}

    def documents(self, start: int = 0) -> Iterator[tuple[int, str]]:
        """Yields the documents from number `start` on; blank ones are counted and left out.

        Args:
            start: The number of the first document wanted; all documents of the source count, from 0.

        Returns:
            Pairs of a document's number and its text.

        Raises:
            ModelError: The source cannot be found, reached or read as text.
        """
        for number, text in enumerate(self._texts(start), start):
            if text.strip():
                yield number, text

    def _texts(self, start: int) -> Iterator[str]:
        if self.dataset == STDLIB_DOCS:
            return islice(_stdlib_docstrings(), start, None)
        if not _is_local(self.dataset):
            return _hub_texts(self, start)
        path = _local_file(self.dataset)
        if path.suffix.lower() == ".parquet":
            return _parquet_texts(path, self.column, start)
        texts = _txt_texts(path) if path.suffix.lower() == ".txt" else _jsonl_texts(path, self.column)
        return islice(texts, start, None)


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
    if not path.is_file() or path.suffix.lower() not in LOCAL_SUFFIXES:
        kind = "a file of another kind" if path.is_file() else "a folder"
        raise ModelError(
            f"the text source {dataset} cannot be read; expected a .txt, .jsonl or .parquet file, got {kind}; "
            "convert it or name another"
        )
    return path


def _stdlib_docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts):
            for text in _docstrings(path.read_bytes()):
                if len(text) >= _DOCSTRING_MIN_CHARS and text not in seen:
                    seen.add(text)
                    yield text
    if not seen:
        raise ModelError(
            f"the Python standard library has no docstrings to read; expected .py files under {root}, got none; "
            "use a local .txt, .jsonl or .parquet file instead"
        )


def _docstrings(source: bytes) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"):  # old modules hold invalid escapes, which are no concern here
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and other files that only look like modules
            return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield inspect.cleandoc(text)


def _txt_texts(path: Path) -> Iterator[str]:
    if not _has_blank_line(path):
        yield from (line for line in _lines(path) if line.strip())
        return
    for is_text, lines in groupby(_lines(path), key=lambda line: bool(line.strip())):
        if is_text:
            yield "\n".join(lines)


def _has_blank_line(path: Path) -> bool:
    """Whether a blank line separates two texts; blank lines at either end separate nothing."""
    text_seen = blank_seen = False
    for line in _lines(path):
        if line.strip():
            if blank_seen:
                return True
            text_seen = True
        else:
            blank_seen = text_seen
    return False


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"the text file {path} cannot be read as text; expected UTF-8, got the byte "
            f"0x{error.object[error.start]:02x} which is not part of it; convert the file to UTF-8"
        ) from error


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ModelError(
                f"line {number} of {path} cannot be read; expected one JSON object a line, got {error}; "
                "correct the line"
            ) from error
        yield _text_of(row, column, f"line {number} of {path}")


def _text_of(row: Any, column: str, place: str) -> str:
    if not isinstance(row, dict):
        raise ModelError(f"{place} has no columns; expected a JSON object, got {type(row).__name__}; correct it")
    if column not in row:
        columns = ", ".join(row) or "none"
        raise ModelError(
            f"{place} has no column {column!r}; expected one of its columns, {columns}; name one of these"
        )
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        columns = ", ".join(name for name in row if isinstance(row[name], str)) or "none"
        raise ModelError(
            f"{place} holds no text in column {column!r}; expected a string, got {type(text).__name__}; "
            f"name a column that holds text ({columns} here)"
        )
    return text


def _parquet_texts(path: Path, column: str, start: int) -> Iterator[str]:
    # load_dataset takes file names for patterns, so the special characters of a real name are escaped
    request = {"path": "parquet", "data_files": glob.escape(str(path)), "split": "train"}
    rows = _dataset_rows(f"the text file {path}", start, request, advice="write it as Parquet again")
    for number, row in enumerate(rows, start):
        yield _text_of(row, column, f"row {number} of {path}")


def _hub_texts(source: TextSource, start: int) -> Iterator[str]:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    what = f"the dataset {source.dataset}"
    # told to be offline, `datasets` gives up at once, and may still find the dataset in its cache
    if not HF_HUB_OFFLINE and (reason := why_unreachable()):
        raise _unreachable(what, reason)
    config = source.config or DEFAULT_CONFIGS.get(source.dataset)
    request = {"path": source.dataset, "name": config, "split": source.split}
    rows = _dataset_rows(what, start, request, advice="check its id, configuration and split")
    for number, row in enumerate(rows, start):
        yield _text_of(row, source.column, f"row {number} of the dataset {source.dataset}")


def _dataset_rows(what: str, start: int, request: dict[str, Any], advice: str) -> Iterator[dict[str, Any]]:
    """Streams rows by `datasets.load_dataset`; `what` and `advice` begin and end the error messages."""
    import datasets  # takes seconds, and most sources do without

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs of a damaged file, it raises as well
    try:
        yield from datasets.load_dataset(**request, streaming=True).skip(start)
    except ConnectionError as error:
        raise _unreachable(what, _one_line(error)) from error
    except FileNotFoundError as error:
        raise ModelError(
            f"{what} cannot be found; expected a dataset on the Hugging Face Hub that you may read, "
            f"got: {_one_line(error)}; check the id, log in with `hf auth login`, or {_WITHOUT_NETWORK}"
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ModelError(f"{what} cannot be read; expected rows of text, got: {_one_line(error)}; {advice}") from error


def _unreachable(what: str, got: str) -> ModelError:
    return ModelError(
        f"{what} cannot be fetched; expected a network connection to the Hugging Face Hub, "
        f"got: {got}; connect, or {_WITHOUT_NETWORK}"
    )


def _one_line(error: Exception) -> str:
    """The error's message in one line, without its final stop, cut where it becomes a page."""
    message = " ".join(str(error).split()) or type(error).__name__
    return (message if len(message) <= 300 else f"{message[:300]}...").rstrip(".")
