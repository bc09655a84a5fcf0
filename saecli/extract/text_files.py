"""Texts from files: Python's own docstrings, .txt, .jsonl and .parquet."""

import ast
import hashlib
import inspect
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from ..base.errors import ModelError, one_line

# From 100 lines on, a .jsonl file is refused if over 1% of them hold no text.
ENOUGH_LINES, MOST_BAD = 100, 0.01
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
DOCSTRING_MIN_CHARS = 40
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Text = Any  # a string, or a `chats.Conversation`
Texts = Generator[Text, None, None]
Read = Callable[[Any, str, str], Text]  # from a row, a column, and words for the row in errors


def stdlib_docstrings() -> Texts:
    """The distinct docstrings of Python's standard library, in the order of its files."""
    seen: set[str] = set()
    for path in _stdlib_files():
        for text in _docstrings(path.read_bytes()):
            if len(text) >= DOCSTRING_MIN_CHARS and text not in seen:
                seen.add(text)
                yield text


def _stdlib_files() -> list[Path]:
    paths: list[Path] = []
    for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in STDLIB_SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths)


@cache
def stdlib_sha256() -> str:
    """Of the files read: distributions leave out different modules of one version."""
    digest = hashlib.sha256()
    for path in _stdlib_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()


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


def jsonl_texts(path: Path, column: str, read: Read, note: Callable[[str], None]) -> Texts:
    """One column of a file with one JSON object per line; up to 1% of the lines, if without text, are skipped."""
    lines = bad = 0
    first: ModelError | None = None
    refused = False
    try:
        for number, line in enumerate(_lines(path, errors="surrogateescape"), 1):
            if not line.strip():
                continue
            lines += 1
            text = None
            try:
                text = _text_in(line, column, read, f"line {number} of {path}")
            except ModelError as error:
                first = first or error
                bad += 1
            if lines >= ENOUGH_LINES and bad > MOST_BAD * lines:
                break
            if text is not None:
                yield text
        refused = bad > MOST_BAD * lines
    finally:  # also if reading stops before the file's end
        if bad and not refused:
            note(f"left out {bad:,} of {lines:,} lines, the first: {first}")
    if first is None or not refused:
        return
    if bad == lines:
        raise first
    raise first.within(
        after=f"bad lines: {bad:,} of the first {lines:,}, and no more than {MOST_BAD:.0%} are left out"
    )


def _text_in(line: str, column: str, read: Read, where: str) -> Text:
    try:
        text = read(json.loads(line), column, where)
        str(text).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{where} is not UTF-8; correct the line") from error
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
            batches = file.iter_batches(columns=[column]) if is_there else file.iter_batches(1)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows):
                yield read(row, column, f"row {number} of {path}")
    except ModelError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are of both kinds
        raise ModelError(
            f"the text file {path} cannot be read: {one_line(error)}; write it as Parquet again"
        ) from error
