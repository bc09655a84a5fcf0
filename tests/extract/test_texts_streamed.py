"""Streamed texts: going on from marks, and after failures of the network, from files and from a hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fake_hub import COMMIT, DATASET, FakeHub, serving

from saecli.base.errors import ModelError
from saecli.extract.steady import Document, Patience, steadily
from saecli.extract.streamed_texts import MARK_EVERY, Streamed
from saecli.extract.texts import TextSource
from saecli.store.reader import ActivationStore

FILES, ROWS = 5, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of several Parquet files of several row groups, as a folder."""
    folder = tmp_path_factory.mktemp("dataset")
    for file in range(FILES):
        texts = [f"File {file}, row {row}: {'so it goes. ' * (row % 19)}" for row in range(ROWS)]
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / f"train-{file:05d}-of-{FILES:05d}.parquet", row_group_size=70)
    return folder


@pytest.fixture(scope="module")
def streamed(folder: Path) -> Streamed:
    return Streamed("the dataset", {"path": str(folder), "split": "train"}, "text", "mend it")


@pytest.fixture(scope="module")
def whole(streamed: Streamed) -> list[Document]:
    return list(streamed.documents(0, None, print))


def test_a_pass_from_any_mark_and_one_from_a_mark_of_that_give_the_rest(streamed, whole):
    assert [document.number for document in whole] == list(range(FILES * ROWS))
    marks = {document.mark["document"]: document for document in whole if document.mark}
    assert list(marks) == list(range(MARK_EVERY, FILES * ROWS, MARK_EVERY))
    for number, document in marks.items():
        mark = json.loads(json.dumps(document.mark))
        rest = list(streamed.documents(number + 40, mark, print))
        assert [part[:2] for part in rest] == [part[:2] for part in whole[number + 40 :]]
        for later in {part.mark["document"]: part.mark for part in rest if part.mark != mark}.values():
            again = streamed.documents(later["document"] + 3, json.loads(json.dumps(later)), print)
            assert next(again)[:2] == whole[later["document"] + 3][:2]
            again.close()


class Failing:
    """Opens a numbered source, which breaks where it is told to: once for each time a number is named."""

    def __init__(self, error: Exception, *breaks: int) -> None:
        self.error, self.breaks, self.opened = error, list(breaks), []

    def __call__(self, start: int, mark: dict[str, Any] | None) -> Iterator[Document]:
        self.opened.append((start, mark and mark["document"]))
        for number in range(start, 50):
            if number in self.breaks:
                self.breaks.remove(number)
                raise self.error
            yield Document(number, str(number), {"document": number - number % 10})


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError("slow")])
def test_a_source_that_breaks_is_opened_again_where_it_broke(error):
    source, notes = Failing(error, 0, 0, 17, 17, 17, 49), []
    patience = Patience(notes.append, pauses=(0.0, 0.0, 0.0))
    documents = list(steadily(source, 0, None, (OSError,), patience))
    assert [document.number for document in documents] == list(range(50))
    assert source.opened == [(0, None)] * 3 + [(17, 10)] * 3 + [(49, 40)]
    assert len(notes) == 6
    assert notes[0] == f"the connection failed ({error}); trying again in 0 s, 3 more times at most"
    assert notes[4].endswith("1 more time at most")


def raised_from(cause: Exception) -> Exception:
    """A file that was not found, as the network failed."""
    error = FileNotFoundError("no data file")
    error.__context__ = cause
    return error


@pytest.mark.parametrize(("error", "tries"), [
    (ConnectionResetError("gone"), 3), (raised_from(TimeoutError("slow")), 3), (FileNotFoundError("no data file"), 1),
    (PermissionError("not yours"), 1), (ValueError("no such column"), 1)])
def test_tries_are_bounded_and_only_for_errors_that_may_pass(error, tries):
    source, got = Failing(error, *[5] * 99), []
    with pytest.raises(type(error), match=str(error)):
        got += steadily(source, 0, None, (OSError, ValueError), Patience(got.append, pauses=(0.0, 0.0)))
    assert len(source.opened) == tries


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    """For processes that are to know no hub but this; its address is read at import."""
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return own | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1",
                  "SAE_HOME": str(home)}


@pytest.mark.long
def test_an_extraction_from_a_hub_is_pinned_and_goes_on_without_what_it_has_read(folder: Path, tmp_path: Path):
    words = ["extract", "--model", "tiny-gemma2", "--dataset", DATASET, "--rows", "90000", "--shard-rows", "2000"]
    with serving(folder) as hub:
        settings = {"env": environment(hub, tmp_path), "capture_output": True, "text": True, "check": False}
        hub.failures = 1
        done = subprocess.run([sys.executable, "-m", "saecli", *words, "--name", "whole"], **settings)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("the connection failed (")
        assert "trying again in 1 s, 5 more times at most" in done.stderr
        # Kills itself when so many shards are there: no signal comes as precisely from without.
        kill = ("import os, sys; from saecli.cli.main import main\n"
                "def hook(event, found):\n"
                "    if event == 'os.rename' and str(found[1]).endswith('00038.h5'): os.kill(os.getpid(), 9)\n"
                f"sys.addaudithook(hook); sys.argv = ['sae', *{words!r}, '--name', 'killed']; main()")
        assert subprocess.run([sys.executable, "-c", kill], **settings).returncode == -9
        hub.sent.clear()
        done = subprocess.run([sys.executable, "-m", "saecli", *words, "--name", "killed"], **settings)
        assert done.returncode == 0 and "going on after 76,000 rows" in done.stderr, done.stderr
    metas = [ActivationStore.open(tmp_path / "activations" / name).meta for name in ("whole", "killed")]
    assert metas[0].source["dataset_revision"] == COMMIT
    assert metas[0].source == metas[1].source
    assert [shard.sha256 for shard in metas[0].shards] == [shard.sha256 for shard in metas[1].shards]
    # `datasets` looks at the first file for the columns; of the others those before the cursor are not touched
    assert hub.sent["train-00001-of-00005.parquet"] == 0 < hub.sent["train-00004-of-00005.parquet"]


@pytest.mark.slow
def test_what_a_hub_refuses_is_told_in_a_sentence(folder: Path, tmp_path: Path):
    expected = {f"{DATASET!r}, column='body'": "has no column 'body'; expected one of its columns, text",
                f"{DATASET!r}, revision='nowhere'": "check its id and --dataset-revision",
                f"{DATASET!r}, split='tests'": "cannot be read", "'some/nothing'": "cannot be found"}
    tries = "".join(f"try:\n    next(TextSource({source}).pinned(print).documents())\n"
                    "except ModelError as error:\n    print(error)\n" for source in expected)
    program = f"from saecli.base.errors import ModelError\nfrom saecli.extract.texts import TextSource\n{tries}"
    with serving(folder) as hub:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                              env=environment(hub, tmp_path))
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, said in zip(lines, expected.values(), strict=True):
        assert said in line


def test_a_column_that_is_not_there_is_told_of_with_the_row(streamed):
    lacking = Streamed("the dataset", streamed.request, "body", "mend it")
    with pytest.raises(ModelError, match="row 0 of the dataset has no column 'body'; expected one of its columns"):
        next(lacking.documents(0, None, print))


def test_a_commit_needs_no_hub_and_a_branch_is_asked_for_only_of_one(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision in ("0" * 40, "main", None):
        pinned = TextSource(DATASET, revision=revision).pinned(print)
        assert pinned.identity()["dataset_revision"] == revision
