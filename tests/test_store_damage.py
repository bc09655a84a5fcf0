"""Damaged, foreign and newer files are refused by a sentence that names them; none of their rows is handed out."""

import json

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storing import collect, make_store, memory_folder

from saecli.errors import StoreError
from saecli.store import ActivationStore

ROWS = np.random.default_rng(0).standard_normal((250, 4), np.float32)


def rewritten(path, **changes):
    """A shard's contents in a file that plain h5py wrote, with some of what it says changed."""
    with h5py.File(path) as file:
        values = {"data": file["activations"][:], "chunks": (8, 4)} | changes
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset(changes.pop("name", "activations"), **{k: v for k, v in values.items() if k != "name"})


@pytest.mark.parametrize(("damage", "said"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated"),
    (lambda path: path.write_bytes(path.read_bytes()[:1000]), "truncated"),
    (lambda path: path.write_bytes(b""), "cannot read shard"),
    (lambda path: path.write_text("not HDF5"), "file signature not found"),
    (lambda path: path.unlink(), "is missing"),
    (lambda path: (path.unlink(), path.mkdir()), "Is a directory; restore it"),
    (lambda path: rewritten(path, name="acts"), "activations"),
    (lambda path: rewritten(path, data=ROWS[:99]), r"expected shape \(100, 4\), got \(99, 4\)"),
    (lambda path: rewritten(path, data=ROWS[:100, :3], chunks=(8, 3)), r"expected shape \(100, 4\), got \(100, 3\)"),
    (lambda path: rewritten(path, data=ROWS[:100].astype(float)), "expected type little-endian float32, got float64"),
    (lambda path: rewritten(path, data=ROWS[:100].astype(">f4")), "expected type little-endian float32, got >f4"),
    (lambda path: rewritten(path, chunks=(10, 4)), r"expected chunks of shape \(8, 4\), got \(10, 4\)"),
    (lambda path: rewritten(path, chunks=None), r"expected chunks of shape \(8, 4\), got None"),
    (lambda path: rewritten(path, compression="gzip"), "expected filters 0, got 1"),
    (lambda path: rewritten(path, data=None, shape=(100, 4), dtype="<f4"), "expected chunks 13, got 0"),
])
def test_a_damaged_or_foreign_shard_is_refused_by_name(tmp_path, damage, said):
    store = make_store(tmp_path / "s", ROWS)
    path = tmp_path / "s" / "shards" / "00001.h5"
    rewritten(path)  # another program's file of the same layout is as good
    np.testing.assert_array_equal(collect(store.split("all").sequential(64)), ROWS)
    damage(path)
    with pytest.raises(StoreError, match=rf"(?s)00001\.h5.*{said}|{said}.*00001\.h5"):
        collect(ActivationStore.open(tmp_path / "s").split("all").sequential(64))
    problems = list(store.verify())
    assert len(problems) == 1
    assert "00001.h5" in problems[0]


def test_a_single_flipped_bit_is_found_and_its_shard_named(tmp_path):
    store = make_store(tmp_path / "s", ROWS, "bfloat16")
    path = tmp_path / "s" / "shards" / "00002.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    (problem,) = store.verify()
    assert f"shard {path} is damaged: expected SHA-256" in problem


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_header_bytes_give_a_sentence_or_the_same_rows(data):
    with memory_folder() as folder:
        store = make_store(folder / "s", ROWS[:100], documents=np.arange(100))
        path = folder / "s" / "shards" / "00000.h5"
        content = bytearray(path.read_bytes())
        with h5py.File(path) as file:
            start = file["activations"].id.get_chunk_info(0).byte_offset
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, start - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            rows = collect(ActivationStore.open(folder / "s").split("all").sequential(64))
        except StoreError as error:
            assert "00000.h5" in str(error)
        else:
            np.testing.assert_array_equal(rows, ROWS[:100])
        assert len(list(store.verify())) <= 1


def test_a_shard_cut_short_after_it_was_first_read_is_refused(tmp_path, monkeypatch):
    store = make_store(tmp_path / "s", ROWS)
    monkeypatch.setattr("saecli.store.shard.MappedShards.MAPS", 1)
    rows = store.split("all")
    np.testing.assert_array_equal(collect(rows.sequential(64)), ROWS)
    path = tmp_path / "s" / "shards" / "00000.h5"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StoreError, match=r"00000\.h5 was cut short: expected \d+ bytes, got 1000"):
        collect(rows.sequential(64))


@pytest.mark.parametrize(("change", "said"), [
    ({"format_version": 2}, "expected format version 1 or older, got 2; upgrade saecli"),
    ({"format_version": None}, "expected field 'format_version' to be of type int, got None"),
    ({"d_in": "4"}, "expected field 'd_in' to be of type int, got '4'"),
    ({"d_in": 0}, "d_in must be at least 1, got 0"),
    ({"dtype": "float8"}, "cannot store 'float8'; expected one of float32, float16, bfloat16"),
    ({"columns": ["mood"]}, "cannot store column 'mood'"),
    ({"shards": [{"file": "../../etc"}]}, "expected field 'rows'"),
    ({"shards": [{"file": "../00000.h5", "rows": 1}]}, r"expected shard 0 to be named 00000\.h5, got '\.\./00000\.h5'"),
    ({"shard_rows": 99}, r"expected 99 rows in shard 00000\.h5, got 100"),
])
def test_a_damaged_or_newer_store_json_is_refused_by_name(tmp_path, change, said):
    make_store(tmp_path / "s", ROWS)
    path = tmp_path / "s" / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=rf"store\.json: {said}"):
        ActivationStore.open(tmp_path / "s")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff"])
def test_a_store_json_that_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError, match=r"cannot read .*store\.json"):
        ActivationStore.open(tmp_path)


def test_files_that_store_json_does_not_list_are_ignored(tmp_path):
    store = make_store(tmp_path / "s", ROWS)
    (tmp_path / "s" / "shards" / "00003.h5").write_text("left by a killed process")
    (tmp_path / "s" / "shards" / ".00003.h5.partial").write_text("so was this")
    assert ActivationStore.open(tmp_path / "s").rows == store.rows == 250
    assert not list(store.verify())
