"""Damaged, foreign and newer files are refused by a sentence that names them; none of their rows is handed out."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import collect, make_store, memory_folder

from saecli.base.errors import StoreError
from saecli.store.reader import ActivationStore

ROWS = np.random.default_rng(0).standard_normal((250, 4), np.float32)


def flip(path, at, bit=4):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def read(folder):
    return collect(ActivationStore.open(folder / "s").split("all").sequential(64))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "truncated"),
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_bytes(b"not HDF5" * 999), "damaged, or store.json does not fit"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_damaged_shard_is_refused_by_name_and_not_resumed_from(tmp_path, damage, said):
    store = make_store(tmp_path / "s", ROWS)
    damage(tmp_path / "s" / "shards" / "00001.h5")
    with pytest.raises(StoreError, match=rf"00001\.h5.*({said}).* remove it with `sae rm s`"):
        read(tmp_path)
    (problem,) = store.verify()
    assert "00001.h5" in problem


@pytest.mark.parametrize(
    ("index", "change", "said"),
    [
        (0, {"dtype": "float16"}, "expected type bfloat16, got float16"),
        (0, {"columns": ["role"]}, "expected columns ['document'], got ['role']"),
        (0, {"columns": []}, "expected columns ['document'], got []"),
        (2, {"rows": 49}, "expected shape (50, 4), got (49, 4)"),
        (0, {"world": {"features": 3, "sha256": ""}}, "expected known features False, got True"),
        (0, {"dtype": "float32"}, None),
        (0, {"d_in": 3}, None),
        (0, {"d_in": 2**40}, None),
        (0, {"chunk_rows": 9}, None),
        (0, {"frame": {"start": 64, "xxh3": "0" * 16}}, None),
    ],
)
def test_a_store_json_that_does_not_fit_its_shards_is_named(tmp_path, index, change, said):
    make_store(tmp_path / "s", ROWS, "bfloat16", documents=np.arange(250))
    marker = tmp_path / "s" / "store.json"
    document = json.loads(marker.read_text())
    (document["shards"][index] if {"rows", "frame"} & change.keys() else document).update(change)
    marker.write_text(json.dumps(document))
    path = tmp_path / "s" / "shards" / f"{index:05d}.h5"
    with pytest.raises(StoreError) as error:
        read(tmp_path)
    sentence = str(error.value)
    assert sentence in ActivationStore.open(tmp_path / "s").verify()
    expected = f"{marker} does not fit shard {path}, which is as it was written: {said}; restore it"
    assert (expected if said else f"shard {path} is") in sentence


@given(st.data())
def test_one_flipped_bit_anywhere_is_refused_by_name_and_found_by_verify(data):
    with memory_folder() as folder:
        store = make_store(folder / "s", ROWS[:100], "bfloat16", documents=np.arange(100))
        path = folder / "s" / "shards" / "00000.h5"
        flip(
            path,
            data.draw(st.integers(0, path.stat().st_size - 1)),
            1 << data.draw(st.integers(0, 7)),
        )
        with pytest.raises(StoreError, match=r"00000\.h5 is damaged.* expected the XXH3-64"):
            read(folder)
        (problem,) = store.verify()
        assert f"shard {path} is damaged" in problem


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = make_store(tmp_path_factory.mktemp("whole") / "s", ROWS).path
    return json.loads((path / "store.json").read_text())


SHARD = {
    "file": "../00000.h5",
    "rows": 1,
    "resume": {"cursor": {}, "skip": 0},
    "frame": {"start": 0, "xxh3": ""},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 4}, "expected format version 3 or older, got 4; upgrade saecli"),
        ({"format_version": 2}, "expected format version 3, got 2, of an older saecli"),
        ({"format_version": None}, "format_version: expected a whole number, got None"),
        ({"d_in": "4"}, "d_in: expected a whole number, got '4'"),
        ({"d_in": 0}, "d_in: expected at least 1, got 0"),
        ({"chunk_rows": 10**30}, "chunk_rows: expected at most 1099511627776, got 10000"),
        ({"dtype": "float8"}, "dtype: expected float32, float16 or bfloat16, got 'float8'"),
        ({"columns": ["mood"]}, "columns: expected some of token_id, .*, role, .* got 'mood'"),
        ({"shards": [{"file": "../../etc"}]}, r"expected a field shards\.0\.rows, got none"),
        ({"shards": [SHARD]}, r"expected shard 0 to be named 00000\.h5, got '\.\./00000\.h5'"),
        ({"shards": [SHARD | {"frame": None}]}, r"shards\.0\.frame: expected"),
        ({"shards": None}, "shards: expected a valid array, got None"),
        ({"ranks": 2}, "expected no list of shards"),
        ({"shard_rows": 99}, r"expected 99 rows in shard 00000\.h5, got 100"),
        *((text, "") for text in ("", "{", "[]", "null", "\x00\xff", "[" * 100_000, "9" * 10_000)),
    ],
)
def test_a_damaged_or_newer_store_json_is_refused_by_name(tmp_path, document, change, said):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "store.json").write_text(
        change if isinstance(change, str) else json.dumps(document | change)
    )
    with pytest.raises(StoreError, match=rf"cannot read .*store\.json: {said}"):
        ActivationStore.open(tmp_path / "s")


@pytest.mark.parametrize("maps", [1, 256])
def test_a_shard_that_changes_while_the_store_is_open_is_checked_again(tmp_path, monkeypatch, maps):
    monkeypatch.setattr("saecli.store.shard.Chunks.MAPS", maps)
    path = tmp_path / "s" / "shards" / "00000.h5"
    rows = make_store(tmp_path / "s", ROWS).split("all")
    np.testing.assert_array_equal(collect(rows.sequential(64)), ROWS)
    if maps == 1:
        flip(path, path.stat().st_size // 2)
        with pytest.raises(StoreError, match=r"00000\.h5 is damaged"):
            collect(rows.sequential(64))
    os.truncate(path, 1000)
    with pytest.raises(StoreError, match=r"00000\.h5 (was cut short|is truncated): .*, got 1000"):
        collect(rows.sequential(64))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 300),
    st.floats(),
    st.text(),
    st.sampled_from(["float32", "float16", [], {}, [[]], ["document"], 10**400]),
)


@given(st.data())
def test_a_fuzzed_store_json_gives_a_sentence_or_the_same_rows(data):
    with memory_folder() as folder:
        make_store(folder / "s", ROWS, documents=np.arange(250))
        marker = folder / "s" / "store.json"
        document = json.loads(marker.read_text())
        place, keys = document, []
        while isinstance(place, dict | list) and place and (not keys or data.draw(st.booleans())):
            choices = sorted(place) if isinstance(place, dict) else range(len(place))
            parent, key = place, data.draw(st.sampled_from(choices))
            place = parent[key]
            keys.append(key)
        if data.draw(st.booleans()):
            del parent[key]
        else:
            parent[key] = data.draw(ODD)
        marker.write_text(json.dumps(document))
        try:
            rows = read(folder)
        except StoreError as error:
            assert any(said in str(error) for said in ("store.json", ".h5", "holds no whole shard"))
        else:
            np.testing.assert_array_equal(rows, ROWS[: len(rows)])


def test_files_that_store_json_does_not_list_are_ignored(tmp_path):
    store = make_store(tmp_path / "s", ROWS)
    (tmp_path / "s" / "shards" / "00003.h5").write_text("left by a killed process")
    (tmp_path / "s" / "shards" / ".00003.h5.partial").write_text("so was this")
    assert ActivationStore.open(tmp_path / "s").rows == store.rows == 250
    assert not list(store.verify())
