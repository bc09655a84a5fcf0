"""`sae finetune`: an SAE trained on through its language model, against plain torch on a small real model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import (
    CommandLine,
    assert_same_weights,
    change_json,
    make_run,
    make_store,
    random_sae,
    some_rows,
    weights,
)
from launching import signalled, together
from plain_hooks import all_replaced, but_first
from safetensors.torch import load_file
from tiny_models import WIDTH, save_model, save_tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from tuning import LENGTH, written_texts

import saecli
from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.sae.activations import BatchTopK, JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.store.reader import JoinedRows
from saecli.train.finetune import TRAINED, FinetuneSettings, Opened
from saecli.train.runs import read_metrics

LAYER, F = 1, 32
ACTS = [TopK(k=4), BatchTopK(k=4), JumpRelu(), Relu()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the extraction of its text."""
    return written_texts(tmp_path_factory.mktemp("text") / "text.jsonl")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path, options: dict) -> Path:
    home = tmp_path_factory.mktemp("home")
    layers = {"resid_post": [LAYER], "mlp_in": [LAYER], "mlp_out": [LAYER, LAYER + 1]}
    for site in layers:
        saecli.extract(str(model), layer=layers[site], site=[site], name=site, home=home, **options)
    return home


@pytest.fixture
def home(sae: CommandLine, stores: Path) -> Path:
    shutil.copytree(stores, sae.home, dirs_exist_ok=True)
    return sae.home


def sae_of(rows: Tensor, activation: Any) -> SAE:
    """A tied SAE of which about 4 latents are active per row."""
    directions = torch.randn(F, rows.shape[1], generator=torch.Generator().manual_seed(0))
    W_enc = functional.normalize(directions, dim=1).T.contiguous()
    pre = rows @ W_enc
    level = pre.flatten().topk(4 * len(rows)).values[-1]
    parameters = {
        name: torch.full_like(start, level) for name, start in activation.parameters(F).items()
    }
    b_enc = -level.expand(F).clone() if isinstance(activation, Relu) else torch.zeros(F)
    return SAE(W_enc, b_enc, 0.5 * W_enc.T.contiguous(), rows.mean(0), activation, parameters)


def begun(home: Path, activation: Any) -> SAE:
    """The run `old`."""
    store = saecli.open_store(home / "activations" / "resid_post")
    (rows,) = store.split("train").sequential(100_000)
    old = sae_of(torch.from_numpy(rows.copy()), activation)
    old.scale = torch.linspace(0.5, 2, 2 * old.d_in)
    at = {"model": store.meta.source["model"], "layer": LAYER, "site": "resid_post"}
    make_run(home, "old", old, data="resid_post", origin=at)
    return old


def loss_and_gradient(
    model: Path, sae: SAE, store: saecli.ActivationStore, objective: str, weight: float
) -> tuple[float, Tensor]:
    """The objective plus the weighted FVU per row, in float64, and its gradient in the decoder, by plain torch."""
    windows = store.split("train", fraction=TRAINED).windows()
    ids = torch.tensor([token_ids.tolist() for token_ids, _ in windows])
    llama = LlamaForCausalLM.from_pretrained(model).double()
    exact = sae.copy_to(torch.float64)
    exact.W_dec.requires_grad_()

    def logits(replaced: Callable) -> tuple[Tensor, list]:
        with all_replaced([llama.model.layers[LAYER]], replaced) as seen:
            return llama(input_ids=ids).logits.log_softmax(-1), seen

    wanted, ((_, y, _),) = logits(lambda number, x, y: y)
    got, _ = logits(lambda number, x, y: but_first(y, exact(y)))
    wanted, rows = wanted.detach(), y[:, 1:].flatten(0, 1).detach()
    if objective == "kl":
        total = (wanted.exp() * (wanted - got)).sum(-1)[:, 1:].sum()
    else:
        predictions = got[:, 1:-1].flatten(0, 1)
        total = functional.nll_loss(predictions, ids[:, 2:].flatten(), reduction="sum")
    fvu = (exact(rows) - rows).square().sum() / (rows - rows.mean(0)).square().sum()
    loss = total / len(rows) + weight * fvu
    return loss.item(), torch.autograd.grad(loss, exact.W_dec)[0]


@pytest.mark.parametrize("objective", ["kl", pytest.param("ce", marks=pytest.mark.slow)])
def test_the_first_step_has_the_loss_and_the_gradient_of_plain_torch(sae, home, model, objective):
    old = begun(home, TopK(k=4))
    words = "finetune old --tokens 3075 --only decoder --fvu-weight 2 --lr 1e-3 --name new"
    sae(words, "--objective", objective).succeeds()
    store = saecli.open_store("resid_post", home)
    loss, gradient = loss_and_gradient(model, old, store, objective, 2.0)
    (line,) = [line for line in read_metrics(home / "runs" / "new") if "loss" in line]
    assert line["loss"] == pytest.approx(loss, rel=1e-5) and line["batch_l0"] == 4
    tuned = weights(home, "new")
    moved, large = tuned["W_dec"] - old.W_dec, gradient.abs() > 1e-3 * gradient.abs().max()
    # Adam's first step goes against the gradient's sign.
    assert (moved.sign()[large] == -gradient.sign()[large]).all() and large.sum() > 100
    for name in ("W_enc", "b_enc"):
        torch.testing.assert_close(tuned[name], getattr(old, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(saecli.load_sae("new", home).scale, old.scale)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTS, ids=lambda one: one.name)
def test_held_out_kl_falls_and_l0_stays(sae, home, activation):
    begun(home, activation)
    document = sae("finetune", "old", "--tokens", "120000", "--lr", "0.01", "--json").json
    before, after = document["before"], document["after"]
    assert document["kept"] == "after" and document["run"] == f"finetune-{activation.name}-1"
    assert after["kl"] < 0.8 * before["kl"]
    assert after["l0"] == pytest.approx(before["l0"], rel=0.15)  # of 330 held-out rows
    model = str(saecli.load_sae("old", home).metadata["model"])
    rows = kept_out(home, "resid_post")
    again = saecli.evaluate(document["run"], rows, model=model, home=home)
    assert again["kl"] == pytest.approx(after["kl"], rel=1e-4)
    assert again["fvu"] == pytest.approx(after["fvu"], rel=1e-4)


def kept_out(home: Path, name: str) -> Any:
    """The rows on which before and after are compared."""
    store = saecli.open_store(home / "activations" / name)
    return store.split("train", fraction=TRAINED, rest=True)


def test_a_short_run_with_relu_keeps_its_l0(sae, home):
    begun(home, Relu())
    document = sae("finetune", "old", "--tokens", "20000", "--lr", "0.01", "--json").json
    assert document["kept"] == "after"
    assert document["after"]["l0"] == pytest.approx(document["before"]["l0"], rel=0.03)


def test_a_store_made_again_under_its_name_is_told(sae, home):
    begun(home, TopK(k=4))
    change_json(home / "runs" / "old" / "run.json", data_hash="another")
    sentence = "resid_post is not the store that old was trained on, though it has its name"
    words = ("finetune", "old", "--tokens", "3000")
    assert sentence in sae(*words, "--name", "again").err
    assert sentence not in sae(*words, "--name", "named", "--data", "resid_post").err


def test_a_run_without_a_store_asks_for_its_text(sae, home, model, options):
    text = options["dataset"]
    words = f"--layer {LAYER} --context {LENGTH + 1} --act topk --k 4 --rows 600 --name live"
    sae(f"train --model {model} --dataset {text} {words}").succeeds()
    sae("finetune", "live", "--tokens", "3000").fails(2, f"give its text, --dataset {text}")


def test_what_is_worse_is_not_kept(sae, home):
    begun(home, TopK(k=4))
    done = sae("finetune", "old", "--tokens", "9000", "--lr", "3", "--name", "new", "--json")
    assert done.json["kept"] == "before" and "the SAE's weights are kept as they were" in done.err
    assert_same_weights(home, "old", "new", rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_streamed_text_trains_what_its_store_does(sae, home, options, model):
    begun(home, BatchTopK(k=4))
    words = "finetune old --tokens 20000 --json --name"
    stored = sae(f"{words} stored").json
    of_text = ("--dataset", options["dataset"], "--context", str(LENGTH + 1))
    streamed = sae(f"{words} streamed", *of_text).json
    assert [stored["before"], stored["after"]] == [streamed["before"], streamed["after"]]
    assert_same_weights(home, "stored", "streamed")
    config = home / "runs" / "streamed" / "config.toml"
    assert sae("finetune", "--config", config, "--name", "again").status == 0
    assert_same_weights(home, "again", "streamed")
    python = saecli.finetune("old", home=home, tokens=20_000)
    torch.testing.assert_close(python.W_dec, weights(home, "stored")["W_dec"], rtol=0, atol=0)
    assert python.metadata["kept"] == stored["kept"] and python.metadata["layer"] == LAYER
    assert python.metadata["fraction"] == 0.9


@pytest.mark.slow
def test_a_run_is_resumed_in_the_precision_that_it_was_begun_in(sae, home):
    begun(home, Relu())
    words = ["finetune", "old", "--tokens", "160000", "--model-dtype", "bfloat16"]
    assert sae(*words, "--name", "whole").status == 0
    signalled(home, [*words, "--name", "killed"], "checkpoint.safetensors", 2)
    assert sae("finetune", "--resume").status == 0
    assert_same_weights(home, "whole", "killed")


@pytest.mark.slow
def test_texts_are_read_from_a_column_in_the_proportions_asked_for(sae, home, tmp_path):
    begun(home, TopK(k=4))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(json.dumps({"text": "c", "body": file.stem * LENGTH}) + "\n")
        file.write_text(file.read_text() * 400)
    text = {"dataset": [*map(str, files)], "mix": (3.0, 1.0), "text_column": "body"}
    settings = FinetuneSettings.of({"tokens": 4000, **text})
    windows = Opened.open(Home.at(home), "old", settings, None, Silent()).text.train
    tokens = np.concatenate([window.token_ids[window.is_row] for window in windows])
    _, counts = np.unique(tokens, return_counts=True)
    of_each = (counts / len(tokens)).tolist()  # of some 270 documents
    assert of_each == pytest.approx([0.75, 0.25], abs=0.05)
    (tmp_path / "a.txt").write_text("a")
    for option in ("mix", "text-column", "dataset-config", "dataset-split", "dataset-revision"):
        words = ("finetune", "old", "--dataset", tmp_path / "a.txt", f"--{option}", "1")
        sae(*words).fails(2, f"--{option} does nothing with the dataset")


def test_windows_of_a_text_begin_as_those_of_the_saes_rows(sae, home, model, options, tmp_path):
    old = begun(home, TopK(k=4))
    bare = shutil.copytree(model, tmp_path / "model")
    save_tokenizer(bare, bos=False)
    old.metadata = saecli.load_sae("old", home=home).metadata | {"model": str(bare)}
    losses = {}
    for name, prepend_bos in (("with", True), ("without", False)):
        old.metadata["prepend_bos"] = prepend_bos
        saecli.save_sae(old, tmp_path / name)
        words = ("--tokens", "3000", "--dataset", options["dataset"], "--name", name, "--json")
        losses[name] = sae("finetune", tmp_path / name, *words).json["before"]["ce_clean"]
    assert losses["with"] != losses["without"]


@pytest.mark.slow
def test_a_killed_run_resumed_equals_one_never_stopped(sae, home, options):
    begun(home, Relu())
    words = ["finetune", "old", "--tokens", "160000"]
    of_text = ["--dataset", options["dataset"], "--context", str(LENGTH + 1)]
    for name, more in (("whole", []), ("whole-text", of_text)):
        assert sae(*words, *more, "--name", name).status == 0
        killed = name.replace("whole", "killed")
        signalled(home, [*words, *more, "--name", killed], "checkpoint.safetensors", 2)
        assert "go on by `sae finetune --resume" in sae("train", "--resume", "--name", killed).err
        assert sae("finetune", "--resume").status == 0
        assert_same_weights(home, name, killed)
        scales = [saecli.load_sae(run, home).scale for run in ("old", killed)]
        torch.testing.assert_close(*scales)


@pytest.mark.slow
def test_transcoders_and_crosscoders_are_spliced_and_trained(sae, home):
    one, two = (f"mlp_out-l{layer}-mlp_out" for layer in (LAYER, LAYER + 1))
    train = f"train --d-sae {F} --act topk --k 4 --epochs 3 --fraction 0.9"
    assert sae(f"{train} --data mlp_in --target {one} --name transcoder").status == 0
    assert sae(f"{train} --data {one} --data {two} --name crosscoder").status == 0
    for run, width in (("transcoder", WIDTH), ("crosscoder", 2 * WIDTH)):
        done = sae("finetune", run, "--tokens", "100000", "--json")
        document = done.json
        assert document["after"]["kl"] < document["before"]["kl"]
        assert weights(home, document["run"])["W_dec"].shape == (F, width)
        model = str(saecli.load_sae(run, home).metadata["model"])
        first, second, third = (kept_out(home, name) for name in ("mlp_in", one, two))
        of_transcoder = run == "transcoder"
        rows = JoinedRows((first,), second) if of_transcoder else JoinedRows((second, third))
        measured = saecli.evaluate(document["run"], rows, model=model, home=home)
        assert measured["kl"] == pytest.approx(document[document["kept"]]["kl"], rel=1e-4)
        config = home / "runs" / document["run"] / "config.toml"
        assert sae("finetune", "--config", config, "--name", f"{run}-again").status == 0
        assert_same_weights(home, f"{run}-again", document["run"])


@pytest.mark.slow
def test_two_processes_train_what_one_does(sae, home):
    begun(home, BatchTopK(k=4))
    words = ["finetune", "old", "--tokens", "30000", "--json"]
    alone = sae(*words, "--name", "alone").json
    both = together(2, "--home", home, *words, "--name", "both")
    assert both.json["after"]["loss"] == pytest.approx(alone["after"]["loss"], rel=1e-4)
    assert_same_weights(home, "alone", "both", rtol=1e-3, atol=1e-4)


def test_memory_that_runs_out_halves_the_forward_pass(sae, home, monkeypatch):
    begun(home, TopK(k=4))
    forward = LlamaMLP.forward
    words = ("finetune", "old", "--tokens", "3000", "--json")
    assert sae(*words, "--name", "plenty").status == 0

    def scarce(self: LlamaMLP, x: Tensor) -> Tensor:
        if x.requires_grad and len(x) > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", scarce)
    done = sae(*words, "--name", "scarce")
    assert "for lack of memory" in done.err
    checkpoints = (home / "runs" / name / "checkpoint.safetensors" for name in ("plenty", "scarce"))
    plenty, scarce = (int(load_file(path)["most_tokens"]) for path in checkpoints)
    assert plenty == 0 < scarce  # with which a resumed run goes on
    assert_same_weights(home, "plenty", "scarce", rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ("old --data resid_post --dataset x.txt", 2, "cannot use both --data and --dataset"),
        ("old --context 8", 2, "--context does nothing without --dataset"),
        ("old --data bare", 1, "expected a store that `sae extract` made"),
        ("narrow", 2, "expected an SAE of the model's width, 16, got 8"),
        ("nowhere", 2, "records no hook point"),
        ("old --resume --model tiny-gemma2", 2, "--model does nothing with --resume"),
        ("old --resume", 2, "RUN does nothing with --resume"),
        ("old --fvu-weight -1", 2, "--fvu-weight must be at least 0"),
        ("old --only encoder", 2, "--only"),
        ("old --model nothing/here", 1, "nothing/here"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(sae, home, model, words, status, sentence):
    begun(home, TopK(k=4))
    make_store(home, "bare", some_rows(100, WIDTH))
    make_run(home, "nowhere", random_sae(d_in=WIDTH), data="bare", origin={})
    make_run(home, "narrow", random_sae(), data="resid_post")
    given = [] if {"--model", "--resume"} & {*words.split()} else ["--model", model]
    sae(f"finetune {words}", *given).fails(status, sentence)
    assert not [path for path in (home / "runs").iterdir() if "finetune" in path.name]


def test_python_writes_no_files_to_track(home):
    begun(home, TopK(k=4))
    with pytest.raises(saecli.SaeError, match="--log-to does nothing in finetune"):
        saecli.finetune("old", home=home, log_to="wandb")
