"""What is written is what is read: against arrays in memory, plain h5py and torch's own rounding."""


import numpy as np
import pytest
import torch
from storing import collect, make_meta, make_store

from saecli.base.errors import StoreError
from saecli.store.values import DTYPES
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


def test_decoding_equals_numpy_and_torch_for_all_finite_bits():
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_blocks_already_encoded_are_stored_as_they_are(tmp_path, dtype):
    rows = awkward_rows(np.random.default_rng(0), 50, 4)
    encoded = DTYPES[dtype].encode_rows(rows)
    encoded.view(np.uint16)[3, 2] = 0x7F80 if dtype == "bfloat16" else 0x7C00  # infinity
    store = make_store(tmp_path / "s", encoded, dtype)
    assert store.meta.dropped == {"nonfinite": 1}
    kept = np.delete(rounded(rows, dtype), 3, axis=0)
    np.testing.assert_array_equal(collect(store.split("all").sequential(9)), kept)


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
