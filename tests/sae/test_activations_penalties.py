"""Penalties against their definitions, finite differences and autograd."""

import numpy as np
import pytest
import torch
from torch import Tensor

from saecli.sae.activations import ACTIVATIONS, Activation, Gated, Relu
from saecli.sae.codes import Codes

B, F, D = 30, 7, 16
every_offer = pytest.mark.parametrize(
    "activation",
    [kind() for kind in ACTIVATIONS.values() if "l1" in kind().penalties()],
    ids=lambda activation: activation.name,
)
NORMS = torch.linspace(0.5, 3, F, dtype=torch.float64)


def codes_and_decoder(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes, some negative and none near zero, and decoder weights with the norms `NORMS`."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(B, F, generator=generator, dtype=torch.float64) * torch.linspace(0.02, 2, F)
    W_dec = torch.randn(F, D, generator=generator, dtype=torch.float64)
    return z, W_dec / W_dec.norm(dim=1, keepdim=True) * NORMS[:, None]


def test_l1_is_the_sum_of_sizes_in_the_reconstruction() -> None:
    z, W_dec = codes_and_decoder()
    expected = np.mean(
        [sum(abs(z[row, i]) * np.linalg.norm(W_dec[i]) for i in range(F)) for row in range(B)]
    )
    assert Relu().penalty("l1").value(z, Codes(z), W_dec, {}).item() == pytest.approx(
        expected, rel=1e-12
    )


@every_offer
def test_gradient_of_a_penalty_equals_finite_differences(activation: Activation) -> None:
    z, W_dec = (tensor.requires_grad_() for tensor in codes_and_decoder())
    assert torch.autograd.gradcheck(
        lambda z, W: activation.penalty("l1").value(z, Codes(z), W, {}), (z, W_dec)
    )


@every_offer
def test_shrinking_codes_while_the_decoder_grows_changes_no_penalty(activation: Activation) -> None:
    z, W_dec = codes_and_decoder()
    scale = torch.linspace(0.1, 9, F, dtype=torch.float64)
    before = activation.penalty("l1").value(z, Codes(z), W_dec, {})
    after = activation.penalty("l1").value(z, Codes(z * scale), W_dec / scale[:, None], {})
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)


@every_offer
def test_norm_weights_are_the_derivative_in_decoder_norms(activation: Activation) -> None:
    z, W_dec = codes_and_decoder()
    norms = NORMS.clone().requires_grad_()
    scaled = W_dec / NORMS[:, None] * norms[:, None]
    (derivative,) = torch.autograd.grad(
        B * activation.penalty("l1").value(z, Codes(z), scaled, {}), norms
    )
    weights = activation.norm_weights("l1", Codes(z), W_dec, {})
    if isinstance(activation, Gated):  # which penalises gates, by norms without gradient
        assert not weights.any()
        return
    torch.testing.assert_close(weights, derivative)
    assert (derivative > 0).any()
    assert not activation.norm_weights("none", Codes(z), W_dec, {}).any()
