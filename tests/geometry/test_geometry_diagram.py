"""Power diagrams against the encoders that they are, distances computed in extended precision."""

import numpy as np
import pytest
import torch
from encoders import Case, cases, encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st

from saecli.geometry.diagram import PowerDiagram, agreement, kth_order_diagram
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


@given(cases(kinds=("topk",), shapes=("plain", "shifted", "uneven")))
def test_nearest_sites_are_the_largest_pre_activations(case: Case) -> None:
    diagram, k = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc), case.sae.activation.k
    nearest = np.sort(diagram.nearest(case.rows, k), axis=1)
    np.testing.assert_array_equal(nearest, np.sort(np.argsort(powers(diagram, case.rows), axis=1)[:, :k], axis=1))
    kept = np.argsort(-case.sae.pre_activations(case.rows).numpy(), axis=1)[:, :k]
    np.testing.assert_array_equal(nearest, np.sort(kept, axis=1))


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
