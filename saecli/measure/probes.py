"""Probes: logistic regression on a few latents, or on activations, measured by cross-validation.

A k-sparse probe takes the k latents whose mean codes differ most between the classes of the training part, each in
units of its mean magnitude where it fires, as sae-probes does; then no latent is chosen for the scale of its codes.
Every probe is standardised by its training part, and its C is the best of `CS` by AUC, cross-validated inside it.

Sources: Gurnee et al., "Finding Neurons in a Haystack: Case Studies with Sparse Probing" (2023), for the choice by mean
difference; Kantamneni et al., "Are Sparse Autoencoders Useful? A Case Study in Sparse Probing" (2025).

Shapes: N rows, F = d_sae, P features of a probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

FOLDS, INNER_FOLDS = 5, 3
CS = (1e-4, 1e-2, 1.0, 1e2)  # inverse weights of the squared penalty
SEED = 0  # of the folds
LEVEL = 0.95

Rows = NDArray[np.int64]  # row numbers


@dataclass(frozen=True)
class Score:
    """How well a probe tells the classes of rows that it was not fitted to.

    Args:
        accuracy: fraction of the rows told right, of each fold, (folds,).
        auc: area under the ROC curve, of each fold, (folds,).
    """

    accuracy: NDArray[np.float64]
    auc: NDArray[np.float64]


def folds(labels: NDArray[np.bool_], count: int = FOLDS) -> list[tuple[Rows, Rows]]:
    """The row numbers of training and test part of each fold, with equal fractions of both classes."""
    return list(StratifiedKFold(count, shuffle=True, random_state=SEED).split(labels, labels))


def most_different(codes: csr_matrix, labels: NDArray[np.bool_], count: int) -> list[int]:
    """The latents whose mean codes differ most between classes, the most different first.

    Args:
        codes: (N, F).
        labels: (N,).
        count: how many.
    """
    difference = np.asarray(codes[labels].mean(0) - codes[~labels].mean(0), dtype=np.float64).ravel()
    fired = np.asarray((codes != 0).sum(0)).ravel()
    magnitude = np.asarray(abs(codes).sum(0), dtype=np.float64).ravel() / np.maximum(fired, 1)
    size = np.abs(difference) / np.where(magnitude > 0, magnitude, 1)
    return np.argsort(-size, kind="stable")[:count].tolist()


def sparse_scores(codes: csr_matrix, labels: NDArray[np.bool_], counts: Sequence[int]) -> dict[int, Score]:
    """The scores of k-sparse probes for each k of `counts`, on codes, (N, F), of rows with labels, (N,)."""
    parts = folds(labels)
    best = [most_different(codes[train], labels[train], max(counts)) for train, _ in parts]
    return {count: score([codes[:, latents[:count]].toarray().astype(np.float64) for latents in best], labels, parts)
            for count in counts}


def dense_score(x: NDArray[np.float64], labels: NDArray[np.bool_]) -> Score:
    """The score of a probe on all of x, (N, P)."""
    return score([x] * FOLDS, labels, folds(labels))


def score(features: Sequence[NDArray[np.float64]], labels: NDArray[np.bool_],
          parts: Sequence[tuple[Rows, Rows]]) -> Score:
    """The score of a probe, cross-validated.

    Args:
        features: of all rows, (N, P), in each fold.
        labels: (N,).
        parts: row numbers of training and test part of each fold.
    """
    found = []
    for x, (train, test) in zip(features, parts, strict=True):
        values = _decisions(x[train], labels[train], x[test])
        found.append((((values > 0) == labels[test]).mean(), roc_auc_score(labels[test], values)))
    return Score(*np.array(found).T)


def mean_and_interval(values: NDArray[np.float64]) -> tuple[float, float | None, float | None]:
    """The mean, and the ends of its 95% interval by Student's t; None for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = float(student.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


def _decisions(x: NDArray[np.float64], labels: NDArray[np.bool_], test: NDArray[np.float64]) -> NDArray[np.float64]:
    """The decision values of rows `test`, by the probe fitted to rows x with these labels."""
    inner = folds(labels, INNER_FOLDS)
    aucs = [np.mean([roc_auc_score(labels[held], _fitted(x[kept], labels[kept], x[held], C)) for kept, held in inner])
            for C in CS]
    return _fitted(x, labels, test, CS[int(np.argmax(aucs))])  # of equal ones the strongest penalty


def _fitted(x: NDArray[np.float64], labels: NDArray[np.bool_], test: NDArray[np.float64],
            C: float) -> NDArray[np.float64]:
    mean, spread = x.mean(0), x.std(0)
    spread = np.where(spread > 0, spread, 1)
    probe = LogisticRegression(C=C, max_iter=1000).fit((x - mean) / spread, labels)
    return probe.decision_function((test - mean) / spread)
