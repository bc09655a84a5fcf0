"""jumprelu with a target for L0: its gradients against plain autograd and by hand, its controller, its file."""

import numpy as np
import pytest
import torch
from homes import normal
from solver_problems import RowsInMemory, sparse_mixture, started, trained
from torch import Tensor

from saecli.sae.activations import JumpRelu
from saecli.sae.codes import Codes, SparseCodes
from saecli.sae.dictionary import SAE, Batch
from saecli.train.options import PamSgd, Sgd, SolverConfig, TrainingConfig
from saecli.train.plan import Plan
from saecli.train.rows import ArrayRows
from saecli.train.start import initial_sae

B, F, D, L = 40, 60, 12, 5.0
AIM, MULTIPLIER = 7.0, 0.4
TARGET = JumpRelu(target_l0=L).penalty("target-l0")
SOLVERS = [Sgd(), PamSgd(release=0.3)]


def parameters() -> dict[str, Tensor]:
    return {
        "threshold": torch.linspace(0.4, 1.2, F, dtype=torch.float64),
        "aim": torch.tensor(AIM, dtype=torch.float64),
        "multiplier": torch.tensor(MULTIPLIER, dtype=torch.float64),
    }


@pytest.mark.parametrize(("shift", "kind"), [(-1.5, SparseCodes), (0.0, Codes)])
def test_gradients_of_the_loss_equal_plain_autograd(shift: float, kind: type[Codes]) -> None:
    activation = JumpRelu(target_l0=L)
    W_enc, W_dec, b_dec = normal(D, F, seed=1) / 4, normal(F, D, seed=2), normal(D, seed=3)
    b_enc = torch.full((F,), shift).double()
    sae = SAE(W_enc, b_enc, W_dec, b_dec, activation, parameters())
    leaves = [
        tensor.requires_grad_()
        for name, tensor in sae.named_parameters()
        if name not in sae.estimates
    ]
    x, threshold = normal(B, D, seed=4), sae.threshold
    loss = sae.loss(Batch.of(x), "target-l0", 0.7)

    pre, width = x @ sae.W_enc + sae.b_enc, 0.5 * threshold.detach()
    active = (pre > threshold).double()
    near = ((pre - threshold).abs() < width / 2).double()
    straight_through = near * (pre - threshold) / width
    step = active + straight_through - straight_through.detach()
    z = pre * active + threshold.detach() * (step - active)
    e = (step.sum(1).mean() - AIM) / L
    expected = (z @ sae.W_dec + sae.b_dec - x).square().sum(1).mean() + 0.7 * (
        e**2 + 2 * MULTIPLIER * e
    )

    assert type(loss.codes) is kind
    assert (near.bool() & (active == 0)).any()
    torch.testing.assert_close(loss.value, expected)
    assert len(leaves) == 5
    ours, theirs = torch.autograd.grad(loss.value, leaves), torch.autograd.grad(expected, leaves)
    torch.testing.assert_close(ours, theirs)


def test_without_a_target_the_step_has_no_gradient_in_pre_activations() -> None:
    pre = normal(B, F, seed=5).requires_grad_()
    learned = {"threshold": parameters()["threshold"].requires_grad_()}
    activation = JumpRelu()
    activation(pre, learned).dense().sum().backward()
    assert torch.equal(pre.grad, (pre > learned["threshold"]).double())
    penalty = activation.penalty("l0").value(pre, Codes(pre), torch.eye(F), learned)
    assert torch.autograd.grad(penalty, [pre, learned["threshold"]], allow_unused=True)[0] is None


@pytest.mark.parametrize(("active", "side"), [(4 * F // 10, 1), (1, -1)])
def test_the_controller_moves_thresholds_and_multiplier_with_l0(active: int, side: int) -> None:
    before = parameters()
    codes = Codes((torch.arange(F) < active).double().expand(B, F))
    after = TARGET.after_step(codes, before, 0.3)
    excess = min(active / AIM - 1, 1.0)
    torch.testing.assert_close(after["threshold"], before["threshold"] * np.exp(0.05 * excess))
    torch.testing.assert_close(after["multiplier"], before["multiplier"] + 0.05 * excess)
    assert side * (after["threshold"] - before["threshold"]).min() > 0
    assert after["aim"].item() == AIM  # as long as it is below the schedule's
    higher = TARGET.after_step(codes, before | {"aim": torch.tensor(15.0)}, 0.3)
    assert higher["aim"].item() == pytest.approx(L + 0.4 * (15 - L))  # 15: a quarter of the latents
    assert TARGET.after_step(codes, before, 0.9)["aim"] == L
    nothing = TARGET.after_step(Codes(torch.zeros(0, F, dtype=torch.float64)), before, 0.3)
    assert nothing.keys() == after.keys()  # processes all-reduce the same tensors
    assert nothing["multiplier"] == MULTIPLIER
    assert torch.equal(nothing["threshold"], before["threshold"])


def test_calibrated_rows_have_the_target_as_their_l0() -> None:
    pre, learned = normal(B, F, seed=5), parameters()
    threshold = TARGET.calibrated(pre, learned)["threshold"]
    assert (pre > threshold).sum() == round(L * B)
    ratios = threshold / learned["threshold"]
    torch.testing.assert_close(ratios, ratios[:1].expand(len(ratios)))


def test_training_starts_with_the_first_aim_as_its_l0() -> None:
    x = normal(2000, D, seed=6)
    start = initial_sae(JumpRelu(target_l0=3.0), F, Batch.of(x), 0, None, "target-l0")
    assert start.codes(x).count().item() / len(x) == pytest.approx(12, abs=0.01)
    assert start.aim == 12


@pytest.mark.slow
@pytest.mark.parametrize("config", SOLVERS, ids=lambda one: one.name)
@pytest.mark.parametrize("target", [2.0, 6.0])
def test_rows_held_out_have_the_target_as_their_l0(config: SolverConfig, target: float) -> None:
    x, activation = sparse_mixture(8000).x, JumpRelu(target_l0=target)
    data = RowsInMemory(x[:4000], batch_size=50)
    weight = activation.penalty("target-l0").default_weight(x.shape[1])
    sae = trained(started(config, data, activation, 8, "target-l0", weight, smoothing=0.1), data, 8)
    assert sae.codes(x[4000:]).count().item() / 4000 == pytest.approx(target, rel=0.05)
    assert sae.tensors().keys() == {"W_enc", "b_enc", "W_dec", "b_dec", "threshold"}


def test_the_default_target_is_32_or_an_eighth_of_the_latents() -> None:
    rows = ArrayRows(sparse_mixture(100).x.numpy())

    def planned(activation: JumpRelu, d_sae: int = 512, **options: str) -> JumpRelu:
        return Plan.resolve(
            rows, None, TrainingConfig(d_sae=d_sae, **options), Sgd(), activation
        ).activation

    assert planned(JumpRelu()).expected_l0(8) == planned(JumpRelu()).target_l0 == 32
    assert planned(JumpRelu(), d_sae=24).target_l0 == 3
    assert planned(JumpRelu(target_l0=5)).expected_l0(8) == 5
    assert planned(JumpRelu(), sparsity="l0") == JumpRelu()
