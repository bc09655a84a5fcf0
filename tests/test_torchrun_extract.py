"""`sae extract` in several processes: real ones, started by torchrun, talking by gloo, and killed."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine
from launching import launched, own_words, together, torchrun

from saecli.store import ActivationStore

WORDS = ("extract", "--model", "tiny-gemma2", "--layer", "1", "--site", "resid_post")
MANY = (*WORDS, "--rows", "36000", "--shard-rows", "1500", "--batch-size", "16")


def by_place(home: Path, name: str) -> tuple[np.ndarray, np.ndarray, ActivationStore]:
    """Rows in an order of their own, and their columns: document, position and token, with the rows' first bytes."""
    store = ActivationStore.open(home / "activations" / name)
    rows = store.split("all")
    columns = [np.concatenate(list(rows.column(one, 4096))) for one in ("token_id", "position", "document")]
    x = np.concatenate([batch.copy() for batch in rows.sequential(4096)])
    order = np.lexsort((*x.T[:4], *columns))
    return x[order], np.stack(columns)[:, order], store


def shards_of(folder: Path) -> int:
    """How many shards a store has, as far as it says."""
    return len(ActivationStore.open(folder).meta.shards) if (folder / "store.json").exists() else 0


def assert_same_rows(home: Path, name: str, expected: str) -> None:
    (x, columns, store), (wanted, wanted_columns, one) = by_place(home, name), by_place(home, expected)
    np.testing.assert_array_equal(columns, wanted_columns)
    np.testing.assert_array_equal(x, wanted)  # bit for bit: who computes a block changes nothing of it
    assert store.complete
    assert store.meta.request_hash == one.meta.request_hash
    assert store.meta.dropped == one.meta.dropped
    assert store.meta.norm_quantiles == one.meta.norm_quantiles
    assert store.verify() == []


@pytest.mark.slow
def test_two_processes_store_the_rows_of_one_and_one_of_them_speaks(sae: CommandLine):
    words = (*WORDS, "--site", "mlp_out", "--rows", "11000", "--shard-rows", "900")
    assert sae(*words, "--name", "one").status == 0
    done = together(2, "--home", sae.home, *words, "--name", "two", "--json")
    assert done.status == 0, done.err
    assert [store["rows"] for store in done.json["stores"]] == [11_000, 11_000]
    assert own_words(done.err) == []
    for site in ("l1-resid_post", "l1-mlp_out"):
        assert_same_rows(sae.home, f"two-{site}", f"one-{site}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    assert together(1, "--home", home, *MANY, "--name", "whole").status == 0
    return home


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_process_killed_ends_the_others_and_other_numbers_of_them_complete_the_store(whole: Path, victim: int):
    name = f"killed-{victim}"
    folder = whole / "activations" / name
    with launched(torchrun(2), "--home", whole, *MANY, "--name", name) as started:
        started.until(lambda: shards_of(folder) > 3)
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
    before = ActivationStore.open(folder)
    assert 0 < before.rows < 36_000
    again = together(3, "--home", whole, *MANY, "--name", name)
    assert again.status == 0, again.err
    assert own_words(again.err)[0] == f"{name}: going on after {before.rows:,} rows"
    assert_same_rows(whole, name, "whole")


@pytest.mark.slow
def test_control_c_keeps_whole_shards_and_one_process_completes_the_store(whole: Path, monkeypatch, capsys):
    folder = whole / "activations" / "stopped"
    with launched(torchrun(2), "--home", whole, *MANY, "--name", "stopped") as started:
        started.until(lambda: shards_of(folder) > 3)
        started.process.send_signal(signal.SIGINT)
        done = started.done()
    assert done.status != 0
    rows = ActivationStore.open(folder).rows
    assert own_words(done.err) == [f"stopped; {rows:,} rows are saved, and the same command goes on from there"]
    alone = CommandLine(whole, monkeypatch, capsys)
    assert alone(*MANY, "--name", "stopped").status == 0
    assert_same_rows(whole, "stopped", "whole")


@pytest.mark.long
def test_a_damaged_shard_of_several_processes_is_written_anew_by_one_or_by_several(whole: Path, monkeypatch, capsys):
    assert together(2, "--home", whole, *MANY, "--name", "damaged").status == 0
    shards = sorted((whole / "activations" / "damaged" / "shards").glob("*.h5"))
    before = [shard.read_bytes() for shard in shards]
    alone = CommandLine(whole, monkeypatch, capsys)
    for mend in (lambda *words: together(3, "--home", whole, *words), alone):
        shards[2].write_bytes(before[2][:100_000] + b"x" + before[2][100_001:])
        shards[7].unlink()
        done = mend(*MANY, "--name", "damaged")
        assert done.status == 0, done.err
        assert "writing anew 00002.h5, 00007.h5" in done.err
        assert [shard.read_bytes() for shard in shards] == before
    assert_same_rows(whole, "damaged", "whole")


@pytest.mark.long
def test_an_error_names_its_process_once_and_other_commands_are_refused(sae: CommandLine, tmp_path: Path):
    refused = together(2, "--home", sae.home, "list")
    assert refused.status == 1
    assert own_words(refused.err)[-1].endswith("sae list runs in one process: expected extract or train, which run in "
                                               "several, got 2 processes; run it without torchrun")
    assert len(own_words(refused.err)) == 1
    wrong = together(2, "--home", sae.home, *WORDS, "--rows", "none")
    assert wrong.err.count("Invalid value for '--rows'") == 1
    missing = together(3, "--home", sae.home, *WORDS, "--dataset", tmp_path / "no.txt")
    assert missing.err.count("no.txt does not exist") == 1
