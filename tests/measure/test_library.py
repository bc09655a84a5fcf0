"""The commands from Python: each function returns what its command prints as JSON, in silence, and takes SAEs and rows
in memory too."""

from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, D, make_run, make_store, random_sae, some_rows
from reports import index_of, make_text_run, save_model

import saecli
from saecli.sae.activations import Activation, Relu, TopK


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
    _, mine = make_text_run(sae.home, str(save_model(tmp_path / "model")))
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
