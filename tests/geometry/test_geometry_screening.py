"""Supports and margins screened in float32 against those of float64 throughout."""

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st

from saecli.geometry import screening
from saecli.geometry.largest_cells import cells_of
from saecli.sae.activations import Activation, JumpRelu, Relu, ReluTopK, TopK


def check(case: Case) -> None:
    cells = cells_of(case.sae)
    supports, margins = cells.look(case.rows)
    pre = cells.pre_activations(case.rows)
    expected = cells.margins(pre)
    # What float64 itself may be off by: rounding of a value over the distance of the two nearest sites.
    W = case.sae.W_enc
    apart = torch.cat([torch.pdist(W.T), W.norm(dim=0)])
    largest = float(case.rows.norm(dim=1).max() * W.norm(dim=0).max() + case.sae.b_enc.abs().max())
    atol = 1e-14 * largest / float(apart[apart > 0].min() if apart.any() else 1)
    torch.testing.assert_close(margins, expected, rtol=1e-9, atol=atol)
    clear = expected > atol  # of a boundary; on one, float64 has no say either
    assert torch.equal(supports[clear], cells.supports(pre)[clear])


@given(cases())
def test_what_is_seen_equals_float64(case: Case) -> None:
    check(case)


@given(cases(kinds=("relu", "jumprelu", "topk"), shapes=("plain", "shifted", "clustered", "uneven")),
       st.floats(-12, -5))
def test_rows_nearer_to_a_boundary_than_float32_can_tell_are_seen_as_float64_does(case: Case, size: float) -> None:
    cells = cells_of(case.sae)
    rows = []
    for row in case.rows:
        slack, h, _ = cells.cell(row).tightest(row[None])
        if torch.isfinite(slack).all() and h.norm() > 0:  # onto the boundary, and a little to both sides of it
            step = slack[0] * h[0] / h[0].square().sum()
            rows += [row - (1 - 10**size) * step, row - (1 + 10**size) * step]
    if rows:
        check(Case(case.sae, torch.stack(rows)))


@pytest.mark.parametrize("activation", [TopK(24), TopK(1), TopK(600), TopK(599), Relu(), JumpRelu(), ReluTopK(24)])
@pytest.mark.parametrize("offset", [0, 100])
def test_many_latents_are_seen_as_float64_sees_them(activation: Activation, offset: float) -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 64, 600, "plain"), activation, rng)
    check(Case(sae, torch.from_numpy(rng.normal(size=(300, 64)) + offset)))


@pytest.mark.parametrize("activation", [TopK(8), Relu(), JumpRelu()])
def test_products_and_rows_in_several_pieces_are_seen_as_float64_sees_them(activation: Activation, monkeypatch) -> None:
    monkeypatch.setattr(screening, "PIECE", 24)
    monkeypatch.setattr(screening, "CACHED", 500)  # fewer than a row's latents, and some ten pairs'
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 64, 600, "plain"), activation, rng)
    check(Case(sae, torch.from_numpy(rng.normal(size=(60, 64)))))


def test_few_rows_are_left_to_float64() -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 256, 4096, "plain"), TopK(32), rng)
    cells, rows = cells_of(sae), torch.from_numpy(rng.normal(size=(500, 256)))
    proved = cells._swaps.look(rows)[2]
    assert proved.double().mean() > 0.8


def test_the_bound_on_float32_holds() -> None:
    rng = np.random.default_rng(0)
    for D in (3, 100, screening.PIECE, screening.PIECE + 1, 3000):
        x, w = torch.from_numpy(rng.normal(size=(200, D)) + 10), torch.from_numpy(rng.normal(size=(D, 50)))
        b = torch.from_numpy(100 * rng.normal(size=50))
        error = screening.product(x.float(), w.float(), b.float()).double() - torch.addmm(b, x, w)
        size = x.norm(dim=1)[:, None] * w.norm(dim=0) + b.abs()
        assert (error.abs() <= screening.rounding(D) * size).all()
