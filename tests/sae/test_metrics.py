"""Accumulators against numpy in float64 over all rows at once."""

import itertools

import numpy as np
import pytest
import torch
from homes import reconstruction_oracle
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from saecli.base.errors import ConfigError
from saecli.sae.activations import Relu
from saecli.sae.codes import Codes, SparseCodes
from saecli.sae.dictionary import SAE
from saecli.sae.metrics import (
    DENSE_FREQUENCY,
    Firing,
    Reconstruction,
    doubts,
    firing,
    reconstruction,
)

SEEDS, CUTS = st.integers(0, 1000), st.lists(st.integers(0, 60), max_size=6)


def rows_and_codes(seed: int, rows: int, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator) + offset
    x_hat = x + 0.3 * torch.randn(rows, 6, generator=generator)
    z = (torch.randn(rows, 11, generator=generator) - 0.8).relu()
    z[:, 4] = 0  # silent
    z[:, 7] = -1.5  # dense, and negative
    return x, x_hat, z


def in_batches(accumulator: Reconstruction | Firing, cuts: list[int], *tensors: Tensor) -> dict:
    edges = [0, *sorted(cuts), len(tensors[0])]
    for start, stop in itertools.pairwise(edges):
        *rows, z = (t[start:stop] for t in tensors)
        accumulator.update(*rows, Codes(z))
    return accumulator.result()


@given(seed=SEEDS, rows=st.integers(2, 60), cuts=CUTS)
def test_reconstruction_in_any_batches_matches_numpy_over_all_rows(seed, rows, cuts):
    tensors = rows_and_codes(seed, rows)
    got = in_batches(Reconstruction(6, 11), [min(c, rows) for c in cuts], *tensors)
    oracle = reconstruction_oracle(*tensors)
    assert got.pop("l1") == pytest.approx(oracle.pop("l1"), rel=1e-6)
    assert got == pytest.approx(oracle, rel=1e-10)


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_rows_of_massive_norm_are_told_apart_as_by_numpy(seed: int, cuts: list[int]) -> None:
    x, x_hat, z = rows_and_codes(seed, 40)
    x[[3, 17]] *= 100
    x_hat[[3, 17]] = x[[3, 17]] + 1
    massive = np.linalg.norm(x.numpy(), axis=1) > 30
    got = in_batches(Reconstruction(6, 11, massive=lambda y: y.norm(dim=1) > 30), cuts, x, x_hat, z)
    rows = x.numpy().astype(np.float64)
    scatter = ((rows - rows.mean(0)) ** 2).sum(1)
    assert got["massive_rows"] == massive.sum() == 2
    assert got["massive_variance"] == pytest.approx(scatter[massive].sum() / scatter.sum())
    others = reconstruction_oracle(*(t[torch.from_numpy(~massive)] for t in (x, x_hat, z)))
    assert got["ordinary_fvu"] == pytest.approx(others["fvu"])
    assert got["fvu"] == pytest.approx(reconstruction_oracle(x, x_hat, z)["fvu"])
    assert list(doubts(got, 6, 22)) == ["massive"]


@pytest.mark.parametrize("bias", [0.0, -2.5])
def test_an_saes_measures_match_numpy_with_dense_and_with_few_codes(bias: float) -> None:
    generator = torch.Generator().manual_seed(7)
    W_enc = torch.randn(6, 50, generator=generator) / 6**0.5
    sae = SAE(W_enc, torch.full((50,), bias), W_enc.T.contiguous() / 5, torch.ones(6), Relu())
    x = torch.randn(300, 6, generator=generator)
    z = (x.double() @ W_enc.double() + bias).relu()
    assert isinstance(sae.codes(x), SparseCodes) == (bias != 0)
    oracle = reconstruction_oracle(x, z @ sae.W_dec.double() + 1, z)
    assert reconstruction(sae, x.split(70)) == pytest.approx(oracle, rel=1e-5)
    counts = firing(sae, x.split(70), keep=80)
    assert counts.frequency.tolist() == pytest.approx((z > 0).double().mean(0).tolist())
    torch.testing.assert_close(counts.patterns.double(), z[:80], rtol=1e-4, atol=1e-5)


def test_fvu_keeps_its_digits_where_the_mean_is_a_million_deviations() -> None:
    x, x_hat, z = (t.double() for t in rows_and_codes(0, 5000))
    x, x_hat = x + 1e6, x_hat + 1e6
    got = in_batches(Reconstruction(6, 11), list(range(100, 5000, 100)), x, x_hat, z)
    assert got["fvu"] == pytest.approx(reconstruction_oracle(x, x_hat, z)["fvu"], rel=1e-9)


def test_half_precision_rows_are_summed_in_float64() -> None:
    x, x_hat, z = (t.bfloat16() for t in rows_and_codes(1, 3000, offset=2.0))
    got = in_batches(Reconstruction(6, 11), list(range(0, 3000, 7)), x, x_hat, z)
    oracle = reconstruction_oracle(x.float(), x_hat.float(), z.float())
    assert got.pop("l1") == pytest.approx(oracle.pop("l1"), rel=1e-6)
    assert got == pytest.approx(oracle, rel=1e-10)


def test_a_zero_row_counts_as_cosine_zero_and_constant_rows_have_no_finite_fvu() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    x_hat = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    got = in_batches(Reconstruction(2, 1), [], x, x_hat, torch.ones(2, 1))
    assert got["cosine"] == pytest.approx(0.5)
    x = torch.ones(5, 2)
    assert not np.isfinite(in_batches(Reconstruction(2, 1), [], x, x + 1, torch.ones(5, 1))["fvu"])


@given(seed=SEEDS, rows=st.integers(1, 60), cuts=CUTS)
def test_firing_in_any_batches_matches_numpy_over_all_rows(seed: int, rows: int, cuts: list[int]):
    _, _, codes = rows_and_codes(seed, rows)
    got = in_batches(Firing(11), [min(c, rows) for c in cuts], codes)
    fires = codes.numpy() != 0
    l0, frequency = fires.sum(1), fires.mean(0)
    assert got.pop("frequency") == pytest.approx(frequency.tolist())
    expected = {"rows": rows, "l0": l0.mean(), "l0_std": l0.std(), "density": l0.mean() / 11}
    expected["silent"] = (frequency == 0).sum()
    expected["dense"] = (frequency > DENSE_FREQUENCY).sum()
    assert got == pytest.approx(expected, abs=1e-12)


def test_histogram_and_patterns_count_rows_whatever_the_batches() -> None:
    _, _, codes = rows_and_codes(3, 50)
    counts = Firing(11, keep=20)
    in_batches(counts, [7, 9, 30], codes)
    assert torch.equal(counts.patterns, codes[:20]) and Firing(11).patterns.shape == (0, 11)
    assert torch.equal(counts.l0_histogram, (codes != 0).sum(1).bincount(minlength=12))


@pytest.mark.parametrize("accumulator", [Reconstruction(2, 3), Firing(3)])
def test_measuring_no_rows_is_refused(accumulator: Reconstruction | Firing) -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        accumulator.result()


@pytest.mark.parametrize(
    ("fvu", "l0", "d_in", "d_sae", "doubtful"),
    [
        (1.0, 8.0, 8, 16, []),
        (1.01, 8.0, 8, 16, ["fvu"]),
        (0.5, 8.01, 8, 16, ["l0"]),
        (0.5, 5.01, 8, 10, ["l0"]),
        (float("inf"), 0.0, 8, 16, []),
        (float("nan"), 0.0, 8, 16, []),
        (9.0, 9.0, 8, 16, ["fvu", "l0"]),
    ],
)
def test_a_measure_is_doubtful_above_its_bound_alone(fvu, l0, d_in, d_sae, doubtful):
    assert list(doubts({"fvu": fvu, "l0": l0}, d_in, d_sae)) == doubtful
