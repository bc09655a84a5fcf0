"""Cells as half-spaces against the SAE itself: who belongs to them, that they are convex, and the maps on them."""

import sys

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st

from saecli.base.errors import ConfigError
from saecli.geometry.cells import Cell
from saecli.geometry.largest_cells import cells_of
from saecli.geometry.survey import Degenerate, ranks
from saecli.sae.activations import JumpRelu, TopK
from saecli.sae.dictionary import SAE

ANY = ("relu", "jumprelu", "batchtopk", "topk", "relu-topk")


def around(row: torch.Tensor, seed: int, count: int = 60) -> torch.Tensor:
    """Points near and far from a row, (count, D)."""
    rng = np.random.default_rng(seed)
    return row + torch.from_numpy(rng.normal(size=(count, len(row))) * 10 ** rng.uniform(-3, 1, (count, 1)))


@given(cases(kinds=ANY, shapes=("plain", "shifted", "clustered", "uneven")), st.integers(0, 2**32))
def test_a_cell_holds_the_points_that_keep_the_same_latents_and_no_others(case: Case, seed: int) -> None:
    for row in case.rows[:3]:
        points = around(row, seed)
        same = ((case.sae.encode(points) != 0) == (case.sae.encode(row[None]) != 0)).all(1)
        cell = cells_of(case.sae).cell(row)
        assert torch.equal(cell.contains(points), same)
        H, c = cell.inequalities()
        assert len(H) <= cell.count
        assert torch.equal((points @ H.T > c).all(1), same)


@given(cases(kinds=("abs-topk",), shapes=("plain", "shifted", "uneven")), st.integers(0, 2**32))
def test_a_cell_of_abs_topk_tells_signs_apart(case: Case, seed: int) -> None:
    if case.sae.activation.k == case.sae.d_sae:
        return  # one cell whatever the signs
    for row in case.rows[:3]:
        points = around(row, seed)
        same = (case.sae.encode(points).sign() == case.sae.encode(row[None]).sign()).all(1)
        assert torch.equal(cells_of(case.sae).cell(row).contains(points), same)


@given(cases(shapes=("plain", "shifted", "uneven")), st.integers(0, 2**32))
def test_no_inequality_is_tighter_than_the_one_said_to_be_the_tightest(case: Case, seed: int) -> None:
    cell, points = cells_of(case.sae).cell(case.rows[0]), around(case.rows[0], seed)
    slack, h, c = cell.tightest(points)
    H, every_c = cell.inequalities()
    expected = (points @ H.T - every_c).amin(1) if len(H) else torch.full((len(points),), torch.inf).double()
    torch.testing.assert_close(slack.clamp(max=1e9), expected.clamp(max=1e9), rtol=1e-9, atol=1e-9)
    if len(H):
        torch.testing.assert_close((points * h).sum(1) - c, slack, rtol=1e-9, atol=1e-9)


@given(cases(shapes=("plain", "shifted", "clustered", "uneven")))
def test_margins_are_the_distances_to_the_nearest_of_the_inequalities(case: Case) -> None:
    cells = cells_of(case.sae)
    for row, margin in zip(case.rows, cells.margins(cells.pre_activations(case.rows)), strict=True):
        H, c = cells.cell(row).inequalities()
        expected = float(((H @ row - c) / H.norm(dim=1)).min()) if len(H) else np.inf
        assert float(margin) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(cases(shapes=("plain", "shifted", "twins", "zeros", "uneven")), st.integers(0, 2**32))
def test_the_segment_between_two_points_of_a_cell_stays_in_it(case: Case, seed: int) -> None:
    cell, points = cells_of(case.sae).cell(case.rows[0]), around(case.rows[0], seed)
    members = points[cell.tightest(points)[0] > 1e-9]
    if len(members) < 2:
        return
    rng = np.random.default_rng(seed)
    first, second = (members[torch.from_numpy(rng.integers(0, len(members), 50))] for _ in range(2))
    share = torch.from_numpy(rng.random((50, 1)))
    assert cell.contains(share * first + (1 - share) * second).all()


def test_too_many_inequalities_are_refused_and_the_tightest_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 3, 20, "plain"), TopK(5), rng)
    cell = cells_of(sae).cell(torch.ones(3).double())
    assert cell.count == 75
    monkeypatch.setattr(sys.modules["saecli.geometry.cells"], "EXACT", 100)
    with pytest.raises(ConfigError, match="75 inequalities in 3 dimensions; expected at most 100 numbers"):
        cell.inequalities()
    assert cell.contains(torch.ones(1, 3).double()).all()


def test_a_cell_without_inequalities_is_the_whole_space() -> None:
    none = torch.empty(0, dtype=torch.long)
    cell = Cell.swapping(torch.zeros(3, 2).double(), torch.zeros(2).double(), torch.arange(2), none)
    assert cell.contains(torch.randn(4, 3).double()).all()
    assert torch.isinf(cell.tightest(torch.zeros(1, 3).double())[0]).all()
    assert cell.inequalities()[0].shape == (0, 3)


@given(cases(kinds=("relu", "topk", "abs-topk", "jumprelu"), shapes=("plain", "clustered", "twins", "zeros")))
def test_ranks_are_those_of_the_jacobian(case: Case) -> None:
    supports = case.sae.encode(case.rows) != 0
    found = ranks(case.sae, supports)
    for row, support, (kept, rank) in zip(case.rows, supports, found, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: case.sae(x[None])[0], row)
        values = np.linalg.svd(jacobian.numpy(), compute_uv=False)
        relative = values / max(values[0], np.finfo(float).tiny)
        assert kept == int(support.sum())
        assert (relative > 1e-12).sum() <= rank <= (relative > 1e-18).sum()  # between them lies rounding


def test_equal_and_zero_latents_are_counted() -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 4, 12, "plain"), JumpRelu(), rng)
    assert Degenerate.of(sae) == Degenerate(0, 0, 0, 0)
    W_enc, W_dec, threshold = sae.W_enc.clone(), sae.W_dec.clone(), sae.activation_parameters["threshold"].clone()
    b_enc = sae.b_enc.clone()
    W_enc[:, [0, 1, 2]], b_enc[[0, 1]], threshold[[0, 1]] = 0, 5, 0.5
    W_dec[[3, 4]], W_dec[[5, 6, 7]] = 0, W_dec[8].clone()
    W_dec[9, 0], W_dec[10] = 0.0, W_dec[9].clone()
    W_dec[9, 0], W_dec[10, 0] = 0.0, -0.0
    found = Degenerate.of(SAE(W_enc, b_enc, W_dec, sae.b_dec, JumpRelu(), {"threshold": threshold}))
    assert found == Degenerate(zero_encoder=3, equal_encoder=2, zero_decoder=2, equal_decoder=6)
    threshold[0] = 0.6
    apart = SAE(W_enc, b_enc, W_dec, sae.b_dec, JumpRelu(), {"threshold": threshold})
    assert Degenerate.of(apart).equal_encoder == 0
