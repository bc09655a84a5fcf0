"""k-means, local PCA and the SAE on the same rows, each against its definition in float64."""

import numpy as np
import pytest
import torch
from encoders import encoder, sae_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from saecli.activations import TopK
from saecli.geometry import piecewise_affine
from saecli.geometry.piecewise_affine import affine_residual, kmeans, principal_directions, references
from saecli.metrics import reconstruction
from saecli.sae import SAE

D = 6


def clusters(seed: int, rows: int = 400) -> np.ndarray:
    """Rows about ten centres, each cluster stretched its own way."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, 10, rows)
    stretch = rng.normal(size=(10, D, D))
    return (5 * rng.normal(size=(10, D))[which] + np.einsum("nd,nde->ne", rng.normal(size=(rows, D)), stretch[which])
            ).astype(np.float32)


def a_sae(F: int = 30) -> SAE:
    rng = np.random.default_rng(0)
    return sae_of(*encoder(rng, D, F, "plain"), TopK(3), rng)


def scatter(rows: np.ndarray) -> float:
    rows = rows.astype(np.float64)
    return ((rows - rows.mean(0)) ** 2).sum()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 8), st.integers(1, 12))
def test_local_pca_equals_sklearn_pca_of_each_cell(seed: int, rank: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    train, rows = rng.normal(size=(60, D)), rng.normal(size=(20, D))
    train_cells, cells = rng.integers(0, count, 60), rng.integers(0, count, 20)
    centres = rng.normal(size=(count, D))
    expected = 0.0
    for c in range(count):
        fitted, measured = train[train_cells == c], rows[cells == c]
        if len(measured) and len(fitted) > 1 and rank:
            pca = PCA(min(rank, len(fitted) - 1, D), svd_solver="full").fit(fitted)
            expected += ((pca.inverse_transform(pca.transform(measured)) - measured) ** 2).sum()
        elif len(measured):
            expected += ((measured - (fitted.mean(0) if len(fitted) else centres[c])) ** 2).sum()
    found = affine_residual(train, train_cells, rows, cells, centres, rank)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, D - 1), st.sampled_from([4, 30]))
def test_no_affine_map_of_the_same_rank_beats_local_pca_on_its_own_rows(seed: int, rank: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D)) @ rng.normal(size=(D, D)) + rng.normal(size=D)
    one = np.zeros(rows, int)
    best = affine_residual(x, one, x, one, x[:1], rank)
    centred = x - x.mean(0)
    for _ in range(20):
        # Any affine map of rank r is z V + b with z best for V, so only V is left to choose.
        directions = principal_directions(centred, rank)
        nudged = np.linalg.qr(directions + 0.1 * rng.normal(size=directions.shape))[0]
        assert ((centred - centred @ nudged @ nudged.T) ** 2).sum() >= best - 1e-9


def test_the_three_fvus_are_their_definitions() -> None:
    train, rows = clusters(0), clusters(1, 150)
    sae = a_sae()
    found = references(sae, train, rows, rank=3)
    assert (found.kmeans_cells, found.local_pca_cells, found.local_pca_rank) == (30, 30, 3)
    assert (found.rows_fitted, found.rows_measured) == (400, 150)

    fitted = KMeans(30, n_init=1, random_state=0).fit(train)
    means = np.stack([train[fitted.labels_ == c].astype(np.float64).mean(0) for c in range(30)])
    expected = ((rows - means[fitted.predict(rows)]) ** 2).sum() / scatter(rows)
    assert found.kmeans_fvu == pytest.approx(expected, rel=1e-9)
    measured = reconstruction(sae, torch.from_numpy(rows).double().split(37))
    assert found.sae_fvu == pytest.approx(measured["fvu"], rel=1e-9)
    assert 0 < found.local_pca_fvu < found.kmeans_fvu


def test_cells_are_as_many_as_the_training_rows_allow() -> None:
    found = references(a_sae(F=500), clusters(0), clusters(1), rank=5)
    assert (found.kmeans_cells, found.local_pca_cells) == (100, 20)


def test_a_rank_that_spans_the_space_leaves_nothing_unexplained() -> None:
    found = references(a_sae(), clusters(0), clusters(1), rank=100)
    assert found.local_pca_rank == D
    assert found.local_pca_fvu < 1e-20


def test_many_rows_are_clustered_from_random_centres_about_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    train = clusters(0, 2000)
    careful = kmeans(train, 10, 0).inertia_
    monkeypatch.setattr(piecewise_affine, "CAREFUL_WORK", 0)
    assert kmeans(train, 10, 0).inertia_ < 2 * careful
    monkeypatch.setattr(piecewise_affine, "LLOYD_WORK", 5 * train.size)
    assert len(kmeans(train, 10, 0).cluster_centers_) == 5


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_equal_rows_give_no_finite_number_and_no_warning(rows: int) -> None:
    same = np.ones((rows, D), np.float32)
    found = references(a_sae(), same, same, rank=3)
    assert np.isnan([found.kmeans_fvu, found.local_pca_fvu]).all()
    assert found.sae_fvu == np.inf  # as `sae eval` has it
    assert found.kmeans_cells == max(1, rows // 4)
