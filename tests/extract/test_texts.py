"""Text sources against what the standard library and the files themselves say."""

import argparse
import ast
import fractions
import hashlib
import inspect
import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import captured

from saecli.base.errors import ModelError
from saecli.extract.texts import STDLIB_DOCS, TextSource

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
TABLE = {"text": ["first", "", None, "  ", "fifth\nline", "sixth"], "number": [1, 2, 3, 4, 5, 6]}
TABLE_DOCUMENTS = [(0, "first"), (1, ""), (2, ""), (3, "  "), (4, "fifth\nline"), (5, "sixth")]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_table(path: Path) -> str:
    if path.suffix.lower() == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(TABLE), path, row_group_size=2)
        return str(path)
    rows = [dict(zip(TABLE, values, strict=True)) for values in zip(*TABLE.values(), strict=True)]
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def documents(dataset: str, start: int = 0, **options: str) -> list[tuple[int, str]]:
    return [(number, text) for number, text, *_ in TextSource(dataset, **options).documents(start)]


@pytest.mark.long
def test_stdlib_docs_of_other_files_are_another_text(tmp_path: Path, monkeypatch):
    whole, stripped = tmp_path / "whole", tmp_path / "stripped"
    for folder in (whole, stripped):
        (folder / "test").mkdir(parents=True)
        (folder / "calendar.py").write_text(f'"""{"What a calendar holds. " * 3}"""')
    (stripped / "test" / "test_calendar.py").write_text('"""Not read."""')
    identities = []
    for folder in (whole, stripped):
        monkeypatch.setattr("sysconfig.get_path", lambda name, folder=folder: str(folder))
        identities.append(TextSource(STDLIB_DOCS).identity())
    assert identities[0] == identities[1]
    (stripped / "turtle.py").write_text(f'"""{"What a turtle draws. " * 3}"""')
    other = tmp_path / "other"
    stripped.rename(other)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(other))
    assert TextSource(STDLIB_DOCS).identity() != identities[0]
    assert len(list(TextSource(STDLIB_DOCS).documents())) == 2


def test_stdlib_docs_are_the_docstrings(tmp_path: Path, monkeypatch):
    """Of four modules, since all of them take seconds."""
    stdlib = Path(ast.__file__).parent
    shutil.copytree(stdlib / "json", tmp_path / "json")
    for module in (argparse, ast, fractions):
        shutil.copy(module.__file__, tmp_path)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    found = documents(STDLIB_DOCS)
    texts = [text for _, text in found]
    method = fractions.Fraction.limit_denominator
    for thing in (json, json.dumps, argparse.ArgumentParser, ast.walk, method):
        assert inspect.getdoc(thing) in texts
    assert [number for number, _ in found] == list(range(len(texts)))
    assert len(set(texts)) == len(texts) > 50
    assert all(text == text.strip("\n") and len(text) >= 40 for text in texts)


@pytest.mark.slow
def test_stdlib_docs_come_in_a_fixed_order():
    found = documents(STDLIB_DOCS)
    assert documents(STDLIB_DOCS, 1000) == found[1000:]
    program = (
        "from hashlib import sha256; from saecli.extract.texts import TextSource; "
        "texts = [(number, text) for number, text, *_ in TextSource('stdlib-docs').documents()]; "
        "print(sha256(repr(texts).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    printed = captured([sys.executable, "-c", program], check=True, env=environment)
    assert printed.stdout.strip() == hashlib.sha256(repr(found).encode()).hexdigest()


def test_importing_texts_does_not_import_datasets():
    program = "import sys, saecli.extract.texts; print('datasets' in sys.modules or 'huggingface_hub' in sys.modules)"
    printed = captured([sys.executable, "-c", program], check=True)
    assert printed.stdout.strip() == "False"


@given(st.lists(WORDS, max_size=12))
def test_txt_documents_match_a_split_of_the_whole_content(tmp_path_factory, lines):
    content = "\n".join(lines)
    path = write(tmp_path_factory.mktemp("txt") / "a.txt", content)
    stripped = ["" if not line.strip() else line for line in lines]
    paragraphs = [part.strip("\n") for part in "\n".join(stripped).strip("\n").split("\n\n")]
    paragraphs = [part for part in paragraphs if part]
    expected = paragraphs if len(paragraphs) > 1 else [line for line in stripped if line]
    if expected:
        assert [text for _, text in documents(path)] == expected
    else:
        with pytest.raises(ModelError, match="there is no text in"):
            documents(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one\r\ntwo\r\n \t\r\nthree", ["one\ntwo", "three"]),
        ("\ufeffone", ["one"]),
    ],
)
def test_txt_blank_lines_between_texts_separate_documents(tmp_path, content, expected):
    assert [text for _, text in documents(write(tmp_path / "a.txt", content))] == expected


@given(start=st.integers(0, 8))
@pytest.mark.parametrize("suffix", [".txt", ".TXT", ".jsonl", ".JSONL", ".parquet", ".PARQUET"])
def test_starting_later_gives_the_tail_of_the_whole_pass(tmp_path_factory, suffix, start):
    path = tmp_path_factory.mktemp("resume") / f"a [1]*{suffix}"
    if suffix.lower() == ".txt":
        source = write(path, "one\ntwo\n\nthree\n\nfour")
        whole = [(0, "one\ntwo"), (1, "three"), (2, "four")]
    else:
        source, whole = write_table(path), TABLE_DOCUMENTS
    assert documents(source) == whole
    assert documents(source, start) == whole[start:]


def test_another_column_is_read_where_named(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "body": "b"}\n\n{"body": "c"}\n')
    assert documents(path, column="body") == [(0, "b"), (1, "c")]


def test_identity_follows_the_content_of_a_local_file(tmp_path):
    path = tmp_path / "a.txt"
    first = TextSource(write(path, "one")).identity()
    assert first == {"dataset": str(path), "bytes": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
    assert TextSource(os.path.relpath(path)).identity() == first
    assert TextSource(write(path, "two")).identity() != first


def test_identity_of_hub_datasets_tells_sources_apart():
    identity = TextSource("Salesforce/wikitext").identity()
    assert identity["config"] == "wikitext-103-raw-v1"
    other = TextSource("Salesforce/wikitext", config="wikitext-2-v1").identity()
    assert other["config"] == "wikitext-2-v1"
    assert TextSource("Salesforce/wikitext", column="body").identity() != identity
    assert TextSource(STDLIB_DOCS, column="body").identity() == TextSource(STDLIB_DOCS).identity()


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("none.txt", None, "text", "does not exist"),
        (".", None, "text", "got a folder"),
        ("a.csv", "a,b", "text", "expected a .txt, .jsonl or .parquet file"),
        ("a.txt", b"caf\xe9\n", "text", "it has the byte 0xe9"),
        ("a.jsonl", '{"body": "b", "n": 1}', "text", "no column 'text'; expected .*, body, n"),
        ("a.jsonl", '{"body": "b", "n": 1}', "n", r"expected a string, got int; .*\(body here\)"),
        ("a.jsonl", '{"text": "b"}\n{"text"', "text", "line 2 of .* expected one JSON object"),
        ("a.jsonl", "[1]", "text", "expected a JSON object, got list"),
        ("a.parquet", b"PAR1 but not really", "text", "write it as Parquet again"),
        ("a.parquet", TABLE, "body", "no column 'body'; expected one of its columns, text, number"),
    ],
)
def test_files_that_cannot_be_read_give_one_sentence(tmp_path, name, content, column, message):
    path = tmp_path / name
    if content is TABLE:
        write_table(path)
    elif content is not None:
        write(path, content)
    with pytest.raises(ModelError, match=message) as caught:
        documents(str(path), column=column)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


GOOD = b'{"text": "t"}\n'
BAD = [
    b'{"text"\n',
    b"[1]\n",
    b'{"body": "b"}\n',
    b'{"text": 1}\n',
    b'{"text": "\xe9"}\n',
    b'{"text": "\\udc80"}\n',
    b"[" * 100_000 + b"\n",
    b"9" * 5000 + b"\n",
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_left_out_with_a_note_at_the_end(tmp_path, bad):
    path, told = write(tmp_path / "a.jsonl", GOOD * 60 + b"\n" + bad + GOOD * 50), []
    found = list(TextSource(path).documents(note=told.append))
    assert [document.number for document in found] == list(range(110))
    (note,) = told
    assert note.startswith(f"left out 1 of 111 lines, the first: line 62 of {path} ")
    assert [number for number, _ in documents(path, 105)] == [105, 106, 107, 108, 109]
    some = TextSource(path).documents(note=told.append)
    for _ in range(70):
        next(some)
    some.close()
    assert told[1].startswith("left out 1 of 71 lines")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD * 99 + BAD[0] * 2, "line 100 of .*; bad lines: 2 of the first 101, and .* 1%"),
        (BAD[0] * 2 + GOOD * 98 + GOOD * 9000, "line 1 of .*; bad lines: 2 of the first 100"),
        (GOOD * 9 + BAD[0], "line 10 of .*; bad lines: 1 of the first 10"),
        (BAD[2] * 7, "line 1 of .* has no column 'text'; expected .* body; .* --text-column"),
    ],
)
def test_more_than_one_bad_line_in_a_hundred_is_refused(tmp_path, content, message):
    told = []
    with pytest.raises(ModelError, match=message):
        list(TextSource(write(tmp_path / "a.jsonl", content)).documents(note=told.append))
    assert told == []
