"""`sae controls`: weights that stay fixed, rows that lose their structure, and how far a run is from both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_store, some_rows, targets_of
from ridge_problems import least_squares, terms_of
from storing import collect

import saecli
from saecli.measure.controls import of_model, shuffle_columns
from saecli.model.language_model import LanguageModel
from saecli.model.source import find_model
from saecli.store.reader import RowSource
from saecli.train.fit import planned
from saecli.train.pam import PamSolver
from saecli.train.training import Record, Training, start_training

QUICK = ("--d-sae", "24", "--epochs", "2", "--batch-size", "64")
NAMES = ["none", "fixed encoder", "fixed decoder", "shuffled rows", "random weights"]


def trained(
    fixed: str, solver: str, act: str, **options: Any
) -> tuple[dict[str, torch.Tensor], Training]:
    """The weights at the start, and the training at its end, with some of them fixed."""
    given = {"d_sae": 24, "epochs": 3, "batch_size": 64} | options
    plan = replace(planned(some_rows(900), solver, act, given), fixed=fixed)
    first, last = (start_training(plan, Record()) for _ in range(2))
    last.train()
    return first.solver.sae().tensors(), last


def rows_of(source: RowSource) -> np.ndarray:
    return collect(source.sequential(99))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixed", "solver", "act", "options"),
    [
        ("W_enc", "pam-sgd", "topk", {"k": 4}),
        ("W_enc", "pam-sgd", "topk", {"k": 1, "d_sae": 200}),
        ("W_enc", "pam-sgd", "relu", {"sparsity_weight": 50.0}),
        ("W_enc", "pam-sgd", "jumprelu", {"target_l0": 3}),
        ("W_enc", "pam-sgd", "batchtopk", {"k": 4, "release": 0.0}),
        ("W_enc", "sgd", "relu", {}),
        ("W_enc", "sgd", "topk", {"k": 1, "d_sae": 200}),
        ("W_dec", "sgd", "topk", {"k": 1, "d_sae": 200}),
        ("W_dec", "sgd", "relu", {"sparsity_weight": 50.0}),
        ("W_dec", "sgd", "jumprelu", {"target_l0": 3}),
        ("W_dec", "sgd", "batchtopk", {"k": 4, "mu_enc": 1.0}),
    ],
    ids=str,
)
def test_held_weights_equal_their_start_and_the_others_move(fixed, solver, act, options):
    start, trainer = trained(fixed, solver, act, **options)
    end = trainer.solver.sae().tensors()
    assert torch.equal(start[fixed], end[fixed])
    assert trainer.solver.revived == 0
    for name in {"W_enc", "W_dec", "b_enc", "b_dec"} - {fixed}:
        assert not torch.equal(start[name], end[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("act", ["batchtopk", "jumprelu"])
def test_thresholds_beside_a_held_encoder_are_trained_to_the_l0_asked_for(act):
    sparsity = {"k": 4} if act == "batchtopk" else {"target_l0": 4}
    _, trainer = trained("W_enc", "pam-sgd", act, epochs=40, **sparsity)
    codes = trainer.sae.encode(torch.from_numpy(some_rows(900)))
    assert (codes != 0).sum(1).double().mean() == pytest.approx(4, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "options"),
    [
        ("pam-sgd", {}),
        ("pam-sgd", {"release": 1.0}),
        ("pam", {"alpha": 0.5}),
        ("pam", {"alpha": 0.0}),
    ],
    ids=str,
)
def test_the_decoder_of_a_held_encoder_is_the_exact_optimum(solver, options):
    _, trainer = trained("W_enc", solver, "topk", k=4, dtype="float64", smoothing=0.0, **options)
    x = torch.cat([batch.x for batch in trainer.rows.in_epoch(0)])
    sae, solver = trainer.solver.sae(), trainer.solver
    zeros = torch.zeros_like(sae.W_dec)
    terms = terms_of((solver.alpha, 0, 0, 0), sae.W_enc.T, zeros, torch.zeros(8))
    exact = least_squares(sae.encode(x), x, terms, c=0.0 if type(solver) is PamSolver else None)
    np.testing.assert_allclose(sae.W_dec, exact.W, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(sae.b_dec, exact.b, rtol=1e-6, atol=1e-7)


def test_shuffled_rows_keep_every_marginal_and_lose_correlation(tmp_path: Path):
    factors = np.random.default_rng(1).normal(size=(2, 8))
    x = make_store(tmp_path, "rows", (some_rows(3000, 2) @ factors).astype(np.float32))
    rows = saecli.open_store("rows", tmp_path).split("train")
    before = rows_of(rows)
    first, again, other = (rows_of(shuffle_columns(rows, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(before, axis=0))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    off = ~np.eye(x.shape[1], dtype=bool)
    assert np.abs(np.corrcoef(before.T)[off]).mean() > 0.4
    assert np.abs(np.corrcoef(first.T)[off]).max() < 0.1


TINY = "extract --model tiny-gemma2 --layer 1 --rows 3000 --dtype float32"


@pytest.fixture
def notes(sae: CommandLine) -> CommandLine:
    """A home with activations of the bundled model, in float32 so that they can be compared."""
    words = f"{TINY} --name notes --site mlp_in --site mlp_out"
    assert sae(*words.split()).status == 0
    return sae


def nothing(done: float) -> None: ...


def no_memory(*args: object) -> None:
    raise MemoryError("Unable to allocate 1 TiB")


def no_gpu_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["train", "test"])
def test_rows_of_random_weights_are_of_the_same_tokens_and_other_numbers(notes: CommandLine, which):
    x, y = (saecli.open_store(f"notes-l1-{site}", notes.home) for site in ("mlp_in", "mlp_out"))
    rows = (saecli.join(x, target=y) if which == "train" else saecli.join(x, y)).split(which)
    source, cpu, stored = find_model("tiny-gemma2"), torch.device("cpu"), rows_of(rows)
    own, first, again, other = (
        rows_of(of_model(LanguageModel(source, cpu, weights_seed=seed), rows, nothing))
        for seed in (None, 0, 0, 1)
    )
    np.testing.assert_allclose(own, stored, rtol=1e-3, atol=1e-3)  # tokens and order are the same
    np.testing.assert_array_equal(first, again)
    for drawn in (first, other):
        assert drawn.shape == stored.shape
        assert abs(np.corrcoef(drawn.ravel(), stored.ravel())[0, 1]) < 0.4
    assert not np.allclose(first, other)


@pytest.mark.slow
def test_a_models_rows_are_those_stored_also_where_some_were_dropped(sae: CommandLine):
    words = f"{TINY} --name few --max-norm-multiple 1.2"
    assert sae(*words.split()).status == 0
    rows = saecli.open_store("few", sae.home).split("all")
    model = LanguageModel(find_model("tiny-gemma2"), torch.device("cpu"))
    assert rows.store.meta.dropped["high_norm"] > 10
    np.testing.assert_allclose(rows_of(of_model(model, rows, nothing)), rows_of(rows), atol=1e-3)


@pytest.mark.slow
def test_random_weights_are_read_by_norms_of_their_own(sae: CommandLine):
    assert sae(f"{TINY} --name few").status == 0
    rows = saecli.open_store("few", sae.home).split("all")
    source, cpu = find_model("tiny-gemma2"), torch.device("cpu")
    assert rows.reads is not None and np.ptp(rows.reads) > 0.01
    own = of_model(LanguageModel(source, cpu), rows, nothing)
    np.testing.assert_allclose(own.reads, rows.reads, rtol=1e-5)
    drawn = LanguageModel(source, cpu, weights_seed=0)
    for norm in drawn.model.modules():
        if "RMSNorm" in type(norm).__name__:
            torch.nn.init.uniform_(norm.weight, 0, 3)
    point = rows.store.meta.origin.read[0]
    random = of_model(drawn, rows, nothing)
    np.testing.assert_allclose(random.reads, drawn.reads(point).numpy(), rtol=1e-6)
    assert np.ptp(random.reads) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("sites", [["mlp_out"], ["mlp_in", "mlp_out"]], ids=["SAE", "crosscoder"])
def test_with_a_model_every_control_is_measured_and_the_table_says_so(notes: CommandLine, sites):
    words = ["--steps", "30", "--d-sae", "64", "--act", "topk", "--k", "8", "--name", "run"]
    words += [word for site in sites for word in ("--data", f"notes-l1-{site}")]
    assert notes("train", *words).status == 0
    options = ("--model", "tiny-gemma2", "--tokens", "200", "--json")
    done = notes("controls", "run", *options)
    lines = {line["control"]: line for line in done.json["controls"]}
    assert list(lines) == NAMES and done.json["notes"] == []
    (evaluated,) = notes("eval", "run", *options).json["runs"]
    for name in ("fvu", "l0", "dead_fraction", "ce_recovered", "kl", "rows"):
        assert lines["none"][name] == evaluated[name]
    for name, line in lines.items():
        assert (line["kl"] is None) == (line["ce_recovered"] is None) == (name in NAMES[3:])
        assert line["rows"] == evaluated["rows"] and line["l0"] == 8
        assert line["mcc"] is None


@pytest.mark.long
@pytest.mark.parametrize("solver", ["pam-sgd", "sgd"])
def test_a_run_finds_known_features_and_its_controls_do_not(sae: CommandLine, solver):
    world = "import synthetic --features 64 --d-in 32 --l0 4 --rows 6000"
    assert sae(*world.split()).status == 0
    train = f"train --d-sae 64 --act batchtopk --k 4 --solver {solver} --steps 800"
    assert sae(*train.split(), "--name", "run").status == 0
    before = set(sae.home.rglob("*"))
    done = sae("controls", "run", "--json")
    assert set(sae.home.rglob("*")) == before
    lines = {line["control"]: line for line in done.json["controls"]}
    assert list(lines) == NAMES[:4]
    run = lines.pop("none")
    for name, line in lines.items():
        assert run["mcc"] > line["mcc"] + 0.2, name
        assert run["fvu"] < line["fvu"]
        assert line["l0"] == pytest.approx(4, rel=0.15)
        assert (line["f1"] is None) == (name == "shuffled rows")


@pytest.mark.slow
def test_what_makes_no_sense_is_left_out_with_a_note(sae: CommandLine, monkeypatch):
    x = make_store(sae.home, "x", some_rows(1500))
    make_store(sae.home, "y", targets_of(x))
    for words in ("--solver sgd --tied --name tied", "--target y --skip --name across"):
        assert sae("train", "--data", "x", *words.split(), *QUICK).status == 0
    tied = saecli.controls("tied", home=sae.home)
    assert [line["control"] for line in tied["controls"]] == ["none", "shuffled rows"]
    assert "to fix one is to fix both" in tied["notes"][0]
    assert sae("controls", "tied", "--json").json == tied
    done = sae("controls", "across").succeeds()
    assert "shuffled rows are left out: a transcoder's targets" in done.err
    assert "fixed encoder" in done.out
    assert sae("train", "--data", "x", *QUICK, "--name", "plain").status == 0
    refusals = {no_memory: "Unable to allocate 1 TiB", no_gpu_memory: "CUDA out of memory"}
    for lacking, words in refusals.items():
        monkeypatch.setattr("saecli.measure.controls.shuffle_columns", lacking)
        document = saecli.controls("plain", home=sae.home)
        assert [line["control"] for line in document["controls"]] == NAMES[:3]
        assert document["notes"] == [f"without shuffled rows: {words}"]
