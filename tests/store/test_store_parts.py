"""Streams in parts, one for each of several processes: together they are the whole stream's batches, row for row."""

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import make_store, memory_folder

from saecli.store import reader as store_reader
from saecli.store.stream import Part


def numbered(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32)[:, None] + np.zeros(2, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
@given(st.data())
def test_parts_of_every_batch_are_the_batch(in_memory: bool, data):
    count, parts = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 5))
    size = data.draw(st.integers(parts, 120))
    asked = {"seed": 1, "epoch": 2, "window_bytes": data.draw(st.integers(1, 3000))}
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        rows = make_store(folder / "s", numbered(count), shard_rows=data.draw(st.integers(1, 150)),
                          chunk_rows=data.draw(st.integers(1, 40))).split("all")
        patch.setattr("saecli.store.stream.RUN_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        patch.setattr(store_reader.ActivationStore, "in_memory", lambda store: in_memory)
        whole = [batch[:, 0].copy() for batch in rows.batches(size, **asked)]
        found = [[batch[:, 0].copy() for batch in rows.batches(size, **asked, part=Part(number, parts))]
                 for number in range(parts)]
        nothing = np.empty(0, np.float32)  # a part that has no rows of the last batch leaves it out
        for batch, *own in zip_longest(whole, *found, fillvalue=nothing):
            np.testing.assert_array_equal(np.concatenate(own), batch)


@given(count=st.integers(1, 300), parts=st.integers(1, 5), size=st.integers(1, 120))
def test_parts_of_the_stored_order_follow_each_other_in_whole_batches(count: int, parts: int, size: int):
    with memory_folder() as folder:
        rows = make_store(folder / "s", numbered(count), shard_rows=70, chunk_rows=11).split("all")
        whole = [batch[:, 0].copy() for batch in rows.sequential(size)]
        found = [batch[:, 0].copy() for number in range(parts) for batch in rows.sequential(size, Part(number, parts))]
        assert len(found) == len(whole)
        for own, batch in zip(found, whole, strict=True):
            np.testing.assert_array_equal(own, batch)
