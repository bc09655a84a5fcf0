"""The format on disk, byte by byte and without our reader; damaged, foreign and newer files are refused by a sentence
that names them, and none of their rows is handed out."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storing import change_listed, collect, listed_shards, make_store, memory_folder
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from saecli.base.errors import StoreError
from saecli.store.blocks import RowBlock, Windows
from saecli.store.reader import ActivationStore
from saecli.store.schema import COLUMNS, StoreMeta
from saecli.store.values import DTYPES
from saecli.store.writer import StoreWriter

ROWS = np.random.default_rng(0).standard_normal((250, 4), np.float32)


def read(folder):
    return collect(ActivationStore.open(folder / "s").split("all").sequential(64))


def cut_to(length: int) -> Callable[[Path], int]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_to(-100), "damaged"),
        (cut_to(1000), "truncated"),
        (cut_to(0), "truncated"),
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
    "change",
    [
        {"dtype": "float32"},
        {"d_in": 3},
        {"d_in": 2**40},
        {"chunk_rows": 9},
        {"frame": {"start": 64, "xxh3": "0" * 16}},
    ],
)
def test_a_shard_that_does_not_fit_store_json_is_named(tmp_path, change):
    make_store(tmp_path / "s", ROWS, "bfloat16", documents=np.arange(250))
    marker = tmp_path / "s" / "store.json"
    if "frame" in change:
        change_listed(tmp_path / "s", 0, **change)
    else:
        marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    with pytest.raises(StoreError, match=r"shard .*00000\.h5 is") as error:
        read(tmp_path)
    assert str(error.value) in ActivationStore.open(tmp_path / "s").verify()


@given(st.data())
def test_one_flipped_bit_anywhere_is_refused_by_name_and_found_by_verify(data):
    with memory_folder() as folder:
        store = make_store(folder / "s", ROWS[:100], "bfloat16", documents=np.arange(100))
        path = folder / "s" / "shards" / "00000.h5"
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"00000\.h5 is damaged.* expected the XXH3-64"):
            read(folder)
        (problem,) = store.verify()
        assert f"shard {path} is damaged" in problem


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    path = make_store(tmp_path_factory.mktemp("whole") / "s", ROWS).path
    return json.loads((path / "store.json").read_text())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 5}, "expected format version 4 or older, got 5; upgrade saecli"),
        ({"format_version": 3}, "expected format version 4, got 3, of an older saecli"),
        ({"format_version": None}, "format_version: expected a valid integer, got None"),
        ({"d_in": "4"}, "d_in: expected a valid integer, got '4'"),
        ({"d_in": 0}, "d_in: expected at least 1, got 0"),
        ({"chunk_rows": 10**30}, "chunk_rows: expected at most 1099511627776, got 10000"),
        ({"dtype": "float8"}, "dtype: expected 'float32', 'float16' or 'bfloat16', got 'float8'"),
        ({"shards": [{"file": "00000.h5"}]}, r"shards\.0\.rows: Field required"),
        ({"shard_count": -1}, "shard_count: expected at least 0, got -1"),
        ({"shards": None}, "shards: expected a valid array, got None"),
        *((text, "") for text in ("", "{", "[]", "null", "\x00\xff", "[" * 100_000, "9" * 10_000)),
    ],
)
def test_a_damaged_or_newer_store_json_is_refused_by_name(tmp_path, document, change, said):
    (tmp_path / "s").mkdir()
    text = change if isinstance(change, str) else json.dumps(document | change)
    (tmp_path / "s" / "store.json").write_text(text)
    with pytest.raises(StoreError, match=rf"cannot read .*store\.json: {said}"):
        ActivationStore.open(tmp_path / "s")


@pytest.mark.parametrize("file", ["../../00000.h5", "/etc/passwd", "00000/shards/00000.h5", ".h5"])
def test_a_shard_is_no_path(tmp_path, file):
    path = make_store(tmp_path / "s", ROWS).path
    change_listed(path, 1, file=file)
    said = re.escape(f"1.file: expected a shard's name such as 00000.h5, got '{file}'")
    with pytest.raises(StoreError, match=f"cannot read .*{said}"):
        ActivationStore.open(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda path: path.write_text(path.read_text().splitlines()[0]),
            "expected 3 shards, got 1",
        ),
        (lambda path: path.write_text("null\n" * 3), "0: "),
        (lambda path: path.write_bytes(b"\xff\n" * 3), ""),
        (lambda path: path.unlink(), "it has no shards.jsonl"),
    ],
)
def test_a_damaged_list_of_shards_is_refused_by_name(tmp_path, change, said):
    path = make_store(tmp_path / "s", ROWS).path
    change(path / "shards.jsonl")
    with pytest.raises(StoreError, match=r"shards\.jsonl") as error:
        ActivationStore.open(path)
    assert said in str(error.value)


def test_files_that_store_json_does_not_list_are_ignored(tmp_path):
    store = make_store(tmp_path / "s", ROWS)
    (tmp_path / "s" / "shards" / "00003.h5").write_text("left by a killed process")
    (tmp_path / "s" / "shards" / ".00003.h5.partial").write_text("so was this")
    with (tmp_path / "s" / "shards.jsonl").open("a") as file:
        file.write('{"file": "00003.h5", "ro')  # so was the end of this
    assert ActivationStore.open(tmp_path / "s").rows == store.rows == 250
    assert not list(store.verify())


# Exact in bfloat16. Row 7 has a NaN; row 8 is of high norm. Both are left out.
FEW_ROWS = ((np.arange(40).reshape(10, 4) - 20) / 4).astype(np.float32)
FEW_ROWS[7, 0] = np.nan
LEFT_OUT = [7, 8]
HALVES = ["float16", "bfloat16"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = FEW_ROWS.copy()
    rows[8] *= 100
    meta = StoreMeta({"kind": "array"}, "request", "bfloat16", 4, 6, 4, ("document", "role"), 10.0)
    with StoreWriter.open(tmp_path / "s", meta) as writer:
        columns = {"document": np.arange(10) // 2, "role": np.arange(10) % 3}
        writer.append(RowBlock(rows, columns, {"special": np.array([0, 5])}), {"row": 0})
        writer.finish()
    return tmp_path / "s"


def test_activations_are_little_endian_chunks_at_the_frames_offset(written: Path):
    stored = np.delete(FEW_ROWS, LEFT_OUT, axis=0)
    shards = listed_shards(written)
    assert [shard["rows"] for shard in shards] == [6, 2]
    for shard, rows, padding in zip(shards, np.split(stored, [6]), (2, 0), strict=True):
        content = (written / "shards" / shard["file"]).read_bytes()
        assert content[:9] == b"\x89HDF\r\n\x1a\n\x03"
        superblocks_end_of_file = struct.unpack_from("<Q", content, 28)[0]
        assert superblocks_end_of_file == len(content)
        start = shard["frame"]["start"]
        bits = b"".join(struct.pack("<f", value)[2:] for value in rows.ravel()) + bytes(8 * padding)
        assert content[start : start + len(bits)] == bits
        assert shard["frame"]["xxh3"] == xxh3_64_hexdigest(
            content[:start] + content[start + len(bits) :]
        )


def test_columns_checksums_and_statistics_are_as_specified(written: Path):
    path = written / "shards" / "00000.h5"
    content = path.read_bytes()
    start = listed_shards(written)[0]["frame"]["start"]

    def unpacked(name: str, kind: str) -> tuple:
        with h5py.File(path) as file:
            assert file[name].chunks is None
            at, size = file[name].id.get_offset(), file[name].id.get_storage_size()
        return struct.unpack(f"<{size // struct.calcsize(kind)}{kind}", content[at : at + size])

    assert unpacked("document", "q") == (0, 0, 1, 1, 2, 2)
    assert unpacked("role", "B") == (0, 1, 2, 0, 1, 2)
    assert unpacked("chunk_xxh3", "Q") == tuple(
        xxh3_64_intdigest(content[start + at : start + at + 32]) for at in (0, 32)
    )
    # Rows are -5, -4.75, -4.5, -4.25 and each of the next five one more; 0, 1, ... 5 scatter by 17.5.
    assert unpacked("statistics/mean", "d") == pytest.approx((-2.5, -2.25, -2.0, -1.75), rel=1e-14)
    assert unpacked("statistics/scatter", "d") == pytest.approx((17.5,) * 4, rel=1e-14)
    norms = np.linalg.norm(FEW_ROWS[:6], axis=1)
    expected = {"rows": 6, "mean": norms.mean(), "max": norms.max(), "median": np.median(norms)}
    expected["massive_rows"] = 0
    with h5py.File(path) as file:
        assert dict(file["statistics"].attrs) == pytest.approx(expected)


@pytest.mark.parametrize("columns", range(len(COLUMNS) + 1))
@pytest.mark.parametrize("windows", [False, True])
def test_a_shard_with_any_number_of_columns_is_whole(tmp_path, columns, windows):
    """Each makes the list of the file's datasets longer, parts of which HDF5 may allocate late."""
    values = {name: np.arange(10) for name in [*COLUMNS][:columns]}
    meta = StoreMeta({}, "request", "float32", 4, 6, 4, tuple(values), windows=windows)
    kept = np.ones(10, bool)
    with StoreWriter.open(tmp_path / "s", meta) as writer:
        tokens = Windows.of(np.array([7, 3]), np.arange(10), kept) if windows else None
        block = RowBlock(np.ones((10, 4), np.float32), values, windows=tokens)
        writer.append(block, {"row": 0})
        writer.finish()
    store = ActivationStore.open(tmp_path / "s")
    assert store.verify() == []
    for name in values:
        assert collect(store.split("all").column(name, 4)).tolist() == [*range(10)]
    for path in (tmp_path / "s" / "shards").iterdir():
        with h5py.File(path) as file:
            assert {*values} <= file.keys() and ("windows" in file) == windows


def test_the_readmes_lines_read_a_bfloat16_shard_in_plain_h5py(written: Path):
    readme = (Path(__file__).parents[2] / "saecli/store/README.md").read_text(encoding="utf-8")
    (lines,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if "activations" in block
    )
    shard = written / "shards" / "00000.h5"
    names: dict = {}
    exec(lines.replace("sae-data/activations/notes/shards/00000.h5", str(shard)), names)
    assert names["x"].dtype == np.float32
    np.testing.assert_array_equal(names["x"], FEW_ROWS[:6])


@pytest.mark.parametrize("dtype", HALVES)
def test_decoding_and_encoding_equal_torchs(dtype):
    """Decoding of all finite bits, encoding of random ones."""
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(getattr(torch, dtype)).float().numpy()
    finite = np.isfinite(expected)
    decoded = np.empty(finite.sum(), np.float32)
    DTYPES[dtype].decode_rows(bits.view(DTYPES[dtype].storage)[finite], decoded)
    np.testing.assert_array_equal(decoded.view(np.uint32), expected[finite].view(np.uint32))
    bits = np.random.default_rng(0).integers(0, 2**32, (1000, 100), np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0))
    encoded = DTYPES[dtype].encode_rows(values)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint16).numpy()
    np.testing.assert_array_equal(encoded.view(np.uint16), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_blocks_already_encoded_are_stored_as_they_are(tmp_path, dtype):
    rows = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    encoded = DTYPES[dtype].encode_rows(rows)
    encoded.view(np.uint16)[3, 2] = 0x7F80 if dtype == "bfloat16" else 0x7C00  # infinity
    store = make_store(tmp_path / "s", encoded, dtype)
    assert store.meta.dropped == {"nonfinite": 1}
    kept = np.delete(torch.from_numpy(rows).to(getattr(torch, dtype)).float().numpy(), 3, axis=0)
    np.testing.assert_array_equal(collect(store.split("all").sequential(9)), kept)
