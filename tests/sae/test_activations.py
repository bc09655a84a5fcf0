"""Activations against their formulas: thresholds, batchtopk, and how their settings are kept and refused."""

import numpy as np
import pytest
import torch
from homes import activation_of, normal
from torch import Tensor

from saecli.base.devices import products_in
from saecli.base.errors import ConfigError
from saecli.sae.activations import (
    ACTIVATIONS,
    Activation,
    BatchTopK,
    JumpRelu,
    MatchingPursuit,
    Relu,
    activation_from_json,
    activation_to_json,
)
from saecli.sae.codes import Codes, PreActivations
from saecli.sae.dictionary import SAE, Batch
from saecli.train.options import TrainingConfig
from saecli.train.plan import fill_defaults

B, F, K = 20, 12, 3
W_ENC = {
    "W_enc": torch.randn(5, F, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
}
EVERY = [activation_of(act, K) for act in ACTIVATIONS]


def random_pre(seed: int = 0) -> Tensor:
    return torch.randn(B, F, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_batchtopk_keeps_the_largest_of_a_training_batch() -> None:
    pre = random_pre()
    lowest_kept = np.sort(pre.numpy().ravel())[-B * K]
    codes = BatchTopK(k=K).training_codes(pre, {}).dense()
    assert torch.equal(codes, torch.where(pre >= lowest_kept, pre, 0.0))
    assert (codes != 0).sum() == B * K
    assert len((codes != 0).sum(1).unique()) > 1
    assert torch.equal(BatchTopK(k=F).training_codes(pre, {}).dense(), pre.relu())
    for same in (pre[:1].expand(B, F), pre.bfloat16()):  # many are equal
        assert (BatchTopK(k=K).training_codes(same, {}).dense() != 0).sum() == B * K
    parameters = {"threshold": torch.tensor(0.7, dtype=torch.float64)}
    assert torch.equal(BatchTopK(k=K)(pre, parameters).dense(), pre * (pre > 0.7))  # at inference


def test_batchtopk_calibrated_on_rows_keeps_k_of_them_on_average() -> None:
    pre, parameters = random_pre() + 0.5, {"threshold": torch.tensor(9.0, dtype=torch.float64)}
    for k in (1, K, 6):
        assert BatchTopK(k=k)(pre, BatchTopK(k=k).calibrated(pre, parameters)).count() == B * k
    few = (pre > 0).sum() // B + 1
    kept_all = BatchTopK(k=int(few))(pre, BatchTopK(k=int(few)).calibrated(pre, parameters)).dense()
    assert torch.equal(kept_all, pre.relu())
    assert BatchTopK(k=F).calibrated(pre, parameters)["threshold"] == 0


def test_batchtopk_threshold_is_a_running_mean() -> None:
    activation, parameters = BatchTopK(k=K), BatchTopK(k=K).parameters(F)
    parameters = {"threshold": parameters["threshold"].double()}
    smallest = []
    for seed in range(4):
        codes = activation.training_codes(random_pre(seed), parameters)
        dense = codes.dense()
        smallest.append(dense[dense > 0].min().item())
        parameters = activation.after_step(codes, parameters)
    expected = smallest[0]
    for value in smallest[1:]:
        expected = 0.7 * expected + 0.3 * value
    assert parameters["threshold"].item() == pytest.approx(expected, rel=1e-12)
    silent = activation.after_step(Codes(torch.zeros(B, F, dtype=torch.float64)), parameters)
    assert torch.equal(silent["threshold"], parameters["threshold"])


@pytest.mark.parametrize("factor", [0.2, 3.0])
@pytest.mark.parametrize("activation", EVERY, ids=lambda activation: activation.name)
def test_rescaled_parameters_scale_codes_with_pre_activations(activation, factor):
    pre = random_pre()
    start = activation.parameters(F).items()
    parameters = {name: torch.full_like(value, 0.6) for name, value in start}
    rescaled = activation.rescaled(parameters, factor) | {"W_enc": factor * W_ENC["W_enc"]}
    expected = activation(pre, parameters | W_ENC).dense() * factor
    torch.testing.assert_close(activation(pre * factor, rescaled).dense(), expected)


def test_the_l0_penaltys_gradient_is_the_straight_through_estimate() -> None:
    bandwidth, pre = 0.3, random_pre()
    threshold = torch.linspace(0.1, 1, F, dtype=torch.float64).requires_grad_()
    activation = JumpRelu()
    near = (np.abs(pre.numpy() - threshold.detach().numpy()) < bandwidth / 2).astype(float)
    assert 0 < near.mean() < 1
    learned = {"threshold": threshold}
    penalty = activation.penalty("l0").value(pre, Codes(pre), torch.eye(F), learned)
    assert penalty.item() == pytest.approx((pre > threshold).sum(1).double().mean().item())
    penalty.backward()
    np.testing.assert_allclose(threshold.grad.numpy(), -near.mean(0) / bandwidth, rtol=1e-12)


@pytest.mark.parametrize(
    "activation",
    [activation for activation in EVERY if "l1" in activation.penalties()],
    ids=lambda activation: activation.name,
)
def test_norm_weights_are_the_derivative_of_l1_in_decoder_norms(activation: Activation) -> None:
    z, directions = random_pre(), torch.nn.functional.normalize(normal(F, 5, seed=1), dim=1)
    norms = torch.linspace(0.5, 3, F, dtype=torch.float64).requires_grad_()
    W_dec = directions * norms[:, None]
    penalty = activation.penalty("l1").value(z, Codes(z), W_dec, {})
    (derivative,) = torch.autograd.grad(B * penalty, norms)
    weights = activation.norm_weights("l1", Codes(z), W_dec.detach(), {})
    if activation.name == "gated":  # which penalises gates, by norms without gradient
        assert not weights.any()
        return
    torch.testing.assert_close(weights, derivative)
    assert (derivative > 0).any()
    assert not activation.norm_weights("none", Codes(z), W_dec.detach(), {}).any()


@pytest.mark.parametrize("activation", EVERY, ids=lambda activation: activation.name)
def test_json_round_trip_and_missing_settings_take_their_defaults(activation: Activation) -> None:
    document = activation_to_json(activation)
    assert activation_from_json(document) == activation
    assert activation_from_json({"name": activation.name}) == type(activation)()
    with pytest.raises(ConfigError, match=r"unexpected \['colour'\]"):
        activation_from_json(document | {"colour": 1})


@pytest.mark.parametrize(
    ("activation", "given", "sparsity", "weight"),
    [
        (Relu(), None, "l1", 0.8),
        (Relu(), "l1-codes", "l1-codes", 0.8),
        (JumpRelu(), None, "target-l0", 3.2),
        (BatchTopK(k=3), None, "none", 0),
    ],
    ids=str,
)
def test_defaults_of_the_penalty_fit_the_activation(activation, given, sparsity, weight):
    training = fill_defaults(TrainingConfig(sparsity=given), activation, 100, 64)
    assert training.sparsity == sparsity
    assert training.sparsity_weight == pytest.approx(weight)


@pytest.mark.parametrize("activation", EVERY, ids=lambda activation: activation.name)
def test_a_process_without_rows_of_a_batch_adds_nothing_to_its_loss(activation: Activation) -> None:
    W_enc, W_dec = normal(5, F).float(), normal(F, 5, seed=1).float()
    parameters = activation.parameters(F)
    sae = SAE(W_enc, torch.zeros(F), W_dec, torch.zeros(5), activation, parameters)
    loss = sae.loss(Batch(torch.zeros(0, 5), torch.zeros(0, 5), size=2), "none")
    assert loss.value == 0 and loss.codes.shape == (0, F)
    for name, value in activation.after_step(loss.codes, parameters).items():
        assert torch.equal(value, parameters[name])


@pytest.mark.parametrize("scale", [1e-20, 1, 1e25])
def test_matching_pursuit_takes_rows_of_any_size_and_number(scale: float) -> None:
    W_enc, x = normal(8, 400).float(), normal(300, 8, seed=1).float()
    pursuit = MatchingPursuit(k=3)
    alone = [pursuit(row @ W_enc, {"W_enc": W_enc}).dense() for row in x[:, None]]
    codes = pursuit(x @ (W_enc * scale), {"W_enc": W_enc * scale}).dense()
    torch.testing.assert_close(codes / scale, torch.cat(alone), rtol=1e-5, atol=1e-4)


def test_matching_pursuit_in_bfloat16_is_near_that_in_float32() -> None:
    x, found = normal(100, 64).float(), []
    for precision in ("float32", "bf16"):
        W_enc = normal(64, 200, seed=1).float().requires_grad_()
        with products_in(precision):
            pre = PreActivations.apply(x, W_enc, torch.zeros(200))
            codes = MatchingPursuit(k=3)(pre, {"W_enc": W_enc})
            codes.values.square().sum().backward()
        found.append((codes.dense().detach(), W_enc.grad.T))
    for exact, rounded in zip(*found, strict=True):
        errors = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
        assert 0 < errors.nanmedian() < 0.02  # a few choices between equals differ
