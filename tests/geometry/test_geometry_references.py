"""k-means, local PCA and the SAE on the same rows, each against its definition in float64 and brute force."""

import itertools

import numpy as np
import pytest
import torch
from encoders import encoder, sae_of
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA

from saecli.geometry import bridge as bridge_module
from saecli.geometry import local_pca as kmeans_module
from saecli.geometry.bridge import Bridge, Visited, own_cells
from saecli.geometry.cells import cells_of
from saecli.geometry.local_pca import LocalPCA, Stream, StreamedPCA, kmeans
from saecli.geometry.survey import visits
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.metrics import reconstruction

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


def a_sae(F: int = 30, k: int = 3) -> SAE:
    rng = np.random.default_rng(0)
    return sae_of(*encoder(rng, D, F, "plain"), TopK(k), rng)


def visited(sae: SAE, train: np.ndarray, rows: np.ndarray) -> Visited:
    cells = cells_of(sae)
    return Visited(cells, visits(cells, train)[0], visits(cells, rows)[0])


def scatter(rows: np.ndarray) -> float:
    rows = rows.astype(np.float64)
    return ((rows - rows.mean(0)) ** 2).sum()


def pca_residual(fitted: np.ndarray, measured: np.ndarray, centre: np.ndarray, rank: int) -> float:
    """The squared error of scikit-learn's PCA of one cell."""
    rank = min(rank, len(fitted) - 1, D)
    if rank < 1:
        return ((measured - (fitted.mean(0) if len(fitted) else centre)) ** 2).sum()
    pca = PCA(rank, svd_solver="full").fit(fitted)
    return (
        ((pca.inverse_transform(pca.transform(measured)) - measured) ** 2).sum()
        if len(measured)
        else 0.0
    )


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_local_pca_equals_sklearn_pca_of_each_cell(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    train, rows = rng.normal(size=(60, D)), rng.normal(size=(20, D))
    train_cells, cells = rng.integers(0, count, 60), rng.integers(0, count, 20)
    centres, ranks = rng.normal(size=(count, D)), rng.integers(0, D + 3, count)
    expected = sum(
        pca_residual(train[train_cells == c], rows[cells == c], centres[c], ranks[c])
        for c in range(count)
    )
    fitted = LocalPCA(train, train_cells, centres)
    assert fitted.spectrum(rows, cells).residual(ranks) == pytest.approx(
        expected, rel=1e-9, abs=1e-9
    )
    assert np.square(fitted.reconstruct(rows, cells, ranks) - rows).sum() == pytest.approx(
        expected, rel=1e-9, abs=1e-9
    )
    none = np.zeros(count, int)
    assert fitted.means_residual(rows, cells) == pytest.approx(
        fitted.spectrum(rows, cells).residual(none), rel=1e-9
    )


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 60), st.sampled_from([0, 1000]))
def test_local_pca_of_a_stream_equals_that_of_the_rows_in_memory(
    seed: int, count: int, batch: int, far: int
) -> None:
    rng = np.random.default_rng(seed)
    train, rows = rng.normal(size=(60, D)) + far, rng.normal(size=(20, D)) + far
    train_cells, cells = rng.integers(0, count, 60), rng.integers(0, count, 20)
    centres, ranks = rng.normal(size=(count, D)) + far, rng.integers(0, D + 3, count)
    held, streamed = LocalPCA(train, train_cells, centres), StreamedPCA(centres, directions=True)
    means = StreamedPCA(centres, directions=False)
    for at in range(0, 60, batch):
        streamed.add(train[at : at + batch], train_cells[at : at + batch])
        means.add(train[at : at + batch], train_cells[at : at + batch])
    expected, found = held.spectrum(rows, cells), streamed.spectrum(rows, cells)
    np.testing.assert_array_equal(found.rows, expected.rows)
    for some, own in zip(found.variances, expected.variances, strict=True):
        np.testing.assert_allclose(some, own, atol=1e-9)
    assert found.residual(ranks) == pytest.approx(expected.residual(ranks), rel=1e-6)
    np.testing.assert_allclose(
        streamed.reconstruct(rows, cells, ranks), held.reconstruct(rows, cells, ranks), atol=1e-5
    )
    assert means.means_residual(rows, cells) == pytest.approx(
        held.means_residual(rows, cells), rel=1e-9
    )


def test_references_of_a_stream_are_about_those_of_all_rows_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, rows, sae = clusters(0, 6000), clusters(1, 300), a_sae()
    stream = Stream(6000, lambda: (train[at : at + 500] for at in range(0, 6000, 500)))
    own = visited(sae, train[:200], rows)
    streamed = Bridge.fit(sae, train[:200], rank=2, stream=stream)
    found, held = (
        streamed.measure(rows, own),
        Bridge.fit(sae, train, rank=2).measure(rows, visited(sae, train, rows)),
    )
    assert (found.rows_fitted, found.kmeans_cells, found.local_pca_cells) == (6000, 30, 30)
    assert found.own_cells.rows_fitted <= 200
    assert found.kmeans_fvu == pytest.approx(held.kmeans_fvu, rel=0.2)
    assert found.local_pca_fvu == pytest.approx(held.local_pca_fvu, rel=0.2)
    assert found.variable_rank_mean == pytest.approx(2, abs=0.2)
    counts = streamed.local_pca.counts
    assert (counts.sum(), streamed.kmeans.counts.sum()) == (6000, 6000)
    np.testing.assert_array_equal(counts, np.bincount(streamed.pieces.predict(train), minlength=30))
    monkeypatch.setattr(bridge_module, "SCATTER", 7 * D**2)
    few = Bridge.fit(sae, train[:200], rank=2, stream=stream).measure(rows, own)
    assert (few.kmeans_cells, few.local_pca_cells) == (30, 7)


@given(st.integers(0, 2**32), st.floats(0, 3))
def test_no_choice_of_ranks_beats_the_theorems_ranks_for_lambda(seed: int, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3))
    cells = rng.integers(0, 3, 40)
    spectrum = LocalPCA(x, cells, np.zeros((3, 3))).spectrum(x, cells)

    def cost(ranks: tuple[int, ...]) -> float:
        total = 0.0
        for c, rank in enumerate(ranks):
            inside = x[cells == c]
            total += penalty * rank * len(inside)
            centred = inside - inside.mean(0)
            total += (np.linalg.svd(centred, compute_uv=False)[rank:] ** 2).sum()
        return total

    best = min(cost(ranks) for ranks in itertools.product(range(4), repeat=3))
    assert cost(tuple(spectrum.ranks(penalty))) == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(st.integers(0, 2**32), st.floats(0, 3))
def test_lambda_is_the_least_that_affords_a_mean_rank(seed: int, rank: float) -> None:
    rng = np.random.default_rng(seed)
    x, cells = rng.normal(size=(60, 3)), rng.integers(0, 4, 60)
    spectrum = LocalPCA(x, cells, np.zeros((4, 3))).spectrum(x, cells)
    penalty = spectrum.penalty_for(rank)
    assert spectrum.mean_rank(spectrum.ranks(penalty)) <= rank + 1e-9
    if penalty > 0:
        assert spectrum.mean_rank(spectrum.ranks(penalty * (1 - 1e-9))) > rank


def test_the_fvus_are_their_definitions() -> None:
    train, rows = clusters(0), clusters(1, 150)
    sae = a_sae()
    found = Bridge.fit(sae, train, rank=3).measure(rows, visited(sae, train, rows))
    assert (found.kmeans_cells, found.local_pca_cells, found.local_pca_rank) == (30, 30, 3)
    assert (found.rows_fitted, found.rows_measured) == (400, 150)

    fitted = KMeans(30, n_init=1, random_state=0).fit(train)
    means = np.stack([train[fitted.labels_ == c].astype(np.float64).mean(0) for c in range(30)])
    expected = ((rows - means[fitted.predict(rows)]) ** 2).sum() / scatter(rows)
    assert found.kmeans_fvu == pytest.approx(expected, rel=1e-9)
    measured = reconstruction(sae, torch.from_numpy(rows).double().split(37))
    assert found.sae_fvu == pytest.approx(measured["fvu"], rel=1e-9)
    assert 0 < found.local_pca_fvu < found.kmeans_fvu
    assert found.variable_rank_mean == pytest.approx(3, abs=0.2)


def test_arrows_lead_to_the_reconstructions_that_were_measured() -> None:
    train, rows = clusters(0), clusters(1, 150)
    sae = a_sae()
    bridge = Bridge.fit(sae, train, rank=2)
    found, arrows = bridge.measure(rows, visited(sae, train, rows)), bridge.reconstructions(rows)
    for name, fvu in (
        ("k-means", found.kmeans_fvu),
        ("SAE", found.sae_fvu),
        ("local PCA", found.local_pca_fvu),
    ):
        assert np.square(arrows[name] - rows).sum() / scatter(rows) == pytest.approx(fvu, rel=1e-6)


def test_a_free_rank_takes_everything_and_a_dear_one_nothing() -> None:
    train, rows = clusters(0), clusters(1, 150)
    sae = a_sae()
    bridge, own = Bridge.fit(sae, train, rank=1), visited(sae, train, rows)
    free, dear = (bridge.measure(rows, own, penalty) for penalty in (0.0, 1e9))
    assert free.variable_rank_mean > 4
    assert (dear.variable_rank_mean, dear.variable_rank_lambda) == (0, 1e9)
    assert free.variable_rank_fvu < free.local_pca_fvu < dear.variable_rank_fvu


@pytest.mark.parametrize("sae", [a_sae(8, 1), a_sae(6, 2)], ids=["top-1", "top-2"])
def test_price_of_shared_vectors_equals_brute_force(sae: SAE) -> None:
    train, rows = clusters(0, 2000), clusters(1, 500)
    patterns, found = (sae.encode(torch.from_numpy(some).double()) != 0 for some in (train, rows))
    sae_error = pca_error = 0.0
    used, count = [], 0
    for pattern in patterns.unique(dim=0):
        fitted, measured = train[(patterns == pattern).all(1)], rows[(found == pattern).all(1)]
        if len(fitted) >= 4 * sae.activation.k and len(measured):
            errors = sae(torch.from_numpy(measured).double()).numpy() - measured
            sae_error += (errors**2).sum()
            pca_error += pca_residual(
                fitted.astype(np.float64), measured, measured[0], sae.activation.k
            )
            used.append(measured)
            count += 1
    residual = np.square(sae(torch.from_numpy(rows).double()).numpy() - rows).sum(1)
    result = own_cells(visited(sae, train, rows), train, rows, residual)
    assert result.cells == count > 3
    assert result.rank == sae.activation.k
    total = ((np.concatenate(used) - rows.mean(0, dtype=np.float64)) ** 2).sum()
    assert result.sae_fvu == pytest.approx(sae_error / total, rel=1e-6)
    assert result.local_pca_fvu == pytest.approx(pca_error / total, rel=1e-6)
    assert result.price == pytest.approx((sae_error - pca_error) / total, rel=1e-6)
    assert result.price > 0
    assert result.enough == (
        result.rows_measured >= 100 and (count >= 20 or result.rows_measured >= 450)
    )


def test_cells_with_too_few_rows_give_no_price() -> None:
    sae = a_sae(500, 20)
    found = Bridge.fit(sae, clusters(0), rank=5).measure(
        clusters(1), visited(sae, clusters(0), clusters(1))
    )
    assert (found.kmeans_cells, found.local_pca_cells) == (100, 20)
    own = found.own_cells
    assert (own.cells, own.price, own.sae_fvu, own.enough) == (0, None, None, False)


def test_a_rank_that_spans_the_space_leaves_nothing_unexplained() -> None:
    own = visited(a_sae(), clusters(0), clusters(1))
    found = Bridge.fit(a_sae(), clusters(0), rank=100).measure(clusters(1), own)
    assert found.local_pca_rank == D
    assert found.local_pca_fvu < 1e-12


def test_many_rows_are_clustered_in_mini_batches_about_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = clusters(0, 2000)
    careful = kmeans(train, 10, 0)
    monkeypatch.setattr(kmeans_module, "CAREFUL_WORK", 0)
    quick = kmeans(train, 10, 0)
    assert isinstance(quick, MiniBatchKMeans)

    def error(fitted: KMeans) -> float:
        return np.square(train - fitted.cluster_centers_[fitted.predict(train)]).sum()

    assert error(quick) < 2 * error(careful)
    monkeypatch.setattr(kmeans_module, "MINIBATCH_WORK", 15 * train.size)
    assert len(kmeans(train, 10, 0).cluster_centers_) == 5


@pytest.mark.parametrize("rows", [1, 2, 50])
@pytest.mark.parametrize("activation", [TopK(3), Relu()], ids=["topk", "relu"])
def test_equal_rows_give_no_finite_number_and_no_warning(rows: int, activation: TopK) -> None:
    same = np.ones((rows, D), np.float32)
    rng = np.random.default_rng(0)
    sae = sae_of(*encoder(rng, D, 30, "plain"), activation, rng)
    found = Bridge.fit(sae, same, rank=3).measure(same, visited(sae, same, same))
    assert np.isnan([found.kmeans_fvu, found.local_pca_fvu, found.variable_rank_fvu]).all()
    assert found.sae_fvu == np.inf  # as `sae eval` has it
    assert found.kmeans_cells == max(1, rows // 4)
