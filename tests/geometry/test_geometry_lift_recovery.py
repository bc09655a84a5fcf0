"""Lifts and sections of power diagrams, and which diagrams are K-th order ones, against the cells themselves."""

import itertools
import math

import numpy as np
import pytest
import torch
from encoders import Case, cases
from hypothesis import given
from hypothesis import strategies as st
from saecli.geometry.power_diagram import PowerDiagram, lift, section
from saecli.geometry.recovery import recover, sites_for

from saecli.base.errors import ConfigError


def random_diagram(seed: int, n: int, D: int) -> PowerDiagram:
    rng = np.random.default_rng(seed)
    return PowerDiagram(torch.from_numpy(rng.normal(size=(n, D))), torch.from_numpy(rng.normal(size=n)))


def orthonormal(rng: np.random.Generator, m: int, D: int) -> torch.Tensor:
    return torch.from_numpy(np.linalg.qr(rng.normal(size=(D, m)))[0].T.copy())


def hexagon(weights: tuple[float, ...] = (0,) * 6) -> PowerDiagram:
    """Six sites at the corners of a regular hexagon, counter-clockwise."""
    angles = torch.arange(6).double() * math.pi / 3
    return PowerDiagram(torch.stack([angles.cos(), angles.sin()], 1), torch.tensor(weights).double())


@given(cases(kinds=("topk",), shapes=("plain", "shifted", "uneven")))
def test_rows_at_height_0_are_nearest_to_the_lifted_sites_of_their_power_cells(case: Case) -> None:
    diagram, k = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc), case.sae.activation.k
    lifted = lift(diagram)
    assert lifted.centroids.shape == (case.sae.d_sae, case.sae.d_in + 1)
    assert (lifted.weights == 0).all()
    raised = torch.cat([case.rows, torch.zeros(len(case.rows), 1)], 1)
    distances = np.linalg.norm(raised.numpy()[:, None] - lifted.centroids.numpy(), axis=2)
    kept = case.sae.pre_activations(case.rows).topk(k).indices.sort(-1).values.numpy()
    np.testing.assert_array_equal(np.sort(np.argsort(distances, axis=1)[:, :k], axis=1), kept)


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 5))
def test_section_of_a_lift_is_the_diagram_but_for_a_constant(seed: int, n: int, D: int) -> None:
    diagram = random_diagram(seed, n, D)
    back = section(lift(diagram), torch.zeros(D + 1), torch.eye(D, D + 1))
    torch.testing.assert_close(back.centroids, diagram.centroids)
    torch.testing.assert_close(back.weights - diagram.weights, (-diagram.weights.max()).expand(n), atol=1e-12, rtol=0)


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 5), st.data())
def test_points_of_any_plane_lie_in_the_same_cells_of_every_order_of_section_and_diagram(
        seed: int, n: int, D: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    diagram, m, k = random_diagram(seed, n, D), data.draw(st.integers(1, D)), data.draw(st.integers(1, n))
    origin, basis = torch.from_numpy(rng.normal(size=D)), orthonormal(rng, m, D)
    u = torch.from_numpy(rng.normal(size=(20, m)))
    torch.testing.assert_close(section(diagram, origin, basis).power(u), diagram.power(origin + u @ basis),
                               rtol=1e-9, atol=1e-9)
    assert torch.equal(section(diagram, origin, basis).nearest(u, k), diagram.nearest(origin + u @ basis, k))


@given(st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 4), st.data())
def test_sites_are_recovered_from_the_cells_of_their_kth_order_diagram(
        seed: int, d: int, D: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, d - 1))
    diagram, shift = random_diagram(seed, d, D), data.draw(st.floats(-3, 3))
    supports = np.random.default_rng(seed).permutation(list(itertools.combinations(range(d), k)))
    nu, beta = diagram.sites_of(torch.from_numpy(supports))
    found = recover(PowerDiagram(nu, beta + shift), k, supports.tolist())
    assert found.is_kth_order
    torch.testing.assert_close(found.diagram.centroids, diagram.centroids)
    torch.testing.assert_close(found.diagram.weights, diagram.weights + shift, atol=1e-9, rtol=0)
    assert torch.equal(found.supports.sort(1).values, torch.from_numpy(supports).sort(1).values)


@pytest.mark.parametrize("seed", range(10))
def test_a_shuffled_diagram_of_four_sites_is_recognised_and_its_cells_are_those_of_the_sites_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nu, beta = random_diagram(seed, 4, 2).sites_of(torch.tensor(list(itertools.combinations(range(4), 2))))
    order = torch.from_numpy(rng.permutation(6))
    given_diagram = PowerDiagram(nu[order], beta[order])
    found = recover(given_diagram, 2)
    assert found.is_kth_order
    x = torch.from_numpy(3 * rng.normal(size=(500, 2)))
    named = found.supports[given_diagram.nearest(x, 1)[:, 0]]
    assert torch.equal(named.sort(1).values, found.diagram.nearest(x, 2).sort(1).values)


@given(st.integers(0, 2**32), st.sampled_from([(4, 2), (5, 2), (5, 3), (6, 3)]))
def test_a_random_diagram_with_as_many_cells_is_refused(seed: int, shape: tuple[int, int]) -> None:
    d, k = shape
    diagram = random_diagram(seed, math.comb(d, k), 2)
    assert not recover(diagram, k, list(itertools.combinations(range(d), k))).is_kth_order


def test_the_regular_hexagon_is_refused_unless_opposite_corners_share_no_site() -> None:
    subsets = list(itertools.combinations(range(4), 2))
    accepted = 0
    for order in itertools.permutations(subsets):
        found = recover(hexagon(), 2, order)
        complementary = all(not set(order[corner]) & set(order[corner + 3]) for corner in range(3))
        assert found.is_kth_order == complementary
        accepted += complementary
    assert accepted == 48  # of 720


def test_the_hexagon_with_one_heavier_corner_is_refused_however_its_corners_are_called() -> None:
    assert recover(hexagon(), 2).is_kth_order
    assert recover(hexagon((0.3, 0, 0, 0.3, 0, 0)), 2).residual > 0.01
    assert recover(hexagon((0.3, 0, 0, 0, 0, 0)), 2).residual > 0.01
    assert recover(hexagon((0.3, 0, 0, -0.3, 0, 0)), 2).is_kth_order


@pytest.mark.parametrize(("cells", "k", "supports", "words"), [
    (7, 2, None, r"has C\(d, 2\) cells, got 7"), (6, 0, None, "must be at least 1, got 0"),
    (10, 2, None, "of 10 cells not every labelling can be tried"),
    (6, 2, [(0, 1)] * 6, "each of the 6 subsets of 2 out of 4 sites once, got 1 of them"),
    (3, 1, [(0,), (1,), (7,)], "got 2 of them")])
def test_what_is_no_question_is_refused(cells: int, k: int, supports: list | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recover(random_diagram(0, cells, 2), k, supports)


def test_cells_tell_how_many_sites() -> None:
    assert [sites_for(math.comb(d, k), k) for d, k in ((2, 1), (4, 2), (6, 5), (40, 3))] == [2, 4, 6, 40]
