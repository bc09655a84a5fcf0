"""Documents from Python's docstrings, .txt, .jsonl and .parquet files, and datasets of the Hugging Face hub.

Documents are numbered, blank ones too, so that a later pass resumes where an earlier one stopped. Only hub datasets are
read by `datasets`, which takes over a second to open the smallest file.
"""

import ast
import inspect
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..base.errors import ModelError, one_line
from ..base.files import expanded, file_sha256
from ..base.machine import why_unreachable

STDLIB_DOCS = "stdlib-docs"
LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
CHAT_COLUMNS = ("messages", "conversations")
DEFAULT_CONFIGS = {"Salesforce/wikitext": "wikitext-103-raw-v1"}  # if the user names none
MARK_EVERY = 256  # rows of a hub dataset between two marks
PARQUET_ROWS = 256  # in memory at a time: a row may be a book
WITHOUT_NETWORK = "use --dataset stdlib-docs or a local .txt, .jsonl or .parquet file instead"
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
DOCSTRING_MIN_CHARS = 40
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Text = Any  # a string, or a `tokenizer.Conversation`
Texts = Generator[Text, None, None]
Read = Callable[[Any, str, str], Text]  # from a row, a column, and words for the row in errors
Mark = dict[str, Any]  # {"document": number, "state": the state of `datasets` before that document}


class Document(NamedTuple):
    """A text, its number, the mark from which to read it again, None for the beginning, and its source's number."""

    number: int
    text: Text
    mark: Mark | None
    source: int = 0


def value_of(row: Any, column: str, where: str) -> Any:
    """The value in a column of a row; `where` names the row in errors."""
    if not isinstance(row, dict):
        raise ModelError(
            f"{where} has no columns; expected a JSON object, got {type(row).__name__}; correct it"
        )
    if column not in row:
        raise ModelError(
            f"{where} has no column {column!r}; expected one of its columns, {', '.join(row) or 'none'}; "
            "name one with --text-column"
        )
    return row[column]


def text_of(row: Any, column: str, where: str) -> str:
    text = value_of(row, column, where)
    if text is not None and not isinstance(text, str):
        columns = ", ".join(name for name in row if isinstance(row[name], str)) or "none"
        raise ModelError(
            f"{where} holds no text in column {column!r}; expected a string, got {type(text).__name__}; "
            f"name a column that holds text with --text-column ({columns} here)"
        )
    return text or ""


@dataclass(frozen=True)
class TextSource:
    """Where documents come from; config, split and revision are those of a hub dataset."""

    dataset: str  # `stdlib-docs`, the path of a .txt, .jsonl or .parquet file, or a Hugging Face dataset id
    config: str | None = None
    split: str = "train"
    column: str = "text"  # that holds the text
    revision: str | None = None  # commit, branch or tag; None for the newest state
    chat: bool = False  # whether the column holds messages, or until `recognised` may
    read: Read = text_of  # a row's text
    asked: str | None = None  # the column before `recognised`
    unread: str | None = None  # why `recognised` could not read it

    @property
    def name(self) -> str:
        """Dataset, configuration, split and column, these where they are not the default."""
        split = "" if self.split == "train" else self.split
        column = "" if self.column == "text" else self.column
        return " ".join(filter(None, [self.dataset, self.config, split, column]))

    @property
    def on_hub(self) -> bool:
        return self.dataset != STDLIB_DOCS and not _is_local(self.dataset)

    def pinned(self) -> Self:
        """The source with its revision resolved to a commit: the hub's, or without a network the one in the client's
        cache, if any."""
        if not self.on_hub:
            return self
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionResolutionError

        try:
            commit = HfApi().resolve_revision(
                self.dataset,
                repo_type="dataset",
                revision=self.revision,
                local_files_only=why_unreachable() is not None,
            )
            return replace(self, revision=commit.resolved)
        except RevisionResolutionError:
            return self
        except _hub_errors() as error:
            raise self._unread(one_line(error)) from error

    def recognised(self) -> Self:
        """The source with the column of its messages, if its first row has one; where the network does not let it be
        read, as it is, with the reason."""
        if not self.chat:
            return self
        try:
            row = next(replace(self, read=lambda row, *_: row).documents()).text
        except ModelError as error:
            if not self.on_hub or why_unreachable() is None:
                raise
            return replace(self, asked=self.column, unread=str(error))
        names = (self.column, *CHAT_COLUMNS) if self.column == "text" else (self.column,)
        values = row if isinstance(row, dict) else {}  # a line may hold something else
        column = next((name for name in names if name in values), self.column)
        messages = values.get(column)
        is_chat = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
        return replace(
            self, asked=self.column, column=column if is_chat else self.column, chat=is_chat
        )

    def identity(self, asked: bool = False) -> dict[str, Any]:
        """What determines the documents; with `asked` as known before `recognised`, the same without a network."""
        column = (self.asked if asked else None) or self.column
        if self.dataset == STDLIB_DOCS:
            return {"dataset": STDLIB_DOCS, "python": platform.python_version()}
        if self.on_hub:
            return {
                "dataset": self.dataset,
                "config": self._config,
                "split": self.split,
                "column": column,
                "dataset_revision": self.revision,
            }
        path = _local_file(self.dataset)
        identity = {
            "dataset": str(path.resolve()),
            "bytes": path.stat().st_size,
            "sha256": self._sha256,
        }
        return identity if path.suffix.lower() == ".txt" else {**identity, "column": column}

    @cached_property
    def _sha256(self) -> str:
        return file_sha256(_local_file(self.dataset))

    def documents(self, start: int = 0, mark: Mark | None = None) -> Iterator[Document]:
        """The documents from number `start` on, including blank ones, read from a mark at or before it."""
        is_empty = start == 0
        for document in self._documents(start, mark):
            is_empty = False
            yield document
        if is_empty:
            raise ModelError(f"there is no text in {self.dataset}; name another file or dataset")

    def _documents(self, start: int, mark: Mark | None) -> Iterator[Document]:
        if self.on_hub:
            yield from self._on_hub(start, mark)
            return
        with closing(self._not_on_hub()) as texts:
            for number, text in enumerate(islice(texts, start, None), start):
                yield Document(number, text, None)

    def _not_on_hub(self) -> Texts:
        if self.dataset == STDLIB_DOCS:
            return stdlib_docstrings()
        path = _local_file(self.dataset)
        kind = path.suffix.lower()
        if kind == ".txt":
            return txt_texts(path)
        if kind == ".jsonl":
            return jsonl_texts(path, self.column, self.read)
        return parquet_texts(path, self.column, self.read)

    def _on_hub(self, start: int, mark: Mark | None) -> Iterator[Document]:
        """Nothing before the mark is read or downloaded."""
        from huggingface_hub.constants import HF_HUB_OFFLINE

        # Without a network `datasets` fails only after minutes. With HF_HUB_OFFLINE set it may find its cache.
        if not HF_HUB_OFFLINE and (reason := why_unreachable()):
            raise self._unread(reason)
        import datasets

        try:
            builder = datasets.load_dataset_builder(
                self.dataset, self._config, revision=self.revision
            )
            # Without a network the library takes the newest commit that it has prepared.
            if self.revision and HF_HUB_OFFLINE and Path(builder.cache_dir).name != self.revision:
                raise self._unread(f"another commit than {self.revision} in the cache")
            data = builder.as_streaming_dataset(split=self.split)
            number = 0
            if mark is not None:
                data.load_state_dict(mark["state"])
                number = mark["document"]
            # Closed, else the library's readers print errors at interpreter exit.
            with closing(iter(data)) as rows:
                for row in rows:
                    if number >= start:
                        where = f"row {number} of the dataset {self.dataset}"
                        yield Document(number, self.read(row, self.column, where), mark)
                    number += 1
                    if number % MARK_EVERY == 0:
                        mark = {"document": number, "state": data.state_dict()}
        except ModelError:
            raise
        except _hub_errors() as error:
            raise self._unread(one_line(error)) from error

    @property
    def _config(self) -> str | None:
        return self.config or DEFAULT_CONFIGS.get(self.dataset)

    def _unread(self, reason: str) -> ModelError:
        return ModelError(
            f"the dataset {self.dataset} cannot be read: {reason}; check its id, configuration, split and "
            f"revision, the network, and `hf auth login`, or {WITHOUT_NETWORK}"
        )


@dataclass(frozen=True)
class Mixture:
    """One source, or several whose documents are interleaved: each comes from the source with the fewest rows over its
    share, the first of equals. When a source ends, the others go on in their proportions."""

    sources: tuple[TextSource, ...]
    names: tuple[str, ...] = ()  # of several
    shares: tuple[float, ...] = ()  # of the rows; they sum to 1
    rows: Callable[[Document], int] | None = None  # of a document; None counts documents

    def pinned(self) -> Self:
        return replace(self, sources=tuple(source.pinned().recognised() for source in self.sources))

    def demand_read(self) -> None:
        """Raise a ModelError if the network did not let a source be read."""
        reasons = [source.unread for source in self.sources if source.unread]
        if reasons:
            raise ModelError(reasons[0])

    @property
    def chat(self) -> bool:
        return any(source.chat for source in self.sources)

    def identity(self, asked: bool = False) -> dict[str, Any]:
        parts = [source.identity(asked) for source in self.sources]
        if not self.names:
            return parts[0]
        mixture = [{"share": share, **part} for share, part in zip(self.shares, parts, strict=True)]
        return {"dataset": " + ".join(part["dataset"] for part in parts), "mixture": mixture}

    def documents(
        self, start: int = 0, mark: Mark | None = None, note: Callable[[str], None] = lambda _: None
    ) -> Iterator[Document]:
        """A mixture's marks have the number and mark of each source's next document, and the rows of those before.
        `note` tells of a source that ends before others."""
        if not self.names:
            yield from self.sources[0].documents(start, mark)
            return
        number, begun = (
            (mark["document"], mark["sources"]) if mark else (0, [(0, None, 0)] * len(self.sources))
        )
        following, marks, counts = map(list, zip(*begun, strict=True))
        waiting = {
            index: source.documents(following[index], marks[index])
            for index, source in enumerate(self.sources)
        }
        while waiting:
            index = min(waiting, key=lambda source: counts[source] / self.shares[source])
            if (document := next(waiting[index], None)) is None:
                del waiting[index]
                if waiting:
                    note(f"{self.names[index]} ends after {counts[index]:,} rows; others go on")
                continue
            marks[index] = document.mark
            before = {"document": number, "sources": [*zip(following, marks, counts, strict=True)]}
            following[index] = document.number + 1
            counts[index] += self.rows(document) if self.rows else 1
            if number >= start:
                yield Document(number, document.text, before, index)
            number += 1


def _hub_errors() -> tuple[type[Exception], ...]:
    """The exceptions that `datasets` and the hub's client raise by design."""
    import datasets
    from huggingface_hub.errors import HTTPError

    return (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, HTTPError)


def _is_local(dataset: str) -> bool:
    path = expanded(dataset)
    return (
        path.suffix.lower() in LOCAL_SUFFIXES
        or path.exists()
        or path.is_absolute()
        or dataset.startswith(".")
    )


def _local_file(dataset: str) -> Path:
    path = expanded(dataset)
    if not path.exists():
        raise ModelError(
            f"the text file {dataset} does not exist; expected a .txt, .jsonl or .parquet file, a Hugging "
            f"Face dataset id, or {STDLIB_DOCS}; check the name"
        )
    if path.suffix.lower() not in LOCAL_SUFFIXES:
        raise ModelError(
            f"the text source {dataset} cannot be read: expected a .txt, .jsonl or .parquet file, got "
            "one of another kind; convert it or name another"
        )
    return path


def stdlib_docstrings() -> Texts:
    """The distinct docstrings of Python's standard library, in the order of its files."""
    seen: set[str] = set()
    for path in _stdlib_files(sysconfig.get_path("stdlib")):
        for text in _docstrings(path.read_bytes()):
            if len(text) >= DOCSTRING_MIN_CHARS and text not in seen:
                seen.add(text)
                yield text


def _stdlib_files(root: str) -> list[Path]:
    paths: list[Path] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in STDLIB_SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths)


def _docstrings(source: bytes) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"):  # old modules have invalid escapes
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and other files that only look like modules
            return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield inspect.cleandoc(text)


def txt_texts(path: Path) -> Texts:
    """The paragraphs of a file, or its lines if no blank lines separate paragraphs."""
    blocks = (is_text for is_text, _ in groupby(_lines(path), key=lambda line: bool(line.strip())))
    if sum(islice(filter(None, blocks), 2)) < 2:  # blank lines at either end separate nothing
        yield from (line for line in _lines(path) if line.strip())
        return
    for is_text, lines in groupby(_lines(path), key=lambda line: bool(line.strip())):
        if is_text:
            yield "\n".join(lines)


def _lines(path: Path, errors: str = "strict") -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", errors=errors) as file:
            for line in file:
                yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"the text file {path} is not UTF-8: it has the byte 0x{error.object[error.start]:02x}; "
            "convert the file to UTF-8"
        ) from error


def jsonl_texts(path: Path, column: str, read: Read) -> Texts:
    """One column of a file with one JSON object per line."""
    for number, line in enumerate(_lines(path, errors="surrogateescape"), 1):
        if line.strip():
            yield _text_in(line, column, read, f"line {number} of {path}")


def _text_in(line: str, column: str, read: Read, where: str) -> Text:
    try:
        text = read(json.loads(line), column, where)
        str(text).encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{where} holds bytes that are not UTF-8, or half of a surrogate pair; correct the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{where} cannot be read; expected one JSON object per line, got {one_line(error)}; "
            "correct the line"
        ) from error
    return text


def parquet_texts(path: Path, column: str, read: Read) -> Texts:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            is_there = column in file.schema_arrow.names
            # Else the first row is refused, or shows the column of messages.
            size, columns = (PARQUET_ROWS, [column]) if is_there else (1, None)
            batches = file.iter_batches(size, columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows):
                yield read(row, column, f"row {number} of {path}")
    except ModelError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are of both kinds
        raise ModelError(
            f"the text file {path} cannot be read: {one_line(error)}; write it as Parquet again"
        ) from error
