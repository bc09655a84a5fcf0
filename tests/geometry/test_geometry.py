"""Cells, margins, ranks and power diagrams against slow certain accounts and the SAE itself; the census and the sample
of a stream against the whole stream; k-means, local PCA and the SAE, each against its definition in float64."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from encoders import Case, case_of, cases, sae_of, walls
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from saecli.base.errors import ConfigError
from saecli.geometry import geometry, references
from saecli.geometry.cells import Cells, PowerDiagram, agreement, cells_of
from saecli.geometry.geometry import Census, describe, map_rank, support_keys, visit_rows
from saecli.geometry.references import LocalPCA, kmeans, measure_references, nearest
from saecli.sae.activations import (
    AbsTopK,
    Activation,
    JumpRelu,
    MatchingPursuit,
    Relu,
    ReluTopK,
    TopK,
)
from saecli.sae.dictionary import SAE
from saecli.sae.metrics import reconstruction


def supports_at(cells: Cells, rows: torch.Tensor) -> torch.Tensor:
    return cells.supports(cells.pre_activations(rows))


@given(cases(shapes=("plain", "shifted", "uneven")))
def test_supports_are_the_latents_whose_codes_are_not_zero(case: Case) -> None:
    assert torch.equal(supports_at(cells_of(case.sae), case.rows), case.sae.encode(case.rows) != 0)


@given(cases())
def test_margins_equal_the_nearest_of_all_walls(case: Case) -> None:
    cells = cells_of(case.sae)
    margins = cells.margins(cells.pre_activations(case.rows)).numpy()
    expected = [
        min((distance for distance, _ in walls(case.sae, row)), default=np.inf)
        for row in case.rows.numpy()
    ]
    scale = max(1.0, float(case.sae.W_enc.abs().max()))
    np.testing.assert_allclose(margins, expected, rtol=1e-9, atol=1e-9 * scale)


@given(cases(shapes=("plain", "shifted", "clustered", "uneven")), st.integers(0, 2**32))
def test_no_direction_leaves_the_cell_before_the_margin(case: Case, seed: int) -> None:
    cells = cells_of(case.sae)
    margins = cells.margins(cells.pre_activations(case.rows))
    directions = np.random.default_rng(seed).normal(size=(50, case.sae.d_in))
    directions = torch.from_numpy(directions / np.linalg.norm(directions, axis=1, keepdims=True))
    home = supports_at(cells, case.rows)
    for row, margin, support in zip(case.rows, margins, home, strict=True):
        if margin < 1e-9:
            continue  # on the wall to rounding
        reach = min(float(margin), 1e3)
        assert (supports_at(cells, row + (1 - 1e-6) * reach * directions) == support).all()
        if torch.isinf(margin):
            continue
        towards = torch.from_numpy(min(walls(case.sae, row.numpy()), key=lambda wall: wall[0])[1])
        steps = torch.tensor([1 - 1e-6, 1 + 1e-6], dtype=torch.float64)[:, None] * margin
        inside, outside = (supports_at(cells, row + steps * towards) == support).all(1)
        assert inside
        assert not outside


@given(cases(shapes=("plain", "shifted", "zeros", "uneven", "twins")), st.floats(0.01, 3))
def test_crossings_count_the_walls_within_the_radius(case: Case, radius: float) -> None:
    cells = cells_of(case.sae)
    counts = cells.crossings(cells.pre_activations(case.rows), radius)
    for row, count in zip(case.rows.numpy(), counts.tolist(), strict=True):
        distances = np.array([distance for distance, _ in walls(case.sae, row)])
        surely, perhaps = ((distances < radius * factor).sum() for factor in (1 - 1e-6, 1 + 1e-6))
        assert surely <= count <= perhaps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "shape"),
    [
        (TopK(24), "plain"),
        (TopK(24), "clustered"),
        (AbsTopK(24), "shifted"),
        (AbsTopK(24), "plain"),
        (Relu(), "plain"),
        (ReluTopK(24), "plain"),
        (ReluTopK(400), "plain"),
    ],
)
def test_margins_of_many_latents_equal_the_nearest_of_all_walls(activation: Activation, shape: str):
    case = case_of(activation, 32, 600, shape=shape)
    cells = cells_of(case.sae)
    margins = cells.margins(cells.pre_activations(case.rows)).numpy()
    expected = [min(distance for distance, _ in walls(case.sae, row)) for row in case.rows.numpy()]
    np.testing.assert_allclose(margins, expected, rtol=1e-9)


@pytest.mark.parametrize("activation", [Relu(), TopK(2), AbsTopK(2), ReluTopK(2)], ids=repr)
def test_a_row_of_nan_has_no_margin_and_spoils_no_other(activation: Activation) -> None:
    case = case_of(activation, 3, 5)
    cells, rows = cells_of(case.sae), case.rows
    expected = cells.margins(cells.pre_activations(rows))
    rows[1, 0] = expected[1] = torch.nan
    torch.testing.assert_close(cells.margins(cells.pre_activations(rows)), expected, equal_nan=True)


@pytest.mark.parametrize("kind", [TopK, AbsTopK])
def test_a_cell_that_is_the_whole_space_has_no_boundary(kind: type) -> None:
    case = case_of(kind(5), 3, 5)
    cells = cells_of(case.sae)
    pre = cells.pre_activations(case.rows)
    assert torch.isinf(cells.margins(pre)).all()
    assert (cells.crossings(pre, 1e9) == 0).all()
    assert cells.possible_log10 == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("F", "k"), [(1, 1), (80, 3), (256, 15), (4096, 320)])
def test_possible_cells_are_counted_exactly(F: int, k: int) -> None:
    W, b = np.zeros((2, F)), np.zeros(F)
    rng = np.random.default_rng(0)
    clipped = sum(math.comb(F, j) for j in range(k + 1))
    for activation, count in ((TopK(k), math.comb(F, k)), (ReluTopK(k), clipped), (Relu(), 2**F)):
        possible = cells_of(sae_of(W, b, activation, rng)).possible_log10
        assert possible == pytest.approx(math.log10(count), abs=1e-9)


def test_an_activation_without_cells_is_refused_in_one_sentence() -> None:
    said = r"matching-pursuit has no cells .*; expected one of relu, "
    with pytest.raises(ConfigError, match=said):
        cells_of(case_of(MatchingPursuit(2), 2, 3).sae)


@given(
    cases(
        kinds=("relu", "topk", "abs-topk", "jumprelu"),
        shapes=("plain", "clustered", "twins", "zeros"),
    )
)
def test_ranks_are_those_of_the_jacobian(case: Case) -> None:
    sae = case.sae.copy_to(torch.float64)
    for row, support in zip(case.rows, case.sae.encode(case.rows) != 0, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: case.sae(x[None])[0], row)
        values = np.linalg.svd(jacobian.numpy(), compute_uv=False)
        relative = values / max(values[0], np.finfo(float).tiny)
        result = map_rank(sae, support.nonzero()[:, 0])
        # Between them lies rounding.
        assert (relative > 1e-12).sum() <= result <= (relative > 1e-18).sum()


def powers(diagram: PowerDiagram, rows: torch.Tensor) -> np.ndarray:
    """`||x - mu_i||^2 - alpha_i` in numpy's longest floats, (B, n)."""
    mu, alpha, x = (
        t.numpy().astype(np.longdouble) for t in (diagram.centroids, diagram.weights, rows)
    )
    return np.square(x[:, None] - mu).sum(-1) - alpha


@given(cases(kinds=("topk", "abs-topk")))
def test_every_row_without_a_tie_lies_in_the_cell_of_its_nearest_sites(case: Case) -> None:
    result = agreement(cells_of(case.sae), case.rows.split(3))
    assert result["rows"] == len(case.rows)
    assert result["agreement"] == (1.0 if result["ties"] < result["rows"] else None)


@given(cases(kinds=("topk",), shapes=("plain", "shifted", "uneven")))
def test_nearest_sites_are_the_largest_pre_activations(case: Case) -> None:
    diagram, k = PowerDiagram.from_encoder(case.sae.W_enc, case.sae.b_enc), case.sae.activation.k
    nearest = np.sort(diagram.nearest(case.rows, k), axis=1)
    np.testing.assert_array_equal(
        nearest, np.sort(np.argsort(powers(diagram, case.rows), axis=1)[:, :k], axis=1)
    )
    kept = np.argsort(-case.sae.pre_activations(case.rows).numpy(), axis=1)[:, :k]
    np.testing.assert_array_equal(nearest, np.sort(kept, axis=1))


def test_abs_topk_is_no_diagram_of_its_encoder_but_one_of_twice_the_sites() -> None:
    case = case_of(AbsTopK(3), 4, 12, rows=200)
    sae, rows = case.sae, case.rows
    kept = sae.pre_activations(rows).abs().topk(3).indices.sort(-1).values
    single = PowerDiagram.from_encoder(sae.W_enc, sae.b_enc).nearest(rows, 3).sort(-1).values
    double = cells_of(sae).diagram.nearest(rows, 3)
    assert not torch.equal(single, kept)
    assert torch.equal((double % 12).sort(-1).values, kept)
    assert torch.equal(double >= 12, sae.pre_activations(rows).gather(1, double % 12) < 0)
    result = agreement(cells_of(sae), [rows])
    assert (result["agreement"], result["ties"]) == (1.0, 0)


def test_large_rows_do_not_pass_rounding_off_as_disagreement() -> None:
    case = case_of(TopK(8), 16, 200, rows=500, seed=1)
    result = agreement(cells_of(case.sae), [1e5 * case.rows + 1e6])
    assert result["agreement"] == 1.0
    assert result["ties"] < 5


@pytest.mark.parametrize("kind", [TopK, AbsTopK])
def test_equal_latents_at_the_boundary_are_ties_and_counted_apart(kind: type) -> None:
    W = np.array([[1.0, 1.0, -0.5], [0.0, 0.0, 0.5]])
    sae = sae_of(W, np.zeros(3), kind(1), np.random.default_rng(0))
    result = agreement(cells_of(sae), [torch.tensor([[1.0, 0.0], [2.0, 0.1], [-1.0, 8.0]])])
    sites = 3 * (1 + (kind is AbsTopK))
    assert result == {"rows": 3, "ties": 2, "agreement": 1.0, "sites": sites, "order": 1}
    assert agreement(cells_of(sae), [torch.tensor([[1.0, 0.0]])])["agreement"] is None


@pytest.mark.parametrize("activation", [Relu(), JumpRelu()])
def test_thresholded_activations_have_no_power_diagram(activation: Relu) -> None:
    assert agreement(cells_of(case_of(activation, 2, 3).sae), []) is None


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 20), st.integers(1, 90))
def test_streamed_counts_equal_a_set_over_all_rows(seed: int, rows: int, F: int, batch: int):
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
def test_the_sample_of_a_stream_is_uniform_in_order_and_whole_if_it_fits(rows, kept, monkeypatch):
    monkeypatch.setattr(geometry, "SAMPLE_BYTES", 4 * 4 * 700)
    case = case_of(TopK(3), 4, 20, rows)
    x = case.rows.float()
    result = visit_rows(cells_of(case.sae), x.split(128), rows)
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


D = 6


def clusters(seed: int, rows: int = 400) -> np.ndarray:
    """Rows about ten centres, each cluster stretched its own way."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, 10, rows)
    stretch = rng.normal(size=(10, D, D))
    return (
        5 * rng.normal(size=(10, D))[which]
        + np.einsum("nd,nde->ne", rng.normal(size=(rows, D)), stretch[which])
    ).astype(np.float32)


def a_sae() -> SAE:
    return case_of(TopK(3), D, 30).sae


def scatter(rows: np.ndarray) -> float:
    rows = rows.astype(np.float64)
    return ((rows - rows.mean(0)) ** 2).sum()


def pca_residual(fitted: np.ndarray, measured: np.ndarray, centre: np.ndarray, rank: int) -> float:
    """The squared error of scikit-learn's PCA of one cell."""
    rank = min(rank, len(fitted) - 1, D)
    if rank < 1:
        return ((measured - (fitted.mean(0) if len(fitted) else centre)) ** 2).sum()
    pca = PCA(rank, svd_solver="full").fit(fitted)
    if not len(measured):
        return 0.0
    return ((pca.inverse_transform(pca.transform(measured)) - measured) ** 2).sum()


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(0, D + 3))
def test_local_pca_equals_sklearn_pca_of_each_cell(seed: int, count: int, rank: int) -> None:
    rng = np.random.default_rng(seed)
    train, rows = rng.normal(size=(60, D)), rng.normal(size=(20, D))
    train_labels, labels = rng.integers(0, count, 60), rng.integers(0, count, 20)
    centres = rng.normal(size=(count, D))
    expected = sum(
        pca_residual(train[train_labels == c], rows[labels == c], centres[c], rank)
        for c in range(count)
    )
    reconstructed = LocalPCA(train, centres, train_labels).reconstruct(rows, rank, labels)
    assert np.square(reconstructed - rows).sum() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_fvus_are_their_definitions() -> None:
    train, rows = clusters(0), clusters(1, 150)
    sae = a_sae()
    measures = measure_references(sae, rows, train, 3)
    fitted = KMeans(30, n_init=1, random_state=0).fit(train)
    labels = fitted.predict(rows)
    cells = [(train[fitted.labels_ == c].astype(np.float64), rows[labels == c]) for c in range(30)]
    for name, rank in (("kmeans_fvu", 0), ("local_pca_fvu", 3)):
        error = sum(pca_residual(own, measured, own[0], rank) for own, measured in cells)
        assert measures[name] == pytest.approx(error / scatter(rows), rel=1e-6)
    expected = reconstruction(sae, torch.from_numpy(rows).double().split(37))
    assert measures["sae_fvu"] == pytest.approx(expected["fvu"], rel=1e-9)
    expected = {"metric": "raw", "kmeans_cells": 30, "local_pca_cells": 30, "local_pca_rank": 3}
    expected |= {"rows_fitted": 400, "rows_measured": 150}
    assert {name: value for name, value in measures.items() if "fvu" not in name} == expected


def test_a_rank_that_spans_the_space_leaves_nothing_unexplained() -> None:
    measures = measure_references(a_sae(), clusters(1), clusters(0), 100)
    assert measures["local_pca_rank"] == D
    assert measures["local_pca_fvu"] < 1e-12


def test_many_rows_are_clustered_in_mini_batches_about_as_well(monkeypatch: pytest.MonkeyPatch):
    train = clusters(0, 2000)

    def error(centres: np.ndarray) -> float:
        return np.square(train - centres[nearest(train, centres)]).sum()

    careful = kmeans(train, 10).cluster_centers_
    monkeypatch.setattr(references, "CAREFUL_WORK", 0)
    quick = kmeans(train, 10).cluster_centers_
    assert not np.array_equal(quick, careful)
    assert error(quick) < 2 * error(careful)
    monkeypatch.setattr(references, "MINIBATCH_WORK", 15 * train.size)
    assert len(kmeans(train, 10).cluster_centers_) == 5


@pytest.mark.parametrize("rows", [1, 2, 50])
@pytest.mark.parametrize("activation", [TopK(3), Relu()], ids=["topk", "relu"])
def test_equal_rows_give_no_finite_number_and_no_warning(rows: int, activation: TopK) -> None:
    same = np.ones((rows, D), np.float32)
    measures = measure_references(case_of(activation, D, 30).sae, same, same, 3)
    assert np.isnan([measures["kmeans_fvu"], measures["local_pca_fvu"]]).all()
    assert measures["sae_fvu"] == np.inf  # as `sae eval` has it
    assert measures["kmeans_cells"] == max(1, rows // 4)
