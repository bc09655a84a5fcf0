"""soft-topk against the sum over all subsets, against a recursion, in its limits, and at extremes."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from saecli.base.errors import ConfigError
from saecli.sae.activations import SoftTopK, TopK


def random_pre(rows: int, F: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, F, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_enumeration(pre: Tensor, k: int, temperature: float) -> Tensor:
    """rho_T from its definition: every subset's probability, summed over the subsets that hold a latent."""
    subsets = torch.zeros(math.comb(pre.shape[1], k), pre.shape[1], dtype=pre.dtype)
    for number, members in enumerate(itertools.combinations(range(pre.shape[1]), k)):
        subsets[number, list(members)] = 1
    return pre * ((pre @ subsets.T / temperature).softmax(1) @ subsets)


def log_symmetric(logits: np.ndarray, k: int) -> np.ndarray:
    """Logarithms of the elementary symmetric polynomials of exp(logits), up to degree k, one number at a time."""
    found = np.full(k + 1, -np.inf)
    found[0] = 0
    for logit in logits:
        found[1:] = np.logaddexp(found[1:], found[:-1] + logit)
    return found


@pytest.mark.parametrize("temperature", [0.05, 0.4, 3.0, 100.0])
@pytest.mark.parametrize(
    ("F", "k"), [(2, 1), (3, 2), (5, 1), (6, 3), (7, 6), (8, 4), (9, 2), (11, 5), (6, 6)]
)
def test_codes_and_gradient_equal_the_sum_over_all_subsets(
    F: int, k: int, temperature: float
) -> None:
    pre, upstream = random_pre(6, F).requires_grad_(), random_pre(6, F, seed=1)
    codes, reference = (
        SoftTopK(k=k, temperature=temperature)(pre, {}).dense(),
        by_enumeration(pre, k, temperature),
    )
    torch.testing.assert_close(codes, reference, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad((z * upstream).sum(), pre)[0] for z in (codes, reference)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_a_large_row_equals_the_recursion_that_leaves_each_latent_out() -> None:
    F, k, temperature = 300, 40, 0.1
    pre = random_pre(1, F)
    logits = pre[0].numpy() / temperature
    whole = log_symmetric(logits, k)[k]
    inclusion = [
        math.exp(logits[i] + log_symmetric(np.delete(logits, i), k - 1)[k - 1] - whole)
        for i in range(F)
    ]
    expected = pre * torch.tensor(inclusion, dtype=torch.float64)
    codes = SoftTopK(k=k, temperature=temperature)(pre, {}).dense()
    torch.testing.assert_close(codes, expected, rtol=1e-10, atol=1e-14)
    single = SoftTopK(k=k, temperature=temperature)(pre.float(), {}).dense()
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 700])
def test_each_row_is_on_its_own(rows: int) -> None:
    pre = random_pre(rows, 10)
    codes = SoftTopK(k=4)(pre, {}).dense()
    assert codes.shape == pre.shape
    for row in range(0, rows, 150):
        torch.testing.assert_close(
            codes[row : row + 1], SoftTopK(k=4)(pre[row : row + 1], {}).dense(), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("k", [1, 4, 63])
def test_as_the_temperature_falls_it_becomes_the_signed_topk(k: int) -> None:
    pre = random_pre(50, 64) - 2
    torch.testing.assert_close(
        SoftTopK(k=k, temperature=1e-6)(pre, {}).dense(), TopK(k=k)(pre, {}).dense()
    )


def test_as_the_temperature_rises_every_latent_is_as_likely() -> None:
    pre = random_pre(50, 64)
    torch.testing.assert_close(SoftTopK(k=16, temperature=1e9)(pre, {}).dense(), pre / 4)


def test_ties_share_what_is_left_of_k() -> None:
    pre = torch.tensor([[5.0, 1.0, 1.0, 1.0, -4.0]])
    expected = torch.tensor([[5.0, 2 / 3, 2 / 3, 2 / 3, 0.0]])
    torch.testing.assert_close(SoftTopK(k=3, temperature=1e-6)(pre, {}).dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 5, 39, 40])
@pytest.mark.parametrize(
    ("size", "temperature"), list(itertools.product((1e-30, 1.0, 1e15), (1e-6, 1.0, 1e12)))
)
def test_at_extremes_codes_are_finite_and_probabilities_sum_to_k(
    dtype: torch.dtype, k: int, size: float, temperature: float
) -> None:
    pre = (random_pre(8, 40, dtype=dtype) * size).requires_grad_()
    codes = SoftTopK(k=k, temperature=temperature)(pre, {}).dense()
    codes.sum().backward()
    assert codes.isfinite().all()
    assert pre.grad.isfinite().all()
    rounding = 1e-4 if dtype == torch.float32 else 1e-12
    assert torch.allclose((codes / pre).sum(1), torch.tensor(float(k), dtype=dtype), rtol=rounding)
    assert (codes.abs() <= pre.abs() * (1 + rounding)).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-60, 9e-7])
def test_a_temperature_that_float32_could_lose_is_refused(temperature: float) -> None:
    with pytest.raises(
        ConfigError, match=f"^temperature must be at least 1e-06, got {temperature:g}$"
    ):
        SoftTopK(temperature=temperature)


def test_the_gradient_keeps_the_rows_and_not_the_tree() -> None:
    pre, kept = random_pre(600, 64).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()), lambda _: None
    ):
        SoftTopK(k=8)(pre, {})
    assert sum(kept) == pre.numel()
