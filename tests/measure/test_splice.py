"""Splicing an SAE into a language model, against plain torch on a small real model."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, random_sae
from tiny_models import WIDTH, loaded, save_model
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import saecli
from saecli.extract.effects import effects
from saecli.extract.forward import Forward, fill
from saecli.extract.language_model import LanguageModel
from saecli.extract.options import COLUMNS, HookPoint
from saecli.extract.passes import Passes
from saecli.extract.splice import StoredWindow, stored_windows
from saecli.extract.texts import Document
from saecli.extract.windows import Windows, in_blocks
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.split import is_test
from saecli.store.writer import StoreWriter

CONTEXT, LAYER, BOS = 12, 1, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return loaded(folder, head=True)


def documents() -> list[Document]:
    """Sixty texts of up to 40 random letters, each of them a token."""
    draw = np.random.default_rng(0)
    return [
        Document(number, "".join(map(chr, draw.integers(97, 157, draw.integers(1, 40)))), None)
        for number in range(60)
    ]


def extracted(home: Path, model: LanguageModel, limit: int | None = None) -> Path:
    """A store as `sae extract` makes it."""
    path = home / "activations" / "store"
    source = {
        "model": str(Path(model.source.location).resolve()),
        "layer": LAYER,
        "site": "resid_post",
        "context": CONTEXT,
        "positions": "all",
    }
    meta = StoreMeta(source, "x", "float32", WIDTH, 500, 64, COLUMNS, windows=True)
    windows = Windows(model.tokenizer, CONTEXT)
    with StoreWriter.open(path, meta, limit=limit) as writer:
        fill(
            {HookPoint(LAYER, "resid_post"): writer},
            lambda cursor: in_blocks(lambda _: documents(), windows, limit or 10**9, cursor),
            Forward(model, "float32", 8 * CONTEXT, print),
            limit or 10**9,
            lambda tokens, rows: None,
        )
    return path


def assert_agree(found: dict, expected: dict) -> None:
    assert (found["ce_recovered"] is None) == (expected["ce_recovered"] is None)
    both = [name for name in expected if expected[name] is not None]
    assert {name: found[name] for name in both} == pytest.approx(
        {name: expected[name] for name in both}, rel=1e-4
    )


def oracle(folder: Path, windows: Iterator[list[int]], sae: SAE) -> dict[str, float]:
    """One window at a time in float64, the site replaced by a hook written out here."""
    llama, sae = LlamaForCausalLM.from_pretrained(folder).double(), sae.copy_to(torch.float64)
    return oracle_of(
        llama,
        llama.model.layers[LAYER],
        windows,
        lambda x: torch.cat([x[:, :1], sae(x[0, 1:])[None]], dim=1),
    )


def oracle_of(
    llama: LlamaForCausalLM,
    module: torch.nn.Module,
    windows: Iterator[list[int]],
    spliced: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """The effects of replacing a module's output."""

    def run(ids: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
        handle = module.register_forward_hook(
            lambda module, args, output: replace(
                output if isinstance(output, Tensor) else output[0]
            )
        )
        logits = llama(input_ids=ids).logits[0]
        handle.remove()
        return logits.log_softmax(-1)

    losses, divergences = {"ce_clean": [], "ce_spliced": [], "ce_zero": []}, []
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            found = {
                "ce_clean": run(ids, lambda x: x),
                "ce_spliced": run(ids, spliced),
                "ce_zero": run(ids, torch.zeros_like),
            }
            for name, log_probabilities in found.items():
                losses[name].append(
                    functional.nll_loss(log_probabilities[1:-1], ids[0, 2:], reduction="none")
                )
            clean = found["ce_clean"]
            divergences.append((clean.exp() * (clean - found["ce_spliced"])).sum(-1)[1:])
    result = {name: float(torch.cat(values).mean()) for name, values in losses.items()}
    rise = torch.cat(losses["ce_zero"]) - torch.cat(losses["ce_clean"])
    recovered = None
    if rise.mean() > 5 * rise.std(unbiased=False) / len(rise) ** 0.5:
        recovered = float((result["ce_zero"] - result["ce_spliced"]) / rise.mean())
    tokens = torch.cat(divergences)
    return result | {"ce_recovered": recovered, "kl": float(tokens.mean()), "tokens": len(tokens)}


def test_effects_on_held_out_documents_match_plain_torch(
    sae: CommandLine, folder: Path, model: LanguageModel
):
    extracted(sae.home, model)
    saes = {
        name: random_sae(d_in=WIDTH, seed=seed) for seed, name in enumerate(("random", "other"))
    }
    for name, one in saes.items():
        make_run(sae.home, name, one, data="store", split_seed=5)
    done = sae("eval", *saes, "--model", folder, "--tokens", "1000000", "--json")
    assert done.status == 0, done.err
    held_out = [
        document for document in documents() if is_test(np.array([document.number]), seed=5)[0]
    ]
    assert len(held_out) > 2
    windows = [
        window.token_ids.tolist() for window in Windows(model.tokenizer, CONTEXT).cut(held_out)
    ]
    for found in done.json["runs"]:
        expected = oracle(folder, iter(windows), saes[found["run"]])
        assert_agree(found, expected)
    assert (
        "special tokens (BOS) keep their own activations in ce_spliced, are zero in ce_zero, and are left "
        "out of the means"
    ) in done.err


def test_an_exact_sae_changes_nothing(sae: CommandLine, folder: Path, model: LanguageModel):
    extracted(sae.home, model)
    identity = SAE(
        torch.eye(WIDTH), torch.zeros(WIDTH), torch.eye(WIDTH), torch.zeros(WIDTH), TopK(k=WIDTH)
    )
    make_run(sae.home, "exact", identity, data="store")
    (found,) = sae("eval", "--model", folder, "--json").json["runs"]
    assert found["ce_spliced"] == pytest.approx(found["ce_clean"], rel=1e-6)
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert list(found)[-7:] == [
        "ce_clean",
        "ce_spliced",
        "ce_zero",
        "ce_recovered",
        "kl",
        "tokens",
        "unbeaten",
    ]


def test_only_rows_of_a_window_are_replaced_and_scored(folder: Path, model: LanguageModel):
    draw = np.random.default_rng(1)
    windows = [
        StoredWindow(np.array([BOS, *draw.integers(4, 60, length)]), draw.random(length + 1) < 0.6)
        for length in (11, 7, 11, 3)
    ]
    sae = random_sae(d_in=WIDTH)
    place = (HookPoint(LAYER, "resid_post"),)
    ((found,),) = effects([Passes(model)], windows, place, [place], [sae], lambda tokens: None)
    llama, exact = LlamaForCausalLM.from_pretrained(folder).double(), sae.copy_to(torch.float64)
    clean, spliced, divergences = [], [], []

    def replace(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
        return torch.where(stored[:, None], exact(output[0]), output[0])[None]

    with torch.no_grad():
        for window in windows:
            ids, stored = torch.from_numpy(window.token_ids), torch.from_numpy(window.replaced)
            p = llama(input_ids=ids[None]).logits[0].log_softmax(-1)
            handle = llama.model.layers[LAYER].register_forward_hook(replace)
            q = llama(input_ids=ids[None]).logits[0].log_softmax(-1)
            handle.remove()
            for losses, values in ((clean, p), (spliced, q)):
                nll = functional.nll_loss(values[:-1], ids[1:], reduction="none")
                losses.append(nll[stored[:-1]])
            divergences.append((p.exp() * (p - q)).sum(-1)[stored])
    expected = {
        "ce_clean": float(torch.cat(clean).mean()),
        "ce_spliced": float(torch.cat(spliced).mean()),
        "kl": float(torch.cat(divergences).mean()),
        "tokens": sum(int(window.replaced.sum()) for window in windows),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_a_crosscoder_of_two_models_is_spliced_into_each(
    sae: CommandLine, folder: Path, tmp_path: Path
):
    llamas = [LlamaForCausalLM.from_pretrained(folder) for _ in range(2)]
    with torch.no_grad():
        for parameter in llamas[1].parameters():
            parameter *= 1 + 0.5 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    shutil.copytree(folder, tmp_path / "other")
    llamas[1].save_pretrained(tmp_path / "other")
    (tmp_path / "text.txt").write_text("\n\n".join(document.text for document in documents()))
    names = [str(folder), str(tmp_path / "other")]
    stores = saecli.extract(
        names,
        layer=LAYER,
        dataset=str(tmp_path / "text.txt"),
        context=CONTEXT,
        dtype="float32",
        home=sae.home,
    )
    draw = torch.Generator().manual_seed(0)
    W_enc, W_dec = (
        torch.randn(2 * WIDTH, 9, generator=draw),
        torch.randn(9, 2 * WIDTH, generator=draw),
    )
    cross = SAE(W_enc, torch.zeros(9), W_dec, torch.zeros(2 * WIDTH), Relu(), widths=(WIDTH, WIDTH))
    found = saecli.evaluate(
        cross, saecli.join(*stores), split="all", model=names[::-1], tokens=10**6, home=sae.home
    )
    assert "kl" not in found and [one["model"] for one in found["hook_points"]] == names
    windows = [
        window.token_ids.tolist() for window in stored_windows(stores[0].split("all"), 10**9)
    ]
    llamas, cross = [one.double() for one in llamas], cross.copy_to(torch.float64)

    def predicted(place: slice) -> Iterator[Tensor]:
        for window in windows:
            states = [
                llama(torch.tensor([window]), output_hidden_states=True).hidden_states[LAYER + 1][
                    0, 1:
                ]
                for llama in llamas
            ]
            yield cross(torch.cat(states, 1))[:, place]

    for llama, place, measured in zip(
        llamas, cross.hook_columns, found["hook_points"], strict=True
    ):
        with torch.no_grad():
            y_hat = iter([*predicted(place)])
        expected = oracle_of(
            llama,
            llama.model.layers[LAYER],
            iter(windows),
            lambda x, y_hat=y_hat: torch.cat([x[:, :1], next(y_hat)[None]], dim=1),
        )
        assert_agree(measured, expected)
    for wrong in (names[:1], [*names[:1], *names[:1]]):
        with pytest.raises(saecli.SaeError, match="model must be given once for each model that"):
            saecli.evaluate(cross, saecli.join(*stores), model=wrong, home=sae.home)
    saecli.save_sae(cross, tmp_path / "saved", store=saecli.join(*stores))
    with pytest.raises(saecli.SaeError, match="in another order than it was trained on; name"):
        saecli.evaluate(tmp_path / "saved", saecli.join(*stores[::-1]), home=sae.home)


@pytest.mark.parametrize("limit", [None, 300])
def test_windows_rebuilt_from_the_store_match_extraction(
    tmp_path: Path, model: LanguageModel, limit: int | None
):
    rows = ActivationStore.open(extracted(tmp_path, model, limit=limit)).split("all")
    cutter = Windows(model.tokenizer, CONTEXT)
    found = list(stored_windows(rows, 10**9))
    cut = list(cutter.cut(documents()))
    left = rows.rows
    for window, expected in zip(found, cut, strict=limit is None):
        assert window.token_ids.tolist() == expected.token_ids.tolist()
        first = np.cumsum(expected.kept) <= left  # of the last window, rows up to the limit
        assert window.replaced.tolist() == (expected.kept & first).tolist()
        left -= expected.kept.sum()
    assert sum(window.replaced.sum() for window in found) == rows.rows


def test_windows_are_whole_and_no_more_than_asked_for(tmp_path: Path, model: LanguageModel):
    rows = ActivationStore.open(extracted(tmp_path, model)).split("all")
    windows = list(stored_windows(rows, 50))
    counts = [window.replaced.sum() for window in windows]
    assert sum(counts) >= 50 > sum(counts[:-1])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"num_hidden_layers": 1},
            "expected a layer 1, got layers 0 to 0; name the model that the rows came from",
        ),
        ({"vocab_size": 20}, "got token ids below 20; name the model that the rows came from"),
        ({"hidden_size": 32}, "expected activations of 16 dimensions, got 32"),
        ({"max_position_embeddings": 8}, "expected windows of 12 tokens, got at most 8"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_measuring(
    sae: CommandLine,
    tmp_path: Path,
    model: LanguageModel,
    changes: dict,
    sentence: str,
    monkeypatch,
):
    extracted(sae.home, model)
    make_run(sae.home, "random", random_sae(d_in=WIDTH), data="store")
    other = tmp_path / "other"
    config = LlamaConfig(**{**model.source.config.to_dict(), "head_dim": None, **changes})
    LlamaForCausalLM(config).save_pretrained(other)
    model.tokenizer.save_pretrained(other)
    monkeypatch.setattr(
        "saecli.measure.evaluate.reconstruction", lambda *_: pytest.fail("measured first")
    )
    done = sae("eval", "--model", other)
    assert (done.status, sentence in done.err) == (2, True), done.err


@pytest.mark.slow
def test_the_effect_of_a_transcoder_is_that_of_a_hook_on_the_mlp(sae: CommandLine, folder: Path):
    sae.home.mkdir()
    text = sae.home / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": document.text}) for document in documents()))
    words = (
        "--context",
        str(CONTEXT),
        "--dtype",
        "float32",
        "--site",
        "resid_pre",
        "--site",
        "mlp_out",
        "--name",
        "t",
    )
    assert (
        sae("extract", "--model", folder, "--dataset", text, "--layer", str(LAYER), *words).status
        == 0
    )
    words = (
        "--act",
        "topk",
        "--k",
        "4",
        "--d-sae",
        "24",
        "--epochs",
        "3",
        "--batch-size",
        "64",
        "--json",
    )
    names = [f"t-l{LAYER}-{site}" for site in ("resid_pre", "mlp_out")]
    assert (
        sae(
            "train", "--data", names[0], "--target", names[1], "--skip", *words, "--name", "run"
        ).status
        == 0
    )
    (found,) = sae(
        "eval", "run", "--model", folder, "--split", "all", "--tokens", "100000", "--json"
    ).json["runs"]
    windows = [
        window.token_ids.tolist()
        for window in Windows(loaded(folder).tokenizer, CONTEXT).cut(documents())
    ]
    transcoder = saecli.load_sae("run", sae.home).copy_to(torch.float64)
    llama = LlamaForCausalLM.from_pretrained(folder).double()
    seen = []
    llama.model.layers[LAYER].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )

    expected = oracle_of(
        llama,
        llama.model.layers[LAYER].mlp,
        iter(windows),
        lambda y: torch.cat([y[:, :1], transcoder(seen[-1][0, 1:])[None]], dim=1),
    )
    assert_agree(found, expected)
