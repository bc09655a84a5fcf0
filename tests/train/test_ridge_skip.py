"""The affine skip of the decoder step, against least squares over all unknowns at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ridge_problems import codes_of, problem, terms_of

from saecli.train.ridge import HeldRows, StreamedCodes, Sums, choose_alpha, plan, solve
from saecli.train.ridge.skip import SkipSums

F, E, D = 9, 4, 3
WEIGHTS = {"all": (0.7, 2.0, 0.3, 5.0), "ridge only": (0.7, 0.0, 0.0, 0.0)}


def draw(rows: int, seed: int = 1) -> torch.Tensor:
    """What the skip multiplies, far from 0, and no function of the codes."""
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2


def system_of(kind: str, z: torch.Tensor, x: torch.Tensor, y: torch.Tensor, prefixes: tuple[int, ...] = ()):
    both = torch.cat([y, x], 1)
    if kind == "held rows":
        return HeldRows(z, both)
    if kind == "streamed":
        system = StreamedCodes(torch.zeros(F, E + D).double(), lambda: map(codes_of, z.split(7)), 1e9, prefixes)
    else:
        system = Sums(F, E + D, prefixes=prefixes)
    for codes, targets in zip(z.split(7), both.split(7), strict=True):
        system.add(codes_of(codes), targets)
    return system


def terms_with_skip(weights, direction, W_t, b_t, x, y, joint: bool = True):
    skip = SkipSums(D, E, x.device)
    for rows, targets in zip(x.split(11), y.split(11), strict=True):
        skip.add(rows, targets)
    terms = terms_of(weights, direction, W_t, torch.cat([b_t, b_t.new_zeros(D)]), decayed=True)
    return replace(terms, skip=skip, joint=joint)


def least_squares(z, x, y, terms, direction, prefixes=()):
    """(W, S, b, c) by one stacked least squares over the entries of all of them, c W's multiple of the direction."""
    masks = np.arange(F) < np.array(prefixes or (F,))[:, None]
    copies = z.numpy()[:, None] * masks / np.sqrt(len(masks))
    left = np.hstack([copies.reshape(-1, F), np.repeat(np.hstack([x.numpy(), np.ones((len(x), 1))]), len(masks), 0)
                      / np.sqrt(len(masks))])
    right = np.repeat(y.numpy(), len(masks), 0) / np.sqrt(len(masks))
    width = F + D + 1
    on_W, on_b = np.eye(F, width), np.eye(1, width, width - 1)
    b_t = terms.b_t.numpy()[None, :E]
    blocks = [(left, right, None), (np.sqrt(terms.beta) * on_b, np.zeros((1, E)), None),
              (np.sqrt(terms.nu) * on_b, np.sqrt(terms.nu) * b_t, None),
              (np.sqrt(terms.mu) * on_W, np.sqrt(terms.mu) * terms.W_t.numpy(), None),
              (terms.decay.sqrt().numpy()[:, None] * on_W, np.zeros((F, E)), None),
              (np.sqrt(terms.alpha) * on_W, np.zeros((F, E)), direction)]
    # Unknowns column by column of the targets, and last c, in which alpha's rows alone are linear.
    rows = [np.hstack([np.kron(np.eye(E), part), np.zeros((E * len(part), 1)) if along is None else
                       -np.sqrt(terms.alpha) * along.numpy().T.reshape(-1, 1)]) for part, _, along in blocks]
    found = np.linalg.lstsq(np.vstack(rows), np.concatenate([part.T.ravel() for _, part, _ in blocks]), rcond=None)[0]
    both = found[:-1].reshape(E, width).T
    return both[:F], both[F:-1], both[-1], found[-1]


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize(("kind", "rows", "prefixes"), [
    ("sums", 40, ()), ("held rows", 8, ()), ("streamed", 40, ()), ("sums", 40, (2, 5, 9)), ("streamed", 40, (2, 5, 9))])
def test_decoder_skip_bias_and_multiple_are_those_of_one_least_squares(weights, directed, kind, rows, prefixes):
    z, y, direction, W_t, b_t = problem(rows, F, E)
    x = draw(rows)
    terms = terms_with_skip(weights, direction if directed else None, W_t, b_t, x, y)
    state = solve(system_of(kind, z, x, y, prefixes), terms)
    W, S, b, c = least_squares(z, x, y, terms, direction if directed else None, prefixes)
    most = 5e-3 if kind == "streamed" else 1e-6  # of the norm; an iterative solution's tolerance is 1e-4
    for found, exact in ((state.W(terms.direction).numpy(), W), (state.skip.numpy(), S), (state.b.numpy(), b)):
        assert np.linalg.norm(found - exact) <= most * np.linalg.norm(exact)
    assert state.c == pytest.approx(c if directed else 0.0, rel=most)


def test_targets_that_lack_what_a_skip_predicts_leave_the_difference_to_it():
    z, y, direction, W_t, b_t = problem(40, F, E)
    x, before = draw(40), torch.ones(D, E).double()
    whole = solve(system_of("sums", z, x, y), terms_with_skip((0.7, 0, 0, 0), direction, W_t, b_t, x, y))
    left = y - x @ before
    rest = solve(system_of("sums", z, x, left), terms_with_skip((0.7, 0, 0, 0), direction, W_t, b_t, x, left))
    np.testing.assert_allclose(rest.skip + before, whole.skip, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(rest.Delta, whole.Delta, rtol=1e-6, atol=1e-8)


def test_a_skip_of_dimensions_that_codes_are_is_solved_for_all_the_same():
    z, y, _, W_t, b_t = problem(40, F, E)
    x = z[:, :D].contiguous()
    terms = replace(terms_with_skip((1e-9, 0, 0, 0), None, W_t, b_t, x, y), decay=torch.zeros(F).double())
    state = solve(system_of("sums", z, x, y), terms)
    fitted = z @ state.W(None) + x @ state.skip + state.b
    ones = torch.ones(40, 1).double()
    best = torch.cat([z, ones], 1) @ torch.linalg.lstsq(torch.cat([z, ones], 1), y).solution
    np.testing.assert_allclose(fitted, best, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["sums", "held rows"])
def test_alpha_is_chosen_for_the_targets_alone_as_without_the_dimensions_of_a_skip(kind):
    rows = 40 if kind == "sums" else 8
    z, y, direction, W_t, b_t = problem(rows, F, E)
    x = draw(rows) * 1e3
    terms = terms_with_skip((0.0, 0, 0, 0), direction, W_t, b_t, x, y)
    found = choose_alpha(system_of(kind, z, x, y), terms, z, torch.cat([y, x], 1), None)
    plain = Sums(F, E) if kind == "sums" else HeldRows(z, y)
    if kind == "sums":
        plain.add(codes_of(z), y)
    without = choose_alpha(plain, replace(terms, skip=None, b_t=b_t), z, y, None)
    assert found.alpha == pytest.approx(without.alpha, rel=1e-6)


def test_a_plan_has_room_for_the_dimensions_of_a_skip():
    assert plan(1000, F, E + D).bytes > plan(1000, F, E).bytes
