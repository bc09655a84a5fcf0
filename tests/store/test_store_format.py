"""The format on disk, byte by byte and without our reader."""

import hashlib
import json
import re
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from saecli.store.schema import StoreMeta
from saecli.store.writer import StoreWriter

# Exact in bfloat16. Row 7 has a NaN; row 8 is of high norm. Both are left out.
ROWS = ((np.arange(40).reshape(10, 4) - 20) / 4).astype(np.float32)
ROWS[7, 0] = np.nan
LEFT_OUT = [7, 8]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    rows = ROWS.copy()
    rows[8] *= 100
    meta = StoreMeta({"kind": "array"}, "request", "bfloat16", 4, 6, 4, ("document", "label"), 10.0)
    with StoreWriter.open(tmp_path / "s", meta) as writer:
        writer.append(rows, {"document": np.arange(10) // 2, "label": np.arange(10) % 3}, {"row": 0},
                      {"special": np.array([3.0, 5.0])})
        writer.finish()
    return tmp_path / "s"


def test_activations_are_little_endian_chunks_at_the_frames_offset(written: Path):
    stored = np.delete(ROWS, LEFT_OUT, axis=0)
    document = json.loads((written / "store.json").read_text())
    assert [shard["rows"] for shard in document["shards"]] == [6, 2]
    for shard, rows, padding in zip(document["shards"], np.split(stored, [6]), (2, 0), strict=True):
        content = (written / "shards" / shard["file"]).read_bytes()
        assert content[:9] == b"\x89HDF\r\n\x1a\n\x03"
        assert struct.unpack_from("<Q", content, 28) == (len(content),)  # the superblock's end of the file
        start = shard["frame"]["start"]
        bits = b"".join(struct.pack("<f", value)[2:] for value in rows.ravel()) + bytes(8 * padding)
        assert content[start : start + len(bits)] == bits
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert shard["frame"]["xxh3"] == xxh3_64_hexdigest(content[:start] + content[start + len(bits) :])


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
    assert unpacked("label", "q") == (0, 1, 2, 0, 1, 2)
    assert unpacked("chunk_xxh3", "Q") == tuple(xxh3_64_intdigest(content[start + at : start + at + 32])
                                                for at in (0, 32))
    # Rows are -5, -4.75, -4.5, -4.25 and each of the next five one more; 0, 1, ... 5 scatter by 17.5.
    assert unpacked("statistics/mean", "d") == pytest.approx((-2.5, -2.25, -2.0, -1.75), rel=1e-14)
    assert unpacked("statistics/scatter", "d") == pytest.approx((17.5,) * 4, rel=1e-14)
    squares = [sum((first + n + k / 4) ** 2 for k in range(4)) for n, first in enumerate([-5] * 6)]
    bins = [int(np.floor(40 * (np.log2(square) / 2 + 149))) + 1 for square in squares]
    assert unpacked("statistics/norm_bin", "i") == tuple(sorted(bins))
    assert unpacked("statistics/norm_count", "q") == (1,) * 6
    with h5py.File(path) as file:
        assert dict(file["statistics"].attrs) == pytest.approx(
            {"norm_mean": np.mean(np.sqrt(squares)), "norm_max": np.sqrt(max(squares))})


def test_the_readmes_lines_read_a_bfloat16_shard_in_plain_h5py(written: Path):
    readme = (Path(__file__).parents[2] / "saecli/store/README.md").read_text(encoding="utf-8")
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "activations" in block)
    shard = written / "shards" / "00000.h5"
    found: dict = {}
    exec(lines.replace("sae-data/activations/notes/shards/00000.h5", str(shard)), found)
    assert found["x"].dtype == np.float32
    np.testing.assert_array_equal(found["x"], ROWS[:6])
