"""Transcoders: SAEs whose targets are another store's rows, or another array's, with a skip or without."""

from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, linear_map, make_store, same, some_rows, targets_of, weights

import saecli
from saecli.base.errors import ConfigError
from saecli.sae.activations import ACTIVATIONS, Relu
from saecli.sae.dictionary import SAE, Batch
from saecli.train.rows import Smoothing, regressed
from saecli.train.solver import re_aim

QUICK = ("--d-sae", "24", "--epochs", "3", "--batch-size", "64", "--json")
TOPK = ("--act", "topk", "--k", "4")
X_TO_Y = ("--data", "x", "--target", "y")


@pytest.fixture
def home(sae: CommandLine) -> Path:
    """A home with rows, targets of another width, and the rows once more."""
    x = make_store(sae.home, "x", some_rows(1500))
    make_store(sae.home, "y", targets_of(x))
    make_store(sae.home, "again", x)
    return sae.home


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [
        "sgd",
        "sgd --skip",
        "sgd --tied",
        "pam --skip",
        "pam-sgd",
        "pam-sgd --skip",
        "pam-sgd --skip --solve iterative",
        "pam-sgd --skip --prefixes 6,12",
        "pam-sgd --skip --release 0",
        "pam-sgd --skip --fraction 0.01",
    ],
)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_solver_and_activation_trains_a_transcoder_as_eval_says(sae, home, solver, act):
    k = ("--k", "4") if "k" in ACTIVATIONS[act].__dataclass_fields__ else ()
    done = sae("train", *X_TO_Y, "--solver", *solver.split(), "--act", act, *k, *QUICK)
    assert done.status == 0, done.err
    document = done.json
    assert document["data"] == "x -> y"
    (measured,) = sae("eval", document["run"], "--json").json["runs"]
    assert measured["fvu"] == pytest.approx(document["final"]["test_fvu"], rel=1e-4)
    assert measured["fvu"] < 0.9
    trained = saecli.load_sae(document["run"], home)
    assert (trained.d_in, trained.d_out, trained.W_skip is not None) == (8, 5, "--skip" in solver)
    x, y = (
        torch.from_numpy(
            np.concatenate(
                [
                    batch.copy()
                    for batch in saecli.open_store(name, home).split("test").sequential(100)
                ]
            )
        )
        for name in ("x", "y")
    )
    fvu = (trained(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert measured["fvu"] == pytest.approx(fvu.item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["pam-sgd", "sgd"])
def test_from_rows_to_themselves_it_is_the_sae(sae, home, solver):
    # By default the release is another for transcoders.
    release = ("--release", "0.5") if solver == "pam-sgd" else ()
    options = ("--solver", solver, *release, *TOPK, *QUICK, "--name")
    plain = sae("train", "--data", "x", *options, "plain").json["final"]
    twice = sae("train", "--data", "x", "--target", "again", *options, "twice").json["final"]
    assert twice["test_fvu"] == pytest.approx(plain["test_fvu"], rel=2e-3)
    trained_twice = weights(home, "twice")
    for name, tensor in weights(home, "plain").items():
        assert (tensor - trained_twice[name]).norm() <= 2e-2 * tensor.norm(), name


@pytest.mark.slow
def test_a_skip_takes_all_that_is_linear(sae, home):
    x = some_rows(1500)
    make_store(home, "linear", x @ linear_map(3) + 2)
    words = ("train", "--data", "x", "--target", "linear", *TOPK, *QUICK)
    assert sae(*words, "--skip").json["final"]["test_fvu"] < 1e-6
    assert sae(*words).json["final"]["test_fvu"] > 1e-3


@pytest.mark.slow
def test_sparsity_report_and_list_take_a_transcoder(sae, home, tmp_path):
    sae("train", *X_TO_Y, "--skip", *TOPK, *QUICK, "--name", "run")
    assert sae("sparsity", "run", "--json").json["runs"][0]["l0"] == pytest.approx(4, abs=0.1)
    assert sae("report", "run", "--out", str(tmp_path / "pages")).status == 0
    assert sae("list").status == 0 and "run" in sae("list").out


def test_arrays_are_fitted_and_measured_with_their_targets():
    x = some_rows(1200)
    y = targets_of(x)
    trained = saecli.fit(x, target=y, act="topk", k=4, d_sae=24, epochs=2, batch_size=64)
    fvu = saecli.evaluate(trained, x, target=y)["fvu"]
    y_hat = trained(torch.from_numpy(x)).numpy()
    expected = np.square(y_hat - y).sum() / np.square(y - y.mean(0)).sum()
    assert fvu == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ConfigError, match="target must have as many rows"):
        saecli.fit(x, target=y[:1000], act="topk", k=4)


@pytest.mark.slow
def test_stores_joined_in_python_train_what_the_command_trains(sae, home):
    sae("train", *X_TO_Y, *TOPK, *QUICK, "--name", "run")
    joined = saecli.join(saecli.open_store("x", home), target=saecli.open_store("y", home))
    trained = saecli.fit(joined, act="topk", k=4, d_sae=24, epochs=3, batch_size=64)
    assert same(trained, saecli.load_sae("run", home))
    fvu = saecli.evaluate("run", home=home)["fvu"]
    assert saecli.evaluate(trained, joined)["fvu"] == pytest.approx(fvu, rel=1e-6)


def test_smoothing_moves_targets_along_with_their_rows():
    x = torch.from_numpy(some_rows(300))
    M = torch.from_numpy(linear_map(5))
    smoothed = Smoothing(0.5, x, x @ M)(Batch(x, x @ M, len(x)), torch.Generator().manual_seed(0))
    assert (smoothed.x - x).norm() > 0.1 * x.norm()
    torch.testing.assert_close(smoothed.y, smoothed.x @ M, rtol=1e-4, atol=1e-4)


def test_a_revived_latent_is_aimed_along_the_regression():
    B = torch.from_numpy(linear_map(5))
    sae = SAE(torch.ones(8, 4), torch.arange(4.0), torch.ones(4, 5), torch.zeros(5), Relu())
    sae.requires_grad_(True)
    directions = torch.tensor([[0.6, 0.0, -0.8, 0.0, 0.0]])
    dead = torch.tensor([False, True, False, False])
    re_aim(sae, dead, ~dead, directions, B, biased=True)
    assert sae.b_enc[1].item() == pytest.approx(5 / 3)
    aimed, expected = sae.W_enc[:, 1].detach(), B @ directions[0]
    torch.testing.assert_close(aimed / aimed.norm(), expected / expected.norm())
    assert aimed.norm().item() == pytest.approx(8**0.5, rel=1e-6)
    torch.testing.assert_close(sae.W_dec[1].detach(), directions[0] * 5**0.5)


def test_the_regression_is_exact_if_linear_and_damped_for_few_rows():
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x *= 10.0 ** torch.arange(-3, 3)
    noise = torch.randn(400, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def regression(rows: int, y: torch.Tensor) -> torch.Tensor:
        some, targets = x[:rows], y[:rows]
        return regressed(rows, some.T @ some, some.T @ targets, targets.square().sum())

    for y in (x, x @ torch.ones(6, 2).double()):
        assert (x @ regression(400, y) - y).norm() < 1e-6 * y.norm()
    x /= 10.0 ** torch.arange(-3, 3)
    interpolating = torch.linalg.lstsq(x[:6], noise[:6]).solution
    assert (x @ regression(6, noise)).norm() < 0.5 * (x @ interpolating).norm()
