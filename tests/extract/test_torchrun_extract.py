"""`sae extract` in several processes: real ones, started by torchrun, talking by gloo, and killed."""

import json
import os
import re
import shutil
import signal
import time
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine
from launching import launched, own_words, together, torchrun
from storing import assert_same_pass, windows_of
from tiny_models import stored
from transformers import AutoModelForCausalLM

from saecli.base.home import Home
from saecli.extract.readers import stdlib_docstrings
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.store.reader import ActivationStore
from saecli.store.schema import rank_folder, read_meta

WORDS = ("extract", "--model", "tiny-gemma2", "--layer", "1", "--site", "resid_post")
MANY = (*WORDS, "--rows", "36000", "--shard-rows", "1500", "--batch-size", "16")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first docstrings, about 5,000 tokens, as a text that two processes read to its end."""
    path = tmp_path_factory.mktemp("text") / "docs.jsonl"
    texts = islice(stdlib_docstrings(), 90)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def by_document(home: Path, name: str) -> tuple[np.ndarray, np.ndarray, ActivationStore]:
    """A store's rows in the order of the text, and their columns: token, position and document."""
    store = ActivationStore.open(home / "activations" / name)
    rows, columns = stored(store.path)
    order = np.argsort(columns["document"], kind="stable")
    table = np.stack([columns[name] for name in ("token_id", "position", "document")])
    return rows[order], table[:, order], store


def shards_of(folder: Path) -> int:
    """How many shards the ranks have stored."""
    return len(list(folder.glob("shards/*/shards/[0-9]*.h5")))


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    other = shutil.copytree(BUNDLED[TINY_GEMMA2], tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.embed_tokens.weight.data *= 1.5
    model.save_pretrained(other)
    return other


@pytest.mark.long
def test_two_processes_store_the_rows_of_one_by_rank(sae: CommandLine, text, other_model: Path):
    words = (*WORDS, "--model", other_model, "--site", "mlp_out", "--dataset", text, "--rows")
    assert sae(*words, "100000", "--name", "one").status == 0
    assert together(2, "--home", sae.home, *words, "100000", "--name", "two").status == 0
    for model, site in product((TINY_GEMMA2, "other"), ("resid_post", "mlp_out")):
        label = f"{model}-l1-{site}"
        x, columns, two = by_document(sae.home, f"two-{label}")
        expected, expected_columns, one = by_document(sae.home, f"one-{label}")
        np.testing.assert_array_equal(columns, expected_columns)
        np.testing.assert_allclose(x, expected, rtol=0.02, atol=0.05)
        assert two.complete and two.verify() == []
        assert sorted(windows_of(two)) == sorted(windows_of(one))
        assert two.meta.request_hash == one.meta.request_hash
        assert two.meta.dropped == one.meta.dropped
        ranks = stored(two.path)[1]["document"] % 2
        assert (np.diff(ranks) >= 0).all() and 0 < ranks.sum() < len(ranks)
    fewer = together(3, "--home", sae.home, *words, "1000", "--name", "three", "--json")
    assert [store["rows"] for store in fewer.json["stores"]] == [1000] * 4


@pytest.mark.long
def test_two_processes_drop_the_rows_of_high_norm_that_one_does(sae: CommandLine, text):
    words = (*WORDS, "--site", "mlp_out", "--dataset", text, "--max-norm-multiple", "1.05")
    assert sae(*words, "--name", "one").status == 0
    assert together(2, "--home", sae.home, *words, "--name", "two").status == 0
    for site in ("resid_post", "mlp_out"):
        _, columns, two = by_document(sae.home, f"two-l1-{site}")
        _, expected, one = by_document(sae.home, f"one-l1-{site}")
        np.testing.assert_array_equal(columns, expected)
        assert two.meta.dropped == one.meta.dropped and two.meta.dropped["high_norm"] > 100
        folders = (two.path, *(rank_folder(two.path, rank) for rank in (0, 1)))
        (median,) = {read_meta(folder).median_norm for folder in folders}
        assert median == pytest.approx(one.meta.median_norm, rel=1e-5)


@pytest.mark.long
def test_two_processes_pack_the_documents_of_one(sae: CommandLine, text):
    words = (*WORDS, "--packed", "--dataset", text)
    assert sae(*words, "--name", "one").status == 0
    assert together(2, "--home", sae.home, *words, "--name", "two").status == 0
    (_, columns, _), (_, expected, _) = by_document(sae.home, "two"), by_document(sae.home, "one")
    # Windows, and so positions, differ.
    np.testing.assert_array_equal(columns[[0, 2]], expected[[0, 2]])


@pytest.mark.long
def test_a_rank_without_documents_stores_no_row(sae: CommandLine, tmp_path: Path):
    (tmp_path / "one.txt").write_text("A paragraph\nof two lines\n")
    words = (*WORDS, "--dataset", tmp_path / "one.txt", "--name", "few", "--json")
    done = together(3, "--home", sae.home, *words)
    assert done.json["rows"] == len(by_document(sae.home, "few")[0]) > 5
    assert Home(sae.home).stores.unfinished() == []


@pytest.mark.long
def test_stores_of_a_killed_process_equal_whole_ones(tmp_path: Path):
    words = (*WORDS, "--site", "mlp_out", "--rows", "11000", "--shard-rows", "450")
    assert together(2, "--home", tmp_path, *words, "--name", "whole").status == 0
    folders = [tmp_path / "activations" / f"killed-l1-{site}" for site in ("mlp_out", "resid_post")]
    for _ in range(2):
        before = sum(map(shards_of, folders))
        with launched(torchrun(2), "--home", tmp_path, *words, "--name", "killed") as started:
            started.until(lambda before=before: sum(map(shards_of, folders)) >= before + 4)
            os.kill(started.ranks()[1], signal.SIGKILL)
            assert started.done().status == 1
        # One rank's part of one store is lost: it is behind the others, which have its rows already.
        shutil.rmtree(folders[0] / "shards" / "00001", ignore_errors=True)
    together(2, "--home", tmp_path, *words, "--name", "killed").succeeds()
    for folder in folders:
        assert_same_pass(folder, folder.with_name(folder.name.replace("killed", "whole")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    assert together(2, "--home", home, *MANY, "--name", "whole").status == 0
    return home


@pytest.mark.long
@pytest.mark.parametrize(("victim", "shards"), [(0, 3), (1, 8)])
def test_a_killed_process_ends_the_others_and_is_resumed(whole: Path, victim: int, shards: int):
    name = f"killed-{victim}"
    folder = whole / "activations" / name
    with launched(torchrun(2), "--home", whole, *MANY, "--name", name) as started:
        started.until(lambda: shards_of(folder) >= shards)
        survivor = started.ranks()[1 - victim]
        os.kill(started.ranks()[victim], signal.SIGKILL)
        killed = time.monotonic()
        done = started.done()
        assert time.monotonic() - killed < 60
    assert not Path(f"/proc/{survivor}").exists()
    assert done.status == 1
    said = own_words(done.err)
    assert said[-1].startswith(f"sae: process {1 - victim} of 2: ")
    assert "run the same command again to go on from what was saved" in said[-1]
    before = read_meta(folder).rows
    # Each rank may have one that its store.json does not name yet.
    assert 1500 * (shards - 2) <= before < 36_000
    refused = together(3, "--home", whole, *MANY, "--name", name)  # torchrun adds a traceback
    assert refused.status == 1
    assert "expected the number of processes that began it, 2, got 3" in refused.err
    again = together(2, "--home", whole, *MANY, "--name", name).succeeds()
    assert own_words(again.err) == [f"{name}: going on after {before:,} rows"]
    # The other process, which is told to end, may have stored a short shard.
    assert_same_pass(folder, whole / "activations" / "whole", but_for=("shards",))


@pytest.mark.long
def test_control_c_keeps_the_whole_shards_of_all_processes(whole: Path, monkeypatch, capsys):
    folder, words = whole / "activations" / "stopped", (*MANY, "--name", "stopped")
    with launched(torchrun(2), "--home", whole, *words) as started:
        started.until(lambda: shards_of(folder) >= 3)
        started.process.send_signal(signal.SIGINT)
        done = started.done()
    assert done.status != 0
    rows = read_meta(folder).rows
    (said,) = own_words(done.err)
    found = re.fullmatch(
        "stopped; at least (.*) rows are saved, and the same command goes on from there", said
    )
    assert 0 < int(found[1].replace(",", "")) <= rows
    alone = CommandLine(whole, monkeypatch, capsys)
    listed = {store["name"]: store for store in alone("list --json").json["stores"]}["stopped"]
    assert (listed["rows"], listed["state"]) == (rows, "unfinished")
    refused = alone(*words)
    assert "expected the number of processes that began it, 2, got 1; run" in refused.err
    again = together(2, "--home", whole, *words)
    assert own_words(again.err) == [f"stopped: going on after {rows:,} rows"]
    assert_same_pass(folder, whole / "activations" / "whole", but_for=("shards",))


@pytest.mark.long
def test_an_error_names_its_process(sae: CommandLine, tmp_path: Path):
    refused = together(2, "--home", sae.home, "list")
    assert refused.status == 1
    assert "sae list runs in one process: expected extract or" in own_words(refused.err)[-1]
    wrong = together(2, "--home", sae.home, *WORDS, "--rows", "none")
    assert "--rows must be a valid integer" in wrong.err
    few = together(2, "--home", sae.home, *WORDS, "--rows", "1")
    assert "--rows must be at least the number of processes, 2, got 1" in few.err
    missing = together(3, "--home", sae.home, *WORDS, "--dataset", tmp_path / "no.txt")
    assert "no.txt does not exist" in missing.err
