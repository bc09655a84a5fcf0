"""`sae extract` in several processes: real ones, started by torchrun, talking by gloo, and killed."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, make_run, random_sae
from launching import launched, own_words, together, torchrun
from storing import assert_same_pass, windows_of
from transformers import AutoModelForCausalLM

from saecli.extract.options import BUNDLED, TINY_GEMMA2
from saecli.store.reader import ActivationStore
from saecli.store.writer import saved_rows

WORDS = ("extract", "--model", "tiny-gemma2", "--layer", "1", "--site", "resid_post")
MANY = (*WORDS, "--rows", "36000", "--shard-rows", "1500", "--batch-size", "16")


def by_document(home: Path, name: str) -> tuple[np.ndarray, np.ndarray, ActivationStore]:
    """A store's rows in the order of the text, and their columns: document, position and token."""
    store = ActivationStore.open(home / "activations" / name)
    rows = store.split("all")
    columns = [
        np.concatenate(list(rows.column(one, 4096))) for one in ("token_id", "position", "document")
    ]
    order = np.argsort(columns[2], kind="stable")
    return (
        np.concatenate([batch.copy() for batch in rows.sequential(4096)])[order],
        np.stack(columns)[:, order],
        store,
    )


def shards_of(folder: Path) -> int:
    """How many shards the ranks have stored."""
    return len(list(folder.glob("ranks/*/shards/[0-9]*.h5")))


def assert_same_documents(home: Path, name: str, expected: str) -> None:
    """The store holds the rows of the same documents, but for the last bits, which depend on batches."""
    (x, columns, store), (wanted, wanted_columns, one) = (
        by_document(home, name),
        by_document(home, expected),
    )
    np.testing.assert_array_equal(columns, wanted_columns)
    np.testing.assert_allclose(x, wanted, rtol=0.02, atol=0.05)
    assert store.complete
    assert store.meta.request_hash == one.meta.request_hash
    assert store.meta.dropped == one.meta.dropped
    assert store.verify() == []


SITES = ("mlp_out", "resid_post")
BOTH = (
    "extract",
    "--model",
    "tiny-gemma2",
    "--layer",
    "1",
    "--site",
    SITES[0],
    "--site",
    SITES[1],
    "--max-norm-multiple",
    "1.05",
    "--rows",
    "11000",
    "--shard-rows",
    "450",
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home where two processes stored two sites, of which either drops rows."""
    home = tmp_path_factory.mktemp("home")
    done = together(2, "--home", home, *BOTH, "--name", "two", "--json")
    assert done.status == 0, done.err
    assert [store["rows"] for store in done.json["stores"]] == [11_000] * 2
    assert own_words(done.err) == []
    return home


@pytest.mark.long
def test_two_processes_drop_rows_from_both_sites(both: Path, monkeypatch, capsys):
    alone = CommandLine(both, monkeypatch, capsys)
    assert alone(*BOTH, "--name", "one").status == 0
    found = {
        name: [by_document(both, f"{name}-l1-{site}") for site in SITES] for name in ("one", "two")
    }
    for (_, columns, mlp), (_, others, post) in found.values():
        np.testing.assert_array_equal(columns, others)
        assert (
            min(
                store.meta.dropped[reason]
                for store in (mlp, post)
                for reason in ("beside", "high_norm")
            )
            > 30
        )
    (_, wanted, one), (_, columns, two) = found["one"][0], found["two"][0]
    assert two.meta.median_norm == pytest.approx(one.meta.median_norm, rel=1e-3)
    assert two.meta.dropped["high_norm"] == pytest.approx(
        one.meta.dropped["high_norm"], rel=0.3
    )  # of whole blocks
    last = min(
        columns[2].max(), wanted[2].max()
    )  # who makes up for rows left out decides the last documents
    for documents in (columns, wanted):
        assert (documents[2] < last - 20).sum() > 8_000
    np.testing.assert_array_equal(
        columns[:, columns[2] < last - 20], wanted[:, wanted[2] < last - 20]
    )
    lost = both / "activations" / "two-l1-mlp_out"
    before = shutil.move(lost, both / "before")  # alone, its rows would come in another order
    refused = alone(*BOTH, "--name", "two").err
    assert "expected the number of processes that began it, 2, got 1" in refused
    assert together(2, "--home", both, *BOTH, "--name", "two").status == 0
    assert_same_pass(lost, before)


@pytest.mark.long
def test_stores_of_a_killed_process_equal_whole_ones(both: Path):
    assert together(2, "--home", both, *BOTH, "--name", "whole").status == 0
    folders = [both / "activations" / f"killed-l1-{site}" for site in SITES]
    for _ in range(2):
        before = sum(map(shards_of, folders))
        with launched(torchrun(2), "--home", both, *BOTH, "--name", "killed") as started:
            started.until(lambda before=before: sum(map(shards_of, folders)) >= before + 4)
            os.kill(started.ranks()[1], signal.SIGKILL)
            assert started.done().status == 1
        # One rank's part of one store is lost: it is behind the others, which have its rows already.
        shutil.rmtree(folders[0] / "ranks" / "00001", ignore_errors=True)
    done = together(2, "--home", both, *BOTH, "--name", "killed")
    assert done.status == 0, done.err
    for folder in folders:
        assert_same_pass(folder, folder.with_name(folder.name.replace("killed", "whole")))


@pytest.mark.long
def test_two_processes_pack_the_documents_of_one(sae: CommandLine):
    words = (*WORDS, "--packed", "--rows", "5000")
    assert sae(*words, "--name", "one").status == 0
    assert together(2, "--home", sae.home, *words, "--name", "two").status == 0
    (_, columns, _), (_, wanted, _) = by_document(sae.home, "two"), by_document(sae.home, "one")
    np.testing.assert_array_equal(
        columns[[0, 2]], wanted[[0, 2]]
    )  # windows, and so positions, are others


@pytest.mark.long
def test_windows_and_effects_of_two_processes_are_those_of_one(sae: CommandLine):
    assert sae(*WORDS, "--rows", "5000", "--name", "one").status == 0
    assert together(2, "--home", sae.home, *WORDS, "--rows", "5000", "--name", "two").status == 0
    stores = [by_document(sae.home, name)[2] for name in ("one", "two")]
    assert sorted(windows_of(stores[0])) == sorted(windows_of(stores[1]))
    make_run(sae.home, "random", random_sae(d_in=stores[0].d_in, seed=0), data="one")
    measured = []
    for name in ("one", "two"):
        words = ("--data", name, "--model", "tiny-gemma2", "--tokens", "1000000", "--json")
        done = sae("eval", "random", *words)
        assert done.status == 0, done.err
        measured.append(done.json["runs"][0])
    one, two = measured
    assert one["tokens"] == two["tokens"] > 100
    for measure in ("ce_clean", "ce_spliced", "ce_zero", "kl"):
        assert two[measure] == pytest.approx(one[measure], rel=2e-3)


@pytest.mark.long
def test_two_processes_store_the_rows_of_two_models_as_one_does(sae: CommandLine, tmp_path: Path):
    other = shutil.copytree(BUNDLED[TINY_GEMMA2], tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.embed_tokens.weight.data *= 1.5
    model.save_pretrained(other)
    words = (*WORDS, "--model", other, "--rows", "5000")
    assert sae(*words, "--name", "one").status == 0
    assert together(2, "--home", sae.home, *words, "--name", "two").status == 0
    for name in ("tiny-gemma2", "other"):
        assert_same_documents(sae.home, f"two-{name}-l1-resid_post", f"one-{name}-l1-resid_post")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    assert together(2, "--home", home, *MANY, "--name", "whole").status == 0
    assert together(1, "--home", home, *MANY, "--name", "alone").status == 0
    assert_same_documents(home, "whole", "alone")
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
    before = saved_rows(folder)
    assert (
        1500 * (shards - 2) <= before < 36_000
    )  # each rank may have one that its store.json does not name yet
    other = together(3, "--home", whole, *MANY, "--name", name)
    assert other.status == 1
    assert "expected the number of processes that began it, 2, got 3" in own_words(other.err)[-1]
    again = together(2, "--home", whole, *MANY, "--name", name)
    assert again.status == 0, again.err
    assert own_words(again.err) == [f"{name}: going on after {before:,} rows"]
    assert_same_pass(folder, whole / "activations" / "whole")


@pytest.mark.long
def test_control_c_keeps_the_whole_shards_of_all_processes(whole: Path, monkeypatch, capsys):
    folder, words = whole / "activations" / "stopped", (*MANY, "--name", "stopped")
    with launched(torchrun(2), "--home", whole, *words) as started:
        started.until(lambda: shards_of(folder) >= 3)
        started.process.send_signal(signal.SIGINT)
        done = started.done()
    assert done.status != 0
    rows = saved_rows(folder)
    assert rows > 0
    assert own_words(done.err) == [
        f"stopped; {rows:,} rows are saved, and the same command goes on from there"
    ]
    alone = CommandLine(whole, monkeypatch, capsys)
    listed = next(
        store for store in alone("list", "--json").json["stores"] if store["name"] == "stopped"
    )
    assert (listed["rows"], listed["state"]) == (rows, "unfinished")
    refused = alone(*words)
    assert (
        "expected the number of processes that began it, 2, got 1; run the command with `torchrun"
        in refused.err
    )
    again = together(2, "--home", whole, *words)
    assert own_words(again.err) == [f"stopped: going on after {rows:,} rows"]
    (x, columns, _), (wanted, wanted_columns, _) = (
        by_document(whole, "stopped"),
        by_document(whole, "alone"),
    )
    np.testing.assert_array_equal(columns, wanted_columns)
    np.testing.assert_allclose(x, wanted, rtol=0.02, atol=0.05)


@pytest.mark.long
def test_an_error_names_its_process_once(sae: CommandLine, tmp_path: Path):
    refused = together(2, "--home", sae.home, "list")
    assert refused.status == 1
    assert own_words(refused.err)[-1].endswith(
        "sae list runs in one process: expected extract or train or finetune, "
        "which run in several, got 2 processes; run it without torchrun"
    )
    assert len(own_words(refused.err)) == 1
    wrong = together(2, "--home", sae.home, *WORDS, "--rows", "none")
    assert wrong.err.count("Invalid value for '--rows'") == 1
    missing = together(3, "--home", sae.home, *WORDS, "--dataset", tmp_path / "no.txt")
    assert missing.err.count("no.txt does not exist") == 1
