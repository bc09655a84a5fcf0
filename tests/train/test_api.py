"""saecli from Python: what fits is what `sae train` fits, from a store or from memory, in silence."""

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from homes import fvu, make_store, random_sae, same, some_rows
from storing import make_store as make_documents

import saecli
from saecli.sae.activations import BatchTopK, JumpRelu, Relu, TopK
from saecli.train.rows import ArrayRows

QUICK = {"d_sae": 24, "epochs": 2, "batch_size": 64}


@pytest.mark.parametrize(
    ("d_in", "options", "activation"),
    [
        (64, {}, BatchTopK(k=32)),
        (24, {"d_sae": 33}, BatchTopK(k=4)),
        (8, {"d_sae": 512}, BatchTopK(k=4)),
        (8, {"d_sae": 4}, BatchTopK(k=1)),
        (8, {"act": "topk"}, TopK(k=4)),
        (64, {"act": "jumprelu"}, JumpRelu(target_l0=32)),
        (8, {"act": "jumprelu", "d_sae": 24}, JumpRelu(target_l0=3)),
        (8, {"act": "jumprelu", "sparsity": "l0"}, JumpRelu()),
        (8, {"init": random_sae(Relu())}, Relu()),
        (8, {"init": random_sae(Relu()), "act": "topk"}, TopK(k=2)),
    ],
)
def test_32_latents_are_active_by_default_and_fewer_of_few(d_in: int, options: dict, activation):
    fitted = saecli.fit(some_rows(100, d_in), solver="sgd", steps=20, **options)
    assert fitted.activation == activation


@pytest.mark.parametrize(
    ("solver", "act", "options"),
    [
        pytest.param("pam-sgd", "batchtopk", {"k": 4}, marks=pytest.mark.slow),
        ("pam-sgd", "jumprelu", {"target_l0": 4.0}),
        pytest.param("sgd", "gated", {"target_l0": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_thresholds_are_set_on_rows_that_were_not_fitted(tmp_path, solver, act, options):
    make_store(tmp_path, "few", some_rows(1500, 24))
    store = saecli.open_store("few", home=tmp_path)
    sae = saecli.fit(
        store, solver=solver, act=act, d_sae=96, steps=300, batch_size=64, smoothing=0, **options
    )
    codes = sae.encode(torch.from_numpy(some_rows(4000, 24, seed=1)))
    assert (codes != 0).sum(1).float().mean().item() == pytest.approx(4, rel=0.08)
    assert sae.cfg["fraction"] == 0.9


@pytest.mark.parametrize(
    "options",
    [
        {"act": "batchtopk", "k": 4},
        {"act": "gated", "target_l0": 4.0},
        {"init": random_sae(TopK(k=4)), "lr": 3.0, "lr_warm_up": 0.0},
    ],
    ids=["batchtopk", "gated", "init"],
)
def test_held_out_rows_decide_nothing_where_documents_are_too_few(tmp_path: Path, options: dict):
    documents, fitted = np.repeat([0, 1], 300), []
    for name, changed in (("one", 1), ("other", 100)):
        rows = some_rows(600)
        rows[documents == 1] *= changed  # which is held out
        make_documents(tmp_path / "activations" / name, rows, "float32", documents=documents)
        store = saecli.open_store(name, home=tmp_path)
        assert set(np.concatenate([*store.split("test").column("document", 90)])) == {1}
        with pytest.warns(UserWarning) as said:
            fitted.append(saecli.fit(store, solver="sgd", epochs=2, normalize="none", **options))
        assert "documents are too few to keep any out of training" in str(said[0].message)
    assert same(*fitted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"solver": "sgd", "act": "topk", "k": 4, "tied": True},
        {"act": "jumprelu", "seed": 3, "fraction": 0.5, "revive": False},
    ],
    ids=str,
)
def test_fitting_a_store_is_sae_train_to_the_bit_and_writes_nothing(sae, capsys, options):
    make_store(sae.home, "rows", some_rows(1000))
    before = set(sae.home.rglob("*"))
    store = saecli.open_store("rows", home=sae.home)
    fitted = saecli.fit(store, **QUICK, **options)
    assert tuple(capsys.readouterr()) == ("", "")
    assert set(sae.home.rglob("*")) == before
    words = ["--d-sae", "24", "--epochs", "2", "--batch-size", "64"]
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    assert sae("train", "--name", "run", *words).status == 0
    assert same(fitted, saecli.load_sae("run", home=sae.home))


@pytest.mark.slow
def test_rows_in_memory_fit_alike_in_any_container_and_dtype(tmp_path: Path):
    rows = np.round(some_rows(600) * 30 + np.arange(8)).astype(np.float32)  # whole, below 256
    np.save(tmp_path / "rows.npy", rows)
    kinds = {
        "tensor": torch.from_numpy(rows),
        "bfloat16": torch.from_numpy(rows).bfloat16(),
        "wider": rows.astype(np.float64),
        "list": rows.tolist(),
        "read-only": np.load(tmp_path / "rows.npy", mmap_mode="r"),
    }
    options = QUICK | {"solver": "sgd", "act": "topk", "k": 6, "epochs": 20}
    fitted = saecli.fit(rows, **options)
    x = torch.from_numpy(rows)
    assert fvu(fitted(x), x) < 0.3
    for name, held in kinds.items():
        assert same(saecli.fit(held, **options), fitted), name


def test_wider_rows_are_trained_on_in_full_when_asked_to():
    rows = some_rows(300).astype(np.float64) * np.pi
    fitted = saecli.fit(rows, dtype="float64", d_sae=16, epochs=1)
    assert fitted.W_enc.dtype == torch.float64
    narrowed = saecli.fit(rows.astype(np.float32), dtype="float64", d_sae=16, epochs=1)
    assert not same(fitted, narrowed)


def test_rows_chosen_from_a_store_are_all_that_is_trained_on(tmp_path: Path):
    make_store(tmp_path, "rows", some_rows(500))
    store = saecli.open_store(tmp_path / "activations" / "rows")
    whole, chosen, every = (
        saecli.fit(rows, solver="sgd", act="relu", **QUICK)
        for rows in (store, store.split("train"), store.split("all"))
    )
    assert same(whole, chosen)
    assert not same(whole, every)


def test_batches_in_memory_hold_every_row_once_shuffled_by_epoch():
    rows = np.arange(50, dtype=np.float32).reshape(25, 2)
    held = ArrayRows(rows)
    epochs = [np.concatenate(list(held.batches(4, seed=0, epoch=epoch))) for epoch in (0, 0, 1)]
    assert all(np.array_equal(np.sort(one, axis=0), rows) for one in epochs)
    assert np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], epochs[2])
    spread = held.spread()
    np.testing.assert_allclose(spread.mean, rows.mean(0))
    np.testing.assert_allclose(spread.variance, rows.var(0))


def test_progress_is_shown_on_demand(capsys):
    saecli.fit(some_rows(300), **QUICK, act="topk", k=8, progress=True)
    said = "--k 8 is not below d_in, 8, so codes are not sparse; lower --k\n"
    assert tuple(capsys.readouterr()) == ("", said)


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (some_rows(20), {"dsae": 3}, "fit has no option dsae; did you mean d_sae?"),
        (some_rows(20), {"xyzzy": 3}, "fit has no option xyzzy; expected one of `sae train`'s"),
        (some_rows(20), {"solver": "adam"}, "--solver must be one of sgd, pam-sgd, pam, got 'a"),
        (some_rows(20), {"act": "tanh"}, "--act must be one of relu"),
        (some_rows(20), {"fraction": 0.5}, "--fraction does nothing in fit with rows that are"),
        (some_rows(20), {"log_to": "wandb"}, "--log-to does nothing in fit, which writes no files"),
        (some_rows(20), {"lr": 1e29, "solver": "sgd", "epochs": 9}, "lower --lr"),
        (some_rows(20)[0], {}, "(rows, d_in), got one of float32 and shape (8,)"),
        (some_rows(20)[:0], {}, "shape (0, 8)"),
        (np.where(np.arange(8) == 3, np.nan, some_rows(5)), {}, "finite, got 5 of 5 with a NaN or"),
        (np.ones((5, 3)), {}, "there is nothing to learn"),
    ],
)
def test_what_cannot_be_fitted_is_told_in_one_sentence(rows, options: dict, sentence: str):
    with pytest.raises(saecli.SaeError) as told:
        saecli.fit(rows, **options)
    assert sentence in str(told.value)


@pytest.mark.slow
def test_an_sae_keeps_its_store_and_says_where_other_rows_come_from(sae, tmp_path, monkeypatch):
    sae("extract --model tiny-gemma2 --rows 900 --layer 1 --layer 3 --name notes").succeeds()
    monkeypatch.setenv("SAE_HOME", str(sae.home))
    one, three = (saecli.open_store(f"notes-l{layer}-resid_post") for layer in (1, 3))
    quick = {"act": "topk", "k": 3, "d_sae": 16, "epochs": 1, "split_seed": 5}
    fitted = saecli.fit(one, **quick)
    saecli.save_sae(fitted, tmp_path / "x")
    make_store(sae.home, "newest", some_rows(40))
    measured = saecli.evaluate(tmp_path / "x")
    assert measured["data"] == one.name and measured["fvu"] == saecli.evaluate(fitted)["fvu"]
    assert [found["data"] for found in saecli.evaluate([tmp_path / "x", fitted])] == [one.name] * 2
    assert saecli.load_sae(tmp_path / "x").metadata["split_seed"] == 5
    said = "was trained on layer 1 resid_post; .* holds layer 3 resid_post"
    with pytest.warns(UserWarning, match=said):
        saecli.evaluate(fitted, three)
    done = sae("eval", str(tmp_path / "x"), "--data", three.name).succeeds()
    assert "was trained on layer 1 resid_post" in done.err
    saecli.save_sae(random_sae(), tmp_path / "stranger")
    with pytest.warns(UserWarning, match="does not name its store: taking the newest"):
        saecli.evaluate(tmp_path / "stranger")
    saecli.save_sae(saecli.fit(saecli.join(one, three), **quick), tmp_path / "both")
    assert saecli.evaluate(tmp_path / "both")["data"] == f"{one.name} + {three.name}"
    said = "in another order.*layer 1 resid_post, layer 3 resid_post"
    with pytest.raises(saecli.SaeError, match=said):
        saecli.evaluate(tmp_path / "both", [three.name, one.name])


def test_import_is_light_and_every_name_is_there_and_typed():
    script = (
        "import sys, saecli\nassert not {'torch', 'numpy', 'typer'} & sys.modules.keys()\n"
        "assert set(saecli.__all__) <= set(dir(saecli))\nassert not hasattr(saecli, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    for module in ("measure.evaluate", "train.rows"):  # which have the types of arguments
        importlib.import_module(f"saecli.{module}")
    for function in (getattr(saecli, name) for name in saecli.__all__ if name[0].islower()):
        parameters = inspect.signature(function).parameters.values()
        assert all(parameter.annotation is not parameter.empty for parameter in parameters)
        assert "return" in get_type_hints(function)
        assert pickle.loads(pickle.dumps(function)) is function
    assert (Path(saecli.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("arguments", "said"), [((), "missing a required argument"), ((5, "x", 7), "too many")]
)
def test_a_wrong_call_names_the_function(arguments: tuple[object, ...], said: str):
    with pytest.raises(TypeError, match=rf"steer\(\) .*{said}"):
        saecli.steer("first", *arguments)


def test_a_type_checker_knows_the_names_that_are_imported_on_first_use():
    tree = ast.walk(ast.parse(Path(saecli.__file__).read_text()))
    typed = {
        alias.name: node.module
        for node in tree
        if isinstance(node, ast.ImportFrom) and node.level and node.module
        for alias in node.names
    }
    del typed["as_usual"]
    assert typed == saecli._MODULES
