"""Arrays of more than two dimensions: each way to flatten gives NumPy's rows, and none is taken unasked."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from storing import collect

from saecli.base.errors import FormatError
from saecli.store import arrays as array
from saecli.store.arrays import ArraySource
from saecli.store.importing import open_array
from saecli.store.reader import ActivationStore
from saecli.store.schema import hash_request

ACTS = np.random.default_rng(0).standard_normal((20, 7, 6)).astype(np.float32)  # batch, position, width
DEEP = ACTS.reshape(5, 4, 7, 6)

@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(1, 200), st.data())
def test_blocks_are_a_reshape_read_once_from_any_row_on(shape, most, data):
    values = np.arange(math.prod(shape)).reshape(shape)
    read = []
    source = ArraySource(tuple(shape), "float32", lambda index: read.append(values[index].size) or values[index])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array, "BLOCK_BYTES", 4 * most)
        blocks = [(begin, block.copy()) for begin, block in source.blocks()]
        assert sum(read) == values.size
        np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), values.reshape(-1, shape[-1]))
        assert all(block.size <= max(most, shape[-1]) for _, block in blocks)
        number = data.draw(st.integers(0, len(blocks) - 1))
        again = list(source.blocks(blocks[number][0]))
        assert [begin for begin, _ in again] == [begin for begin, _ in blocks[number:]]
        start = data.draw(st.integers(0, source.rows - 1))
        rest = np.concatenate([block.copy() for _, block in source.blocks(start)])
        np.testing.assert_array_equal(rest, values.reshape(-1, shape[-1])[start:])


def test_flatten_is_needed_for_three_dimensions_and_refused_for_two(tmp_path):
    for values, said in (
            (ACTS, r"got shape \(20, 7, 6\): flatten positions gives 140 rows of 6 dimensions, "
                   "flatten features 20 rows of 42$"),
            (DEEP, r"got shape \(5, 4, 7, 6\): .* 140 rows of 6 dimensions, flatten features 5 rows of 168$"),
            (ACTS[:1, :1], "gives 1 row of 6 dimensions, flatten features 1 row of 6$")):
        np.save(tmp_path / "a.npy", values)
        with pytest.raises(FormatError, match=said):
            open_array(str(tmp_path / "a.npy"))
    np.save(tmp_path / "b.npy", ACTS[0])
    with pytest.raises(FormatError, match=r"flatten does nothing with .*b\.npy: .* got shape \(7, 6\); leave it out"):
        open_array(str(tmp_path / "b.npy"), flatten="features")
    with pytest.raises(FormatError, match="leave out key, labels and flatten"):
        open_array("digits", flatten="features")


@pytest.mark.parametrize(("shape", "flatten", "fits"), [
    ((20, 7), "positions", True), ((140,), "positions", True), ((140, 1), "positions", True),
    ((20,), "positions", False), ((7, 20), "positions", False), ((20, 7, 2), "positions", False),
    ((20,), "features", True), ((20, 7), "features", False), ((140,), "features", False)])
def test_labels_are_one_for_each_row_in_its_shape_or_flat(tmp_path, shape, flatten, fits):
    labels = 2**40 + np.arange(math.prod(shape)).reshape(shape)  # more than float32 can tell apart
    torch.save({"x": torch.from_numpy(ACTS), "y": torch.from_numpy(labels)}, tmp_path / "a.pt")
    if fits:
        found = open_array(str(tmp_path / "a.pt"), "x", "y", flatten)
        np.testing.assert_array_equal(found.labels, labels.ravel())
        np.testing.assert_array_equal(found.columns(3, 8)["label"], labels.ravel()[3:8])
    else:
        with pytest.raises(FormatError, match=r"labels y do not fit: expected .*, one for each row, got shape"):
            open_array(str(tmp_path / "a.pt"), "x", "y", flatten)


def test_imported_positions_hold_out_whole_sequences(sae: CommandLine, tmp_path: Path):
    np.save(tmp_path / "acts.npy", ACTS)
    refused = sae("import", tmp_path / "acts.npy")
    assert refused.status == 1
    assert "flatten positions gives 140 rows" in refused.err
    assert sae("import", tmp_path / "acts.npy", "--flatten", "positions", "--json").json["rows"] == 140
    store = ActivationStore.open(sae.home / "activations" / "acts")
    np.testing.assert_array_equal(collect(store.split("all").sequential(64)), ACTS.reshape(140, 6))
    parts = [[np.concatenate(list(store.split(part).column(name, 100))) for name in ("document", "position")]
             for part in ("train", "test")]
    (train, _), (test, places) = parts
    assert not set(train) & set(test) and 0 < len(test) < 140
    np.testing.assert_array_equal(places, np.tile(np.arange(7), len(set(test))))
    assert sae("import", tmp_path / "acts.npy", "--flatten", "features", "--name", "rows").status == 0
    meta = ActivationStore.open(sae.home / "activations" / "rows").meta
    source = {"kind": "array", "file": "acts.npy", "key": None, "sha256": meta.source["sha256"], "labels_sha256": None}
    assert (meta.source, meta.columns) == (source, ())
    assert meta.request_hash == hash_request({**source, "dtype": "float32", "shard_rows": meta.shard_rows})
