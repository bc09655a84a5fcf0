"""Penalties against their definitions, finite differences and autograd."""

import numpy as np
import pytest
import torch
from torch import Tensor

from saecli.sae.activations import ACTIVATIONS, Activation, Gated, JumpRelu, Relu
from saecli.sae.codes import Codes

B, F, D = 30, 7, 16
RHO = 0.2
OFFERS = [
    (kind(target_rate=RHO) if sparsity == "kl" else kind(), sparsity)
    for kind in ACTIVATIONS.values()
    for sparsity in kind().penalties()
    if sparsity in ("l1", "kl")
]
every_offer = pytest.mark.parametrize(
    ("activation", "sparsity"), OFFERS, ids=lambda value: getattr(value, "name", value)
)
NORMS = torch.linspace(0.5, 3, F, dtype=torch.float64)


def codes_and_decoder(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes, some negative and none near zero, and decoder weights with the norms `NORMS`."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(B, F, generator=generator, dtype=torch.float64) * torch.linspace(0.02, 2, F)
    W_dec = torch.randn(F, D, generator=generator, dtype=torch.float64)
    return z, W_dec / W_dec.norm(dim=1, keepdim=True) * NORMS[:, None]


def rates(z: np.ndarray, norms: np.ndarray) -> np.ndarray:
    u = np.abs(z) * norms
    return (u / (u + 0.03 * np.sqrt(D))).mean(0)


def test_l1_is_the_sum_of_sizes_in_the_reconstruction() -> None:
    z, W_dec = codes_and_decoder()
    expected = np.mean(
        [sum(abs(z[row, i]) * np.linalg.norm(W_dec[i]) for i in range(F)) for row in range(B)]
    )
    assert Relu().penalty("l1").value(z, Codes(z), W_dec, {}).item() == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("kind", [Relu, JumpRelu])
def test_kl_is_the_divergence_of_firing_rates_from_the_target(kind: type[Activation]) -> None:
    z, W_dec = codes_and_decoder()
    rho = rates(z.numpy(), NORMS.numpy())
    assert rho.min() < RHO < rho.max()
    expected = (RHO * np.log(RHO / rho) + (1 - RHO) * np.log((1 - RHO) / (1 - rho))).sum()
    value = kind(target_rate=RHO).penalty("kl").value(z, Codes(z), W_dec, {})
    assert value.item() == pytest.approx(expected, rel=1e-12)


def test_kl_is_zero_where_every_rate_is_the_target() -> None:
    _, W_dec = codes_and_decoder()
    u = 0.03 * D**0.5 * RHO / (1 - RHO)
    z = (u / NORMS).expand(B, F)
    value = Relu(target_rate=RHO).penalty("kl").value(z, Codes(z), W_dec, {})
    assert value.item() == pytest.approx(0, abs=1e-12)


@every_offer
def test_gradient_of_a_penalty_equals_finite_differences(
    activation: Activation, sparsity: str
) -> None:
    z, W_dec = (tensor.requires_grad_() for tensor in codes_and_decoder())
    assert torch.autograd.gradcheck(
        lambda z, W: activation.penalty(sparsity).value(z, Codes(z), W, {}), (z, W_dec)
    )


@every_offer
def test_shrinking_codes_while_the_decoder_grows_changes_no_penalty(
    activation: Activation, sparsity: str
) -> None:
    z, W_dec = codes_and_decoder()
    scale = torch.linspace(0.1, 9, F, dtype=torch.float64)
    before = activation.penalty(sparsity).value(z, Codes(z), W_dec, {})
    after = activation.penalty(sparsity).value(z, Codes(z * scale), W_dec / scale[:, None], {})
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)


@every_offer
def test_norm_weights_are_the_positive_derivative_in_decoder_norms(
    activation: Activation, sparsity: str
) -> None:
    z, W_dec = codes_and_decoder()
    norms = NORMS.clone().requires_grad_()
    scaled = W_dec / NORMS[:, None] * norms[:, None]
    (derivative,) = torch.autograd.grad(
        B * activation.penalty(sparsity).value(z, Codes(z), scaled, {}), norms
    )
    weights = activation.norm_weights(sparsity, Codes(z), W_dec, {})
    if isinstance(activation, Gated):  # which penalises gates, by norms without gradient
        assert not weights.any()
        return
    torch.testing.assert_close(weights, derivative.clamp(min=0))
    assert (derivative > 0).any()
    assert bool((derivative < 0).any()) == (sparsity == "kl")
    assert not activation.norm_weights("none", Codes(z), W_dec, {}).any()


@pytest.mark.parametrize("rate", [1e-6, 0.05, 1 - 1e-16])
def test_kl_and_its_gradient_are_finite_also_for_silent_latents(rate: float) -> None:
    z, W_dec = (tensor.float() for tensor in codes_and_decoder())
    z[:, 2], W_dec[4] = 0, 0
    z.requires_grad_()
    W_dec.requires_grad_()
    activation = Relu(target_rate=rate)
    penalty = activation.penalty("kl").value(z, Codes(z), W_dec, {})
    penalty.backward()
    weights = activation.norm_weights("kl", Codes(z.detach()), W_dec.detach(), {})
    assert all(tensor.isfinite().all() for tensor in (penalty, z.grad, W_dec.grad, weights))
    assert weights[[2, 4]].tolist() == [0, 0]
