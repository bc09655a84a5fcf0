"""The choice of alpha against the full path of PRESS, and against what a decoder is for: the error on fresh rows."""

import numpy as np
import pytest
import torch
from ridge_problems import NOTHING, press, problem, system_of, terms_of
from sklearn.datasets import load_digits

from saecli.train.ridge import choose_alpha, solve
from saecli.train.ridge.solve import LEAST, MIXED, MOST, sample_rows

PATH = np.geomspace(LEAST, MOST, 101)  # over the mean diagonal


def encoded(x: torch.Tensor, d_sae: int, kept: int, seed: int) -> tuple:
    """Codes of a random topk encoder of unit columns, the inputs, and the encoder's transpose."""
    generator = torch.Generator().manual_seed(seed)
    W_enc = torch.randn(x.shape[1], d_sae, generator=generator)
    W_enc /= W_enc.norm(dim=0)
    before = x @ W_enc
    least = before.topk(kept, 1).values[:, -1:]
    return torch.where(before >= least, before, 0.0).relu(), x, W_enc.T.contiguous()


def inputs(rows: int, d_in: int, seed: int, spread: float = 0.0) -> torch.Tensor:
    """Rows near a subspace; `spread` makes their norms differ, in powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(rows, d_in // 2, generator=generator)
    x = factors @ torch.randn(d_in // 2, d_in, generator=generator) / 3
    x += 0.5 * torch.randn(rows, d_in, generator=generator)
    return x * 10 ** (spread * torch.randn(rows, 1, generator=generator))


def digits(rows: int) -> torch.Tensor:
    x = torch.tensor(load_digits().data[:rows], dtype=torch.float32)
    return (x - x.mean(0)) / x.std()


DATA = {
    "alike": lambda: encoded(inputs(600, 16, 0), 64, 16, 1),
    "norms a hundredfold": lambda: encoded(inputs(600, 16, 0, 0.6), 64, 16, 1),
    "many rows, norms a hundredfold": lambda: encoded(inputs(4000, 16, 3, 0.6), 64, 16, 1),
    "N < F": lambda: encoded(inputs(60, 16, 0), 160, 16, 1),
    "N = F": lambda: encoded(inputs(160, 16, 0), 160, 16, 1),
    "N >> F": lambda: encoded(inputs(8000, 16, 0), 48, 12, 1),
    "sparse": lambda: encoded(inputs(2000, 16, 0), 160, 3, 1),
    "many dimensions, mixed for c": lambda: encoded(inputs(500, 3 * MIXED, 0, 0.3), 250, 10, 0),
    "digits": lambda: encoded(digits(1500), 128, 12, 1),
}


def system_and_terms(z: torch.Tensor, x: torch.Tensor, direction: torch.Tensor | None) -> tuple:
    system = system_of("held rows" if len(z) < z.shape[1] else "sums", z, x, block=1000)
    shape = z.shape[1], x.shape[1]
    return system, terms_of(NOTHING, direction, torch.zeros(shape), torch.zeros(shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_chosen_alpha_is_within_a_hundredth_of_the_best(data, directed):
    z, x, direction = data()
    system, terms = system_and_terms(z, x, direction if directed else None)
    scale = system.scale(1.0)

    def score(alpha: float) -> float:
        return press(system, terms, z, x, alpha)

    path = [score(scale * alpha) for alpha in PATH]
    first = choose_alpha(system, terms, z, x, None).alpha
    starts = (first / 1.5, first, 1.5 * first)
    for chosen in (first, *(choose_alpha(system, terms, z, x, start).alpha for start in starts)):
        assert score(chosen) <= 1.01 * min(path)
        assert 1e-7 * scale < chosen < 1e3 * scale or np.argmin(path) in (0, len(path) - 1)


@pytest.mark.parametrize("last", [None, 1e-3, 1e-9, 1e9])
def test_a_search_finds_its_way_to_the_ends_of_the_range(last):
    z, _, _, W_t, b_t = problem(400, 10, 3)
    noise = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)).double()
    # Noise leaves PRESS flat above 30.
    for x, least, most in ((z @ W_t[:, :3], 0.0, 2e-7), (noise, 30.0, 1e3)):
        system, terms = system_of("sums", z, x), terms_of(NOTHING, None, W_t[:, :3], b_t)
        scale = system.scale(1.0)
        chosen = choose_alpha(system, terms, z, x, last).alpha
        assert least <= chosen / scale <= most * 1.01
        if least:
            at_the_end = press(system, terms, z, x, most * scale)
            assert press(system, terms, z, x, chosen) <= 1.001 * at_the_end


def test_the_chosen_alpha_of_prefixes_is_the_best_of_many():
    z, x, direction, W_t, b_t = problem(100, 12, 4)
    x = x + 3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    terms, system = terms_of(NOTHING, direction, W_t, b_t), system_of("sums", z, x, (3, 7, 12))
    scale = system.scale(1.0)
    scores = [press(system, terms, z, x, scale * alpha) for alpha in PATH[::4]]
    chosen = choose_alpha(system, terms, z, x, None).alpha
    assert 1e-6 * scale < chosen < 1e2 * scale
    assert press(system, terms, z, x, chosen) <= 1.002 * min(scores)


@pytest.mark.slow
@pytest.mark.parametrize("directed", [False, True])
def test_an_iteration_chooses_alpha_as_sums_do(directed):
    z, x, direction = encoded(inputs(2000, 16, 0), 160, 16, 1)
    exact, terms = system_and_terms(z.double(), x.double(), direction if directed else None)
    best, chosen = (
        choose_alpha(system, terms, z, x, None).alpha
        for system in (exact, system_of("streamed", z, x, block=64))
    )
    assert press(exact, terms, z, x, chosen) <= 1.01 * press(exact, terms, z, x, best)


def test_a_good_start_takes_four_factorisations_for_the_decoder_too(monkeypatch):
    z, x, direction = DATA["norms a hundredfold"]()
    system, terms = system_and_terms(z, x, direction)
    chosen = choose_alpha(system, terms, z, x, None).alpha
    taken, original = [], system.factorise
    monkeypatch.setattr(system, "factorise", lambda terms: taken.append(1) or original(terms))
    solve(system, terms, choose_alpha(system, terms, z, x, 1.1 * chosen), z)
    assert len(taken) == 4


def test_sampled_rows_stand_for_all_and_hold_the_largest():
    x = inputs(3000, 16, 0, 0.7).double()
    index, weight = sample_rows(x, x.mean(0), 300)
    norms = (x - x.mean(0)).square().sum(1)
    assert 150 < len(index) <= 301 and len(index.unique()) == len(index)
    assert (weight >= 1).all() and set(norms.topk(20).indices.tolist()) <= set(index.tolist())
    for share in (norms.sqrt(), norms, norms * x[:, 0].sigmoid()):
        assert (weight * share[index]).sum().item() == pytest.approx(share.sum().item(), rel=0.1)
    few, even = sample_rows(x[:50], x.mean(0), 300)
    assert few.tolist() == list(range(50)) and (even == 1).all()
