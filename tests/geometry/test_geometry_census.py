"""The census and the samples of a stream against the whole stream held in memory."""

from collections import Counter

import numpy as np
import pytest
import torch
from encoders import encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st

from saecli.geometry.cells import cells_of
from saecli.geometry.survey import Census, Reservoir, Survey, describe, support_keys
from saecli.sae.activations import TopK


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 20), st.integers(1, 90))
def test_streamed_counts_equal_a_set_over_all_rows(
    seed: int, rows: int, F: int, batch: int
) -> None:
    supports = np.random.default_rng(seed).random((rows, F)) < 0.15
    census = Census()
    for part in torch.from_numpy(supports).split(batch):
        census.add(support_keys(part), int(part.sum()))
    keys = [tuple(row) for row in supports]
    counts = np.array(sorted(Counter(keys).values(), reverse=True))
    assert (census.rows, census.visited) == (rows, len(set(keys)))
    np.testing.assert_array_equal(census.sizes(), counts)
    assert census.l0 == pytest.approx(supports.sum(1).mean())
    assert all(cells == len(set(keys[:seen])) for seen, cells in census.growth)
    marks = [mark for mark in (1, 2, 5, 10, 20, 50, 100, 200) if mark < rows]
    assert [seen for seen, _ in census.growth] == [*marks, rows]
    found = census.occupancy()
    shares = counts / rows
    assert found["entropy"] == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-12)
    assert found["effective"] == pytest.approx(np.exp(found["entropy"]))
    assert (found["max"], found["singletons"]) == (counts[0], (counts == 1).sum())
    assert found["mean"] == pytest.approx(counts.mean())


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_a_stream_that_fits_is_kept_whole_and_in_order(batch: int) -> None:
    stream = np.random.default_rng(0).normal(size=(100, 3))
    reservoir = Reservoir(100)
    for start in range(0, 100, batch):
        reservoir.add(stream[start : start + batch])
    np.testing.assert_array_equal(reservoir.rows, stream)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 13, 60])
def test_every_row_of_a_longer_stream_is_kept_equally_often(batch: int) -> None:
    kept = np.zeros(60)
    for seed in range(2000):
        reservoir = Reservoir(15, seed)
        for start in range(0, 60, batch):
            reservoir.add(np.arange(start, min(start + batch, 60)))
        assert len(set(reservoir.rows.tolist())) == 15
        kept[reservoir.rows] += 1
    # 2000 draws with probability 1/4: a standard deviation of 19
    assert np.abs(kept - 500).max() < 5 * 19.4


def test_distributions_are_described_by_ranks_that_infinities_do_not_spoil() -> None:
    values = np.random.default_rng(0).permutation(np.arange(101.0))
    ranks = {"min": 0, "p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}
    assert describe(values) == {"mean": 50, **ranks}
    assert describe(np.array([1.0, np.inf]))["max"] == np.inf
    assert describe(np.full(3, np.inf))["median"] == np.inf


def test_the_keys_of_the_sample_are_those_of_its_rows() -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 4, 200, "plain"), TopK(3), rng)
    cells, rows = cells_of(sae), torch.from_numpy(rng.normal(size=(3000, 4))).float()
    survey = Survey(cells, Reservoir(700), Reservoir(700))
    for x in rows.split(128):
        survey.add(x)
    kept = torch.from_numpy(survey.sample.rows)
    keys = survey.sample_keys.rows.tolist()
    assert keys == support_keys(cells.supports(cells.pre_activations(kept)))
    assert any(key.endswith(b"\0") for key in keys)  # which fixed-width strings would lose
