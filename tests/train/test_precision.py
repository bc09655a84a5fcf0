"""Products of descent steps in bfloat16: that they are, that nothing else is, and which precision `auto` finds."""

import json
from pathlib import Path

import pytest
import torch
from homes import CommandLine, assert_same_weights, make_store, some_rows
from solver_problems import RowsInMemory, task_of
from torch import Tensor

import saecli
from saecli.base.devices import multiplies_bf16, products_in
from saecli.sae.activations import Activation, Relu, TopK
from saecli.sae.dictionary import Batch
from saecli.train import plan
from saecli.train.options import Pam, PamSgd, Sgd, SolverConfig, TrainingConfig
from saecli.train.plan import fill_defaults
from saecli.train.solver import Solver
from saecli.train.start import initial_sae

CPU = torch.device("cpu")
needs_bf16 = pytest.mark.skipif(not multiplies_bf16(CPU), reason="no bfloat16 products here")
SMALL = {"d_sae": 24, "steps": 30, "batch_size": 64}


def error(value: Tensor, exact: Tensor) -> float:
    return ((value - exact).norm() / exact.norm()).item()


def solver_in(
    name: str, config: SolverConfig, activation: Activation, sparsity: str = "none"
) -> Solver:
    x = torch.randn(256, 48, generator=torch.Generator().manual_seed(0))
    task = task_of(256, 100, 1e-2, sparsity, 0.1, precision=name)
    return config.build(initial_sae(activation, 96, Batch.of(x), seed=0), task)


@needs_bf16
def test_products_and_their_gradients_are_rounded_and_stay_float32():
    def products() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        a, b, c = (
            torch.randn(*shape, generator=generator).requires_grad_()
            for shape in ((64, 80), (80, 96), (96,))
        )
        values = [a @ b, torch.addmm(c, a, b)]
        losses = [value.square().sum() for value in values]
        return [*values, *torch.autograd.grad(losses, [a, b])]

    exact = products()
    with products_in("bf16"):
        rounded = products()
    for product, expected in zip(rounded, exact, strict=True):
        assert product.dtype == torch.float32
        assert 3e-4 < error(product, expected) < 1e-2
    assert all(map(torch.equal, products(), exact))


@needs_bf16
def test_an_error_within_leaves_the_process_as_it_was():
    with pytest.raises(ZeroDivisionError), products_in("bf16"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"
    factor = torch.full((64, 64), 1 + 2.0**-12)
    assert not (factor @ factor == 64).any()


@needs_bf16
@pytest.mark.parametrize("config", [Sgd(), PamSgd(), Pam()], ids=str)
@pytest.mark.parametrize(("activation", "sparsity"), [(Relu(), "l1"), (TopK(k=4), "none")], ids=str)
def test_gradients_are_rounded_and_weights_are_float32(config, activation, sparsity):
    x = torch.randn(256, 48, generator=torch.Generator().manual_seed(1))
    exact, rounded = (solver_in(name, config, activation, sparsity) for name in ("float32", "bf16"))
    for solver in (exact, rounded):
        solver.descend(Batch.of(x))
    for name, tensor in rounded.optimizer.tensors.items():
        assert tensor.dtype == tensor.grad.dtype == torch.float32
        if tensor.dim() == 2:
            # Rounding takes another of two latents that are nearly the k-th.
            most = 0.1 if sparsity == "l1" else 0.3
            assert 1e-4 < error(tensor.grad, exact.optimizer.tensors[name].grad) < most, name


@needs_bf16
@pytest.mark.parametrize("config", [PamSgd(), Pam()], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_the_last_decoder_step_is_bit_for_bit_that_of_float32(last: bool, config: SolverConfig):
    x = torch.randn(256, 48, generator=torch.Generator().manual_seed(1))
    exact, rounded = (solver_in(name, config, Relu(), "l1") for name in ("float32", "bf16"))
    rounded.descend(Batch.of(x))  # after which nothing of it is left
    for solver in (exact, rounded):
        solver.dictionary.load_state_dict(
            solver_in("float32", config, Relu(), "l1").dictionary.state_dict()
        )
        solver.steps = 1
        passes = list(solver.schedule.values())
        solver.decoder_step(passes[-1 if last else 0], RowsInMemory(x, 256))
    assert (exact.alpha == rounded.alpha) == last
    if last:
        for name, tensor in exact.dictionary.state_dict().items():
            assert torch.equal(tensor, rounded.dictionary.state_dict()[name]), name
    else:
        assert 0 < error(rounded.dictionary.decoder(), exact.dictionary.decoder()) < 0.02


@needs_bf16
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_bf16_trains_to_the_same_error_and_leaves_float32_alone(solver: str):
    rows = some_rows(2000)
    x = torch.from_numpy(rows)
    exact, rounded, repeated = (
        saecli.fit(rows, solver=solver, precision=name, **SMALL)
        for name in ("float32", "bf16", "float32")
    )
    assert not torch.equal(rounded.W_enc, exact.W_enc)
    assert error(rounded(x), x) == pytest.approx(error(exact(x), x), rel=0.1)
    assert torch.equal(repeated.W_enc, exact.W_enc)


@pytest.mark.slow
@needs_bf16
def test_a_run_keeps_the_precision_that_auto_found(sae: CommandLine, monkeypatch):
    make_store(sae.home, "rows", some_rows(1000))
    monkeypatch.setattr(plan, "SMALLEST", 0)
    words = ("train", "--d-sae", "24", "--epochs", "2", "--json", "--name")
    assert sae(*words, "named", "--precision", "bf16").status == sae(*words, "found").status == 0
    folder = sae.home / "runs" / "found"
    assert json.loads((folder / "run.json").read_text())["training"]["precision"] == "bf16"
    monkeypatch.setattr(plan, "multiplies_bf16", lambda _: False)  # another would not be chosen
    assert sae("train", "--config", folder / "config.toml", "--name", "repeated").status == 0
    for name in ("named", "repeated"):
        assert_same_weights(sae.home, "found", name)


@pytest.mark.parametrize("supported", [True, False])
def test_auto_is_bf16_if_the_device_has_it_and_dtype_is_float32(monkeypatch, supported: bool):
    monkeypatch.setattr(plan, "multiplies_bf16", lambda _: supported)
    small = fill_defaults(TrainingConfig(d_sae=8, batch_size=1000), Relu(), 1000, 8)
    assert small.precision == "float32"
    monkeypatch.setattr(plan, "SMALLEST", 64)
    expected = {"float32": "bf16" if supported else "float32", "float64": "float32"}
    for dtype, precision in expected.items():
        config = TrainingConfig(d_sae=8, batch_size=1000, dtype=dtype)
        assert fill_defaults(config, Relu(), 1000, 8).precision == precision


def test_bf16_is_refused_where_a_processor_has_no_such_products(sae: CommandLine, monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    make_store(sae.home, "rows", some_rows(1500))
    done = sae("train --device cpu --precision bf16")
    done.fails(2, "--device cpu has no bfloat16 products")
    path = sae("train --device cpu --epochs 1 --json").json["path"]
    document = json.loads(Path(path, "run.json").read_text())
    assert document["training"]["precision"] == "float32"
