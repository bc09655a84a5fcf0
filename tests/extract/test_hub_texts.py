"""Datasets of a hub on this machine: resuming from marks, after failures of the network, and refusals."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from launching import captured, signalled
from model_hub import ModelHub, serving
from storing import assert_same_pass

from saecli.extract.texts import TextSource
from saecli.store.reader import ActivationStore

DATASET, OTHER, FILES, ROWS = "some/texts", "other/texts", 5, 300


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    """A hub with datasets of several Parquet files of several row groups."""
    path, files = tmp_path_factory.mktemp("dataset") / "one.parquet", {}
    for file in range(FILES):
        texts = [f"File {file}, row {row}: {'so it goes. ' * (row % 19)}" for row in range(ROWS)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=70)
        files[f"train-{file:05d}-of-{FILES:05d}.parquet"] = path.read_bytes()
    with serving() as hub:
        hub.add(DATASET, files)
        hub.add(OTHER, dict(list(files.items())[::2]))
        yield hub


def run(hub: ModelHub, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Python in a process that knows no hub but this one."""
    return captured([sys.executable, *words], timeout=600, env=hub.environment(home, **more))


RESUMED = f"""
import json, sys
from saecli.extract.readers import MARK_EVERY
from saecli.extract.texts import TextSource
source = TextSource({DATASET!r}, revision=sys.argv[1])
whole = list(source.documents())
assert [document.number for document in whole] == list(range({FILES * ROWS}))
marks = {{document.mark["document"]: document for document in whole if document.mark}}
assert list(marks) == list(range(MARK_EVERY, {FILES * ROWS}, MARK_EVERY))
for number, document in marks.items():
    rest = list(source.documents(number + 40, json.loads(json.dumps(document.mark))))
    assert [part[:2] for part in rest] == [part[:2] for part in whole[number + 40:]]
    later = next((part for part in rest if part.mark["document"] > number), None)  # a mark of a resumed pass
    if later:
        assert next(source.documents(later.number, json.loads(json.dumps(later.mark))))[:2] == later[:2]
"""


@pytest.mark.slow
def test_a_pass_from_any_mark_gives_the_rest(hub: ModelHub, tmp_path: Path):
    hub.failing_reads = 2  # retried by the hub's client
    done = run(hub, tmp_path, "-c", RESUMED, hub.repos[DATASET].head)
    assert (done.returncode, hub.failing_reads) == (0, 0), done.stderr


@pytest.mark.long
def test_a_killed_extraction_does_not_read_files_again(hub: ModelHub, tmp_path: Path, monkeypatch):
    words = (
        f"extract --model tiny-gemma2 --dataset {DATASET} --rows 90000 --shard-rows 2000".split()
    )
    done = run(hub, tmp_path, "-m", "saecli", *words, "--name", "whole")
    assert done.returncode == 0, done.stderr
    for name, value in hub.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    signalled(tmp_path, [*words, "--name", "killed"], "00038.h5")
    hub.sent.clear()
    done = run(hub, tmp_path, "-m", "saecli", *words, "--name", "killed")
    assert done.returncode == 0 and "going on after 76,000 rows" in done.stderr, done.stderr
    whole, killed = (tmp_path / "activations" / name for name in ("whole", "killed"))
    assert ActivationStore.open(whole).meta.source["dataset_revision"] == hub.repos[DATASET].head
    assert_same_pass(killed, whole)
    # `datasets` looks at the first file for the columns, and not at others before the cursor.
    assert hub.sent["train-00001-of-00005.parquet"] == 0 < hub.sent["train-00004-of-00005.parquet"]


@pytest.mark.slow
def test_a_mixture_of_datasets_records_the_commit_of_each(hub: ModelHub, tmp_path: Path):
    words = f"extract --model tiny-gemma2 --rows 900 --dataset {DATASET} --dataset {OTHER} --name x"
    assert run(hub, tmp_path, "-m", "saecli", *words.split()).returncode == 0
    meta = ActivationStore.open(tmp_path / "activations" / "x").meta
    commits = [part["dataset_revision"] for part in meta.source["mixture"]]
    assert commits == [hub.repos[name].head for name in (DATASET, OTHER)]


@pytest.mark.slow
def test_refusals_of_a_hub_are_sentences(hub: ModelHub, tmp_path: Path):
    expected = {
        f"{DATASET!r}, column='body'": "row 0 of the dataset some/texts has no column 'body'",
        f"{DATASET!r}, revision='nowhere'": "cannot be read",
        f"{DATASET!r}, split='tests'": "cannot be read",
        "'some/nothing'": "cannot be read",
    }
    tries = "".join(
        f"try:\n    list(TextSource({source}).pinned().documents())\n"
        "except ModelError as error:\n    print(error)\n"
        for source in expected
    )
    imports = (
        "from saecli.base.errors import ModelError\nfrom saecli.extract.texts import TextSource\n"
    )
    done = run(hub, tmp_path, "-c", imports + tries)
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, said in zip(lines, expected.values(), strict=True):
        assert said in line


CHATS = [
    [{"role": "user", "content": "And then? " * 4}, {"role": "assistant", "content": "So it goes."}]
] * 40
TEMPLATE = Path(__file__).parents[1] / "templates" / "gemma.jinja"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"HF_ENDPOINT": "http://hub.invalid"}, {"HF_HUB_OFFLINE": "1"}]
)
def test_a_finished_store_is_known_without_a_network(hub: ModelHub, tmp_path: Path, environment):
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": CHATS}), path)
    hub.add("some/chats", {"train.parquet": path.read_bytes()})
    chats = ("--dataset", "some/chats", "--chat-template", str(TEMPLATE))
    for words in (("--dataset", DATASET), chats):
        command = ("-m", "saecli", "extract", "--model", "tiny-gemma2", "--rows", "400", *words)
        first = run(hub, tmp_path, *command)
        assert first.returncode == 0, first.stderr
        again = run(hub, tmp_path, *command, **environment)
        assert again.returncode == 0, again.stderr
        assert "stored already, by the same request" in again.stdout
        other = run(hub, tmp_path, *command, "--context", "16", **environment)
        assert other.returncode == 1 and "cannot be read" in other.stderr
        assert "dataset stdlib-docs or a local" in other.stderr


@pytest.mark.slow
def test_what_datasets_prepared_is_read_offline_if_it_is_the_commit(hub: ModelHub, tmp_path: Path):
    early = hub.repos[DATASET].head
    prepare = (
        f"import datasets; datasets.load_dataset({DATASET!r}, split='train', revision={early!r})"
    )
    assert run(hub, tmp_path, "-c", prepare).returncode == 0
    command = ("-m", "saecli", "extract", "--model", "tiny-gemma2", "--rows", "400")
    words = (*command, "--dataset", DATASET, "--dataset-revision")
    done = run(hub, tmp_path, *words, early, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    done = run(hub, tmp_path, *words, "0" * 40, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "another commit than 0000" in done.stderr


def test_a_commit_needs_no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision in ("0" * 40, "main", None):
        identity = TextSource(DATASET, revision=revision).pinned().identity()
        assert json.loads(json.dumps(identity)) == identity
        assert identity["dataset_revision"] == revision
