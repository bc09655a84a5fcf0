"""Damaged, foreign and newer files are refused by a sentence that names them; none of their rows is handed out."""

import hashlib
import json
import os

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import collect, make_store, memory_folder

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore

ROWS = np.random.default_rng(0).standard_normal((250, 4), np.float32)


def rewritten(path, **changes):
    """A shard's contents in a file that plain h5py wrote, with some of what it says changed, and its hash recorded."""
    with h5py.File(path) as file:
        values = {"data": file["activations"][:], "chunks": (8, 4)} | changes
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset(changes.pop("name", "activations"), **{k: v for k, v in values.items() if k != "name"})
    recorded(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), frame=None)


def recorded(path, **changes):
    """Change what store.json says of a shard."""
    marker = path.parents[1] / "store.json"
    document = json.loads(marker.read_text())
    document["shards"][int(path.stem)] |= changes
    marker.write_text(json.dumps(document))


def flipped(path, at, bit=4):
    """Flip a bit of a shard."""
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("damage", "said"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged|truncated"),
    (lambda path: path.write_bytes(path.read_bytes()[:1000]), "truncated"),
    (lambda path: path.write_bytes(b""), "truncated"),
    (lambda path: path.write_bytes(b"not HDF5" * 999), "is damaged: expected"),
    (lambda path: path.unlink(), "is missing"),
    (lambda path: (path.unlink(), path.mkdir()), "expected a file, got something else|truncated"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "expected a file, got something else|truncated"),
])
def test_a_damaged_shard_is_refused_by_name(tmp_path, ours, damage, said):
    store = make_store(tmp_path / "s", ROWS)
    path = tmp_path / "s" / "shards" / "00001.h5"
    if not ours:
        rewritten(path)
    damage(path)
    with pytest.raises(StoreError, match=rf"00001\.h5.*({said})"):
        collect(ActivationStore.open(tmp_path / "s").split("all").sequential(64))
    (problem,) = store.verify()
    assert "00001.h5" in problem


@pytest.mark.parametrize(("changes", "said"), [
    ({"name": "acts"}, "activations"),
    ({"data": ROWS[:101]}, r"expected shape \(101, 4\), got \(100, 4\)"),
    ({"data": np.ones((100, 5), np.float32), "chunks": (8, 5)}, r"expected shape \(100, 5\), got \(100, 4\)"),
    ({"data": ROWS[:100].astype(float)}, "expected type float64, got little-endian float32"),
    ({"data": ROWS[:100].astype(">f4")}, "expected type >f4, got little-endian float32"),
    ({"chunks": (10, 4)}, r"expected chunks of shape \(10, 4\), got \(8, 4\)"),
    ({"chunks": None}, r"expected chunks of shape None, got \(8, 4\)"),
    ({"data": np.zeros((100, 4), np.float32), "fletcher32": True}, "expected filters 1, got 0"),
    ({"data": np.zeros((100, 4), np.float32), "compression": "gzip"}, "expected filters 1, got 0|truncated"),
    ({"data": None, "shape": (100, 4), "dtype": "<f4"}, "expected chunks 0, got 13|truncated"),
])
def test_another_programs_shard_of_another_layout_is_refused_by_name(tmp_path, changes, said):
    make_store(tmp_path / "s", ROWS)
    path = tmp_path / "s" / "shards" / "00001.h5"
    rewritten(path)  # one of the same layout is as good
    np.testing.assert_array_equal(collect(ActivationStore.open(tmp_path / "s").split("all").sequential(64)), ROWS)
    rewritten(path, **changes)
    with pytest.raises(StoreError, match=rf"(?s)00001\.h5.*({said})|({said}).*00001\.h5"):
        collect(ActivationStore.open(tmp_path / "s").split("all").sequential(64))


@pytest.mark.parametrize(("index", "change", "said"), [
    (0, {"dtype": "float32"}, "expected type little-endian bfloat16, got little-endian float32"),
    (0, {"dtype": "float16"}, "expected type little-endian bfloat16, got little-endian float16"),
    (0, {"d_in": 3}, "expected shape (100, 4), got (100, 3)"),
    (0, {"d_in": 2**40}, "expected shape (100, 4), got (100, 1099511627776)"),
    (0, {"chunk_rows": 10}, "expected chunks of shape (8, 4), got (10, 4)"),
    (0, {"columns": ["label"]}, "expected columns ['document'], got ['label']"),
    (0, {"columns": []}, "expected columns ['document'], got []"),
    (2, {"rows": 49}, "expected shape (50, 4), got (49, 4)"),
    (2, {"rows": 51}, "expected shape (50, 4), got (51, 4)"),
    (0, {"frame": {"start": 64, "xxh3": "0" * 16}}, "expected its frame, got another"),
])
def test_a_store_json_that_does_not_fit_its_whole_shards_is_named_and_no_shard_is_blamed(tmp_path, index, change, said):
    store = make_store(tmp_path / "s", ROWS, "bfloat16", documents=np.arange(250))
    assert store.misfits() == []
    marker = tmp_path / "s" / "store.json"
    document = json.loads(marker.read_text())
    (document["shards"][index] if {"rows", "frame"} & change.keys() else document).update(change)
    marker.write_text(json.dumps(document))
    store = ActivationStore.open(tmp_path / "s")
    sentence = (f"{marker} does not fit shard {tmp_path / 's' / 'shards' / f'{index:05d}.h5'}, which is as it was "
                f"written: {said}; restore it, or remove the folder to go on without it")
    with pytest.raises(StoreError) as error:
        collect(store.split("all").sequential(64))
    assert [str(error.value)] == store.misfits() == [sentence]
    assert store.verify() == []


@pytest.mark.parametrize("frame", [True, False])
@given(st.data())
def test_one_flipped_bit_anywhere_is_refused_by_name_and_found_by_verify(frame, data):
    with memory_folder() as folder:
        store = make_store(folder / "s", ROWS[:100], "bfloat16", documents=np.arange(100))
        path = folder / "s" / "shards" / "00000.h5"
        if not frame:
            recorded(path, frame=None)  # as earlier versions wrote it
        flipped(path, data.draw(st.integers(0, path.stat().st_size - 1)), 1 << data.draw(st.integers(0, 7)))
        with pytest.raises(StoreError, match=r"00000\.h5 is damaged: expected (SHA-256|the XXH3-64)"):
            collect(ActivationStore.open(folder / "s").split("all").sequential(64))
        (problem,) = store.verify()
        assert f"shard {path} is damaged: expected SHA-256" in problem


@pytest.mark.parametrize("maps", [1, 256])
def test_a_shard_cut_short_after_it_was_first_read_is_refused(tmp_path, monkeypatch, maps):
    store = make_store(tmp_path / "s", ROWS)
    monkeypatch.setattr("saecli.store.shard.MappedShards.MAPS", maps)
    rows = store.split("all")
    np.testing.assert_array_equal(collect(rows.sequential(64)), ROWS)
    path = tmp_path / "s" / "shards" / "00000.h5"
    os.truncate(path, 1000)
    with pytest.raises(StoreError, match=r"00000\.h5 (was cut short|is truncated): expected \d+ bytes.*, got 1000"):
        collect(rows.sequential(64))


def test_a_shard_replaced_while_the_store_is_open_is_read_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.setattr("saecli.store.shard.MappedShards.MAPS", 1)
    store = make_store(tmp_path / "s", ROWS)
    rows = store.split("all")
    np.testing.assert_array_equal(collect(rows.sequential(64)), ROWS)
    path = tmp_path / "s" / "shards" / "00000.h5"
    whole = path.read_bytes()
    flipped(path, len(whole) // 2)
    with pytest.raises(StoreError, match=r"00000\.h5 is damaged"):
        collect(rows.sequential(64))
    path.with_name("new").write_bytes(whole)
    path.with_name("new").rename(path)
    np.testing.assert_array_equal(collect(ActivationStore.open(tmp_path / "s").split("all").sequential(64)), ROWS)


@pytest.mark.parametrize(("change", "said"), [
    ({"format_version": 2}, "expected format version 1 or older, got 2; upgrade saecli"),
    ({"format_version": None}, "format_version: expected a valid integer, got None"),
    ({"d_in": "4"}, "d_in: expected a valid integer, got '4'"),
    ({"d_in": 0}, "d_in must be from 1 to 1099511627776, got 0"),
    ({"chunk_rows": 10**30}, "chunk_rows must be from 0 to 1099511627776, got 1000000000000000000000000000000"),
    ({"dtype": "float8"}, "dtype must be one of float32, float16, bfloat16, got 'float8'"),
    ({"columns": ["mood"]}, "columns must be some of token_id, position, document, label, got 'mood'"),
    ({"shards": [{"file": "../../etc"}]}, r"expected a field shards\.0\.rows, got none"),
    ({"shards": [{"file": "../00000.h5", "rows": 1, "sha256": "", "dropped": {}, "resume": {"cursor": {}, "skip": 0}}]},
     r"expected shard 0 to be named 00000\.h5, got '\.\./00000\.h5'"),
    ({"shards": None}, "shards: expected a valid array, got None"),
    ({"shard_rows": 99}, r"expected 99 rows in shard 00000\.h5, got 100"),
])
def test_a_damaged_or_newer_store_json_is_refused_by_name(tmp_path, change, said):
    make_store(tmp_path / "s", ROWS)
    path = tmp_path / "s" / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreError, match=rf"store\.json: {said}"):
        ActivationStore.open(tmp_path / "s")


ODD = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 300), st.floats(), st.text(),
                st.sampled_from(["float32", "float16", [], {}, [[]], ["document"], 10**400]))


@given(st.data())
def test_a_fuzzed_store_json_gives_a_sentence_or_the_first_of_the_same_rows(data):
    with memory_folder() as folder:
        make_store(folder / "s", ROWS, documents=np.arange(250))
        marker = folder / "s" / "store.json"
        document = json.loads(marker.read_text())
        place, keys = document, []
        while isinstance(place, dict | list) and place and (not keys or data.draw(st.booleans())):
            parent, key = place, data.draw(st.sampled_from(sorted(place) if isinstance(place, dict)
                                                           else range(len(place))))
            place = parent[key]
            keys.append(key)
        if data.draw(st.booleans()):
            del parent[key]
        else:
            parent[key] = data.draw(ODD)
        marker.write_text(json.dumps(document))
        try:
            rows = collect(ActivationStore.open(folder / "s").split("all").sequential(64))
        except StoreError as error:
            assert "store.json" in str(error) or ".h5" in str(error) or "holds no whole shard yet" in str(error)
        else:
            np.testing.assert_array_equal(rows, ROWS[: len(rows)])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff", "[" * 100_000, "9" * 10_000])
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
