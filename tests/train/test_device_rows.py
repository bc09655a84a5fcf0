"""Rows on their way to a device: as stored, and kept there, against those that a CPU reads."""

from pathlib import Path

import numpy as np
import pytest
import torch
from storing import collect, make_store

from saecli.base.devices import batches_on
from saecli.store.reader import JoinedRows, Rows
from saecli.store.values import DTYPES
from saecli.train.rows import DeviceRows, stored_bytes

random = np.random.default_rng(0)
N, D = 700, 12
VALUES = (random.standard_normal((N, 5)) @ random.standard_normal((5, D)) + 1).astype(np.float32)
DOCUMENTS = np.repeat(np.arange(N // 10), 10)
CPU = torch.device("cpu")


@pytest.fixture(params=list(DTYPES))
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Rows:
    store = make_store(
        tmp_path / "store", VALUES, request.param, documents=DOCUMENTS, shard_rows=300
    )
    return store.split("train", fraction=0.6)


def joined(tmp_path: Path) -> JoinedRows:
    stores = [
        make_store(tmp_path / name, values, "bfloat16", documents=DOCUMENTS)
        for name, values in (("in", VALUES), ("out", VALUES[:, ::2] ** 2))
    ]
    return JoinedRows((stores[0].split("train"),), stores[1].split("train"))


def all_ways(rows: Rows | JoinedRows) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled and in stored order, decoded."""
    return collect(rows.batches(64, seed=1, epoch=2)), collect(rows.sequential(64))


def test_rows_as_stored_have_the_bits_on_disk_in_the_same_order(rows: Rows):
    stored, decode = rows.as_stored(), DTYPES[rows.store.dtype]
    for got, expected in zip(all_ways(stored), all_ways(rows), strict=True):
        out = np.empty(got.shape, np.float32)
        decode.decode_rows(got, out)
        assert got.dtype == decode.storage
        assert np.array_equal(out, expected)


def test_rows_carried_are_the_numbers_that_are_stored(rows: Rows):
    carried = batches_on(rows.as_stored().batches(64, seed=1, epoch=2), CPU)
    batches = [batch.float().clone() for batch in carried]
    assert np.array_equal(torch.cat(batches).numpy(), all_ways(rows)[0])


@pytest.mark.parametrize("window", [1 << 28, 4096], ids=["one window", "several"])
def test_kept_rows_come_in_the_order_of_the_store(
    rows: Rows, window: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("saecli.store.split.WINDOW_BYTES", window)
    monkeypatch.setattr("saecli.store.split.LARGEST_WINDOW_BYTES", window)
    kept = DeviceRows(rows, CPU)
    for got, expected in zip(all_kept(kept), all_ways(rows), strict=True):
        assert np.array_equal(got, expected)
    assert (kept.rows, kept.d_in, kept.d_target) == (rows.rows, D, 0)


def test_kept_targets_lie_beside_their_rows(tmp_path: Path):
    rows = joined(tmp_path)
    kept = DeviceRows(rows, CPU)
    for got, expected in zip(all_kept(kept), all_ways(rows), strict=True):
        assert np.array_equal(got, expected)
    assert (kept.d_in, kept.d_target, stored_bytes(rows)) == (D, D // 2, N * 2 * (D + D // 2))


def all_kept(kept: DeviceRows) -> tuple[np.ndarray, np.ndarray]:
    return tuple(
        torch.cat([batch.float() for batch in batches]).numpy()
        for batches in (kept.batches(64, seed=1, epoch=2), kept.sequential(64))
    )
