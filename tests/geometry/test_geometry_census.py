"""The census and the sample of a stream against the whole stream in memory."""

from collections import Counter

import numpy as np
import pytest
import torch
from encoders import case_of
from hypothesis import given
from hypothesis import strategies as st

from saecli.geometry import geometry
from saecli.geometry.cells import cells_of
from saecli.geometry.geometry import Census, describe, support_keys, survey_rows
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
    assert (census.rows, len(census.counts)) == (rows, len(set(keys)))
    np.testing.assert_array_equal(census.sizes(), counts)
    assert census.l0 == pytest.approx(supports.sum(1).mean())
    assert all(cells == len(set(keys[:seen])) for seen, cells in census.growth)
    marks = [mark for mark in (1, 2, 5, 10, 20, 50, 100, 200) if mark < rows]
    assert [seen for seen, _ in census.growth] == [*marks, rows]
    occupancy = census.occupancy()
    shares = counts / rows
    assert occupancy["entropy"] == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-12)
    assert occupancy["effective"] == pytest.approx(np.exp(occupancy["entropy"]))
    assert (occupancy["max"], occupancy["singletons"]) == (counts[0], (counts == 1).sum())
    assert occupancy["mean"] == pytest.approx(counts.mean())


@pytest.mark.parametrize(("rows", "kept"), [(500, 500), (3000, 700)])
def test_the_sample_of_a_stream_is_uniform_in_order_and_whole_if_it_fits(
    rows: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "SAMPLE_BYTES", 4 * 4 * 700)
    case = case_of(TopK(3), 4, 20, rows)
    x = case.rows.float()
    result = survey_rows(cells_of(case.sae), x.split(128), rows)
    numbers = [int((x == row).all(1).nonzero()) for row in torch.from_numpy(result.sample)]
    assert len(numbers) == kept and numbers == sorted(set(numbers))
    assert np.median(numbers) == pytest.approx(rows / 2, abs=0.1 * rows)
    assert (result.census.rows, len(result.margins)) == (rows, rows)


def test_distributions_are_described_by_ranks_that_infinities_do_not_spoil() -> None:
    values = np.random.default_rng(0).permutation(np.arange(101.0))
    ranks = {"min": 0, "p5": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "max": 100}
    assert describe(values) == {"mean": 50, **ranks}
    assert describe(np.array([1.0, np.inf]))["max"] == np.inf
    assert describe(np.full(3, np.inf))["median"] == np.inf
