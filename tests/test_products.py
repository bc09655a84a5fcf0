"""Products that skip zeros against dense ones, with their gradients."""

import pytest
import torch
from torch import Tensor

from saecli.activations import ACTIVATIONS, Activation
from saecli.products import DENSITY, NonZeros, pre_activations, reconstructions
from saecli.dictionary import SAE
from saecli.solvers import Task
from saecli.solvers.sgd import Sgd

B, D, F = 30, 7, 50
SPARSE = [kind(k=2) if hasattr(kind, "k") else kind() for kind in ACTIVATIONS.values()]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(density: float) -> Tensor:
    kept = torch.rand(B, F, generator=torch.Generator().manual_seed(1)) < density
    return normal(B, F, seed=2) * kept


@pytest.mark.parametrize("density", [0.0, 0.02, 0.08])
@pytest.mark.parametrize("pairs", [1, 40, 1 << 19])
def test_products_with_the_non_zeros_equal_those_with_the_matrix(density, pairs, monkeypatch):
    monkeypatch.setattr("saecli.products.PAIRS", pairs)
    dense = matrix(density)
    found = NonZeros.of(dense)
    right, below = normal(F, D, seed=3), normal(B, D, seed=4)
    torch.testing.assert_close(found.times(right), dense @ right)
    torch.testing.assert_close(found.transposed_times(below), dense.T @ below)
    gram = torch.zeros(F, F, dtype=torch.float64)
    found.add_gram(gram)
    torch.testing.assert_close(gram, (dense.T @ dense).tril())
    torch.testing.assert_close(found.column_sums(), dense.sum(0))
    sizes = (dense != 0).sum(1)
    assert found.pairs == (sizes * (sizes + 1)).sum() / 2


def test_a_matrix_of_many_non_zeros_is_left_dense():
    assert NonZeros.of(matrix(1.5 * DENSITY)) is None
    assert NonZeros.of(matrix(0.5 * DENSITY)) is not None


@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_reconstructions_and_their_gradients_equal_autograds_where_codes_are_not_zero(density):
    leaves = [matrix(density), normal(F, D, seed=3), normal(D, seed=4)]
    weights = normal(B, D, seed=5)
    found, expected = ([leaf.clone().requires_grad_() for leaf in leaves] for _ in range(2))
    ours, dense = reconstructions(*found), torch.addmm(expected[2], expected[0], expected[1])
    torch.testing.assert_close(ours, dense)
    (ours * weights).sum().backward()
    (dense * weights).sum().backward()
    expected[0].grad *= leaves[0] != 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_gradients_of_pre_activations_equal_autograds(density):
    x, leaves, gradient = normal(B, D, seed=3), [normal(D, F, seed=4), normal(F, seed=5)], matrix(density)
    found, expected = ([leaf.clone().requires_grad_() for leaf in leaves] for _ in range(2))
    ours, dense = pre_activations(x, *found), torch.addmm(expected[1], x, expected[0])
    assert torch.equal(ours, dense)
    ours.backward(gradient)
    dense.backward(gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("activation", SPARSE, ids=lambda one: one.name)
@pytest.mark.parametrize("sparsity", ["none", "l1"])
def test_a_training_steps_gradients_equal_autograds_of_the_loss_written_out(activation: Activation, sparsity: str):
    x = normal(B, D, seed=3)
    parameters = {name: tensor.double() for name, tensor in activation.parameters(F).items()}
    b_enc = normal(F, seed=6) - (2.0 if activation.name in ("relu", "jumprelu") else 0.0)  # so that few are active
    initial = SAE(normal(D, F, seed=4) / 4, b_enc, normal(F, D, seed=5), normal(D, seed=7), activation, parameters)
    solver = Sgd().build(initial, Task(B, 10, 1e-3, sparsity, 0.3, penalty_warm_up=0.0))
    leaves = list(solver.optimizer.tensors.values())
    found = torch.autograd.grad(solver._loss(x)[0], leaves, allow_unused=True)
    trained = solver.trained
    pre = x @ trained["W_enc"] + trained["b_enc"]
    z = activation.training_codes(pre, solver._parameters())
    loss = (z @ trained["W_dec"] + trained["b_dec"] - x).square().sum(1).mean()
    if sparsity == "l1":
        loss = loss + 0.3 * (z.abs() * trained["W_dec"].norm(dim=1)).sum(1).mean()
    expected = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert (NonZeros.of(z) is None) == (activation.name in ("swish", "soft-topk"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
