"""SAEs of several stores or arrays: transcoders, whose targets are another's rows, with a skip or without; crosscoders,
of several places side by side."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import fvu, k_of, linear_map, make_store, normal, some_rows, targets_of, weights
from reports import index_of, pages_of
from storing import collect

import saecli
from saecli.base.errors import ConfigError
from saecli.measure.hook_points import HookPointMeasures, HookPointSums, latent_class
from saecli.sae.activations import ACTIVATIONS, Relu, TopK
from saecli.sae.dictionary import SAE, Batch
from saecli.store.values import Spread
from saecli.train.moments import penalty_decay
from saecli.train.rows import ArrayRows, Smoothing, TrainingRows, fit_normalisation
from saecli.train.runs import read_metrics
from saecli.train.upkeep import re_aim

QUICK = ("--d-sae", "24", "--epochs", "3", "--batch-size", "64", "--json")
TOPK = ("--act", "topk", "--k", "4")
X_TO_Y = ("--data", "x", "--target", "y")


@pytest.fixture
def home(sae) -> Path:
    """A home with rows, targets of another width, and the rows once more."""
    x = make_store(sae.home, "x", some_rows(1500))
    make_store(sae.home, "y", targets_of(x))
    make_store(sae.home, "again", x)
    return sae.home


KEYS = "run path solver act data d_in d_sae rows_train rows_counted rows_test epochs steps".split()
KEYS += "seconds rows_per_second warnings notes final".split()
FILES = {"run.json", "config.toml", "metrics.jsonl", "loss.png", ".lock"}
FILES |= {"checkpoint.safetensors", "sae.safetensors"}
TO_ITSELF = ["sgd", "sgd --tied", "pam", "pam-sgd"]
ACROSS = ["sgd", "sgd --skip", "sgd --tied", "pam --skip", "pam-sgd", "pam-sgd --skip"]
ACROSS += [
    f"pam-sgd --skip --{option}"
    for option in ("solve iterative", "prefixes 6,12", "release 0", "fraction 0.01")
]
TASKS = [*(("x", solver) for solver in TO_ITSELF), *(("x -> y", solver) for solver in ACROSS)]
WITH_EVERY_ACT = [("x", "sgd"), ("x -> y", "pam-sgd --skip")]
WITH_EVERY_TASK = ["topk", "jumprelu"]


CASES = [
    pytest.param(*task, act, marks=[] if in_ci else pytest.mark.long)
    for task, act in product(TASKS, ACTIVATIONS)
    for in_ci in [task in WITH_EVERY_ACT or act in WITH_EVERY_TASK]
]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "solver", "act"), CASES)
def test_every_solver_and_activation_leaves_a_run_that_eval_confirms(sae, home, data, solver, act):
    k = ("--k", "4") if k_of(act) else ()
    stores = X_TO_Y if data == "x -> y" else ("--data", "x")
    document = sae("train", *stores, "--solver", *solver.split(), "--act", act, *k, *QUICK).json
    assert list(document) == KEYS and document["data"] == data
    final, folder = document["final"], Path(document["path"])
    assert {"train_fvu", "test_fvu", "test_mse", "test_l0", "dead_fraction"} <= final.keys()
    assert ("alpha" in final) == (not solver.startswith("sgd"))
    assert {path.name for path in folder.iterdir()} == FILES
    assert [line["epoch"] for line in read_metrics(folder) if "epoch" in line] == [1, 2, 3]
    (measured,) = sae("eval", document["run"], "--json").json["runs"]
    assert measured["fvu"] == pytest.approx(final["test_fvu"], rel=1e-4)
    assert measured["rows"] == document["rows_test"]
    trained = saecli.load_sae(document["run"], home)
    x, y = (
        torch.from_numpy(collect(saecli.open_store(name, home).split("test").sequential(100)))
        for name in ("x", data[-1])
    )
    assert measured["fvu"] == pytest.approx(fvu(trained(x), y), rel=1e-4)
    if data == "x -> y":
        assert measured["fvu"] < 0.9
        assert (trained.d_in, trained.d_out) == (8, 5)
        assert (trained.W_skip is not None) == ("--skip" in solver)


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
    found = saecli.evaluate(trained, x, target=y)["fvu"]
    expected = fvu(trained(torch.from_numpy(x)), torch.from_numpy(y))
    assert found == pytest.approx(expected, rel=1e-4)
    of_one_width = saecli.fit(x, target=x + 1, act="topk", k=4, d_sae=24, epochs=1)
    with pytest.raises(ConfigError, match="is a transcoder"):
        saecli.evaluate(of_one_width, x)
    with pytest.raises(ConfigError, match="target must have 1200 rows"):
        saecli.fit(x, target=y[:1000], act="topk", k=4)


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


def test_the_regression_is_near_a_linear_map_and_damped_for_few_rows():
    x, noise = np.random.default_rng(0).normal(size=(2, 400, 6))

    def predicted(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        stored = ArrayRows(x, y)
        normalisation = fit_normalisation("scale", stored.spread(), torch.float64, d_target=6)
        rows = TrainingRows(stored, normalisation, 64, 0)
        return rows.sample.x @ rows.regression, rows.sample.y

    found, y = predicted(x, x @ noise[:6])
    assert (found - y).norm() < 0.05 * y.norm()
    found, y = predicted(x[:7], noise[:7])  # which a plane fits exactly
    assert found.norm() < 0.8 * y.norm()


SHARED, OWN, D = 16, 8, 24  # features of both places, of one alone; dimensions
COMMON = ("--d-sae", "40", "--batch-size", "128", "--json", "--epochs")
SHORT, LONG = (*COMMON, "2"), (*COMMON, "10")
A_AND_B = ("--data", "a", "--data", "b", "--name", "run")


def two_models(rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two places that share some features, in directions of their own, and have some alone; the second on
    another scale."""
    generator = np.random.default_rng(0)
    count = SHARED + 2 * OWN
    codes = (generator.random((rows, count)) < 0.1) * (1 + generator.random((rows, count)))
    directions = generator.normal(size=(2, count, D)) / np.sqrt(D)
    directions[0, SHARED + OWN :] = directions[1, SHARED : SHARED + OWN] = 0
    noise = 0.01 * generator.normal(size=(2, rows, D))
    first, second = (codes @ directions[place] + noise[place] for place in range(2))
    return first.astype(np.float32), (50 * second + 3).astype(np.float32)


@pytest.fixture
def two_places(sae) -> Path:
    for name, rows in zip(("a", "b"), two_models(), strict=True):
        make_store(sae.home, name, rows)
    return sae.home


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["pam-sgd", "sgd"])
@pytest.mark.parametrize("options", ["--act batchtopk --k 4", "--act relu"])
def test_features_of_one_place_and_of_both_are_told_apart(sae, two_places, solver, options):
    done = sae("train", *A_AND_B, "--solver", solver, *options.split(), *LONG)
    assert (done.json["data"], done.json["d_in"]) == ("a + b", 2 * D)
    (found,) = sae("sparsity", "run", "--json").json["runs"]
    assert [place["name"] for place in found["places"]] == ["a", "b"]
    for place in found["places"]:
        assert place["width"] == D and place["fvu"] < 0.3 and 5 <= place["exclusive"] <= 14
    assert 10 <= found["shared"] <= 26
    share, scaling = np.array(found["share"]), np.array(found["scaling"], float)
    alone = (share.max(1) > 0.9) & np.isfinite(scaling).all(1)
    elsewhere = scaling[alone, 1 - share[alone].argmax(1)]
    assert np.median(np.abs(elsewhere)) < 0.1
    own = scaling[alone, share[alone].argmax(1)]
    assert np.median(own) == pytest.approx(1, abs=0.15)  # l1 shrinks codes
    out = sae("sparsity", "run").out
    assert "exclusive to one" in " ".join(out.split()) and "latent decoupling" in out
    exclusive = [f"only {name}" for name in "ab"]
    assert sum(found["class"].count(name) for name in exclusive) > 0.8 * alone.sum()
    assert f"run: only a: {found['class'].index('only a')}, " in out
    (measured,) = sae("eval", "run", "--json").json["runs"]
    assert measured["fvu"] == pytest.approx(done.json["final"]["test_fvu"], rel=1e-4)
    assert saecli.load_sae("run", two_places).widths == (D, D)


@pytest.mark.slow
def test_a_report_has_each_latents_places(sae, two_places, tmp_path):
    sae("train", *A_AND_B, "--act", "topk", "--k", "4", *SHORT)
    assert sae("report", "run", "--out", str(tmp_path / "pages")).status == 0
    (found,) = sae("sparsity", "run", "--split", "all", "--json").json["runs"]
    pages = {page["latent"]: page for page in pages_of(tmp_path / "pages").values()}
    assert len(pages) == 40
    columns = index_of(tmp_path / "pages")["latents"]
    for latent, page in pages.items():
        assert [place[0] for place in page["places"]] == ["a", "b"]
        assert columns["classes"][columns["class"][latent]] == found["class"][latent]
        assert [place[1] for place in page["places"]] == pytest.approx(found["share"][latent])
        scaling = found["scaling"][latent][0]
        assert page["places"][0][2] == (scaling if scaling is None else pytest.approx(scaling))


def crosscoder(widths: tuple[int, ...] = (5, 3)) -> SAE:
    d, F = sum(widths), 12
    W_enc, W_dec = normal(d, F), normal(F, d, seed=1)
    b_enc, b_dec = torch.zeros(F).double(), torch.zeros(d).double()
    return SAE(W_enc, b_enc, W_dec, b_dec, Relu(), widths=widths)


def test_l1_weighs_the_sum_of_a_latents_norms_over_places():
    sae, x = crosscoder(), normal(30, 8, seed=2)
    z = sae.encode(x)
    norms = sae.W_dec[:, :5].norm(dim=1) + sae.W_dec[:, 5:].norm(dim=1)
    expected = (sae(x) - x).square().sum(1).mean() + 0.3 * (z * norms).sum(1).mean()
    torch.testing.assert_close(sae.loss(Batch.of(x), "l1", 0.3).value, expected)
    plain = SAE(**sae.tensors(), activation=sae.activation)
    assert plain.loss(Batch.of(x), "l1", 0.3).value < expected


def test_the_decoder_step_has_a_quadratic_with_the_value_and_slope_of_l1():
    sae, weights = crosscoder(), torch.linspace(0.1, 2, 12).double()

    def penalty(size: float) -> torch.Tensor:
        return weights * sae.weighed(size * sae.W_dec)[:, 0]

    decay = penalty_decay(sae, weights, 1.0)
    square = decay * sae.W_dec.square().sum(1)
    torch.testing.assert_close(2 * square, penalty(1.0))  # slopes in the size
    for size in (0.5, 2.0):
        assert (penalty(size) - penalty(1.0) < (size**2 - 1) * square).all()


def test_latent_scaling_is_the_least_squares_multiple_at_each_place():
    sae = crosscoder((4, 4))
    x = normal(200, 8, seed=2) * 2 + 1
    sums = HookPointSums(sae)
    for batch in x.split(37):
        sums.update(batch)
    fvu, share, beta, carried = sums.result(Spread.of(x.numpy().copy()))
    z, error = sae.encode(x), x - sae(x)
    spread = [x[:, at].var(0, correction=0).mean().sqrt() for at in sae.hook_columns]
    for place, scale in enumerate(spread):
        at = sae.hook_columns[place]
        variance = (x[:, at] - x[:, at].mean(0)).square().sum()
        assert fvu[place].item() == pytest.approx((error[:, at].square().sum() / variance).item())
        for latent in range(12):
            sizes = [sae.W_dec[latent, sae.hook_columns[p]].norm() / spread[p] for p in (0, 1)]
            assert share[latent, place].item() == pytest.approx((sizes[place] / sum(sizes)).item())
            best = int(torch.stack(sizes).argmax())
            part = z[:, latent, None] * sae.W_dec[latent, sae.hook_columns[best]] / spread[best]
            aim = (error[:, at] + z[:, latent, None] * sae.W_dec[latent, at]) / scale
            others = (sae(x) - sae.b_dec)[:, at] / scale
            for scaling, wanted in ((beta, aim), (carried, others)):
                expected = (part * wanted).sum() / part.square().sum()
                torch.testing.assert_close(scaling[latent, place], expected)


def test_classes_are_told_by_norms_and_then_by_both_scalings():
    for shares, nu_error, nu_reconstruction, expected in (
        ([0.95, 0.05], 0.1, 0.4, "only a"),
        ([0.95, 0.05], 0.3, 0.9, "looks only a: complete shrinkage"),
        ([0.95, 0.05], 0.1, 0.6, "looks only a: latent decoupling"),
        ([0.05, 0.95], 0.1, 0.4, "only b"),
        ([0.95, 0.05], math.nan, math.nan, "only a by decoder norm"),
        ([0.6, 0.4], 0.9, 0.9, "shared"),
        ([0.8, 0.2], 0.9, 0.9, "in between"),
        ([0.4, 0.6], 0.1, 0.4, "only b by latent scaling"),
    ):
        assert latent_class(["a", "b"], shares, nu_error, nu_reconstruction) == expected
    beta = torch.tensor([[0.5, 2.0, 0.1], [torch.nan] * 3])
    share = torch.tensor([[0.2, 0.5, 0.3]] * 2)
    nu = HookPointMeasures(torch.zeros(3), share, beta, beta).nu(beta)
    assert nu[0] == 0.25 and nu[1].isnan()


def test_a_copy_keeps_the_places():
    sae = crosscoder()
    copies = [sae.sae(), sae.changed(activation=TopK(k=3)), sae.copy_to("cpu")]
    copies += [sae.without_training_parameters()]
    assert {copy.widths for copy in copies} == {(5, 3)}
