"""gated: its loss against the paper's formula by plain autograd, its controller, training to a target."""

from collections.abc import Callable

import pytest
import torch
from homes import normal
from solver_problems import RowsInMemory, sparse_mixture, started, trained

from saecli.sae.activations import Gated
from saecli.sae.codes import Codes, SparseCodes
from saecli.sae.dictionary import SAE, Batch, Coupled, Dictionary
from saecli.train.options import Pam, PamSgd, Sgd, SolverConfig

B, F, D, WEIGHT, PRESSURE = 40, 60, 12, 0.7, 1.7


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
def test_gradients_of_the_loss_equal_the_papers_formula(
    shift: float,
    kind: type[Codes],
    sparsity: str,
    pressure: float,
    made: Callable[[SAE], Dictionary],
) -> None:
    dictionary = made(gated(shift))
    leaves = [
        tensor.requires_grad_()
        for name, tensor in dictionary.named_parameters()
        if name not in dictionary.estimates
    ]
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


@pytest.mark.slow
@pytest.mark.parametrize("config", [Sgd(), PamSgd(), Pam(), Sgd(tied=True)], ids=str)
def test_training_lowers_fvu_and_gives_rows_held_out_the_target(config: SolverConfig) -> None:
    x, activation = sparse_mixture(8000).x, Gated(target_l0=3.0)
    data = RowsInMemory(x[:4000], batch_size=50)
    weight = activation.penalty("target-l0").default_weight(x.shape[1])
    solver = started(config, data, activation, 10, "target-l0", weight)
    sae, held_out = trained(solver, data, 10), x[4000:]
    assert sae.codes(held_out).count().item() / 4000 == pytest.approx(3, rel=0.1)
    assert (sae(held_out) - held_out).square().sum() < 0.2 * held_out.square().sum()
    assert sae.tensors().keys() == {"W_enc", "b_enc", "W_dec", "b_dec", "threshold", "r_mag"}
    assert (sae.threshold >= 0).all()
