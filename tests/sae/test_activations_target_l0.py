"""Activations that are trained to a target L0, jumprelu and gated: the gradients of their losses against plain autograd
and by hand, their controllers, their files."""

import numpy as np
import pytest
import torch
from homes import normal
from solver_problems import RowsInMemory, sparse_mixture, started, trained
from torch import Tensor

from saecli.sae.activations import Gated, JumpRelu
from saecli.sae.codes import Codes, SparseCodes
from saecli.sae.dictionary import SAE, Batch, Coupled, Dictionary
from saecli.train.options import Pam, PamSgd, Sgd
from saecli.train.start import initial_sae

B, F, D, L = 40, 60, 12, 5.0
AIM, MULTIPLIER = 7.0, 0.4
TARGET = JumpRelu(target_l0=L).penalty("target-l0")


def parameters() -> dict[str, Tensor]:
    return {
        "threshold": torch.linspace(0.4, 1.2, F, dtype=torch.float64),
        "aim": torch.tensor(AIM, dtype=torch.float64),
        "multiplier": torch.tensor(MULTIPLIER, dtype=torch.float64),
    }


def leaves_of(dictionary: Dictionary) -> list[Tensor]:
    named = dictionary.named_parameters()
    return [leaf.requires_grad_() for name, leaf in named if name not in dictionary.estimates]


@pytest.mark.parametrize(("shift", "kind"), [(-1.5, SparseCodes), (0.0, Codes)])
def test_gradients_of_the_loss_equal_plain_autograd(shift: float, kind: type[Codes]) -> None:
    activation = JumpRelu(target_l0=L)
    W_enc, W_dec, b_dec = normal(D, F, seed=1) / 4, normal(F, D, seed=2), normal(D, seed=3)
    b_enc = torch.full((F,), shift).double()
    sae = SAE(W_enc, b_enc, W_dec, b_dec, activation, parameters())
    leaves = leaves_of(sae)
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


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("zeros", [1, F // 2, F])
def test_thresholds_of_0_are_calibrated_too(zeros: int, dtype: torch.dtype, size: float) -> None:
    """About half of the pre-activations are above a threshold of 0."""
    pre = (size * normal(B, F, seed=5)).to(dtype)
    pre[0] = 0
    threshold = size * parameters()["threshold"].to(dtype)
    threshold[:zeros] = 0
    found = TARGET.calibrated(pre, {"threshold": threshold})["threshold"]
    assert found.isfinite().all() and (found >= 0).all()
    assert (pre > found).sum() == round(L * B)
    if zeros == 1:  # one factor
        ratios = found[zeros:] / threshold[zeros:]
        torch.testing.assert_close(ratios, ratios[:1].expand(len(ratios)))


def test_training_starts_with_the_first_aim_as_its_l0() -> None:
    x = normal(2000, D, seed=6)
    start = initial_sae(JumpRelu(target_l0=3.0), F, Batch.of(x), 0, None, "target-l0")
    assert start.codes(x).count().item() / len(x) == pytest.approx(12, abs=0.01)
    assert start.aim == 12


JUMPRELU = [
    (config, JumpRelu(target_l0=target), 0.1)
    for config in (Sgd(), PamSgd(release=0.3))
    for target in (2.0, 6.0)
]
GATED = [(config, Gated(target_l0=3.0), 0.0) for config in (Sgd(), PamSgd(), Pam(), Sgd(tied=True))]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "activation", "smoothing"), [*JUMPRELU, *GATED], ids=str)
def test_training_lowers_fvu_and_gives_rows_held_out_the_target(config, activation, smoothing):
    x, gated = sparse_mixture(8000).x, isinstance(activation, Gated)
    data, held_out = RowsInMemory(x[:4000], batch_size=50), x[4000:]
    weight = activation.penalty("target-l0").default_weight(x.shape[1])
    given = (10 if gated else 8, "target-l0", weight)
    sae = trained(started(config, data, activation, *given, smoothing=smoothing), data, given[0])
    l0 = sae.codes(held_out).count().item() / 4000
    assert l0 == pytest.approx(activation.target_l0, rel=0.1 if gated else 0.05)
    assert (sae(held_out) - held_out).square().sum() < 0.2 * held_out.square().sum()
    learned = {"threshold", "r_mag"} if gated else {"threshold"}
    assert sae.tensors().keys() == {"W_enc", "b_enc", "W_dec", "b_dec"} | learned
    assert (sae.threshold >= 0).all()


WEIGHT, PRESSURE = 0.7, 1.7


def gated(shift: float = 0.0, **parts: object) -> SAE:
    activation = Gated(target_l0=5.0)
    learned = {
        "threshold": torch.linspace(0, 1.2, F, dtype=torch.float64),
        "r_mag": normal(F, seed=7) / 3,
        "aim": torch.tensor(7.0).double(),
        "multiplier": torch.tensor(PRESSURE).double().log(),
    }
    W_enc, W_dec, b_dec = normal(D, F, seed=1) / 4, normal(F, D, seed=2), normal(D, seed=3)
    return SAE(W_enc, torch.full((F,), shift).double(), W_dec, b_dec, activation, learned, **parts)


@pytest.mark.parametrize(("shift", "kind"), [(-1.5, SparseCodes), (0.0, Codes)])
@pytest.mark.parametrize(
    ("sparsity", "pressure"), [("target-l0", PRESSURE), ("l1", 1.0), ("none", 0.0)]
)
@pytest.mark.parametrize(
    "made",
    [
        lambda sae: sae,
        lambda sae: Coupled(sae, 1.0, None),
        lambda sae: Coupled(sae, 0.6, normal(F, D, seed=9)),
    ],
    ids=["free", "tied", "residual"],
)
def test_gradients_of_the_loss_equal_the_papers_formula(shift, kind, sparsity, pressure, made):
    dictionary = made(gated(shift))
    leaves = leaves_of(dictionary)
    x = normal(B, D, seed=4)
    loss = dictionary.loss(Batch.of(x), sparsity, WEIGHT)

    W_gate = dictionary.W_enc / dictionary.r_mag.exp()
    b_gate = (dictionary.b_enc - dictionary.threshold) / dictionary.r_mag.exp()
    pi, W_dec = x @ W_gate + b_gate, dictionary.decoder()
    z = (pi > 0) * (dictionary.r_mag.exp() * (x @ W_gate) + dictionary.b_enc).relu()
    frozen = W_dec.detach()
    expected = (
        (z @ W_dec + dictionary.b_dec - x).square().sum(1)
        + (pi.relu() @ frozen + dictionary.b_dec.detach() - x).square().sum(1)
        + WEIGHT * pressure * pi.relu() @ frozen.norm(dim=1)
    ).mean()

    assert type(loss.codes) is kind and 0 < loss.codes.count() < B * F
    torch.testing.assert_close(loss.codes.dense(), z)
    torch.testing.assert_close(loss.value, expected)
    ours, theirs = torch.autograd.grad(loss.value, leaves), torch.autograd.grad(expected, leaves)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "parts", [{"prefixes": (7, F)}, {"W_skip": normal(D, D, seed=8)}], ids=["nested", "skip"]
)
def test_gates_reconstruct_by_prefixes_and_besides_a_skip(parts: dict) -> None:
    sae, x = gated(**parts), normal(B, D, seed=4)
    error = (
        sae.loss(Batch.of(x)).value
        - sae.squared_errors(Batch.of(x), sae.codes(x), sae.W_dec).mean() / B
    )
    g = (x @ sae.W_enc + sae.b_enc - sae.threshold).relu() / sae.r_mag.exp()
    base = sae.b_dec + (x @ sae.W_skip if "W_skip" in parts else 0)
    errors = [
        (g[:, :m] @ sae.W_dec[:m] + base - x).square().sum(1).mean()
        for m in parts.get("prefixes", (F,))
    ]
    torch.testing.assert_close(error, torch.stack(errors).mean())


@pytest.mark.parametrize(("active", "side"), [(20, 1), (1, -1)])
def test_the_multiplier_moves_with_l0_and_thresholds_stay_above_0(active: int, side: int) -> None:
    sae = gated()
    before = sae.activation_parameters | {"threshold": sae.threshold - 0.5}
    codes = Codes((torch.arange(F) < active).double().expand(B, F))
    after = sae.activation.after_step(codes, before)
    after |= sae.activation.penalty("target-l0").after_step(codes, before, 0.9)
    assert side * (after["multiplier"] - before["multiplier"]) > 0 and after["aim"] == 5
    assert torch.equal(after["threshold"], before["threshold"].relu())
