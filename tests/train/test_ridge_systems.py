"""What the three kinds of normal equations share: a factorisation that is superseded says so, sums over several
processes are those over one, and a plan of the memory decides between them."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ridge_problems import codes_of, problem, solved, sums_of, terms_of

from saecli.train.ridge import HeldRows, StreamedCodes, Sums, System, choose_alpha, plan, solve
from saecli.train.ridge.cholesky import Cholesky

WEIGHTS = (0.7, 2.0, 0.3, 5.0)


def all_kinds(z: torch.Tensor, y: torch.Tensor) -> dict[str, System]:
    found = {"direct": Sums(z.shape[1], y.shape[1]), "dual": HeldRows(),
             "iterative": StreamedCodes(torch.zeros(z.shape[1], y.shape[1], dtype=z.dtype), lambda: iter([]), np.inf)}
    for system in found.values():
        for some_z, some_y in zip(z.split(7), y.split(7), strict=True):
            system.add(codes_of(some_z), some_y)
    return found


@pytest.mark.parametrize("kind", ["direct", "dual", "iterative"])
@pytest.mark.parametrize("change", ["factorised again", "rows added"])
def test_a_superseded_factorisation_is_refused_wherever_it_is_used(kind, change):
    z, y, direction, W_t, b_t = problem(30, 12, 4)
    system, terms = all_kinds(z, y)[kind], terms_of(WEIGHTS, direction, W_t, b_t)
    before = system.factorise(terms)
    solve(system, terms, before)
    if change == "factorised again":
        system.factorise(terms)
    else:
        system.add(codes_of(z[:3]), y[:3])
    uses = [lambda: before.solve(direction), lambda: before.solve_cross(b_t), lambda: before.quadratic(z),
            lambda: solve(system, terms, before)]
    for use in (*uses, *([before.condition] if kind != "iterative" else [])):
        with pytest.raises(RuntimeError, match="has been superseded"):
            use()


@pytest.mark.parametrize("change", [lambda sums: sums.reduce(lambda tensor: tensor),
                                    lambda sums: sums.recentre(sums.z_0 + 1, sums.y_0)])
def test_a_change_of_the_sums_supersedes_their_factorisation(change: Callable[[Sums], None]):
    z, y, direction, W_t, b_t = problem(30, 12, 4)
    sums = sums_of(z, y, 7)
    before = sums.factorise(terms_of(WEIGHTS, direction, W_t, b_t))
    change(sums)
    with pytest.raises(RuntimeError, match="has been superseded"):
        before.solve(direction)


def test_a_factorisation_of_other_normal_equations_is_refused():
    z, y, direction, W_t, b_t = problem(30, 12, 4)
    terms = terms_of(WEIGHTS, direction, W_t, b_t)
    with pytest.raises(ValueError, match="other normal equations"):
        solve(sums_of(z, y, 7), terms, sums_of(z, y, 7).factorise(terms))


@pytest.mark.parametrize("rows", [8, 40])
def test_degrees_of_freedom_come_from_the_decoders_factorisation(rows, monkeypatch):
    z, y, direction, W_t, b_t = problem(rows, 12, 4)
    taken, original = [], Cholesky.factorise
    monkeypatch.setattr(Cholesky, "factorise", lambda *args: taken.append(1) or original(*args))
    for kind in ("direct", "dual"):
        system, terms = all_kinds(z, y)[kind], terms_of(WEIGHTS, direction, W_t, b_t)
        taken.clear()
        state = solve(system, terms, z=z)
        assert len(taken) == 1 and 1 <= state.dof <= min(rows, 13)
        assert np.isnan(solve(system, terms).dof)


def test_a_decoder_is_the_same_however_often_it_is_solved_for():
    z, y, direction, W_t, b_t = problem(30, 12, 4)
    terms = terms_of(WEIGHTS, direction, W_t, b_t)
    for system in all_kinds(z, y).values():
        factorisation = system.factorise(terms)
        once, again = (solve(system, terms, factorisation) for _ in range(2))
        assert torch.equal(once.Delta, again.Delta) and torch.equal(once.b, again.b) and once.c == again.c


def together(*actions: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> list:
    """Results of actions that run at the same time and are given an all_reduce between them."""
    barrier, given, results = threading.Barrier(len(actions)), {}, [None] * len(actions)

    def run(rank: int) -> None:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            given[rank] = tensor.clone()
            barrier.wait(60)
            total = sum(given[other] for other in range(len(actions)))
            barrier.wait(60)
            return tensor.copy_(total)

        results[rank] = actions[rank](all_reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("split", [13, 40])  # the last leaves the second process without a row
def test_sums_of_two_processes_equal_those_of_one(offset, split):
    z, y, direction, W_t, b_t = problem(40, 300, 4)
    z, y = z + offset, y - 3 * offset
    terms, atol = terms_of(WEIGHTS, direction, W_t, b_t), 1e-3 if offset else 1e-6
    whole, parts = sums_of(z, y, 7), [sums_of(z[:split], y[:split], 7), sums_of(z[split:], y[split:], 7)]

    def reduced(part: Sums) -> Callable:
        def action(all_reduce: Callable) -> tuple:
            part.reduce(all_reduce)
            return part.rows, part.z_bar, part.y_bar, part.cross(b_t), part.scale(0.9), solved(part, terms).W
        return action

    exact = whole.rows, whole.z_bar, whole.y_bar, whole.cross(b_t), whole.scale(0.9), solved(whole, terms).W
    for found in together(*map(reduced, parts)):
        for value, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=atol)
    sums = parts[0]
    sums.add(codes_of(z[:5].float()), y[:5].float())  # the offsets are still such as float32 can subtract
    whole.add(codes_of(z[:5].float()), y[:5].float())
    torch.testing.assert_close(sums.scale(1.0), whole.scale(1.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("budgets", [(np.inf, np.inf), (np.inf, 0)])
def test_an_iteration_of_two_processes_has_the_decoder_of_one(budgets):
    z, y, direction, W_t, b_t = problem(300, 20, 4)
    z, y = (z * (torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) < 0.08)).float(), y.float()
    terms = terms_of(WEIGHTS, direction, W_t, b_t)
    exact = solved(sums_of(z, y, 64), terms)

    def action_of(own: slice, budget: float) -> Callable:
        def action(all_reduce: Callable) -> tuple:
            system = StreamedCodes(torch.zeros(20, 4), lambda: iter([codes_of(z[own])]), budget)
            system.add(codes_of(z[own]), y[own])
            system.reduce(all_reduce)
            assert system.rows == 300 and system.streams == (0 in budgets)
            return choose_alpha(system, terms, z, y, None).alpha, solved(system, terms)
        return action

    alphas, states = zip(*together(action_of(slice(0, 200), budgets[0]), action_of(slice(200, 300), budgets[1])),
                         strict=True)
    assert torch.equal(states[0].W, states[1].W) and alphas[0] == alphas[1] > 0
    torch.testing.assert_close(states[0].W, exact.W, rtol=1e-2, atol=1e-3)


def test_the_plan_takes_the_factorisation_that_fits_and_else_the_iteration():
    start = torch.zeros(32, 5)
    for rows, memory, way, kind in ((10**6, np.inf, "auto", "direct"), (100, np.inf, "auto", "direct"),
                                    (31, np.inf, "auto", "dual"), (31, np.inf, "iterative", "iterative"),
                                    (31, 0, "direct", "dual"), (10**6, 0, "direct", "direct")):
        chosen = plan(rows, 32, 5, memory, way)
        assert chosen.kind == kind and chosen.bytes > 0
        system = chosen.system(start, lambda: iter([]))
        assert type(system) is {"direct": Sums, "dual": HeldRows, "iterative": StreamedCodes}[kind]
    wide = plan(10**6, 32_768, 2304)
    assert 8 * 32_768**2 <= wide.bytes < 1.7 * 8 * 32_768**2  # the matrix and its factor share an array
    assert plan(100, 8192, 256).bytes < plan(10**6, 8192, 256).bytes / 3
    narrow = plan(10**6, 32_768, 256, wide.bytes / 4)
    assert narrow.kind == "iterative" and narrow.bytes < wide.bytes / 4 and 0 < narrow.budget < wide.bytes / 4
    assert plan(10**6, 32_768, 256, 0.0).bytes == narrow.bytes  # the least that any way takes
