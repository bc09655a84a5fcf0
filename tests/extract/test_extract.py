"""`sae extract` as a user runs it: the rows it stores, going on after a kill, and what bad input gets."""

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import split

import numpy as np
import pytest
import torch
from homes import CommandLine
from tiny_models import CONFIGS, VOCABULARY, save_model, stored
from transformers import AutoTokenizer, LlamaForCausalLM

import saecli
from saecli.base.errors import ConfigError
from saecli.base.options import options_of
from saecli.extract.options import ExtractConfig

TEXT = "\n\n".join(
    " ".join("abcdefghijklmnop"[i % 7 : i % 7 + 3 + i % 9] for i in range(n, n + 20))
    for n in range(40)
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(folder / name, name) for name in CONFIGS}


def test_last_position_gives_one_row_a_document(sae: CommandLine, models, text):
    line = f"extract --model {models['gemma2']} --dataset {text} --layer 1 --context 16 --dtype float32"
    assert sae(line, "--positions", "last", "--name", "last").status == 0
    assert sae(line, "--name", "all").status == 0
    last, columns = stored(sae.home / "activations" / "last")
    every, all_columns = stored(sae.home / "activations" / "all")
    assert columns["document"].tolist() == list(range(40))
    for row, number in zip(last, columns["document"], strict=True):
        of_document = all_columns["document"] == number
        ends = np.flatnonzero(np.diff(all_columns["position"][of_document]) < 0)
        first_window_end = ends[0] if len(ends) else of_document.sum() - 1
        np.testing.assert_allclose(row, every[of_document][first_window_end], rtol=1e-4, atol=1e-5)


def test_the_same_request_is_a_cache_hit(sae: CommandLine, models, text):
    words = ("extract", "--model", models["llama"], "--layer", "0", "--dataset", text, "--json")
    first, again = sae(*words).json, sae(*words, "--batch-size", "3", "--no-packed").json
    assert (first["cached"], again["cached"]) == (False, True)
    assert first["name"] == again["name"]
    other = sae(*words, "--site", "mlp_out").json
    assert other["name"] != first["name"]
    sae(*words, "--site", "mlp_out", "--name", first["name"]).fails(
        1, "made from something else; give another --name"
    )


UNAVAILABLE = ("nowhere.txt does not exist", "or use --model tiny-gemma2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--layer", "7"), "got --layer 7"),
        (("--context", "65"), "got --context 65; lower it"),
        (("--dataset", ""), "--dataset is empty"),
        (("--dataset-split", "test"), "--dataset-split does nothing with the dataset"),
        (("--dataset-config", "x"), "--dataset-config does nothing with the dataset"),
        (("--text-column", "x"), "--text-column does nothing with the dataset"),
        (("--dataset", "a.jsonl", "--dataset-split", "test"), "with the dataset a.jsonl"),
        *(
            (("--" + name, "9" * 10), f"--{name} must be at most 2147483647")
            for name in ("rows", "context", "batch-size", "shard-rows")
        ),
        (("--mix", "1"), "--mix does nothing with the dataset"),
        ((*split("--dataset a.txt --dataset b.txt --mix 1"),), "got 1 for 2 datasets"),
        (("--dataset", "a.txt", "--dataset", "a.txt"), "must name different texts, got one twice"),
        (("--dataset", "nowhere.txt"), UNAVAILABLE[0]),
        (("--model", "google/gemma-2-2b"), UNAVAILABLE[1]),
        (("--context", "1"), "--context must be above 1"),
        (("--rows", "0"), "--rows must be at least 1"),
        (("--name", "a/b"), "--name must be a plain folder name"),
        (("--packed", "--positions", "last"), "--packed does nothing with --positions last"),
    ],
)
def test_what_cannot_work_is_refused(sae: CommandLine, models, text, words, sentence, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, value in (("--model", models["gpt2"]), ("--dataset", text)):
        words = words if name in words else (*words, name, value)
    sae("extract", *words).fails(1 if sentence in UNAVAILABLE else 2, sentence)
    assert not (sae.home / "activations").exists()


def test_the_default_context_is_what_the_model_allows(sae: CommandLine, models, text):
    words = ("extract", "--dataset", text, "--rows", "50", "--model")
    assert sae(*words, models["gpt2"], "--name", "short", "--json").json["rows"] == 50
    assert sae(*words, models["llama"], "--name", "long", "--json").json["rows"] == 50
    for name, context in (("short", 64), ("long", 128)):
        assert saecli.open_store(name, home=sae.home).meta.source["context"] == context
    assert sae(*words, models["gpt2"], *split("--context 64 --name short --json")).json["cached"]


class Code:
    """Pickled, makes a file where it is loaded."""

    def __reduce__(self) -> tuple:
        return open, ("ran", "w")


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, size)


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": Code()}, folder / "pytorch_model.bin")


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def merges_without_tokens(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps(document))


def add_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zz"])
    tokenizer.save_pretrained(folder)


def bring_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "m.Own", "AutoModel": "m.Model", "AutoModelForCausalLM": "m.Model"}
    config |= {"model_type": "own", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "m.py").write_text("open('ran', 'w')\n")


@pytest.mark.parametrize(
    ("architecture", "damage", "sentence"),
    [
        ("llama", bring_code, "this tool runs no code from a model's folder"),
        ("llama", pickle, "use a model with model.safetensors"),
        ("llama", cut("model.safetensors", 2000), "cannot load the model"),
        ("llama", add_token, f"cannot read the token {VOCABULARY}"),
        ("llama", cut("tokenizer.json", 200), "cannot load the tokenizer of"),
        ("llama", merges_without_tokens, "cannot load the tokenizer of"),
        *((name, drop_tokenizer, "cannot load the tokenizer of") for name in CONFIGS),
    ],
)
def test_damage_is_named(sae: CommandLine, models, tmp_path: Path, architecture, damage, sentence):
    folder = shutil.copytree(models[architecture], tmp_path / "model")
    damage(folder)
    (tmp_path / "a.txt").write_text("abzzc")
    sae.monkeypatch.chdir(tmp_path)
    done = sae("extract", "--model", folder, "--dataset", "a.txt").fails(1, sentence)
    assert (done.out, len(done.err.splitlines())) == ("", 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_rows_that_all_overflow_end_the_extraction_early(sae: CommandLine, models, tmp_path: Path):
    folder = tmp_path / "model"
    model = LlamaForCausalLM.from_pretrained(models["llama"])
    model.model.embed_tokens.weight.data.mul_(1e8)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(models["llama"]).save_pretrained(folder)
    (tmp_path / "a.txt").write_text("abcdefgh" * 20_000)
    words = ("extract", "--model", folder, "--layer", "0", "--dataset", tmp_path / "a.txt")
    done = sae(*words, "--dtype", "float16")
    assert done.status == 1
    advice = "at every hook point; try --dtype float32"
    found = re.search(rf"none of ([\d,]+) is finite in float16 {advice}", done.err)
    assert 10_000 <= int(found[1].replace(",", "")) < 20_000
    assert sae(*words, "--dtype", "bfloat16", "--rows", "50").status == 0
    (tmp_path / "a.txt").write_text("abcdefgh\n\nabcdefg")
    assert f"none of 15 is finite in float16 {advice}" in sae(*words, "--dtype", "float16").err


def test_python_extracts_what_the_command_does(sae: CommandLine, models, text):
    options = {"layer": 1, "site": "mlp_out", "context": 16, "rows": 300}
    options |= {"dataset": str(text), "home": sae.home}
    store = saecli.extract(str(models["gpt2"]), **options)
    assert (store.complete, store.rows, store.meta.source["site"]) == (True, 300, "mlp_out")
    line = f"extract --model {models['gpt2']} --dataset {text} --layer 1 --site mlp_out"
    assert sae(f"{line} --context 16 --rows 300 --json").json["cached"]
    assert saecli.extract(str(models["gpt2"]), **options, progress=True).path == store.path
    sites = ["resid_post", "mlp_out"]
    for several in ({"layer": [0, 1]}, {"layer": np.arange(2)}, {"site": sites}):
        assert len(saecli.extract(str(models["gpt2"]), **options | several)) == 2
    for layer in (0, 1):
        numbered = saecli.extract(str(models["gpt2"]), **options | {"layer": np.int64(layer)})
        assert numbered.meta.source["layer"] == layer
    with pytest.raises(ConfigError, match=r"--layer must be a number, .*, got 0\.5"):
        saecli.extract(str(models["gpt2"]), **options | {"layer": 0.5})
    with pytest.raises(ConfigError, match="extract has no option contex; did you mean context"):
        saecli.extract(str(models["gpt2"]), contex=16)
    for site in ("mlp", "mlp:input"):
        with pytest.raises(ConfigError, match="site must be one of resid_post, resid_pre"):
            saecli.extract(str(models["gpt2"]), site=site)


def test_every_option_is_an_argument_of_the_function_by_its_type_and_default():
    options = options_of(ExtractConfig)
    shown = inspect.signature(saecli.extract).parameters
    assert [*shown][:9] == "model layer site module tokenizer name home device progress".split()
    for name in options.keys() - {"model"}:
        assert shown[name].default == options[name].default
        assert shown[name].annotation == options[name].kind
    assert "rows: Rows to store; fewer if the text ends first." in inspect.getdoc(saecli.extract)
