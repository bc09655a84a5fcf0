"""Power diagrams against the encoders that they are, distances computed in extended precision."""

import itertools

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st
from saecli.geometry.agreement import agreement, cell_agreement
from saecli.geometry.power_diagram import PowerDiagram, kth_order_diagram

from saecli.base.errors import ConfigError
from saecli.sae.activations import AbsTopK, JumpRelu, Relu, TopK


def powers(diagram: PowerDiagram, rows: torch.Tensor) -> np.ndarray:
    """`||x - mu_i||^2 - alpha_i` in numpy's longest floats, (B, n)."""
    mu, alpha, x = (t.numpy().astype(np.longdouble) for t in (diagram.centroids, diagram.weights, rows))
    return np.square(x[:, None] - mu).sum(-1) - alpha


@given(cases(kinds=("topk", "abs-topk")))
def test_every_row_without_a_tie_lies_in_the_cell_of_its_nearest_sites(case: Case) -> None:
    found = agreement(case.sae, case.rows.split(3))
    assert (found.rows, found.matching) == (len(case.rows), len(case.rows) - found.ties)
    assert found.fraction in (1.0, None)


@given(cases(kinds=("topk", "abs-topk")))
def test_every_row_without_a_tie_is_nearer_to_its_own_cells_site_than_to_any_other_visited(case: Case) -> None:
    found, cells = cell_agreement(case.sae, case.rows)
    assert (found.rows, found.matching) == (len(case.rows), len(case.rows) - found.ties)
    assert 1 <= cells <= len(case.rows)


def test_all_visited_cells_are_compared_and_equal_cells_are_ties() -> None:
    rng = np.random.default_rng(0)
    W, b = encoder(rng, 3, 12, "plain")
    rows = torch.from_numpy(rng.normal(size=(300, 3)))
    sae = sae_of(W, b, TopK(3), rng)
    found, cells = cell_agreement(sae, rows)
    assert (found.fraction, found.ties) == (1.0, 0)
    assert cells == len((sae.encode(rows) != 0).unique(dim=0)) > 20
    found, cells = cell_agreement(sae_of(np.zeros((3, 12)), np.zeros(12), TopK(3), rng), rows)
    assert (found.ties, cells) == (0, 1)


@given(cases(kinds=("topk",), shapes=("plain", "shifted", "uneven")))
def test_nearest_sites_are_the_smallest_powers_and_the_largest_pre_activations(case: Case) -> None:
    diagram, k = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc), case.sae.activation.k
    nearest = np.sort(diagram.nearest(case.rows, k), axis=1)
    np.testing.assert_array_equal(nearest, np.sort(np.argsort(powers(diagram, case.rows), axis=1)[:, :k], axis=1))
    kept = np.argsort(-case.sae.pre_activations(case.rows).numpy(), axis=1)[:, :k]
    np.testing.assert_array_equal(nearest, np.sort(kept, axis=1))


@given(cases(kinds=("topk",), largest_d_sae=8, shapes=("plain", "shifted")))
def test_supports_are_cells_of_the_ordinary_diagram_of_kth_order_sites(case: Case) -> None:
    k = case.sae.activation.k
    supports = torch.tensor(list(itertools.combinations(range(case.sae.d_sae), k)))
    nu, beta = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc).sites_of(supports)
    chosen = supports[powers(PowerDiagram(nu, beta), case.rows).argmin(1)]
    kept = case.sae.pre_activations(case.rows).topk(k).indices.sort(-1).values
    assert torch.equal(chosen, kept)


@given(cases(kinds=("topk",)))
def test_kth_order_power_is_the_mean_power_of_the_support(case: Case) -> None:
    diagram = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc)
    support = torch.arange(case.sae.d_sae)[: case.sae.activation.k]
    nu, beta = diagram.sites_of(support)
    mean = powers(diagram, case.rows)[:, support.numpy()].mean(1).astype(float)
    np.testing.assert_allclose(powers(PowerDiagram(nu[None], beta[None]), case.rows)[:, 0].astype(float), mean,
                               rtol=1e-9, atol=1e-9 * float(diagram.weights.abs().max()))


@given(cases(kinds=("topk",)), st.floats(-5, 5))
def test_encoder_to_diagram_and_back_is_the_identity_and_a_constant_only_shifts_the_bias(case: Case, c: float) -> None:
    diagram = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc)
    scale = diagram.weights.abs().max().item() + 1
    W_enc, b_enc = diagram.to_encoder()
    assert torch.equal(W_enc, case.sae.W_enc)
    torch.testing.assert_close(b_enc, case.sae.b_enc, rtol=0, atol=1e-14 * scale)
    shifted = PowerDiagram(diagram.centroids, diagram.weights + c)
    torch.testing.assert_close(shifted.to_encoder()[1], case.sae.b_enc + c / 2, rtol=0, atol=1e-14 * scale)


@given(cases(kinds=("topk",), shapes=("plain", "uneven")), st.floats(-100, 100))
def test_a_constant_added_to_all_weights_moves_no_cell(case: Case, constant: float) -> None:
    diagram, k = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc), case.sae.activation.k
    shifted = PowerDiagram(diagram.centroids, diagram.weights + constant)
    assert torch.equal(shifted.nearest(case.rows, k), diagram.nearest(case.rows, k))


def test_abs_topk_is_no_diagram_of_its_encoder_but_one_of_twice_the_sites() -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 4, 12, "plain"), AbsTopK(3), rng)
    rows = torch.from_numpy(rng.normal(size=(200, 4)))
    kept = sae.pre_activations(rows).abs().topk(3).indices.sort(-1).values
    single = PowerDiagram.from_encoder(sae.W_enc, sae.b_enc).nearest(rows, 3).sort(-1).values
    double = kth_order_diagram(sae).diagram.nearest(rows, 3)
    assert not torch.equal(single, kept)
    assert torch.equal((double % 12).sort(-1).values, kept)
    assert torch.equal(double >= 12, sae.pre_activations(rows).gather(1, double % 12) < 0)
    found = agreement(sae, [rows])
    assert (found.fraction, found.ties) == (1.0, 0)


def test_large_rows_do_not_pass_rounding_off_as_disagreement() -> None:
    rng = np.random.default_rng(1)
    sae = sae_of(*encoder(rng, 16, 200, "plain"), TopK(8), rng)
    found = agreement(sae, [torch.from_numpy(1e5 * rng.normal(size=(500, 16)) + 1e6)])
    assert found.fraction == 1.0
    assert found.ties < 5


@pytest.mark.parametrize("kind", [TopK, AbsTopK])
def test_equal_latents_at_the_boundary_are_ties_and_counted_apart(kind: type) -> None:
    W = np.array([[1.0, 1.0, -0.5], [0.0, 0.0, 0.5]])
    sae = sae_of(W, np.zeros(3), kind(1), np.random.default_rng(0))
    found = agreement(sae, [torch.tensor([[1.0, 0.0], [2.0, 0.1], [-1.0, 8.0]])])
    assert (found.rows, found.ties, found.matching, found.fraction) == (3, 2, 1, 1.0)
    assert agreement(sae, [torch.tensor([[1.0, 0.0]])]).fraction is None


@pytest.mark.parametrize("activation", [Relu(), JumpRelu()])
def test_thresholded_activations_have_no_power_diagram(activation: Relu) -> None:
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, 2, 3, "plain"), activation, rng)
    assert agreement(sae, []) is None
    assert cell_agreement(sae, torch.zeros(1, 2)) is None


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs centroids \(n, D\) and weights \(n,\), got \(3, 2\) and \(2,\)"):
        PowerDiagram(torch.zeros(3, 2), torch.zeros(2))
