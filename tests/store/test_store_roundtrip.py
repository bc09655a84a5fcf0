"""What is written is what is read: against arrays in memory, plain h5py and torch's own rounding."""


import h5py
import numpy as np
import pytest
import torch
from storing import collect, make_meta, make_store

from saecli.base.errors import StoreError
from saecli.store.codec import DTYPES
from saecli.store.statistics import Norms
from saecli.store.writer import StoreWriter

TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rounded(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Rows after a trip through a type, by torch."""
    return torch.from_numpy(rows).to(TORCH_TYPES[dtype]).float().numpy()


def awkward_rows(rng: np.random.Generator, rows: int, d_in: int) -> np.ndarray:
    """Finite rows over many magnitudes, subnormal in some types, with zeros of both signs and ties."""
    values = rng.standard_normal((rows, d_in)) * 10.0 ** rng.integers(-8, 4, (rows, d_in))
    values[rng.random((rows, d_in)) < 0.1] = -0.0
    values[rng.random((rows, d_in)) < 0.1] = 1 + 2.0**-8
    return values.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shard_reads_in_plain_h5py(tmp_path, dtype):
    rows = awkward_rows(np.random.default_rng(0), 230, 5)
    make_store(tmp_path / "s", rows, dtype, documents=np.arange(230) + 2**40)
    parts = []
    for path in sorted((tmp_path / "s" / "shards").iterdir()):
        with h5py.File(path) as file:
            parts.append((file["activations"][:].astype(np.float32), file["document"][:]))
            assert file["activations"].dtype == (np.float16 if dtype == "float16" else np.float32)
            assert file["activations"].id.get_type().get_size() == (4 if dtype == "float32" else 2)
    assert [len(part) for part, _ in parts] == [100, 100, 30]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), rounded(rows, dtype))
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), np.arange(230) + 2**40)


def test_decoding_equals_numpy_for_all_finite_float16_and_torch_for_all_finite_bfloat16():
    bits = np.arange(2**16, dtype=np.uint16)
    half = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    decoded = np.empty(half.shape, np.float32)
    DTYPES["float16"].decode(half, decoded)
    np.testing.assert_array_equal(decoded.view(np.uint32), half.astype(np.float32).view(np.uint32))
    brain = bits[(bits & 0x7F80) != 0x7F80]
    decoded = np.empty(brain.shape, np.float32)
    DTYPES["bfloat16"].decode(brain, decoded)
    expected = torch.from_numpy(brain).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_encoding_equals_torch_for_random_bits(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, (1000, 100), np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.abs(values) <= DTYPES[dtype].limit, values, 0).astype(np.float32)  # a NaN compares false
    encoded = DTYPES[dtype].encode_rows(values)
    expected = torch.from_numpy(values).to(TORCH_TYPES[dtype]).view(torch.uint16).numpy()
    np.testing.assert_array_equal(encoded.view(np.uint16), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_once_stored_are_dropped_and_counted(tmp_path, dtype):
    limit = np.float32(DTYPES[dtype].limit)
    rows = np.ones((7, 3), np.float32)
    rows[1, 0], rows[2, 1], rows[3, 2], rows[4, 0], rows[5, 0] = np.nan, np.inf, -np.inf, limit, -limit
    # Just beyond the limit float16 and bfloat16 overflow, as torch says too; float32 has nothing there.
    with np.errstate(over="ignore"):
        rows[6, 1] = np.nextafter(limit, np.float32(np.inf))
    expected = rounded(rows, dtype)
    finite = np.isfinite(expected).all(axis=1)
    assert list(finite) == [True, False, False, False, True, True, False]
    store = make_store(tmp_path / "s", rows, dtype)
    assert store.meta.dropped == {"nonfinite": 4}
    # What is finite but for the stored type has a norm to tell of.
    over = np.linalg.norm(rows[6].astype(np.float64))
    expected_norms = {} if dtype == "float32" else {"nonfinite": Norms(1, over, over)}
    assert store.meta.dropped_norms == expected_norms
    np.testing.assert_array_equal(collect(store.split("all").sequential(9)), expected[finite])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blocks_already_encoded_are_stored_as_they_are(tmp_path, dtype):
    rows = awkward_rows(np.random.default_rng(0), 50, 4)
    encoded = DTYPES[dtype].encode_rows(rows)
    encoded.view(np.uint16)[3, 2] = 0x7F80 if dtype == "bfloat16" else 0x7C00  # infinity
    store = make_store(tmp_path / "s", encoded, dtype)
    assert store.meta.dropped == {"nonfinite": 1}
    kept = np.delete(rounded(rows, dtype), 3, axis=0)
    np.testing.assert_array_equal(collect(store.split("all").sequential(9)), kept)


def test_equal_rows_make_equal_bytes(tmp_path):
    rows = np.random.default_rng(0).standard_normal((230, 5), np.float32)
    first, second = (make_store(tmp_path / name, rows, "bfloat16", block=block).meta
                     for name, block in (("a", 37), ("b", 37)))
    assert [shard.sha256 for shard in first.shards] == [shard.sha256 for shard in second.shards]


@pytest.mark.parametrize(("block", "columns", "said"), [
    (np.zeros((2, 5), np.float32), {"label": np.zeros(2, int)}, r"shape \(rows, 4\), got \(2, 5\)"),
    (np.zeros((2, 4), np.int32), {"label": np.zeros(2, int)}, "expected floats, got int32"),
    (np.zeros((2, 4), np.float32), {}, r"columns \['label'\], got \[\]"),
    (np.zeros((2, 4), np.float32), {"label": np.zeros(3, int)}, "expected 2 integers"),
    (np.zeros((2, 4), np.float32), {"label": np.zeros(2)}, "expected 2 integers, got float64"),
])
def test_blocks_that_do_not_fit_are_refused(tmp_path, block, columns, said):
    with (StoreWriter.open(tmp_path / "s", make_meta(4, columns=("label",))) as writer,
          pytest.raises(ValueError, match=said)):
        writer.append(block, columns, {})


def test_a_store_of_no_rows_is_refused_with_the_counts(tmp_path):
    with (StoreWriter.open(tmp_path / "s", make_meta(4)) as writer,
          pytest.raises(StoreError, match=r"no rows.*5 special, 2 nonfinite")):
        writer.append(np.full((2, 4), np.nan, np.float32), {}, {}, {"special": np.ones(5)})
        writer.finish()
