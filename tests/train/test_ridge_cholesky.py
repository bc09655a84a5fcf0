"""The factorisation against NumPy's, over sides with one panel, several, and a last one that is not whole."""

import numpy as np
import pytest
import torch

from saecli.base.errors import TrainingError
from saecli.train.ridge import cholesky
from saecli.train.ridge.cholesky import Cholesky

SIDES = [1, 7, 16, 17, 50]


@pytest.fixture(autouse=True)
def narrow_panels(monkeypatch):
    monkeypatch.setattr(cholesky, "PANEL", 16)


def positive(side: int) -> torch.Tensor:
    left = torch.randn(side, side + 5, generator=torch.Generator().manual_seed(side), dtype=torch.float64)
    return left @ left.T


def held(side: int) -> tuple[Cholesky, torch.Tensor]:
    left = torch.linalg.cholesky(positive(side))
    return Cholesky.of(left, left.T), positive(side)


@pytest.mark.parametrize("side", SIDES)
def test_solutions_norms_and_conditions_are_those_of_the_whole_matrix(side):
    matrix, exact = held(side)
    diagonal = torch.linspace(0, 3, side, dtype=torch.float64)
    vector, right = torch.arange(side).double(), positive(side)[:, :3] + 1
    for ridge in (0.5, 20.0):  # the second factorisation finds the matrix as it was
        whole = (exact + torch.diag(diagonal + ridge) + 0.3 * torch.outer(vector, vector)).numpy()
        assert matrix.factorise(ridge, diagonal, [(0.3, vector)]) == (ridge, False)
        solution = np.linalg.solve(whole, right.numpy())
        np.testing.assert_allclose(matrix.solve(right), solution, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(matrix.squared_norms(right), (right.numpy() * solution).sum(0), rtol=1e-9)
        exactly = np.linalg.cond(whole, 1)
        assert exactly / 3 <= matrix.condition() <= exactly * (1 + 1e-9)
    torch.testing.assert_close(matrix.matrix.tril(), exact.tril(), rtol=1e-12, atol=1e-12)


def test_rows_added_after_a_factorisation_are_factorised_too():
    matrix, exact = held(40)
    matrix.factorise(1.0, torch.zeros(40).double())
    more = positive(40)
    matrix.matrix.add_(more)
    matrix.factorise(1.0, torch.zeros(40).double())
    right = torch.ones(40, 1).double()
    np.testing.assert_allclose(matrix.solve(right), np.linalg.solve(exact + more + torch.eye(40), right), rtol=1e-9)


@pytest.mark.parametrize("place", [3, 30, 49])
def test_a_ridge_is_raised_until_the_matrix_is_positive_definite(place):
    matrix, _ = held(50)
    matrix.matrix[place, place] = -1.0
    ridge, raised = matrix.factorise(0.01, torch.zeros(50).double())
    assert raised and ridge > 1
    assert matrix.solve(torch.ones(50, 1).double()).isfinite().all()


@pytest.mark.parametrize("place", [3, 49])
def test_a_matrix_that_is_not_finite_is_refused_wherever_it_is_not(place):
    matrix, _ = held(50)
    matrix.matrix[49, place] = torch.inf
    with pytest.raises(TrainingError, match="are not finite; lower lr"):
        matrix.factorise(1.0, torch.zeros(50).double())
