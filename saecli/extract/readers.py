"""Rows of texts: of files by their kind, of Python's docstrings, and of datasets of the Hugging Face hub.

A kind of file is a function, which yields each row, or the error in reading it, after its place, and a line in
`TEXT_FORMATS`. A kind of source is a `Reader`, which `reader_of` chooses. `datasets` reads the hub alone: of files it
ends at the first bad line, takes "NA" in CSV for no text, and over a second to open the smallest.
"""

import ast
import csv
import inspect
import io
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterator, Set
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from ..base.errors import ModelError, one_line
from ..base.files import expanded, file_sha256
from ..base.machine import why_unreachable

STDLIB_DOCS = "stdlib-docs"
DEFAULT_CONFIGS = {"Salesforce/wikitext": "wikitext-103-raw-v1"}  # if the user names none
MARK_EVERY = 256  # rows of a hub dataset between two marks
PARQUET_ROWS = 256  # in memory at a time: a row may be a book
HEAD = 4096  # bytes or characters that show what a file is
LONGEST_FIELD = 1 << 24  # characters: a quote that is never closed takes in the rest of a file
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
DOCSTRING_MIN_CHARS = 40
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Options of `sae extract` that do something with rows that have columns, and with a dataset of the hub.
COLUMN_OPTIONS = frozenset({"text_column", "chat_template", "control_tokens"})
HUB_OPTIONS = frozenset({"dataset_config", "dataset_split", "dataset_revision"})

Placed = Generator[tuple[str, Any], None, None]  # rows after their places; see `Row`
Mark = dict[str, Any]  # {"document": number, "state": the state of `datasets` before that row}


class Row(NamedTuple):
    """A row by its columns, a text without them, or an error."""

    number: int
    where: str  # its place, in errors
    value: Any
    mark: Mark | None = None  # from which to read it again; None for the beginning


class Reader(Protocol):
    @property
    def options(self) -> Set[str]:
        """The `COLUMN_OPTIONS` and `HUB_OPTIONS` that it takes."""
        return frozenset()

    def identity(self, column: str) -> dict[str, Any]:
        """What determines the texts in a column."""

    def commit(self) -> str | None:
        """The commit at which it reads, if any."""
        return None

    def rows(self, column: str, mark: Mark | None) -> Iterator[Row]:
        """The rows, from a mark on if it sets marks."""


class UnreachableError(ModelError):
    """A dataset cannot be read without the network."""


def reader_of(
    dataset: str, config: str | None = None, split: str = "train", revision: str | None = None
) -> Reader:
    path = expanded(dataset)
    if dataset == STDLIB_DOCS:
        return StdlibDocs()
    if _kind(path) in TEXT_FORMATS or path.exists() or path.is_absolute() or dataset[:1] == ".":
        return TextFile(dataset)
    return HubDataset(dataset, config or DEFAULT_CONFIGS.get(dataset), split, revision)


class StdlibDocs(Reader):
    def identity(self, column: str) -> dict[str, Any]:
        return {"dataset": STDLIB_DOCS, "python": platform.python_version()}

    def rows(self, column: str, mark: Mark | None) -> Iterator[Row]:
        for number, text in enumerate(stdlib_docstrings()):
            yield Row(number, f"docstring {number} of {STDLIB_DOCS}", text)


def stdlib_docstrings() -> Iterator[str]:
    """The distinct docstrings of Python's standard library, in order of its files."""
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


@dataclass(frozen=True)
class TextFile(Reader):
    dataset: str

    @property
    def options(self) -> Set[str]:
        known = TEXT_FORMATS.get(_kind(Path(self.dataset)))
        return frozenset() if known is not None and not known.has_columns else COLUMN_OPTIONS

    @cached_property
    def _path(self) -> Path:
        path = expanded(self.dataset)
        if _kind(path) not in TEXT_FORMATS or not path.is_file():
            problem = "is a folder or pipe" if path.exists() else "does not exist"
            raise ModelError(
                f"the text file {self.dataset} {'is of another kind' if path.is_file() else problem}; expected a "
                f"{TEXT_FILES}, a Hugging Face dataset id, or {STDLIB_DOCS}; check the name, or convert it"
            )
        return path

    @cached_property
    def _sha256(self) -> str:
        return file_sha256(self._path)

    def identity(self, column: str) -> dict[str, Any]:
        columns = {"column": column} if self.options else {}
        size = self._path.stat().st_size
        content = {"bytes": size, "sha256": self._sha256}
        return {"dataset": str(self._path.resolve()), **content, **columns}

    def rows(self, column: str, mark: Mark | None) -> Iterator[Row]:
        path = self._path
        try:
            with closing(TEXT_FORMATS[_kind(path)].rows(path, column)) as rows:
                for number, (where, row) in enumerate(rows):
                    yield Row(number, where, row)
        except ModelError:
            raise
        except (OSError, ValueError, RecursionError) as error:  # PyArrow's are of the first two
            raise ModelError(
                f"the text file {path} cannot be read: {one_line(error)}; expected a whole {_kind(path)} "
                "file; write it again, or name another"
            ) from error


def _kind(path: Path) -> str:
    """A file name's suffix, before that of a compression."""
    name = Path(path.name.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSIONS else name).suffix


def _opened(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    """A file as text. Bytes that are not UTF-8 become surrogates, so that only their line is bad."""
    with _uncompressed(path) as file:
        head = file.read(HEAD)
    if b"\0" in head or head.startswith((b"\xff\xfe", b"\xfe\xff")):  # as UTF-16 begins
        raise ModelError(
            f"the text file {path} is no text in UTF-8: expected that, got UTF-16 or binary data; convert the "
            "file to UTF-8, or name another"
        )
    errors = "surrogateescape"
    return io.TextIOWrapper(_uncompressed(path), "utf-8-sig", errors=errors, newline=newline)


def _uncompressed(path: Path) -> Any:
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    import pyarrow  # which reads several frames or members, and refuses a truncated file

    return pyarrow.input_stream(str(path), compression=compression)


def paragraphs(path: Path, column: str) -> Placed:
    """The paragraphs of a file, or its lines if no blank lines separate any."""
    with _opened(path) as file:
        blocks = (is_text for is_text, _ in groupby(file, key=lambda line: bool(line.strip())))
        # Blank lines at either end separate nothing.
        one_each_line = sum(islice(filter(None, blocks), 2)) < 2
    with _opened(path) as file:
        numbered = enumerate((line.rstrip("\n") for line in file), 1)
        for is_text, block in groupby(numbered, key=lambda line: bool(line[1].strip())):
            if is_text and one_each_line:
                yield from ((f"line {number} of {path}", line) for number, line in block)
            elif is_text:
                numbers, lines = zip(*block, strict=True)
                yield f"line {numbers[0]} of {path}", "\n".join(lines)


def json_lines(path: Path, column: str) -> Placed:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    row = ValueError(
                        "expected one JSON object per line, or in .json a list of them, got "
                        + one_line(error)
                    )
                yield f"line {number} of {path}", row


def json_entries(path: Path, column: str) -> Placed:
    """The entries of a list, read whole, else of each line a JSON object."""
    with _opened(path) as file:
        is_list = file.read(HEAD).lstrip().startswith("[")
    if not is_list:
        yield from json_lines(path, column)
        return
    with _opened(path) as file:
        entries = json.load(file)
    for number, entry in enumerate(entries, 1):
        yield f"entry {number} of {path}", entry


def delimited(path: Path, column: str, delimiter: str) -> Placed:
    """Rows below a line of column names; a quoted cell may hold several lines."""
    csv.field_size_limit(LONGEST_FIELD)
    with _opened(path, newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, restkey="", strict=True)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield f"line {rows.line_num + 1} of {path}", error
            else:
                yield f"line {rows.line_num} of {path}", row


def parquet_rows(path: Path, column: str) -> Placed:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        wanted = [part if part in names else part.split(".")[0] for part in parts_of(column, names)]
        # Else the first row is refused, or shows the column of messages.
        size, columns = (PARQUET_ROWS, wanted) if {*wanted} <= {*names} else (1, None)
        batches = file.iter_batches(size, columns=columns)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows):
            yield f"row {number} of {path}", row


def parts_of(column: str, names: Any) -> list[str]:
    return [column] if column in names else column.split("+")


class TextFormat(NamedTuple):
    rows: Callable[[Path, str], Placed]
    has_columns: bool = True


# By the end of the lower-case file name, before that of a compression.
TEXT_FORMATS = {
    ".txt": TextFormat(paragraphs, has_columns=False),
    ".md": TextFormat(paragraphs, has_columns=False),
    ".jsonl": TextFormat(json_lines),
    ".ndjson": TextFormat(json_lines),
    ".json": TextFormat(json_entries),
    ".csv": TextFormat(partial(delimited, delimiter=",")),
    ".tsv": TextFormat(partial(delimited, delimiter="\t")),
    ".parquet": TextFormat(parquet_rows),
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
TEXT_FILES = f"{', '.join(TEXT_FORMATS)} file, also with {' or '.join(COMPRESSIONS)}"
WITHOUT_NETWORK = f"use --dataset {STDLIB_DOCS} or a local {TEXT_FILES}, instead"


@dataclass(frozen=True)
class HubDataset:
    options: ClassVar[Set[str]] = COLUMN_OPTIONS | HUB_OPTIONS

    dataset: str
    config: str | None
    split: str
    revision: str | None

    def identity(self, column: str) -> dict[str, Any]:
        part = {"config": self.config, "split": self.split, "dataset_revision": self.revision}
        return {"dataset": self.dataset, **part, "column": column}

    def commit(self) -> str | None:
        """The hub's, or without a network that in the client's cache."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionResolutionError

        try:
            offline = why_unreachable() is not None
            commit = HfApi().resolve_revision(
                self.dataset, repo_type="dataset", revision=self.revision, local_files_only=offline
            )
            return commit.resolved
        except RevisionResolutionError:
            return self.revision
        except _hub_errors() as error:
            raise self._unread(one_line(error)) from error

    def rows(self, column: str, mark: Mark | None) -> Iterator[Row]:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        # Without a network `datasets` fails only after minutes. With HF_HUB_OFFLINE set it may find its cache.
        if not HF_HUB_OFFLINE and (reason := why_unreachable()):
            raise self._unread(reason)
        import datasets

        try:
            builder = datasets.load_dataset_builder(
                self.dataset, self.config, revision=self.revision
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
                    yield Row(number, f"row {number} of the dataset {self.dataset}", row, mark)
                    number += 1
                    if number % MARK_EVERY == 0:
                        mark = {"document": number, "state": data.state_dict()}
        except ModelError:
            raise
        except _hub_errors() as error:
            raise self._unread(one_line(error)) from error

    def _unread(self, reason: str) -> ModelError:
        kind = ModelError if why_unreachable() is None else UnreachableError
        return kind(
            f"the dataset {self.dataset} cannot be read: {reason}; check its id, configuration, split and "
            f"revision, the network, and `hf auth login`, or {WITHOUT_NETWORK}"
        )


def _hub_errors() -> tuple[type[Exception], ...]:
    import datasets
    from huggingface_hub.errors import HTTPError

    return (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, HTTPError)
