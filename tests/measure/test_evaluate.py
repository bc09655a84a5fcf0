"""How an SAE is scored against known features."""

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from saecli.measure.cosines import Alignment
from saecli.measure.evaluate import FeatureScores
from saecli.sae.codes import Codes, SparseCodes, located


@pytest.mark.parametrize(("latents", "features"), [(4, 6), (6, 4), (5, 5)])
def test_mcc_is_the_best_mean_cosine_of_all_one_to_one_matchings(latents, features):
    random = np.random.default_rng(latents)
    W_dec, directions = random.standard_normal((latents, 3)), random.standard_normal((features, 3))
    norms = [np.linalg.norm(vectors, axis=1) for vectors in (W_dec, directions)]
    cosines = np.abs(W_dec @ directions.T / np.outer(*norms))
    wide = cosines if latents <= features else cosines.T
    best = max(
        wide[np.arange(len(wide)), chosen].mean()
        for chosen in map(list, permutations(range(wide.shape[1]), len(wide)))
    )
    found = Alignment.of(torch.from_numpy(W_dec), torch.from_numpy(directions))
    assert found.mcc() == pytest.approx(best, abs=1e-6)
    assert found.uniqueness() == len(set(cosines.argmax(1).tolist())) / latents


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_scores_over_batches_equal_those_of_each_latent_counted_row_by_row(kind):
    random = np.random.default_rng(0)
    W_dec, directions = random.standard_normal((7, 4)), random.standard_normal((5, 4))
    W_dec[6] = 0
    z = random.standard_normal((50, 7)) * (random.random((50, 7)) < 0.3)
    z[:, 5] = 0
    truth = random.random((50, 5)) * (random.random((50, 5)) < 0.4)
    alignment = Alignment.of(torch.from_numpy(W_dec), torch.from_numpy(directions))
    scores = FeatureScores(alignment)
    for rows in (slice(0, 20), slice(20, 50)):
        scores.update(as_codes(torch.from_numpy(z[rows]), kind), csr_array(truth[rows]))
    unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    nearest = np.abs(W_dec @ unit.T).argmax(1)
    of_latents = []
    for latent, feature in enumerate(nearest):
        fires, there = z[:, latent] != 0, truth[:, feature] > 0
        precision = (fires & there).sum() / fires.sum() if fires.any() else 0
        recall = (fires & there).sum() / there.sum()
        total = precision + recall
        of_latents.append((2 * precision * recall / total if total else 0, precision, recall))
    found = scores.result()
    means = [found[name] for name in ("f1", "precision", "recall")]
    assert means == pytest.approx(np.mean(of_latents, axis=0))
    assert found["true_l0"] == pytest.approx((truth > 0).sum(1).mean())


def as_codes(z: torch.Tensor, kind: str) -> Codes:
    if kind == "dense":
        return Codes(z)
    flat = torch.from_numpy(np.flatnonzero(z.numpy().flatten()))
    offsets, _, indices = located(flat, tuple(z.shape))
    return SparseCodes(z.flatten()[flat], offsets, indices, z.shape[1])
