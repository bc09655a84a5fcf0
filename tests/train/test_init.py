"""`sae train --init`: training starts from an SAE, is repeated and resumed, and refuses what does not fit it."""

import json
import tomllib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import (
    PREFIXES,
    CommandLine,
    assert_same_weights,
    make_run,
    make_store,
    nested_sae,
    random_sae,
    some_rows,
)

import saecli
from saecli.sae.activations import (
    ACTIVATIONS,
    AbsTopK,
    Activation,
    BatchTopK,
    JumpRelu,
    Relu,
    TopK,
)
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save
from saecli.store.values import Spread
from saecli.train.files import read_metrics
from saecli.train.fit import planned
from saecli.train.loop import Loop
from saecli.train.options import NORMALISATIONS
from saecli.train.rows import fit_normalisation
from saecli.train.start import Start, fingerprint
from saecli.train.training import Record, start_training

STILL = ("--solver", "sgd", "--steps", "1", "--lr", "1e-12", "--no-revive", "--json")


def published(activation: Activation | None = None) -> SAE:
    """An SAE for rows far from 0 and of size 30, whose decoder is a little off the exact one."""
    sae = random_sae(activation)
    rows = torch.from_numpy(30 * some_rows(2000))
    sae = sae.changed(
        b_enc=30 * sae.b_enc,
        **{
            name: torch.linspace(0, 20, 20)
            for name in sae.activation_parameters
            if name == "threshold" and sae.threshold.ndim
        },
    )
    sae = saecli.refit(sae, rows)
    return sae.changed(W_dec=0.9 * sae.W_dec, b_dec=sae.b_dec + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "act, normalize",
    [
        case
        for case in product(ACTIVATIONS, NORMALISATIONS)
        if case != ("matching-pursuit", "standardize")
    ],
)
def test_a_start_has_the_codes_of_raw_rows_up_to_one_factor(act: str, normalize: str):
    kind = ACTIVATIONS[act]
    sae = published(kind(k=4) if "k" in kind.__dataclass_fields__ else kind()).copy_to(
        torch.float64
    )
    rows = torch.from_numpy(30 * some_rows(500)).double() * torch.linspace(0.5, 2, 8)
    normalisation = fit_normalisation(normalize, Spread.measured([rows.numpy()], 8), torch.float64)
    sample = normalisation(rows)
    begun = Start("sae", fingerprint(sae), sae).initial(sae.activation, sample, normalisation)
    z, codes = sae.encode(rows), begun.encode(sample)
    factor = (codes.norm() / z.norm()).item()
    torch.testing.assert_close(codes, factor * z)
    torch.testing.assert_close(begun(sample) * normalisation.scale + normalisation.mean, sae(rows))
    assert begun.W_enc.norm().item() == pytest.approx(begun.W_dec.norm().item())


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation",
    [TopK(k=4), AbsTopK(k=4), Relu(), JumpRelu()],
    ids=lambda value: value.name,
)
def test_a_start_that_does_not_learn_has_the_error_of_its_sae(
    sae: CommandLine, activation: Activation
):
    make_store(sae.home, "rows", 30 * some_rows())
    make_run(sae.home, "old", published(activation))
    done = sae("train", "--init", "old", *STILL)
    assert done.status == 0, done.err
    (old,) = sae("eval", "old", "--json").json["runs"]
    assert (done.json["act"], done.json["d_sae"]) == (activation.name, 20)
    assert done.json["final"]["test_fvu"] == pytest.approx(old["fvu"], rel=1e-4)
    assert done.json["final"]["test_l0"] == pytest.approx(old["l0"], rel=1e-3)
    assert ", from old" in done.err
    trained = saecli.load_sae(done.json["run"], sae.home)
    assert [getattr(trained.activation, name) for name in activation.of_codes] == [
        getattr(activation, name) for name in activation.of_codes
    ]


def test_decoder_step_at_the_start_only_lowers_the_error(sae: CommandLine):
    make_store(sae.home, "rows", 30 * some_rows())
    make_run(sae.home, "old", published(TopK(k=4)))
    words = ("--steps", "1", "--lr", "1e-12", "--smoothing", "0", "--json")
    (old,) = sae("eval", "old", "--json").json["runs"]
    for more in ((), ("--solver", "pam")):
        assert (
            sae("train", "--init", "old", *words, *more).json["final"]["test_fvu"]
            < 0.99 * old["fvu"]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "words", "parameters"),
    [
        (Relu(), ("--act", "topk", "--k", "3"), {}),
        (TopK(k=3), ("--act", "jumprelu", "--target-l0", "4"), {"threshold"}),
        (JumpRelu(), ("--act", "batchtopk", "--k", "3"), {"threshold"}),
        (BatchTopK(k=3), ("--act", "relu"), {}),
    ],
    ids=str,
)
def test_another_activation_begins_with_parameters_fitted_to_the_rows(
    sae: CommandLine, old: Activation, words: tuple, parameters: set
):
    make_store(sae.home, "rows", 30 * some_rows())
    make_run(sae.home, "old", published(old))
    still = sae("train", "--init", "old", *words, *STILL)
    done = sae(
        "train",
        "--init",
        "old",
        *words,
        "--solver",
        "sgd",
        "--steps",
        "200",
        "--lr",
        "1e-3",
        "--json",
    )
    assert done.status == 0, done.err
    trained = saecli.load_sae(done.json["run"], sae.home)
    assert (trained.activation.name, set(trained.activation_parameters)) == (
        words[1],
        set(parameters),
    )
    assert done.json["final"]["test_fvu"] < still.json["final"]["test_fvu"]
    if "--k" in words or "--target-l0" in words:
        assert done.json["final"]["test_l0"] == pytest.approx(float(words[3]), rel=0.5)


@pytest.mark.slow
def test_a_target_l0_is_held_from_the_first_step(sae: CommandLine):
    make_store(sae.home, "rows", 30 * some_rows())
    make_run(sae.home, "old", published(TopK(k=3)))
    words = (
        "train",
        "--init",
        "old",
        "--solver",
        "sgd",
        "--act",
        "jumprelu",
        "--steps",
        "300",
        "--lr",
        "3e-3",
    )
    for run, target in (("jumping", "3"), ("again", "2")):
        done = sae(*words, "--target-l0", target, "--name", run, "--json")
        assert done.status == 0, done.err
        lines = read_metrics(sae.home / "runs" / run)
        # From random directions L0 would begin at 4 times the target.
        assert max(line["batch_l0"] for line in lines if "batch_l0" in line) < 4.5
        assert done.json["final"]["test_l0"] == pytest.approx(float(target), rel=0.2)
        words = (*words[:2], run, *words[3:])


def test_k_of_its_own_yields_to_one_that_is_given_and_prefixes_are_kept(sae: CommandLine):
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "old", nested_sae("topk"))
    for words, k, prefixes in (
        ((), 4, PREFIXES),
        (("--k", "6"), 6, PREFIXES),
        (("--act", "topk"), 4, PREFIXES),
        (("--act", "batchtopk", "--k", "2"), 2, PREFIXES),
        (("--prefixes", "10"), 4, (10, 20)),
        (("--prefixes", "20"), 4, (20,)),
    ):
        run = sae("train", "--init", "old", *words, *STILL).json["run"]
        trained = saecli.load_sae(run, sae.home)
        assert (trained.activation.k, trained.prefixes) == (k, prefixes)


@pytest.mark.parametrize("form", ["saelens", "gemma-scope"])
def test_another_tools_folder_is_recorded_by_its_absolute_path(
    sae: CommandLine, tmp_path: Path, monkeypatch, form: str
):
    make_store(sae.home, "rows", 30 * some_rows())
    save(SavedSAE(published(JumpRelu())), form, tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    first = sae("train", "--data", "rows", "--init", "theirs", *STILL, "--sparsity", "l1").json[
        "run"
    ]
    config = sae.home / "runs" / first / "config.toml"
    assert tomllib.loads(config.read_text())["init"] == str((tmp_path / "theirs").resolve())
    monkeypatch.chdir("/")
    again = sae("train", "--config", config, "--json").json["run"]
    assert_same_weights(sae.home, first, again)
    assert (sae.home / "runs" / again / "config.toml").read_text() == config.read_text()


@pytest.mark.parametrize("solver", [pytest.param("sgd", marks=pytest.mark.slow), "pam-sgd"])
def test_training_on_never_ends_worse(sae: CommandLine, tmp_path: Path, solver: str):
    make_store(sae.home, "rows", some_rows(600))
    make_store(sae.home, "others", 3 * some_rows(600, seed=1) @ np.eye(8)[::-1].astype(np.float32))
    first = saecli.fit(
        saecli.open_store("rows", sae.home), solver=solver, act="topk", k=3, d_sae=20, steps=100
    )
    make_run(sae.home, "first", first)
    words = ("train", "--init", "first", "--solver", solver, "--epochs", "2", "--json")
    gained = sae(*words, "--data", "others", "--name", "gained").json
    spoilt = sae(*words, "--data", "rows", "--lr", "3", "--lr-warm-up", "0", "--name", "spoilt")
    for done, data, kept in ((gained, "others", "after"), (spoilt.json, "rows", "before")):
        (found,) = sae("eval", done["run"], "--json").json["runs"]
        kept_out = saecli.open_store(data, sae.home).split("train", fraction=0.9, rest=True)
        compared = saecli.evaluate(done["run"], kept_out, home=sae.home)
        assert done["kept"] == kept
        for name in ("fvu", "l0"):
            assert compared[name] == pytest.approx(done[kept][name], rel=1e-5)
            assert done["final"][f"test_{name}"] == pytest.approx(found[name], rel=1e-5)
        assert done[kept]["rows"] == kept_out.rows
        assert done["rows_train"] + kept_out.rows + done["rows_test"] == 600
        assert (done["after"]["loss"] < done["before"]["loss"]) == (kept == "after")
    (old,) = sae("eval", "first", "--data", "rows", "--json").json["runs"]
    assert spoilt.json["final"]["test_fvu"] == pytest.approx(old["fvu"], rel=1e-5)
    assert "the SAE is kept as it was" in spoilt.err
    document = json.loads((sae.home / "runs" / "spoilt" / "run.json").read_text())
    assert document["result"]["kept"] == "before"
    same = saecli.fit(
        saecli.open_store("rows", sae.home),
        init=first,
        solver=solver,
        epochs=2,
        lr=3.0,
        lr_warm_up=0.0,
    )
    assert fingerprint(same) == fingerprint(saecli.load_sae("spoilt", sae.home))
    rows = some_rows(100)
    in_memory = saecli.fit(rows, init=first, solver=solver, epochs=1, lr=3.0, lr_warm_up=0.0)
    torch.testing.assert_close(in_memory(torch.from_numpy(rows)), first(torch.from_numpy(rows)))


def test_training_on_leaves_a_tenth_of_the_documents_out_and_notes_it(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(600))
    make_run(sae.home, "first", random_sae(TopK(k=3)))
    store = saecli.open_store("rows", sae.home)
    for given, fraction in (("1", 0.9), ("0.95", 0.9), ("0.4", 0.4)):
        words = ("--fraction", given, "--name", f"at-{given}", "--json")
        done = sae("train", "--init", "first", "--steps", "2", *words)
        assert done.status == 0, done.err
        assert done.json["rows_train"] == store.split("train", fraction=fraction).rows
        assert saecli.load_sae(f"at-{given}", sae.home).metadata["fraction"] == fraction
    make_store(sae.home, "few", some_rows(4))
    few = sae("train", "--data", "few", "--init", "first", "--steps", "2", "--json")
    assert few.status == 0, few.err
    assert few.json["before"]["rows"] == few.json["rows_test"] == 1


def test_defaults_of_training_on_keep_what_the_sae_has(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(600))
    make_run(sae.home, "first", random_sae(JumpRelu()))
    done = sae(
        "train",
        "--init",
        "first",
        "--epochs",
        "1",
        "--seed",
        "0",
        "--seed",
        "1",
        "--name",
        "run",
        "--json",
    )
    assert [one["kept"] for one in done.json["runs"]] == ["after", "after"]
    document = json.loads((sae.home / "runs" / "run-seed0" / "run.json").read_text())
    (old,) = sae("eval", "first", "--json").json["runs"]
    assert document["activation"]["target_l0"] == pytest.approx(old["l0"], rel=0.1)
    training = document["training"]
    assert (training["smoothing"], training["sparsity_warm_up"]) == (0, 0)
    given = ("--smoothing", "0.1", "--target-l0", "2")
    assert sae("train", "--init", "first", "--epochs", "1", *given, "--name", "given").status == 0
    document = json.loads((sae.home / "runs" / "given" / "run.json").read_text())
    again = sae(
        "train", "--init", "given", "--epochs", "1", "--sparsity-weight", "3", "--name", "again"
    )
    known = json.loads((sae.home / "runs" / "again" / "run.json").read_text())
    assert again.status == 0
    assert (known["activation"]["target_l0"], known["training"]["sparsity_weight"]) == (2, 3)
    assert document["training"]["smoothing"] == 0.1
    assert document["activation"]["target_l0"] == 2


def test_only_latents_that_fire_on_no_row_are_revived_before_training():
    sae, rows = random_sae(TopK(k=4)), some_rows(600)
    sae = sae.changed(b_enc=sae.b_enc.index_fill(0, torch.tensor([2, 5]), -100.0))
    start, dead = (
        Start("sae", fingerprint(sae), sae),
        int((sae.encode(torch.from_numpy(rows)) == 0).all(0).sum()),
    )
    training = start_training(planned(rows, "sgd", "topk", {"epochs": 3}, start=start), Record())
    count = training.solver.revived
    Loop([training]).train()
    assert count == training.solver.revived == dead > 1


@pytest.mark.slow
def test_from_python_an_sae_or_its_name_will_do_and_several_seeds_share_it(
    sae: CommandLine, monkeypatch, capsys
):
    make_store(sae.home, "rows", some_rows(600))
    mine = random_sae(TopK(k=3))
    make_run(sae.home, "old", mine)
    assert (
        sae(
            "train", "--init", "old", "--epochs", "1", "--seed", "0", "--seed", "1", "--name", "run"
        ).status
        == 0
    )
    monkeypatch.setenv("SAE_HOME", str(sae.home))
    capsys.readouterr()
    for init in (mine, "old", sae.home / "runs" / "old"):
        fitted = saecli.fit(saecli.open_store("rows"), init=init, epochs=1)
        assert fingerprint(fitted) == fingerprint(saecli.load_sae("run-seed0"))
    assert tuple(capsys.readouterr()) == ("", "")
    assert saecli.fit(some_rows(100), init=mine, act="relu", epochs=1).activation == Relu()
    assert saecli.fit(some_rows(100), init=mine, k=5, epochs=1).activation == TopK(k=5)
    assert saecli.fit(some_rows(100), d_sae=9, epochs=1).activation == Relu()
    with pytest.raises(
        saecli.SaeError, match="--d-sae must be 20, as in init sae, got 9; leave it out"
    ):
        saecli.fit(some_rows(100), init=mine, d_sae=9)


def test_a_crosscoder_trains_on_only_in_the_order_of_its_hook_points(sae: CommandLine):
    sae("extract", "--model", "tiny-gemma2", "--layer", "0", "--layer", "1", "--rows", "3000")
    found = sorted(path.name for path in (sae.home / "activations").iterdir())
    data = [word for name in found for word in ("--data", name)]
    words = ("--act", "topk", "--k", "3", "--d-sae", "16", "--steps", "2")
    assert sae("train", *data, *words, "--name", "cross").status == 0
    turned = [word for name in found[::-1] for word in ("--data", name)]
    refused = sae("train", *turned, "--init", "cross", "--steps", "2", "--name", "again")
    assert refused.status == 2
    assert "name them in this order: layer 0 resid_post, layer 1 resid_post" in refused.err
    assert sae("train", *data, "--init", "cross", "--steps", "2", "--name", "again").status == 0
