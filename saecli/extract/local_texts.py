"""Texts that are read without a library: the standard library's docstrings, .txt and .jsonl files."""

import ast
import inspect
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ..base.errors import ModelError, one_line

_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
_DOCSTRING_MIN_CHARS = 40
ENOUGH_LINES, MOST_BAD = 100, 0.01  # from 100 lines on, a .jsonl file is refused if over 1% of them hold no text
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def stdlib_docstrings() -> Iterator[str]:
    """The distinct docstrings of Python's standard library, in the order of its files."""
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
    with warnings.catch_warnings(action="ignore"):  # old modules have invalid escapes
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # templates and other files that only look like modules
            return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
            yield inspect.cleandoc(text)


def txt_texts(path: Path) -> Iterator[str]:
    """The paragraphs of a file, or its lines if no blank lines separate paragraphs."""
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


def _lines(path: Path, errors: str = "strict") -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", errors=errors) as file:
            for line in file:
                yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"the text file {path} cannot be read as text; expected UTF-8, got the byte "
            f"0x{error.object[error.start]:02x} which is not part of it; convert the file to UTF-8"
        ) from error


def jsonl_texts(path: Path, column: str, note: Callable[[str], None]) -> Iterator[str]:
    """One column of a file with one JSON object per line; up to 1% of the lines, if without text, are skipped.

    Args:
        path: the file.
        column: the key of the text.
        note: called when reading ends with a message on the lines skipped, if any.

    Raises:
        ModelError: more lines hold no text, checked from the 100th line on and at the end.
    """
    lines, bad, refused = 0, 0, False
    first: ModelError | None = None
    try:
        for number, line in enumerate(_lines(path, errors="surrogateescape"), 1):
            if not line.strip():
                continue
            lines += 1
            text = None
            try:
                text = _text_in(line, column, f"line {number} of {path}")
            except ModelError as error:
                first, bad = first or error, bad + 1
            if refused := lines >= ENOUGH_LINES and bad > MOST_BAD * lines:
                break
            if text is not None:
                yield text
        if refused := bad > MOST_BAD * lines:
            raise first if bad == lines else ModelError(
                f"{first}; bad lines: {bad:,} of the first {lines:,}, and no more than {MOST_BAD:.0%} are left out"
            )
    finally:  # also if reading stops before the file's end
        if bad and not refused:
            note(f"left out {bad:,} of {lines:,} lines, the first: {first}")


def _text_in(line: str, column: str, place: str) -> str:
    """The text in a column of a line of JSON."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{place} cannot be read; expected one JSON object per line, got {one_line(error)}; "
                         "correct the line") from error
    text = text_of(row, column, place)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{place} cannot be read; expected UTF-8, got bytes or escapes that are no characters; "
                         "correct the line") from error
    return text


def text_of(row: Any, column: str, place: str) -> str:
    """The text in a column of a row; `place` names the row in messages."""
    if not isinstance(row, dict):
        raise ModelError(f"{place} has no columns; expected a JSON object, got {type(row).__name__}; correct it")
    if column not in row:
        columns = ", ".join(row) or "none"
        raise ModelError(
            f"{place} has no column {column!r}; expected one of its columns, {columns}; name one with --text-column"
        )
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        columns = ", ".join(name for name in row if isinstance(row[name], str)) or "none"
        raise ModelError(
            f"{place} holds no text in column {column!r}; expected a string, got {type(text).__name__}; "
            f"name a column that holds text with --text-column ({columns} here)"
        )
    return text
