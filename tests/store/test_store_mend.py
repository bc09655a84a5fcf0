"""Shards that are damaged or missing are written anew by the command that made them, and no others are touched."""

import hashlib
import os
import shutil

import numpy as np
import pytest
import store_producer
from homes import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from storing import collect, make_meta, make_store, memory_folder

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore
from saecli.store.writer import StoreWriter

ROWS = np.random.default_rng(0).standard_normal((250, 4), np.float32)
DAMAGE = {
    "bit": lambda path: path.write_bytes(_flip(path.read_bytes())),
    "short": lambda path: os.truncate(path, 100),
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
}


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def files(store):
    """Every shard's bytes, inode and time of its last change."""
    return {path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_ino, path.stat().st_mtime_ns)
            for path in (store / "shards").iterdir()}


@pytest.mark.slow
@given(st.dictionaries(st.integers(0, 11), st.sampled_from(sorted(DAMAGE))), st.integers(0, 60),
       st.one_of(st.none(), st.integers(200, 900)))
def test_mended_equals_never_damaged_and_other_shards_are_untouched(damage, stop, limit):
    with memory_folder() as folder:
        store_producer.write(folder / "whole", limit)
        with StoreWriter.open(folder / "s", store_producer.META, limit=limit) as writer:  # interrupted after any block
            for cursor, rows, columns, dropped in list(store_producer.blocks(None))[:stop]:
                if not writer.full:
                    writer.append(rows, columns, cursor, dropped)
        if not (folder / "s").exists():
            return
        before = files(folder / "s")
        hurt = {f"{index:05d}.h5": how for index, how in damage.items() if f"{index:05d}.h5" in before}
        for name, how in hurt.items():
            DAMAGE[how](folder / "s" / "shards" / name)
        store_producer.write(folder / "s", limit)
        after, whole = files(folder / "s"), files(folder / "whole")
        assert {name: entry[0] for name, entry in after.items()} == {name: entry[0] for name, entry in whole.items()}
        assert {name: after[name] for name in before.keys() - hurt} == {
            name: entry for name, entry in before.items() if name not in hurt}
        metas = [ActivationStore.open(folder / name).meta.to_json() | {"created": ""} for name in ("s", "whole")]
        assert metas[0] == metas[1]


@pytest.mark.slow
def test_killed_while_it_mends_and_run_again_equals_never_damaged(produce):
    kills = 0
    with memory_folder() as folder:
        store_producer.write(folder / "whole")
        expected = files(folder / "whole")
        for kill_at in range(1, 60, 3):
            shutil.rmtree(folder / "s", ignore_errors=True)
            shutil.copytree(folder / "whole", folder / "s")
            for index, how in ((2, "gone"), (5, "bit"), (len(expected) - 1, "short")):
                DAMAGE[how](folder / "s" / "shards" / f"{index:05d}.h5")
            kills += produce(folder / "s", kill_at=kill_at)[0] < 0
            assert produce(folder / "s") == (0, "")
            assert {name: entry[0] for name, entry in files(folder / "s").items()} == {
                name: entry[0] for name, entry in expected.items()}
            assert not ActivationStore.open(folder / "s").verify()
    assert kills > 10


def test_a_source_that_changed_mends_nothing(tmp_path):
    make_store(tmp_path / "s", ROWS)
    (tmp_path / "s" / "shards" / "00001.h5").unlink()
    before = files(tmp_path / "s")
    for rows, said in ((ROWS[:150], "expected 100 rows for shard 00001.h5, got 50 rows"),
                       (np.where(np.arange(250)[:, None] == 120, np.nan, ROWS).astype(np.float32),
                        "cannot mend shard 00001.h5 of .*: expected its last row to be row 15 of {'row': 185}, got "
                        "row 16 of {'row': 185}")):
        with (StoreWriter.open(tmp_path / "s", make_meta(4)) as writer,
              pytest.raises(StoreError, match=f"{said}.*; the source has changed, so remove the store")):
            for start in range(writer.cursor["row"], len(rows), 37):
                writer.append(rows[start : start + 37], {}, {"row": start})
            writer.finish()
        assert files(tmp_path / "s") == before


def test_rows_that_come_out_with_other_bytes_are_recorded_and_said(tmp_path):
    make_store(tmp_path / "s", ROWS)
    both = ["00001.h5", "00002.h5"]
    for shift, altered in ((1e-3, both), (1e-3, []), (0, both)):
        for name in both:
            (tmp_path / "s" / "shards" / name).unlink()
        rows = ROWS + np.float32(shift)
        with StoreWriter.open(tmp_path / "s", make_meta(4)) as writer:
            while not writer.complete:
                for start in range(writer.cursor["row"], 250, 37):
                    writer.append(rows[start : start + 37], {}, {"row": start})
                    if writer.full:
                        break
                writer.finish()
            assert writer.altered == altered
        store = ActivationStore.open(tmp_path / "s")
        assert not store.verify()
        np.testing.assert_array_equal(collect(store.split("all").sequential(64))[100:], rows[100:])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bit", pytest.param("gone", marks=pytest.mark.slow)])
def test_import_and_extract_again_mend_and_training_on_damage_is_refused(sae: CommandLine, how):
    for words, name in ((["import", "digits", "--shard-rows", "600"], "digits"),
                        (["extract", "--model", "tiny-gemma2", "--rows", "2000", "--shard-rows", "600",
                          "--batch-size", "4", "--name", "text"], "text")):
        assert sae(*words).status == 0
        folder = sae.home / "activations" / name
        before = files(folder)
        path = folder / "shards" / "00001.h5"
        DAMAGE[how](path)
        for refused in (sae("train", "--data", name, "--epochs", "1", "--d-sae", "8"), sae("list", "--check")):
            assert refused.status == 1
            assert f"shard {path} is " in refused.err
            assert "run the command that made the store again, which rewrites that shard" in refused.err
            assert refused.err.count("\n") == 1
        assert not (sae.home / "runs").exists()
        mended = sae(*words, "--json")
        assert mended.status == 0
        assert mended.json["cached"] is False
        assert f"{name}: rewriting 00001.h5\n" in mended.err
        after = files(folder)
        assert after.pop(path.name)[0] == before.pop(path.name)[0]
        assert after == before
        assert sae(*words, "--json").json["cached"] is True
        assert sae("list", "--check").status == 0


def test_damage_that_training_comes_upon_ends_it_by_name_and_is_mended_after(sae: CommandLine):
    """As a failing disk does it: no time of a file tells of the change."""
    words = ["import", "digits", "--shard-rows", "600"]
    sae(*words)
    assert sae("train", "--epochs", "2", "--d-sae", "8", "--name", "before").status == 0
    folder = sae.home / "activations" / "digits"
    path = folder / "shards" / "00001.h5"
    path.write_bytes(_flip(path.read_bytes()))
    while (folder / "store.json").stat().st_ctime_ns <= path.stat().st_ctime_ns:
        (folder / "store.json").chmod(0o644)
    for refused in (sae("eval", "before"), sae("train", "--epochs", "2", "--d-sae", "8", "--name", "during")):
        assert refused.status == 1
        assert f"shard {path} is damaged: expected" in refused.err
    assert not (sae.home / "runs" / "during").exists()
    assert "rewriting 00001.h5" in sae(*words).err
    assert sae("eval", "before").status == 0
