"""Decoder steps without a Gram matrix: against direct ones, and against NumPy where those have no say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ridge_problems import codes_of, press, problem, solved, sums_of, terms_of

from saecli.base.errors import TrainingError
from saecli.train.ridge import TOLERANCE, StreamedCodes, choose_alpha, iterative
from saecli.train.ridge.iterative import JOINED_ROWS

WEIGHTS = {"all": (0.7, 2.0, 0.3, 5.0), "ridge only": (0.7, 0.0, 0.0, 0.0)}
KEPT, STREAMED = np.inf, 0


def products_of(z: torch.Tensor, x: torch.Tensor, budget: float = KEPT, block: int = 64, start=None) -> StreamedCodes:
    blocks = [codes_of(some) for some in z.split(block)]
    start = torch.zeros(z.shape[1], x.shape[1]) if start is None else start
    system = StreamedCodes(start, lambda: iter(blocks), budget)
    for some_z, some_x in zip(blocks, x.split(block), strict=True):
        system.add(some_z, some_x)
    return system


def codes(rows: int, density: float, d_sae: int = 40, d_in: int = 7) -> tuple:
    z, x, direction, W_t, b_t = problem(rows, d_sae, d_in, spread=0.3)
    kept = torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) < density
    return (z * kept).float(), x.float(), direction, W_t, b_t


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("budget", [KEPT, STREAMED])
@pytest.mark.parametrize("rows", [30, 700])
def test_the_decoder_is_that_of_the_direct_solve(weights, density, budget, rows):
    z, x, direction, W_t, b_t = codes(rows, density)
    terms = terms_of(weights, direction, W_t, b_t, decayed=True)
    system = products_of(z, x, budget)
    found, exact = solved(system, terms), solved(sums_of(z.double(), x.double(), 64), terms)
    assert system.streams == (budget == STREAMED)
    assert found.residual <= TOLERANCE and 1 <= found.condition < np.inf
    assert found.c == pytest.approx(exact.c, rel=1e-3)
    assert (found.W - exact.W).norm() <= 2e-3 * exact.W.norm()
    fitted, expected = z @ found.W.float() + found.b.float(), z @ exact.W.float() + exact.b.float()
    assert (fitted - expected).norm() <= 1e-3 * (expected - x).norm()


def test_codes_of_many_blocks_are_joined_and_those_that_do_not_fit_are_made_again():
    z, x, direction, W_t, b_t = codes(2 * JOINED_ROWS + 100, 0.05, d_sae=20, d_in=3)
    terms = terms_of(WEIGHTS["ridge only"], direction, W_t, b_t)
    exact = solved(sums_of(z, x, 4096), terms)
    bytes_of_half = codes_of(z).bytes() // 2
    for budget, streams in ((KEPT, False), (bytes_of_half, True)):
        system = products_of(z, x, budget, 1000)
        torch.testing.assert_close(solved(system, terms).W, exact.W, rtol=1e-3, atol=1e-3)
        assert system.streams == streams


@pytest.mark.slow
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("rows", [300, 2000])
def test_alpha_is_chosen_as_from_sums(directed, rows):
    z, x, direction, W_t, b_t = codes(rows, 0.1, d_sae=160, d_in=16)
    terms = terms_of((0.0, 0.0, 0.0, 0.0), direction if directed else None, W_t, b_t)
    exact = sums_of(z.double(), x.double(), 64)
    best, found = (choose_alpha(system, terms, z, x, None).alpha for system in (exact, products_of(z, x)))
    scores = [press(exact, terms, z, x, alpha) for alpha in (found, best)]
    assert scores[0] <= 1.01 * scores[1]


def test_a_start_near_the_solution_saves_iterations():
    z, x, _, W_t, b_t = codes(2000, 0.1, d_sae=160)
    terms = terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t)
    products = []

    def counted(system: StreamedCodes) -> StreamedCodes:
        original = system.times
        system.times = lambda V, shrink: products.append(1) or original(V, shrink)
        return system

    far = solved(counted(products_of(z, x)), terms)
    cold = len(products)
    products.clear()
    solved(counted(products_of(z, x, start=far.W.float())), replace(terms, alpha=1.1))
    assert len(products) < cold / 2


def test_codes_that_are_not_finite_are_refused_by_a_sentence():
    z, x, _, W_t, b_t = codes(100, 0.5)
    z[2, 3] = torch.nan
    with pytest.raises(TrainingError, match="are not finite; lower lr"):
        solved(products_of(z, x), terms_of((1.0, 0.0, 0.0, 0.0), None, W_t, b_t))


def test_an_iteration_that_does_not_get_there_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(iterative, "MOST", 3)
    z, x, direction, W_t, b_t = codes(2000, 0.3)
    found = solved(products_of(z, x), terms_of((1e-3, 0.0, 0.0, 0.0), direction, W_t, b_t))
    assert found.residual > 10 * TOLERANCE and found.W.isfinite().all()


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_the_gradient_method_finds_solution_residual_and_condition(spread):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 60, generator=generator, dtype=torch.float64)
    matrix = left @ left.T
    size = 10 ** (spread * torch.rand(30, generator=generator, dtype=torch.float64))
    matrix = matrix * size * size[:, None]
    right = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    right[:, 1] = 0
    solution, found = iterative.conjugate_gradient(lambda V: matrix @ V, right, torch.zeros_like(right),
                                                            matrix.diagonal(), 1e-10)
    np.testing.assert_allclose(matrix @ solution, right, atol=1e-7 * right.abs().max())
    assert found.residual <= 1e-10 and found.iterations < 60
    scaled = matrix / matrix.diagonal().sqrt() / matrix.diagonal().sqrt()[:, None]
    assert found.condition == pytest.approx(np.linalg.cond(scaled), rel=0.05)
