"""k-means, local PCA and the SAE on the same rows, each against its definition in float64 and brute force."""

import numpy as np
import pytest
import torch
from encoders import case_of
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from saecli.geometry import references
from saecli.geometry.references import LocalPCA, kmeans, measure_references, nearest
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
    assert {name: value for name, value in measures.items() if not name.endswith("fvu")} == {
        "metric": "raw",
        "kmeans_cells": 30,
        "local_pca_cells": 30,
        "local_pca_rank": 3,
        "rows_fitted": 400,
        "rows_measured": 150,
    }


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
