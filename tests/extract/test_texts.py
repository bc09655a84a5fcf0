"""Text sources against the standard library and the files themselves; mixtures of them, killed and by source."""

import argparse
import ast
import csv
import fractions
import gzip
import hashlib
import inspect
import io
import json
import os
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path
from shlex import split

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from homes import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from launching import captured, signalled
from storing import assert_same_pass

import saecli
from saecli.base.errors import ModelError
from saecli.extract.readers import STDLIB_DOCS, parquet_rows
from saecli.extract.texts import Mixture, TextSource

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=12)
TABLE = {"text": ["first", "", None, "  ", "fifth\nline", "sixth"], "number": [1, 2, 3, 4, 5, 6]}
TABLE_DOCUMENTS = [(0, "first"), (1, ""), (2, ""), (3, "  "), (4, "fifth\nline"), (5, "sixth")]


KINDS = """.txt .TXT .txt.gz .md .jsonl .JSONL .ndjson .jsonl.gz .jsonl.zst .JSONL.GZ .json .json.gz .csv .csv.zst .tsv
.parquet .PARQUET""".split()


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_table(path: Path) -> str:
    kind = Path(path.name.lower()).with_suffix("").suffix or path.suffix.lower()
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(TABLE), path, row_group_size=2)
        return str(path)
    rows = [dict(zip(TABLE, values, strict=True)) for values in zip(*TABLE.values(), strict=True)]
    if kind in (".csv", ".tsv"):
        memory = io.StringIO()
        table = csv.DictWriter(memory, [*TABLE], delimiter="," if kind == ".csv" else "\t")
        table.writeheader()
        table.writerows(rows)
        content = memory.getvalue().encode()
    elif kind == ".json":
        content = json.dumps(rows, indent=1).encode()
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    return write(path, pyarrow.compress(content, codec, asbytes=True) if codec else content)


def documents(dataset: str, start: int = 0, **options: str) -> list[tuple[int, str]]:
    return [(number, text) for number, text, *_ in TextSource(dataset, **options).documents(start)]


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
    [("one\r\ntwo\r\n \t\r\nthree", ["one\ntwo", "three"]), ("\ufeffone", ["one"])],
)
def test_txt_blank_lines_between_texts_separate_documents(tmp_path, content, expected):
    assert [text for _, text in documents(write(tmp_path / "a.txt", content))] == expected


@given(start=st.integers(0, 8))
@pytest.mark.parametrize("suffix", KINDS)
def test_starting_later_gives_the_tail_of_the_whole_pass(tmp_path_factory, suffix, start):
    path = tmp_path_factory.mktemp("resume") / f"a [1]*{suffix}"
    if suffix.lower()[:3] in (".tx", ".md"):
        content = b"one\ntwo\n\nthree\n\nfour"
        source = write(path, gzip.compress(content) if suffix.endswith(".gz") else content)
        whole = [(0, "one\ntwo"), (1, "three"), (2, "four")]
    else:
        source, whole = write_table(path), TABLE_DOCUMENTS
    assert documents(source) == whole
    assert documents(source, start) == whole[start:]


def test_another_column_is_read_where_named(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "body": "b"}\n\n{"body": "c"}\n')
    assert documents(path, column="body") == [(0, "b"), (1, "c")]


def test_few_rows_of_a_parquet_file_are_in_memory(tmp_path):
    texts, path = [f"{number:07} " * 2000 for number in range(3000)], tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    before = pyarrow.total_allocated_bytes()
    with closing(parquet_rows(path, "text")) as found:
        assert next(found)[1] == {"text": texts[0]}
        assert pyarrow.total_allocated_bytes() - before < sum(map(len, texts))


def test_identity_follows_the_content_of_a_local_file(tmp_path):
    path = tmp_path / "a.txt"
    first = TextSource(write(path, "one")).identity()
    assert first == {"dataset": str(path), "bytes": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
    assert TextSource(os.path.relpath(path)).identity() == first
    read = TextSource(str(path))
    assert read.identity() == first
    assert TextSource(write(path, "two")).identity() != first
    assert read.identity(asked=True) == first  # whose bytes are read once


def test_names_of_sources_have_whole_what_is_not_the_default():
    assert TextSource("d", split="train_sft", column="text_clean").name == "d train_sft text_clean"
    assert TextSource("d", config="c").name == "d c"


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
        ("a.docx", "a,b", "text", "is of another kind; expected a .txt, .md, .jsonl, "),
        ("a.txt", b"caf\xe9\n", "text", "line 1 of .* bytes that are not UTF-8"),
        ("a.txt", "one\ntwo".encode("utf-16"), "text", "expected that, got UTF-16 or binary data"),
        ("a.md", bytes(range(256)), "text", "expected that, got UTF-16 or binary data"),
        ("a.txt.gz", gzip.compress(b"one", mtime=0)[:-9], "text", "Truncated .* a whole .txt file"),
        ("a.jsonl.zst", b"no frame", "text", "expected a whole .jsonl file"),
        ("a.jsonl", b"", "text", "there is no text in "),
        ("a.jsonl", b"\n\n", "text", "there is no text in "),
        ("a.csv", b"", "text", "there is no text in "),
        ("a.parquet", {"text": []}, "text", "there is no text in "),
        ("a.json", b"[]", "text", "there is no text in "),
        (
            "a.csv",
            "body,n\nb,1\n",
            "text",
            "line 2 of .* no column 'text'; expected one of body, n;",
        ),
        ("a.tsv", "text\nopen", "body", "no column 'body'; expected one of text;"),
        ("a.csv", 'text,n\n"open,1\nb,2\n', "text", "line 2 of .* unexpected end of data"),
        ("a.json", '{"body": "b"}', "text", "no column 'text'; expected one of body;"),
        ("a.json", '[{"text": "a"}, {', "text", "read: Expecting .* whole .json file"),
        ("a.json", '[["a"]]', "text", "entry 1 of .* expected a JSON object, got list"),
        ("a.json", '{\n"a": 1\n}', "text", "expected one JSON object per line, or in .json a list"),
        ("a.jsonl", '{"a": {"b": "c"}}', "a.text", "no column 'a.text'; expected one of a;"),
        ("a.jsonl", '{"a": "b"}', "a+c", "no column 'c'; expected one of a;"),
        ("a.jsonl", '{"body": "b", "n": 1}', "text", "no column 'text'; expected one of body, n;"),
        ("a.jsonl", '{"body": "b", "n": 1}', "n", r"expected a string, got int; .*\(body here\)"),
        ("a.jsonl", '{"text": "b"}\n{"text"', "text", "line 2 .* JSON object .* got Expecting"),
        ("a.jsonl", "[1]", "text", "expected a JSON object, got list"),
        ("a.jsonl", '{"text": "\\ud83d"}', "text", "not UTF-8, or half of a surrogate pair"),
        ("a.parquet", b"PAR1 but not really", "text", "expected a whole .parquet file"),
        ("a.parquet", TABLE, "body", "no column 'body'; expected one of text, number"),
    ],
)
def test_files_that_cannot_be_read_give_one_sentence(tmp_path, name, content, column, message):
    path = tmp_path / name
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), path)
    elif content is not None:
        write(path, content)
    with pytest.raises(ModelError, match=message) as caught:
        documents(str(path), column=column)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


GOOD = b'{"text": "t"}\n'
ALIKE = ".*; 1 of 99 rows are bad, and at most 1% may be$"
BAD = [b'{"text"\n', b"[1]\n", b'{"body": "b"}\n', b'{"text": 1}\n', b'{"text": "\xe9"}\n']
BAD += [b'{"text": "\\udc80"}\n', b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n"]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson.gz"])
def test_one_bad_line_in_a_hundred_is_left_out_and_two_end_a_file(tmp_path, bad, suffix):
    def source(good_after: int) -> TextSource:
        content = GOOD * 60 + b"\n" + bad + GOOD * good_after
        content = gzip.compress(content) if suffix.endswith(".gz") else content
        return TextSource(write(tmp_path / f"a{suffix}", content))

    told: list[str] = []
    texts = [document.text for document in source(39).documents(warn=told.append)]
    assert texts == ["t"] * 60 + [None] + ["t"] * 39
    (warning,) = told
    assert re.search(r"line 62 of .*; it is left out, as up to 1% of the rows may be$", warning)
    # A later pass from before or after it numbers and counts alike.
    for start in (30, 61, 80):
        rest = [(document.number, document.text) for document in source(39).documents(start)]
        assert rest == [*enumerate(texts)][start:]
    for start in (0, 80):
        with pytest.raises(ModelError, match="line 62 of " + ALIKE):
            list(source(38).documents(start))


def test_many_bad_lines_end_a_file_before_its_end(tmp_path):
    text = TextSource(write(tmp_path / "a.jsonl", GOOD + b"[]\n" * 11 + GOOD * 10**5))
    with pytest.raises(ModelError, match=r"line 2 of .*; 11 of 12 rows are bad"):
        list(text.documents())


def test_a_bad_paragraph_or_cell_is_left_out_too(tmp_path):
    warnings: list[str] = []
    paragraphs = TextSource(write(tmp_path / "a.txt", b"one\n\n" * 150 + b"caf\xe9\n"))
    read = [document.text for document in paragraphs.documents(warn=warnings.append)]
    assert read == ["one"] * 150 + [None]
    open_quote = write(tmp_path / "b.csv", "text,n\n" + "b,1\n" * 150 + '"open,1\nb,2\n')
    assert len([*TextSource(open_quote).documents(warn=warnings.append)]) == 151
    assert [line.split(" of ")[0] for line in warnings] == ["line 301", "line 152"]
    cells = b"text,n\n" + b'"two\nlines",1\n' * 150 + b"caf\xe9,1\n" + b"short\n"
    found = [text for _, text in documents(write(tmp_path / "a.csv", cells))]
    assert found == ["two\nlines"] * 150 + [None, "short"]


def test_nested_and_joined_columns(tmp_path):
    rows = [
        {"prompt": "ask", "completion": {"text": "say"}, "a.b": "dot", "c+d": "plus"},
        {"prompt": "", "completion": {"text": "more"}, "a.b": "", "c+d": ""},
        {"prompt": "why", "completion": None, "a.b": None, "c+d": None},
    ]
    lines = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for path in (lines, str(table)):
        for column, expected in {
            "completion.text": ["say", "more", ""],
            "prompt+completion.text": ["ask\nsay", "more", "why"],
            "a.b": ["dot", "", ""],  # a name, and no path
            "c+d": ["plus", "", ""],
        }.items():
            assert [text for _, text in documents(path, column=column)] == expected


def test_frames_and_members_after_the_first_are_read(tmp_path):
    for suffix, codec in ((".gz", "gzip"), (".zst", "zstd")):
        parts = [pyarrow.compress(text, codec, asbytes=True) for text in (b"one\n", b"two\n")]
        path = write(tmp_path / f"a.txt{suffix}", b"".join(parts))
        assert documents(path) == [(0, "one"), (1, "two")]


def test_json_files_may_hold_texts_alone(tmp_path):
    for name, content in (("a.json", '["one", "two"]'), ("a.jsonl", '"one"\n"two"')):
        path = write(tmp_path / name, content)
        assert documents(path) == [(0, "one"), (1, "two")]
        assert not TextSource(path, chat=True).recognised().chat


def test_a_folder_or_pipe_is_no_text(tmp_path):
    for name, make in (("a", Path.mkdir), ("a.txt", Path.mkdir), ("b.txt", os.mkfifo)):
        make(tmp_path / name)
        with pytest.raises(ModelError, match=r"is a folder or pipe; expected a .txt, "):
            documents(str(tmp_path / name))


def write_counts(path: Path, counts: list[int]) -> str:
    """A file of documents with these numbers of words."""
    texts = (" ".join(["word"] * count) for count in counts)
    return write(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=2, max_size=4),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_rows_keep_their_proportions_and_any_mark_gives_the_rest(tmp_path_factory, counts, weights):
    folder = tmp_path_factory.mktemp("mixture")
    names = [write_counts(folder / f"{index}.jsonl", some) for index, some in enumerate(counts)]
    shares = np.array(weights[: len(counts)]) / sum(weights[: len(counts)])
    sources, told = tuple(map(TextSource, names)), []
    words_of = {"rows_of": lambda document: document.text.count("w")}
    text = Mixture(sources, tuple(names), tuple(shares.tolist()))
    whole = list(text.documents(warn=told.append, **words_of))
    assert [document.number for document in whole] == list(range(sum(map(len, counts))))
    ended = [line.split(" ends after ")[0] for line in told]
    assert len(ended) == len(names) - 1 and {*ended} < {*names}
    rows, left = np.zeros(len(counts)), np.array([*map(len, counts)])
    for document in whole:
        rows[document.source] += document.text.count("w")
        left[document.source] -= 1
        if left.all():  # none is ahead of another by more than a document
            assert np.ptp(rows / shares) <= max(np.array([*map(max, counts)]) / shares) * (1 + 1e-9)
        mark = json.loads(json.dumps(document.mark))
        for start in (document.number, document.number + 1):
            rest = text.documents(start, mark, **words_of)
            found, expected = (
                [own._replace(mark=None) for own in part] for part in (rest, whole[start:])
            )
            assert found == expected
    for index, own in enumerate(counts):
        assert [document.text.count("w") for document in whole if document.source == index] == own


def test_ends_of_texts_are_told_where_rows_need_them(sae: CommandLine, tmp_path: Path):
    counts = {"a.jsonl": 9, "b.jsonl": 40}
    files = [write_counts(tmp_path / name, [20] * count) for name, count in counts.items()]
    mixed = [word for path in files for word in ("--dataset", path)]
    words = ("extract", "--model", "tiny-gemma2", "--json")
    rows = sae(*words, "--dataset", files[0]).json["rows"]

    def told(*more: str) -> list[str]:
        return [line for line in sae(*words, *more).err.splitlines() if " after " in line]

    assert told("--dataset", files[0]) == [f"the text ended after {rows} rows of 100,000"]
    assert told("--dataset", files[0], "--rows", str(rows)) == []
    end = f"{files[0]} ends after {rows} rows; others go on"
    assert told(*mixed, "--rows", str(3 * rows)) == [end]
    first, last = told(*mixed)
    assert first == end
    assert last.startswith("the text ended after ") and last.endswith(" rows of 100,000")


@pytest.mark.slow
def test_a_killed_mixture_equals_a_whole_one_measured_by_source(sae: CommandLine, tmp_path: Path):
    files = [write_counts(tmp_path / name, [*range(3, 40)] * 25) for name in ("a.jsonl", "b.jsonl")]
    mixed = "extract --model tiny-gemma2 --rows 14000 --shard-rows 1000 --name".split()
    for path, weight in zip(["stdlib-docs", *files], "532", strict=True):
        mixed[-1:-1] = ["--dataset", path, "--mix", weight]
    made = sae(*mixed, "whole", "--json").json
    shares = np.array([*made["sources"].values()]) / 14_000
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    for nth in (3, 12):
        signalled(sae.home, [*mixed, "killed"], ".h5", nth)
    assert sae(*mixed, "killed").status == 0
    assert_same_pass(sae.home / "activations" / "killed", sae.home / "activations" / "whole")
    rows = saecli.open_store("whole", home=sae.home).split("all")
    source = np.concatenate(list(rows.column("source", 512)))
    assert np.bincount(source).tolist() == [*made["sources"].values()]
    assert sae("train --act topk --k 4 --d-sae 64 --steps 50 --name run --data whole").status == 0
    x = np.concatenate([batch.copy() for batch in rows.sequential(512)])
    run = saecli.load_sae("run", home=sae.home)
    found = sae("eval", "run", "--split", "all", "--json").json["runs"][0]["sources"]
    fired = sae("sparsity", "run", "--split", "all", "--json").json["runs"][0]
    for number, (one, other) in enumerate(zip(found, fired["sources"], strict=True)):
        alone = saecli.evaluate(run, x[source == number])
        for name in ("rows", "fvu", "l0"):
            assert one[name] == pytest.approx(alone[name])
        frequency = saecli.sparsity(run, x[source == number])["frequency"]
        assert other["frequency"] == pytest.approx(frequency, abs=1e-3)
    rates = np.array([one["frequency"] for one in fired["sources"]])
    others = np.array([[14_000 - one["rows"]] for one in fired["sources"]])
    enough = others * np.array(fired["frequency"]) >= 10
    own = ((rates >= 0.9 * rates.sum(0)) & enough).sum(1).tolist()
    assert [one["mainly"] for one in fired["sources"]] == own != [0, 0, 0]


def test_a_source_of_two_documents_is_measured_and_one_of_one_is_not(sae: CommandLine, tmp_path):
    counts = {"a": [40] * 20, "b": [60, 60], "c": [80]}
    texts = []
    for name, own in counts.items():
        texts += ["--dataset", write_counts(tmp_path / f"{name}.jsonl", own)]
    assert sae("extract", "--model", "tiny-gemma2", *texts[:4], "--name", "two").status == 0
    with_single = [*texts[:2], *texts[4:], "--name", "single"]
    assert sae("extract", "--model", "tiny-gemma2", *with_single).status == 0
    train = ["train", "--data", "two", "--act", "topk", "--k", "2", "--d-sae", "32", "--steps", "5"]
    assert sae(*train, "--name", "run").status == 0
    found = sae("eval", "run", "--json").json["runs"][0]["sources"]
    assert [Path(one["source"]).name for one in found] == ["a.jsonl", "b.jsonl"]
    assert found[1]["rows"] == 60

    for command in ("eval", "sparsity"):
        alone = sae(command, "run", "--data", "single", "--json")
        assert "sources" not in alone.json["runs"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sites",
    [["mlp_out"], pytest.param(["mlp_in", "mlp_out"], marks=pytest.mark.long)],
    ids=["SAE", "crosscoder"],
)
def test_the_effect_by_source_is_that_of_its_store_alone(sae: CommandLine, tmp_path, sites):
    files = [write_counts(tmp_path / f"{name}.jsonl", [*range(3, 30)] * 4) for name in "ab"]
    Path(files[1]).write_text(Path(files[1]).read_text().replace("word", "return the value"))
    words = split("extract --model tiny-gemma2 --layer 1 --rows 100000")
    words += [*(word for site in sites for word in ("--site", site)), "--name"]
    mixed = [word for file in files for word in ("--dataset", file, "--mix", "1")]
    for name, texts in (("mixed", mixed), ("a", mixed[:2]), ("b", mixed[4:6])):
        assert sae(*words, name, *texts).status == 0
    ends = [f"-l1-{site}" for site in sites] if sites[1:] else [""]
    data = [[w for end in ends for w in ("--data", f"{name}{end}")] for name in ("mixed", "a", "b")]
    line = "train --act topk --k 4 --d-sae 64 --steps 50 --name run"
    assert sae(line, *data[0]).status == 0
    line = "eval run --split all --model tiny-gemma2 --tokens 1000000 --json"
    run, *alone = (sae(line, *words).json["runs"][0] for words in data)
    for found, expected in zip(run["sources"], alone, strict=True):
        pairs = [[own, *own.get("hook_points", [])] for own in (found, expected)]
        for one, other in zip(*pairs, strict=True):
            for name in ("ce_clean", "ce_spliced", "ce_zero", "ce_recovered", "kl", "tokens"):
                if other[name] is None:  # zeros at a hook point of tiny-gemma2 may cost nothing
                    assert one[name] is None
                else:
                    assert one[name] == pytest.approx(other[name], rel=1e-4)
    assert alone[0]["kl"] != pytest.approx(alone[1]["kl"], rel=0.1)
    assert sae("eval", "run", "--model", "tiny-gemma2").out.count("a.jsonl") >= 2
