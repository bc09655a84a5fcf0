"""The decoder step: four theorems over a table of systems, terms, prefixes, skips and precisions."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ridge_problems import (
    WEIGHTS,
    copies,
    least_squares,
    press,
    problem,
    solved,
    system_of,
    terms_of,
    with_skip,
)

from saecli.base.errors import TrainingError
from saecli.train.ridge import (
    TOLERANCE,
    HeldRows,
    StreamedCodes,
    Sums,
    choose_alpha,
    method_for,
    optimal_decoder,
)

slow = pytest.mark.slow
F, E = 12, 4
PREFIXES = (3, 7, 12)
F64, F32 = torch.float64, torch.float32
# A system, the number of rows, prefixes, precision, and the largest error over the norm.
SYSTEMS = {
    "sums": ("sums", 40, (), F64, 1e-7),
    "sums of few rows": ("sums", 5, (), F64, 1e-7),
    "sums, float32": ("sums", 40, (), F32, 1e-4),
    "nested sums": ("sums", 40, PREFIXES, F64, 1e-7),
    "nested sums of few rows": ("sums", 6, PREFIXES, F64, 1e-7),
    "one prefix": ("sums", 40, (F,), F64, 1e-7),
    "held rows": ("held rows", 5, (), F64, 1e-7),
    "many held rows": ("held rows", 40, (), F64, 1e-7),
    "streamed": ("streamed", 40, (), F64, 5e-3),
    "nested, streamed": ("streamed", 40, PREFIXES, F64, 5e-3),
    "streamed, float32": ("streamed", 40, (), F32, 5e-3),
}
systems = pytest.mark.parametrize(
    ("kind", "rows", "prefixes", "dtype", "most"), SYSTEMS.values(), ids=SYSTEMS
)
weighted = pytest.mark.parametrize(
    "weights", [*WEIGHTS.values(), (0.0, 2.0, 0.3, 5.0)], ids=[*WEIGHTS, "no alpha"]
)
both = pytest.mark.parametrize("kind", ["sums", "held rows"])


def beside(rows: int) -> torch.Tensor:
    """What a skip multiplies, far from 0, and no function of the codes."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=F64) + 2


def thinned(z: torch.Tensor, density: float) -> torch.Tensor:
    """The codes with all but a fraction of the entries 0, in float32."""
    kept = torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) < density
    return (z * kept).float()


@systems
@weighted
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_decoder_equals_stacked_lstsq(kind, rows, prefixes, dtype, most, weights, directed, skips):
    if skips and rows < F:
        rows += 4  # a skip takes some freedom
    z, y, direction, W_t, b_t = problem(rows, F, E)
    z, y = z.to(dtype), y.to(dtype)
    x = beside(rows).to(dtype)
    terms = terms_of(weights, direction if directed else None, W_t, b_t, decayed=True)
    exact = least_squares(z.double(), y.double(), terms, prefixes, x.double() if skips else None)
    if skips:
        terms, y = with_skip(terms, x, y), torch.cat([y, x], 1)
    block = 3 if directed else 64  # rows that come at a time, or all of them
    state = solved(system_of(kind, z, y, prefixes, block), terms)
    assert not state.raised
    for name in ("W", "b", "skip") if skips else ("W", "b"):
        value, expected = getattr(state, name).numpy(), getattr(exact, name)
        assert np.linalg.norm(value - expected) <= most * np.linalg.norm(expected)
    if weights[0]:
        assert state.c == pytest.approx(exact.c, rel=max(most, 1e-6))


@pytest.mark.parametrize(
    ("kind", "d_sae", "prefixes"), [("sums", 6, ()), ("held rows", 20, ()), ("sums", F, PREFIXES)]
)
@pytest.mark.parametrize("spread", [0.0, pytest.param(0.7, marks=slow)])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_press_equals_refitting_without_each_row(kind, d_sae, prefixes, spread, weights):
    z, y, direction, W_t, b_t = problem(15, d_sae, E, spread=spread)
    z[3, 3:] = 0  # the same in every prefix
    terms = terms_of(weights, direction, W_t, b_t, decayed=True)
    system = system_of(kind, z, y, prefixes)
    c, left_out = solved(system, terms).c, []
    for row in range(len(z)):
        others = torch.arange(len(z)) != row
        refit = least_squares(z[others], y[others], terms, prefixes, c=c)
        errors = copies(z, prefixes)[row] @ refit.W + refit.b - y[row].numpy()
        left_out.append(np.square(errors).sum() / len(errors) * max(1, len(prefixes)))
    assert press(system, terms, z, y) == pytest.approx(np.mean(left_out), rel=1e-6)
    assert press(system, terms, z[4:9], y[4:9]) == pytest.approx(np.mean(left_out[4:9]), rel=1e-6)


def in_two_processes(action: Callable[[int, Callable], object]) -> list:
    """Results of an action that two threads run at the same time, given a rank and an all_reduce between them."""
    barrier, tensors = threading.Barrier(2, timeout=60), {}

    def run(rank: int) -> object:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            tensors[rank] = tensor.clone()
            barrier.wait()
            total = tensors[0] + tensors[1]
            barrier.wait()
            return tensor.copy_(total)

        return action(rank, all_reduce)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("split", [13, 40])  # the last leaves the second process without a row
def test_sums_of_two_processes_equal_those_of_one(offset, split):
    z, y, direction, W_t, b_t = problem(40, 300, E)
    z, y = z + offset, y - 3 * offset
    terms, atol = terms_of(WEIGHTS["all"], direction, W_t, b_t), 1e-3 if offset else 1e-6

    def figures(sums: Sums) -> tuple:
        W = solved(sums, terms).W
        return sums.rows, sums.u, sums.y_bar, sums.cross(b_t), sums.scale(0.9), W

    parts = [system_of("sums", z[:split], y[:split])]
    parts.append(system_of("sums", z[split:], y[split:]) if split < 40 else Sums(300, E))

    def reduced(rank: int, all_reduce: Callable) -> tuple:
        parts[rank].reduce(all_reduce)
        return figures(parts[rank])

    exact = figures(system_of("sums", z, y))
    for values in in_two_processes(reduced):
        torch.testing.assert_close(values, exact, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("budgets", [(np.inf, np.inf), (np.inf, 0)])
def test_an_iteration_of_two_processes_finds_the_decoder_of_one(budgets):
    z, y, direction, W_t, b_t = problem(300, 20, E)
    z, y = thinned(z, 0.08), y.float()
    terms = terms_of(WEIGHTS["all"], direction, W_t, b_t)
    exact = solved(system_of("sums", z, y, block=64), terms)

    def solution(rank: int, all_reduce: Callable) -> tuple[float, torch.Tensor]:
        own = [slice(0, 200), slice(200, 300)][rank]
        system = system_of("streamed", z[own], y[own], block=300, budget=budgets[rank])
        system.reduce(all_reduce)
        assert system.rows == 300 and system.streams == (0 in budgets)
        return choose_alpha(system, terms, z, y, None).alpha, solved(system, terms).W

    (alpha, W), (other_alpha, other_W) = in_two_processes(solution)
    assert torch.equal(W, other_W) and alpha == other_alpha > 0
    torch.testing.assert_close(W, exact.W, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "case", ["streamed", *(pytest.param(case, marks=slow) for case in ("sums", "skip", "nested"))]
)
def test_latents_missed_least_are_those_whose_loss_costs_the_objective_least(case):
    """Columns 0, 4 and 9 are nearly equal, 2 is of one row in twenty, 6 never fires, decoders are of several sizes."""
    z, noise, direction, W_t, _ = problem(60, F, E)
    z[:, 2] = torch.arange(60).double() % 20 == 1
    z[:, 4], z[:, 9] = z[:, 0] + 0.05 * z[:, 5], z[:, 0] - 0.05 * z[:, 7]
    z[:, 6] = 0
    y = z @ (direction * torch.logspace(-1, 1, F)[:, None]) + 0.1 * noise
    prefixes = (5, F) if case == "nested" else ()
    x = beside(60) if case == "skip" else None
    terms = terms_of((0.1, 2.0, 0.0, 0.0), None, W_t, y.mean(0))

    def objective(gone: list[int]) -> float:
        without = z.index_fill(1, torch.tensor(gone, dtype=torch.int64), 0)
        return least_squares(without, y, terms, prefixes, x).objective

    left = [latent for latent in range(F) if latent != 6]
    effects = [objective([latent]) - objective([]) for latent in left]
    missed_least: list[int] = []
    for _ in range(4):
        costs = {
            latent: objective([*missed_least, latent]) - objective(missed_least)
            for latent in left
            if latent not in missed_least
        }
        least = min(costs, key=lambda latent: costs[latent])
        if costs[least] >= 0.3 * np.median(effects):
            break
        missed_least.append(least)
    assert len(missed_least) >= 2

    if x is not None:
        terms, y = with_skip(terms, x, y), torch.cat([y, x], 1)
    system = system_of("streamed" if case == "streamed" else "sums", z, y, prefixes)
    found = optimal_decoder(system, terms, needless=4).needless.nonzero()[:, 0].tolist()
    if case == "streamed":  # whose estimates may take another of the copies
        found = [0 if latent in (4, 9) else latent for latent in found]
        missed_least = [0 if latent in (4, 9) else latent for latent in missed_least]
    assert sorted(found) == sorted(missed_least)


def test_no_latent_is_missed_where_none_varies():
    z, y, _, W_t, b_t = problem(60, F, E)
    terms = terms_of((0.1, 0.0, 0.0, 0.0), None, W_t, b_t)
    assert not optimal_decoder(system_of("sums", 0 * z, y), terms, needless=9).needless.any()


@pytest.mark.parametrize("kind", ["sums", "streamed"])
def test_an_inverse_is_at_least_one_over_the_matrix_on_its_diagonal(kind):
    z, y, _, W_t, b_t = problem(60, F, E)
    z[:, 1::2] = 30 * z[:, ::2] + 0.01 * z.roll(1, 0)[:, ::2]  # near copies of other sizes
    system, terms = system_of(kind, z, y), terms_of((0.1, 0.0, 0.0, 0.0), None, W_t, b_t)
    inverse = system.factorise(terms).inverse().diagonal
    assert (inverse >= 1 / (system.diagonal(1.0) + 0.1)).all()


def test_a_skip_that_cannot_be_solved_for_is_an_error():
    z, y, _, W_t, b_t = problem(40, F, E)
    x = beside(40)
    x[3] = 1e200  # its square is infinite
    terms = with_skip(terms_of((0.7, 0.0, 0.0, 0.0), None, W_t, b_t), x, y)
    with pytest.raises(TrainingError, match="not finite; lower --lr"):
        optimal_decoder(system_of("sums", z, torch.cat([y, x], 1)), terms)


@both
def test_alpha_is_chosen_for_the_targets_without_a_skips_dimensions(kind):
    z, y, direction, W_t, b_t = problem(40 if kind == "sums" else 8, F, E)
    x, terms = beside(len(z)) * 1e3, terms_of((0.0, 0.0, 0.0, 0.0), direction, W_t, b_t)
    wide = torch.cat([y, x], 1)
    alpha = choose_alpha(system_of(kind, z, wide), with_skip(terms, x, y), z, wide, None).alpha
    without = choose_alpha(system_of(kind, z, y), terms, z, y, None).alpha
    assert alpha == pytest.approx(without, rel=1e-6)


def test_a_skip_of_dimensions_that_codes_explain_is_solvable():
    z, y, _, W_t, b_t = problem(40, F, E)
    x = z[:, :3].contiguous()
    terms = with_skip(terms_of((1e-9, 0, 0, 0), None, W_t, b_t), x, y)
    state = optimal_decoder(system_of("sums", z, torch.cat([y, x], 1)), terms)
    fitted = z @ state.W(None) + x @ state.skip + state.b
    left = torch.cat([z, torch.ones(40, 1).double()], 1)
    expected = left @ torch.linalg.lstsq(left, y).solution
    np.testing.assert_allclose(fitted, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("budget", [np.inf, 0], ids=["kept", "streamed"])
@pytest.mark.parametrize("rows", [30, 700])
def test_an_iteration_reconstructs_as_the_direct_solution(density, budget, rows):
    z, y, direction, W_t, b_t = problem(rows, 40, 7, spread=0.3)
    z = thinned(z, density)
    terms = terms_of(WEIGHTS["all"], direction, W_t, b_t, decayed=True)
    system = system_of("streamed", z, y.float(), block=64, budget=budget)
    state, exact = solved(system, terms), solved(system_of("sums", z.double(), y, block=64), terms)
    assert system.streams == (budget == 0)
    assert state.residual <= TOLERANCE
    fitted, expected = (z.double() @ decoder.W + decoder.b for decoder in (state, exact))
    assert (fitted - expected).norm() <= 1e-3 * (expected - y).norm()


def test_the_method_is_a_factorisation_where_it_fits():
    for rows, memory, wanted, prefixes, system in (
        (10**6, np.inf, "auto", (), Sums),
        (31, np.inf, "auto", (), HeldRows),
        (31, np.inf, "auto", (16, 32), Sums),
        (31, np.inf, "iterative", (), StreamedCodes),
        (31, 0, "direct", (), HeldRows),
    ):
        method = method_for(rows, 32, 5, memory, wanted, prefixes)
        assert type(method.system(torch.zeros(32, 5), lambda: iter([]))) is system
    wide = method_for(10**6, 32_768, 2304)
    assert 16 * 32_768**2 <= wide.bytes < 1.3 * 16 * 32_768**2  # the matrix and its factor
    narrow = method_for(10**6, 32_768, 256, wide.bytes / 4)
    assert narrow.kind == "iterative"
    assert narrow.bytes < wide.bytes / 4 and 0 < narrow.budget < wide.bytes / 4
