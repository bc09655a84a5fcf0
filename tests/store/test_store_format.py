"""The format on disk, byte by byte and without our reader; stored types against NumPy's and torch's rounding."""

import json
import re
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from storing import collect, make_store
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from saecli.store.reader import ActivationStore
from saecli.store.schema import COLUMNS, StoreMeta
from saecli.store.values import DTYPES, Windows
from saecli.store.writer import StoreWriter

# Exact in bfloat16. Row 7 has a NaN; row 8 is of high norm. Both are left out.
ROWS = ((np.arange(40).reshape(10, 4) - 20) / 4).astype(np.float32)
ROWS[7, 0] = np.nan
LEFT_OUT = [7, 8]
TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = ROWS.copy()
    rows[8] *= 100
    meta = StoreMeta({"kind": "array"}, "request", "bfloat16", 4, 6, 4, ("document", "role"), 10.0)
    with StoreWriter.open(tmp_path / "s", meta) as writer:
        writer.append(
            rows,
            {"document": np.arange(10) // 2, "role": np.arange(10) % 3},
            {"row": 0},
            {"special": np.array([0, 5])},
        )
        writer.finish()
    return tmp_path / "s"


def test_activations_are_little_endian_chunks_at_the_frames_offset(written: Path):
    stored = np.delete(ROWS, LEFT_OUT, axis=0)
    document = json.loads((written / "store.json").read_text())
    assert [shard["rows"] for shard in document["shards"]] == [6, 2]
    for shard, rows, padding in zip(document["shards"], np.split(stored, [6]), (2, 0), strict=True):
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
    start = json.loads((written / "store.json").read_text())["shards"][0]["frame"]["start"]

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
    norms = np.linalg.norm(ROWS[:6], axis=1)
    expected = {"rows": 6, "mean": norms.mean(), "max": norms.max(), "median": np.median(norms)}
    expected |= dict.fromkeys(("massive_rows", "massive_sum", "massive_squares"), 0)
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
        writer.append(np.ones((10, 4), np.float32), values, {"row": 0}, None, tokens)
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
    np.testing.assert_array_equal(names["x"], ROWS[:6])


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_decoding_and_encoding_equal_torchs(dtype):
    """Decoding of all finite bits, encoding of random ones."""
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(TORCH_TYPES[dtype]).float().numpy()
    finite = np.isfinite(expected)
    decoded = np.empty(finite.sum(), np.float32)
    DTYPES[dtype].decode_rows(bits.view(DTYPES[dtype].storage)[finite], decoded)
    np.testing.assert_array_equal(decoded.view(np.uint32), expected[finite].view(np.uint32))
    bits = np.random.default_rng(0).integers(0, 2**32, (1000, 100), np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.abs(values) <= DTYPES[dtype].limit, values, np.float32(0))
    encoded = DTYPES[dtype].encode_rows(values)
    expected = torch.from_numpy(values).to(TORCH_TYPES[dtype]).view(torch.uint16).numpy()
    np.testing.assert_array_equal(encoded.view(np.uint16), expected)


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_blocks_already_encoded_are_stored_as_they_are(tmp_path, dtype):
    rows = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    encoded = DTYPES[dtype].encode_rows(rows)
    encoded.view(np.uint16)[3, 2] = 0x7F80 if dtype == "bfloat16" else 0x7C00  # infinity
    store = make_store(tmp_path / "s", encoded, dtype)
    assert store.meta.dropped == {"nonfinite": 1}
    kept = np.delete(torch.from_numpy(rows).to(TORCH_TYPES[dtype]).float().numpy(), 3, axis=0)
    np.testing.assert_array_equal(collect(store.split("all").sequential(9)), kept)
