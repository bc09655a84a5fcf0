"""The format on disk, byte by byte and without our reader; stores of earlier versions, kept as files, still open."""

import hashlib
import json
import re
import shutil
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
from homes import CommandLine
from storing import collect
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.writer import StoreWriter

STORES = Path(__file__).parents[1] / "stores"
# Exact in bfloat16. Row 7 has a NaN; row 8 is of high norm, which the second store leaves out.
ROWS = ((np.arange(40).reshape(10, 4) - 20) / 4).astype(np.float32)
ROWS[7, 0] = np.nan
LEFT_OUT = {"version_1": [7], "version_1_measured": [7, 8]}


def written_now(path: Path) -> Path:
    """The second of the kept stores, as this version writes it."""
    rows = ROWS.copy()
    rows[8] *= 100
    meta = StoreMeta({"kind": "array", "file": "version_1.npy"}, "version_1_measured", "bfloat16", 4, 6, 4,
                     ("document", "label"), 10.0, created="2026-11-21T00:00:00.000000+00:00")
    with StoreWriter.open(path, meta) as writer:
        writer.append(rows, {"document": np.arange(10) // 2, "label": np.arange(10) % 3}, {"row": 0},
                      {"special": np.array([3.0, 5.0])})
        writer.finish()
    return path


@pytest.fixture(params=["kept", "written now"])
def measured(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return STORES / "version_1_measured" if request.param == "kept" else written_now(tmp_path / "s")


def test_activations_lie_where_the_frame_says_as_little_endian_bits_in_whole_chunks(measured: Path):
    stored = np.delete(ROWS, LEFT_OUT["version_1_measured"], axis=0)
    document = json.loads((measured / "store.json").read_text())
    assert [shard["rows"] for shard in document["shards"]] == [6, 2]
    for shard, rows, padding in zip(document["shards"], np.split(stored, [6]), (2, 0), strict=True):
        content = (measured / "shards" / shard["file"]).read_bytes()
        assert content[:9] == b"\x89HDF\r\n\x1a\n\x03"
        assert struct.unpack_from("<Q", content, 28) == (len(content),)  # the superblock's end of the file
        start = shard["frame"]["start"]
        bits = b"".join(struct.pack("<f", value)[2:] for value in rows.ravel()) + bytes(8 * padding)
        assert content[start : start + len(bits)] == bits
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert shard["frame"]["xxh3"] == xxh3_64_hexdigest(content[:start] + content[start + len(bits) :])


def test_columns_checksums_and_statistics_are_the_bytes_that_the_format_says(measured: Path):
    path = measured / "shards" / "00000.h5"
    content = path.read_bytes()
    start = json.loads((measured / "store.json").read_text())["shards"][0]["frame"]["start"]

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


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_store_of_an_earlier_version_reads_row_for_row(tmp_path: Path, name: str):
    store = ActivationStore.open(shutil.copytree(STORES / name, tmp_path / name))
    rows = store.split("all")
    expected = np.delete(ROWS, LEFT_OUT[name], axis=0)
    np.testing.assert_array_equal(collect(rows.sequential(4)), expected)
    for column, values in (("document", np.arange(10) // 2), ("label", np.arange(10) % 3)):
        np.testing.assert_array_equal(np.concatenate(list(rows.column(column, 4))), np.delete(values, LEFT_OUT[name]))
    assert store.verify() == []
    train = store.split("train")
    spread, held = train.spread(), collect(train.sequential(4))
    assert 0 < spread.rows == len(held) < store.rows
    np.testing.assert_allclose(spread.mean, held.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(spread.variance, held.var(axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_store_of_an_earlier_version_is_listed_checked_and_trained_on(sae: CommandLine, name: str):
    shutil.copytree(STORES / name, sae.home / "activations" / "old")
    (listed,) = sae("list", "--check", "--json").json["stores"]
    assert (listed["state"], listed["rows"]) == ("complete", 10 - len(LEFT_OUT[name]))
    assert (listed["norms"] is None) == (name == "version_1")
    assert "old" in sae("list").out
    done = sae("train", "--data", "old", "--epochs", "1", "--d-sae", "8", "--json")
    assert done.status == 0, done.err


def test_a_store_that_an_earlier_version_began_is_gone_on_with_and_measured_by_reading_it(tmp_path: Path):
    path = shutil.copytree(STORES / "version_1", tmp_path / "s")
    document = json.loads((path / "store.json").read_text())
    document |= {"complete": False, "shards": document["shards"][:1], "dropped": {}}
    (path / "store.json").write_text(json.dumps(document))
    (path / "shards" / "00001.h5").unlink()
    with StoreWriter.open(path, ActivationStore.open(path).meta) as writer:
        assert writer.cursor == {"row": 0}
        writer.append(ROWS, {"document": np.arange(10) // 2, "label": np.arange(10) % 3}, {"row": 0})
        writer.finish()
    store = ActivationStore.open(path)
    assert store.verify() == []
    assert (store.meta.norms, store.meta.norm_quantiles, store.meta.dropped) == (None, {}, {"nonfinite": 1})
    np.testing.assert_array_equal(collect(store.split("all").sequential(4)), np.delete(ROWS, 7, axis=0))
    train = store.split("train")
    np.testing.assert_allclose(train.spread().mean, collect(train.sequential(4)).mean(axis=0), rtol=1e-6)


def test_the_readmes_lines_read_a_bfloat16_shard_in_plain_h5py():
    readme = (Path(__file__).parents[2] / "saecli/store/README.md").read_text(encoding="utf-8")
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "activations" in block)
    shard = STORES / "version_1_measured" / "shards" / "00000.h5"
    found: dict = {}
    exec(lines.replace("sae-data/activations/notes/shards/00000.h5", str(shard)), found)
    assert found["x"].dtype == np.float32
    np.testing.assert_array_equal(found["x"], ROWS[:6])
