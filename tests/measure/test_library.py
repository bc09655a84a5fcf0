"""The commands from Python: each function returns what its command prints as JSON, in silence, of SAEs and rows in
memory too; with a loaded model the measures of the same model by name, and of an edited one its own."""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, D, make_run, make_store, random_sae, some_rows
from plain_hooks import assert_same_effects, effects_by_hooks
from reports import index_of, make_text_run
from reports import save_model as save_word_model
from tiny_models import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.sae.activations import Activation, Relu, TopK
from saecli.sae.dictionary import SAE


@pytest.fixture
def home(sae: CommandLine) -> Path:
    make_store(sae.home, "rows", some_rows(1500))
    make_run(sae.home, "first", random_sae(TopK(3)))
    make_run(sae.home, "second", random_sae(Relu(), seed=1), created="2026-01-02")
    return sae.home


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "all"])
@pytest.mark.parametrize("command", ["eval", "sparsity", "geometry"])
def test_a_measurement_is_the_json_of_its_command(sae, home, capsys, command, split):
    function = saecli.evaluate if command == "eval" else getattr(saecli, command)
    printed = sae(command, "first", "--split", split, "--json").json
    expected = printed["runs"][0] if command != "geometry" else printed
    assert function("first", split=split, home=home) == expected
    first, store = saecli.load_sae("first", home=home), saecli.open_store("rows", home=home)
    for rows in (store, store.split(split)):
        result = function(first, rows, split=split)
        assert {**result, "run": "first"} == expected
        assert result["run"] == "sae"
    if command != "geometry":
        array = np.concatenate(list(store.split(split).sequential(512)))
        result = function(first, array)
        assert (result["data"], result["split"]) == (None, None)
        named = {"run", "data", "split"}  # and massive rows, which are told by a store's norms
        named |= {"massive_rows", "massive_variance", "ordinary_fvu"} & expected.keys()
        assert result | {name: expected[name] for name in named} == expected
        assert "massive_rows" not in result
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize("act", [TopK(3), Relu()], ids=lambda act: act.name)
def test_strides_of_an_sae_change_no_bit_of_its_measures(act: Activation) -> None:
    for d_in in (D, 24):
        rows = np.random.default_rng(d_in).standard_normal((50, d_in), np.float32)
        strided = random_sae(act, d_in)
        plain = strided.changed(W_enc=strided.W_enc.contiguous(), W_dec=strided.W_dec.contiguous())
        W_enc, W_dec = (weights.T.contiguous().T for weights in (plain.W_enc, plain.W_dec))
        strided = plain.changed(W_enc=W_enc, W_dec=W_dec)
        assert saecli.evaluate(strided, rows) == saecli.evaluate(plain, rows)
    fitted = saecli.fit(rows, d_sae=32, epochs=1)
    assert all(tensor.is_contiguous() for tensor in fitted.tensors().values())


def test_several_saes_are_compared_as_by_the_command(sae: CommandLine, home: Path) -> None:
    result = saecli.evaluate(["first", "second"], home=home)
    assert result == sae("eval", "first", "second", "--json").json["runs"]
    assert saecli.evaluate(home=home) == result[1]  # the newest


def test_progress_says_on_stderr_what_was_chosen(home: Path, capsys: pytest.CaptureFixture[str]):
    saecli.sparsity(home=home, progress=True)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", "using the newest run, second")


def test_a_report_of_an_sae_in_memory_matches_its_runs(sae: CommandLine, tmp_path: Path) -> None:
    _, mine = make_text_run(sae.home, str(save_word_model(tmp_path / "model")))
    chosen = "report run --latent 3 --latent 5 --latent 6 --json --out"
    printed = sae(chosen, tmp_path / "one").json
    store = saecli.open_store("texts", home=sae.home)
    result = saecli.report(mine, tmp_path / "two", store, latents=[3, 5, 6])
    assert (result["measures"], result["pages"]) == (printed["measures"] | {"run": "sae"}, 3)
    one, two = index_of(tmp_path / "one"), index_of(tmp_path / "two")
    assert one["latents"] == two["latents"]
    with pytest.raises(saecli.SaeError, match="expected an empty or a new folder"):
        saecli.report("run", tmp_path / "two", home=sae.home)


def test_an_export_matches_the_commands(sae: CommandLine, home: Path, tmp_path: Path) -> None:
    printed = sae("export", "first", "--to", "saelens", "--out", tmp_path / "one", "--json").json
    said = "wrote relu-topk, negative codes become 0"
    with pytest.warns(UserWarning, match=said):
        exported = saecli.export("first", "saelens", tmp_path / "two", home=home)
    assert exported == printed | {"path": str(tmp_path / "two")}
    loaded = saecli.load_sae("first", home=home)
    with pytest.warns(UserWarning, match=said):
        exported = saecli.export(loaded, "saelens", tmp_path / "three")
    assert exported["files"] == printed["files"]


def test_an_array_is_imported_once_and_listed(sae: CommandLine, home: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "more.npy", some_rows(70))
    store = saecli.import_array(tmp_path / "more.npy", dtype="float16", home=home)
    assert (store.name, store.rows, store.dtype) == ("more", 70, "float16")
    again = sae("import", tmp_path / "more.npy", "--dtype", "float16", "--json").json
    assert (again["cached"], again["path"]) == (True, str(store.path))
    assert saecli.list_home(home) == sae("list", "--json").json
    result = saecli.list_home(home, check=True)
    assert (result["stores"][0]["name"], result["problems"]) == ("more", [])


TEXT = "\n\n".join("abcdefghijklmnop"[n % 9 : n % 9 + 7] for n in range(200))


def opened(folder: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(folder)}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """The options of an extraction."""
    (tmp_path / "text.txt").write_text(TEXT)
    where = {"dataset": (str(tmp_path / "text.txt"),), "home": tmp_path}
    return {**where, "layer": 1, "rows": 900, "context": 12, "dtype": "float32"}


def trained(rows: Any) -> SAE:
    return saecli.fit(rows, act="topk", k=4, d_sae=48, steps=30)


def test_an_edited_model_is_measured_itself_and_its_name_is_warned_of(tmp_path, options):
    folder = save_model(tmp_path / "model", "llama")
    named = {"model": str(folder)}
    loaded = opened(folder)
    with torch.no_grad():
        loaded["model"].lm_head.weight.mul_(2)  # which no row shows
    store = saecli.extract(**loaded, name="rows", **options)
    sae = trained(store)
    loaded["model"].train()
    home = {"home": tmp_path}
    measured = saecli.evaluate(sae, "rows", **loaded, **home)
    assert loaded["model"].training
    loaded["model"].eval()
    windows = [*store.split("test").windows()]
    layer = loaded["model"].model.layers[1]
    with torch.no_grad():
        assert_same_effects(measured, effects_by_hooks(loaded["model"], layer, windows, sae))
    with pytest.warns(UserWarning, match="with other weights or hooks: what it computes"):
        other = saecli.evaluate(sae, "rows", **named, **home)
    assert other["kl"] < 0.9 * measured["kl"]
    unedited = opened(folder)
    saecli.extract(**unedited, name="rows-2", **options)
    assert saecli.evaluate(sae, "rows-2", **named, **home)["kl"] == other["kl"]
    with pytest.warns(UserWarning, match="with other weights or hooks: what it computes"):
        saecli.evaluate(sae, "rows-2", **loaded, **home)


def test_a_hooked_model_is_not_the_one_without(tmp_path: Path, options: dict[str, Any]):
    loaded = opened(save_model(tmp_path / "model", "llama"))
    sae = trained(saecli.extract(**loaded, name="rows", **options))
    layer = loaded["model"].model.layers[0]
    for hook in (
        layer.register_forward_hook(lambda module, args, output: 1.5 * output),
        layer.register_forward_pre_hook(lambda module, args: (1.5 * args[0], *args[1:])),
    ):
        with pytest.raises(saecli.SaeError, match="named 'rows' already, made from something else"):
            saecli.extract(**loaded, name="rows", **options)
        with pytest.warns(UserWarning, match="with other weights or hooks"):
            saecli.evaluate(sae, "rows", **loaded, home=tmp_path)
        hook.remove()
    with torch.no_grad():  # hooks of transformers, which take notes, stay
        loaded["model"](torch.arange(5)[None], output_hidden_states=True, output_attentions=True)
    saecli.evaluate(sae, "rows", **loaded, home=tmp_path)
    saecli.extract(**loaded, name="rows", **options)
    with torch.no_grad():
        loaded["model"].lm_head.weight.mul_(2)
    reported = saecli.report(sae, tmp_path / "page", "rows", **loaded, home=tmp_path)
    assert any("with other weights or hooks" in note for note in reported["notes"])


def test_a_model_in_another_precision_or_folder_is_the_same_model(tmp_path, options):
    folder = save_model(tmp_path / "model", "llama")
    loaded, home = opened(folder), {"home": tmp_path}
    loaded["model"].to(torch.bfloat16)
    sae = trained(saecli.extract(**loaded, name="half", **options))
    saecli.extract(str(folder), name="named", **options)
    for file in folder.iterdir():
        file.touch()
    copied = shutil.copytree(folder, tmp_path / "copied")
    for rows, model in product(("half", "named"), (folder, copied)):  # warnings are errors
        saecli.evaluate(sae, rows, model=str(model), **home)
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"1234")
    for rows in ("half", "named"):
        with pytest.warns(UserWarning, match=f"came from {folder}, and is run through {copied}"):
            saecli.evaluate(sae, rows, model=str(copied), **home)


def test_measures_of_a_loaded_model_are_those_of_its_name(tmp_path: Path, options: dict[str, Any]):
    folder = save_model(tmp_path / "model", "llama")
    loaded, named, home = opened(folder), {"model": str(folder)}, {"home": tmp_path}
    sae = trained(saecli.extract(**loaded, name="rows", **options))
    for measure in (
        lambda **given: saecli.read(sae, "abcabc", **given, **home),
        lambda **given: saecli.steer(sae, 3, "abc", scale=9.0, max_new_tokens=3, **given, **home),
    ):
        ours, theirs = measure(**loaded), measure(**named)
        assert ours.pop("model") == theirs.pop("model") == str(folder)
        assert ours == theirs
    for name, given in (("ours", loaded), ("theirs", named)):
        saecli.report(sae, tmp_path / name, "rows", **given, **home)
    ours, theirs = ((tmp_path / name / "index.html").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs


def test_a_crosscoder_of_two_loaded_models_is_measured_in_each(tmp_path, options):
    folders = [save_model(tmp_path / name, "llama") for name in ("base", "chat")]
    loaded = [opened(folder) for folder in folders]
    tokenizer, models = loaded[0]["tokenizer"], [each["model"] for each in loaded]
    with torch.no_grad():
        models[1].model.norm.weight.mul_(3)
    stores = saecli.extract(models, tokenizer=tokenizer, name="rows", **options)
    joined = saecli.join(*stores)
    sae = trained(joined)
    measured = saecli.evaluate(sae, joined, model=models, tokenizer=tokenizer, home=tmp_path)
    kl = [point["kl"] for point in measured["hook_points"]]
    assert np.isfinite(kl).all() and kl[0] != kl[1]
    steered = {"scale": 3.0, "max_new_tokens": 2, "home": tmp_path, "tokenizer": tokenizer}
    assert saecli.steer(sae, 1, "abc", model=models[1], **steered)["model"] == str(folders[1])


CALLS = {
    "evaluate": lambda sae, **given: saecli.evaluate(sae, "rows", **given),
    "read": lambda sae, **given: saecli.read(sae, "abc", **given),
    "steer": lambda sae, **given: saecli.steer(sae, 1, "abc", **given),
    "report": lambda sae, **given: saecli.report(sae, given["home"] / "page", "rows", **given),
    "probe": lambda sae, **given: saecli.probe(sae, **given),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_loaded_model_lacks_is_refused_in_one_sentence(tmp_path, options, call):
    loaded = opened(save_model(tmp_path / "model", "llama"))
    sae = trained(saecli.extract(**loaded, name="rows", **options))
    for given, sentence in (
        ({"model": loaded["model"]}, "tokenizer must be the loaded model's, got NoneType"),
        ({"model": "tiny-gemma2", "tokenizer": loaded["tokenizer"]}, "does nothing with tiny-"),
        ({"tokenizer": loaded["tokenizer"]}, "tokenizer does nothing without a loaded model"),
        ({**loaded, "model": torch.nn.Linear(2, 2)}, "must be one of transformers, loaded"),
    ):
        with pytest.raises(saecli.SaeError, match=sentence):
            CALLS[call](sae, **given, home=tmp_path)
