"""What a new user tries in the first hour, in Python and in a shell, and what a first mistake is answered with."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from homes import CommandLine, fvu, make_run, make_store, same, some_rows
from launching import captured

import saecli
from saecli.base.errors import ConfigError
from saecli.cli import demo


def test_what_is_missing_is_told_without_loading_torch(tmp_path: Path):
    no_store = "no activation store in home/activations yet; make one with `sae extract`"
    no_run = "no run in home/runs yet; make one with `sae train`"
    sentences = {"train": no_store, "eval": no_run, "geometry": no_run, "steer": no_run}
    sentences |= dict.fromkeys(("export --to saelens", "read --prompt a"), no_run)
    sentences["export --out there --to saelens"] = no_run
    code = (
        f"import sys\nfrom saecli.cli.main import main\nfor line in {[*sentences]}:\n"
        "    sys.argv = ['sae', '--home', 'home', *line.split()]\n"
        "    try:\n        main()\n    except SystemExit as end:\n"
        "        print('ended', end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = captured([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"NO_COLOR": "1"})
    *told, rest = re.split(r"ended [12] False\n", done.stderr)
    assert rest == done.stdout == ""
    for said, sentence in zip(told, sentences.values(), strict=True):
        assert sentence in said


def test_a_model_whose_forward_pass_fails_is_named(sae: CommandLine):
    mlp = "transformers.models.gemma2.modeling_gemma2.Gemma2MLP"
    sae.monkeypatch.setattr(f"{mlp}.forward", lambda self, x: x @ torch.zeros(3, 3))
    done = sae("extract --model tiny-gemma2 --dataset stdlib-docs --rows 100")
    said = "its forward pass failed with RuntimeError: mat1 and mat2"
    done.fails(1, f"tiny-gemma2 cannot run on these tokens: {said}")


@pytest.mark.slow
def test_stores_are_taken_by_name_from_python(sae: CommandLine):
    sae.monkeypatch.setenv("SAE_HOME", str(sae.home))
    make_store(sae.home, "rows", some_rows())
    make_store(sae.home, "more", some_rows())
    fitted = saecli.fit("rows", d_sae=16, epochs=1)
    store = saecli.open_store("rows")
    assert torch.equal(fitted.W_enc, saecli.fit(store, d_sae=16, epochs=1).W_enc)
    assert saecli.open_store().name == "more"
    make_run(sae.home, "run", fitted)
    assert same(saecli.load_sae(), saecli.load_sae("run"))
    for opened in (saecli.open_store, saecli.load_sae, saecli.fit):
        with pytest.raises(saecli.SaeError, match="`sae list` shows every"):
            opened("nowhere")
    for stores, words in (((), "takes stores"), (([store, store],), "got a list")):
        with pytest.raises(ConfigError, match=words):
            saecli.join(*stores)
    assert saecli.join("rows").inputs[0].path == store.path
    assert saecli.join("rows", "more").d_in == 16


@pytest.mark.slow
def test_an_l0_below_one_is_not_answered_with_a_larger_weight(sae: CommandLine):
    make_store(sae.home, "rows", some_rows())
    said = sae("train --act relu --d-sae 16 --epochs 2 --sparsity-weight 1e4").err
    assert "lower --sparsity-weight" in said
    assert "raise --sparsity-weight" not in said


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "ROWS", 1500)
    monkeypatch.setattr(demo, "PASSES", dict.fromkeys(demo.PASSES, 1))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.long
@pytest.mark.usefixtures("brief")
def test_demo_runs_the_chain_and_names_its_pictures(sae: CommandLine, tmp_path: Path):
    done = sae("demo --pictures", tmp_path / "pictures").succeeds()
    printed = re.findall(r"^\d+\. .*?\$ sae --home \S+ (\w+)", done.out, re.MULTILINE | re.DOTALL)
    assert printed == ["extract", *["train"] * 6, "eval", "sparsity", "geometry", "list"]
    assert "In short: from a tenth of the rows PAM-SGD's held-out FVU is " in done.out
    named = [Path(path) for path in done.out.partition("pictures:")[2].split()]
    assert all(path.exists() for path in named)
    assert {*(tmp_path / "pictures").iterdir()} < {*named}


def test_the_demo_concludes_from_its_figures():
    sgd = {0.1: 0.3, 0.3: 0.25, 1.0: 0.2}
    said = demo.conclusion(sgd, {0.1: 0.24, 0.3: 0.2, 1.0: 0.19})
    assert "rows PAM-SGD's held-out FVU is 20.0% below SGD's (0.240, 0.300), from all" in said
    assert "from all of them 5.0% below SGD's (0.190, 0.200)" in said
    assert "its exact decoder pays most where rows are few" in said
    worse = demo.conclusion(sgd, {0.1: 0.33, 0.3: 0.2, 1.0: 0.19})
    assert "10.0% above SGD's (0.330, 0.300)" in worse and "pays most" not in worse


def test_from_text_to_an_understood_sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAE_HOME", str(tmp_path))
    store = saecli.extract("tiny-gemma2", layer=2, rows=2000)
    sae = saecli.fit(store, solver="pam-sgd", act="topk", k=16, d_sae=128, steps=100)

    measures = saecli.evaluate(sae, store, model="tiny-gemma2")
    assert measures["l0"] == 16
    assert measures["fvu"] < 0.4
    assert measures["ce_recovered"] > 0.6

    x = torch.from_numpy(next(store.split("test").sequential(100)))
    assert fvu(sae.decode(sae.encode(x)), x) < 0.5

    saecli.save_sae(sae, tmp_path / "mine")
    assert torch.equal(saecli.load_sae(tmp_path / "mine").W_dec, sae.W_dec)
    assert saecli.geometry(sae, data=store)["cells_visited"] > 50
