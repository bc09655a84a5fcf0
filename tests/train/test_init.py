"""`sae train --init`: training starts from an SAE, is repeated and resumed, and refuses what does not fit it."""

import json
import tomllib
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from homes import (
    PREFIXES,
    CommandLine,
    activation_of,
    assert_same_weights,
    make_run,
    make_store,
    nested_sae,
    random_sae,
    same,
    some_rows,
)

import saecli
from saecli.sae.activations import ACTIVATIONS, Activation, BatchTopK, Gated, JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save
from saecli.store.values import Spread
from saecli.train.fit import planned
from saecli.train.rows import fit_normalisation
from saecli.train.runs import read_metrics
from saecli.train.start import Start, fingerprint
from saecli.train.training import Record, start_training

STILL = "--solver sgd --steps 1 --lr 1e-12 --no-revive".split()


def published(activation: Activation | None = None) -> SAE:
    """An SAE for rows far from 0 and of size 30, whose decoder is a little off the exact one."""
    sae = random_sae(activation)
    rows = torch.from_numpy(30 * some_rows(2000))
    sae = sae.changed(b_enc=30 * sae.b_enc)
    if "threshold" in sae.activation_parameters and sae.threshold.ndim:
        sae = sae.changed(threshold=torch.linspace(0, 20, 20))
    sae = saecli.refit(sae, rows)
    return sae.changed(W_dec=0.9 * sae.W_dec, b_dec=sae.b_dec + 1)


def begin_with(sae: CommandLine, old: SAE, rows: np.ndarray | None = None) -> None:
    """A home with a store and an SAE, `old`."""
    make_store(sae.home, "rows", 30 * some_rows() if rows is None else rows)
    make_run(sae.home, "old", old)


def train_on(sae: CommandLine, *words: str, init: str = "old") -> dict:
    return sae("train", "--init", init, *words, "--json").json


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("normalize", ["model", "scale", "standardize", "none"])
def test_a_start_has_the_codes_of_raw_rows_up_to_one_factor(act: str, normalize: str):
    sae = published(activation_of(act)).copy_to(torch.float64)
    sae.scale = torch.linspace(1, 3, 16, dtype=torch.float64)
    rows = torch.from_numpy(30 * some_rows(500)).double() * torch.linspace(0.5, 2, 8)
    spread, reads = Spread.measured([rows.numpy()], 8), np.linspace(0.5, 4, 8)
    normalisation = fit_normalisation(normalize, spread, torch.float64, reads=reads)
    normalisation = replace(normalisation, kept=sae.scale)  # so that the metric of codes stays too
    sample = normalisation(rows)
    begun = Start("sae", fingerprint(sae), sae).initial(sae.activation, sample, normalisation)
    z, codes = sae.encode(rows), begun.encode(sample)
    factor = (codes.norm() / z.norm()).item()
    torch.testing.assert_close(codes, factor * z)
    torch.testing.assert_close(begun(sample) * normalisation.scale + normalisation.mean, sae(rows))
    assert begun.W_enc.norm().item() == pytest.approx(begun.W_dec.norm().item())


def test_decoder_step_at_the_start_only_lowers_the_error(sae: CommandLine):
    begin_with(sae, published(TopK(k=4)))
    words = ["--steps", "1", "--lr", "1e-12", "--smoothing", "0"]
    (old,) = sae("eval", "old", "--json").json["runs"]
    for more in ([], ["--solver", "pam"]):
        assert train_on(sae, *words, *more)["final"]["test_fvu"] < 0.99 * old["fvu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "words", "parameters"),
    [
        (Relu(), "--act topk --k 3", set()),
        (TopK(k=3), "--act jumprelu --target-l0 4", {"threshold"}),
        (JumpRelu(), "--act batchtopk --k 3", {"threshold"}),
        (BatchTopK(k=3), "--act relu", set()),
    ],
    ids=str,
)
def test_another_activation_begins_with_parameters_fitted_to_the_rows(sae, old, words, parameters):
    begin_with(sae, published(old))
    _, act, *l0 = words.split()
    still = train_on(sae, *words.split(), *STILL)
    done = train_on(sae, *words.split(), *["--solver", "sgd", "--steps", "200", "--lr", "1e-3"])
    trained = saecli.load_sae(done["run"], sae.home)
    assert trained.activation.name == act
    assert set(trained.activation_parameters) == parameters
    assert done["final"]["test_fvu"] < still["final"]["test_fvu"]
    if l0:
        assert done["final"]["test_l0"] == pytest.approx(float(l0[1]), rel=0.5)


def test_a_start_that_is_kept_has_the_l0_that_another_activation_is_asked_for(sae: CommandLine):
    begin_with(sae, published(TopK(k=3)))
    worse = "--solver sgd --lr 3 --steps 20 --no-revive".split()
    for words in ("--act batchtopk --k 2", "--act batchtopk --k 3", "--act jumprelu --target-l0 2"):
        document = train_on(sae, *words.split(), *worse)
        assert document["kept"] == "before"
        assert document["final"]["test_l0"] == pytest.approx(float(words.split()[-1]), rel=0.1)


@pytest.mark.parametrize("act", [Gated(), JumpRelu()], ids=lambda act: act.name)
@pytest.mark.parametrize("lr", [1e-3, 3.0])
def test_a_start_has_the_target_l0_that_is_asked_for(act: Activation, lr: float):
    rows, old = some_rows(600), random_sae(act)
    x = torch.from_numpy(rows)
    assert (old.encode(x) != 0).sum(1).float().mean() > 6
    options = {"init": old, "solver": "sgd", "lr": lr, "lr_warm_up": 0.0, "epochs": 2}
    given = {"act": act.name, "sparsity": "target-l0", "target_l0": 2.0}
    warned = pytest.warns(UserWarning, match="weights are kept as they were")
    with warned if lr > 1 else nullcontext():
        found = saecli.fit(rows, **options, **given)
    assert (found.encode(x) != 0).sum(1).float().mean().item() == pytest.approx(2, rel=0.02)


@pytest.mark.slow
def test_a_target_l0_is_held_from_the_first_step(sae: CommandLine):
    begin_with(sae, published(TopK(k=3)))
    words, init = "--solver sgd --act jumprelu --steps 300 --lr 3e-3".split(), "old"
    for run, target in (("first", "3"), ("second", "2")):
        done = train_on(sae, *words, "--target-l0", target, "--name", run, init=init)
        lines = read_metrics(sae.home / "runs" / run)
        # From random directions L0 would begin at 4 times the target.
        assert max(line["batch_l0"] for line in lines if "batch_l0" in line) < 4.5
        assert done["final"]["test_l0"] == pytest.approx(float(target), rel=0.2)
        init = run


def test_k_of_its_own_yields_to_one_that_is_given_and_prefixes_are_kept(sae: CommandLine):
    begin_with(sae, nested_sae("topk"))
    cases = ("--act batchtopk --k 2", 2, PREFIXES), ("--prefixes 10", 4, (10, 20))
    for words, k, prefixes in cases:
        trained = saecli.load_sae(train_on(sae, *words.split(), *STILL)["run"], sae.home)
        assert (trained.activation.k, trained.prefixes) == (k, prefixes)


def test_another_tools_folder_is_recorded_by_its_absolute_path(sae, tmp_path, monkeypatch):
    make_store(sae.home, "rows", 30 * some_rows())
    save(SavedSAE(published(JumpRelu())), "saelens", tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    first = train_on(sae, "--data", "rows", *STILL, "--sparsity", "l1", init="theirs")["run"]
    config = sae.home / "runs" / first / "config.toml"
    assert tomllib.loads(config.read_text())["init"] == str((tmp_path / "theirs").resolve())
    monkeypatch.chdir("/")
    repeated = sae("train", "--config", config, "--json").json["run"]
    assert_same_weights(sae.home, first, repeated)
    assert (sae.home / "runs" / repeated / "config.toml").read_text() == config.read_text()


@pytest.mark.parametrize("solver", [pytest.param("sgd", marks=pytest.mark.slow), "pam-sgd"])
def test_training_on_never_ends_worse(sae: CommandLine, solver: str):
    make_store(sae.home, "rows", some_rows(600))
    make_store(sae.home, "others", 3 * some_rows(600, seed=1) @ np.eye(8)[::-1].astype(np.float32))
    rows = saecli.open_store("rows", sae.home)
    first = saecli.fit(rows, solver=solver, act="topk", k=3, d_sae=20, steps=100)
    make_run(sae.home, "old", first)
    words = ("--solver", solver, "--epochs", "2")
    gained = train_on(sae, *words, "--data", "others")
    far = ["--data", "rows", "--lr", "3", "--lr-warm-up", "0", "--name", "spoilt"]
    spoilt = train_on(sae, *words, *far)
    for done, data, kept in ((gained, "others", "after"), (spoilt, "rows", "before")):
        (evaluated,) = sae("eval", done["run"], "--json").json["runs"]
        kept_out = saecli.open_store(data, sae.home).split("train", fraction=0.9, rest=True)
        compared = saecli.evaluate(done["run"], kept_out, home=sae.home)
        assert done["kept"] == kept
        for name in ("fvu", "l0"):
            assert compared[name] == pytest.approx(done[kept][name], rel=1e-5)
            assert done["final"][f"test_{name}"] == pytest.approx(evaluated[name], rel=1e-5)
        assert done[kept]["rows"] == kept_out.rows
        assert done["rows_train"] + kept_out.rows + done["rows_test"] == 600
        assert (done["after"]["loss"] < done["before"]["loss"]) == (kept == "after")
    (old,) = sae("eval", "old", "--data", "rows", "--json").json["runs"]
    assert spoilt["final"]["test_fvu"] == pytest.approx(old["fvu"], rel=1e-5)
    options = {"init": first, "solver": solver, "epochs": 2, "lr": 3.0, "lr_warm_up": 0.0}
    x, said = some_rows(100), "did not lower the loss, .* the SAE's weights are kept as they were"
    with pytest.warns(UserWarning, match=said):
        from_store, in_memory = (saecli.fit(given, **options) for given in (rows, x))
    assert same(from_store, saecli.load_sae("spoilt", sae.home))
    torch.testing.assert_close(in_memory(torch.from_numpy(x)), first(torch.from_numpy(x)))


def test_training_on_leaves_a_tenth_of_the_documents_out_and_notes_it(sae: CommandLine):
    begin_with(sae, random_sae(TopK(k=3)), some_rows(600))
    store = saecli.open_store("rows", sae.home)
    for words, fraction in (("", 0.9), ("--fraction 0.4", 0.4)):
        done = train_on(sae, "--steps", "2", *words.split())
        assert done["rows_train"] == store.split("train", fraction=fraction).rows
        assert saecli.load_sae(done["run"], sae.home).metadata["fraction"] == fraction
    make_store(sae.home, "few", some_rows(4))
    few = train_on(sae, "--data", "few", "--steps", "2")
    assert few["before"]["rows"] == few["rows_test"] == 1


def test_defaults_of_training_on_keep_what_the_sae_has(sae: CommandLine):
    begin_with(sae, random_sae(JumpRelu()), some_rows(600))

    def settings(*words: str, init: str = "old") -> dict:
        run = train_on(sae, "--epochs", "1", *words, init=init)["run"]
        document = json.loads((sae.home / "runs" / run / "run.json").read_text())
        return document["training"] | document["activation"]

    (old,) = sae("eval", "old", "--json").json["runs"]
    kept = settings()
    assert kept["target_l0"] == pytest.approx(old["l0"], rel=0.1)
    assert (kept["smoothing"], kept["sparsity_warm_up"]) == (0, 0)
    given = settings("--smoothing", "0.1", "--target-l0", "2", "--name", "given")
    assert (given["smoothing"], given["target_l0"]) == (0.1, 2)
    kept = settings("--sparsity-weight", "3", init="given")
    assert (kept["target_l0"], kept["sparsity_weight"]) == (2, 3)


def test_only_latents_that_fire_on_no_row_are_revived_before_training():
    sae, rows = random_sae(TopK(k=4)), some_rows(600)
    sae = sae.changed(b_enc=sae.b_enc.index_fill(0, torch.tensor([2, 5]), -100.0))
    dead = int((sae.encode(torch.from_numpy(rows)) == 0).all(0).sum())
    start = Start("sae", fingerprint(sae), sae)
    training = start_training(planned(rows, "sgd", "topk", {"epochs": 3}, start=start), Record())
    count = training.solver.revived
    training.train()
    assert count == training.solver.revived == dead > 1


@pytest.mark.slow
def test_an_sae_or_its_name_will_do_and_several_seeds_share_it(sae, monkeypatch, capsys):
    mine = random_sae(TopK(k=3))
    begin_with(sae, mine, some_rows(600))
    train_on(sae, "--epochs", "1", "--seed", "0", "--seed", "1", "--name", "run")
    monkeypatch.setenv("SAE_HOME", str(sae.home))
    capsys.readouterr()
    for init in (mine, "old", sae.home / "runs" / "old"):
        fitted = saecli.fit(saecli.open_store("rows"), init=init, epochs=1)
        assert fingerprint(fitted) == fingerprint(saecli.load_sae("run-seed0"))
    assert tuple(capsys.readouterr()) == ("", "")
    assert saecli.fit(some_rows(100), init=mine, act="relu", epochs=1).activation == Relu()
    assert saecli.fit(some_rows(100), init=mine, k=5, epochs=1).activation == TopK(k=5)
    with pytest.raises(saecli.SaeError, match="d-sae must be 20"):
        saecli.fit(some_rows(100), init=mine, d_sae=9)


@pytest.mark.slow
def test_a_crosscoder_trains_on_only_in_the_order_of_its_hook_points(sae: CommandLine):
    sae("extract --model tiny-gemma2 --layer 0 --layer 1 --rows 2000")
    stores = sorted(path.name for path in (sae.home / "activations").iterdir())
    data = [word for name in stores for word in ("--data", name)]
    turned = [word for name in stores[::-1] for word in ("--data", name)]
    assert sae("train --act topk --k 3 --d-sae 16 --steps 2 --name cross", *data).status == 0
    said = "name them in this order: layer 0 resid_post, layer 1 resid_post"
    sae("train --init cross --steps 2", *turned).fails(2, said)
    train_on(sae, *data, "--steps", "2", init="cross")
