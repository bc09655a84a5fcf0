"""Sets of transcoders, one for each layer: trained by one command."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, assert_same_weights, make_store, some_rows
from tiny_models import LAYERS, save_model

import saecli

LENGTH = 15
TRAIN = "train --each --solver sgd --act batchtopk --k 4 --d-sae 32 --steps 30 --batch-size 64"
PAIRS = ("--data", "m-l*-mlp_in", "--target", "m-l*-mlp_out", "--name", "t")
SET = [f"t-m-l{layer}-mlp_in" for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    home, draw = tmp_path_factory.mktemp("home"), np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(97, 157, LENGTH))) for _ in range(250)]
    path = home / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"dataset": str(path), "context": LENGTH + 1, "dtype": "float32", "home": home}
    saecli.extract(str(model), layer="all", site=["mlp_in", "mlp_out"], name="m", **options)
    return home


@pytest.fixture
def home(sae: CommandLine, stores: Path) -> Path:
    shutil.copytree(stores, sae.home, dirs_exist_ok=True)
    return sae.home


def test_each_transcoder_of_a_set_is_that_of_its_two_stores_alone(sae, home):
    done = sae(TRAIN, *PAIRS, "--json")
    assert done.status == 0, done.err
    runs = done.json["runs"]
    assert [run["run"] for run in runs] == SET
    assert [run["data"] for run in runs] == [
        f"m-l{layer}-mlp_in -> m-l{layer}-mlp_out" for layer in range(LAYERS)
    ]
    alone = TRAIN.replace(" --each", "")
    sae(f"{alone} --data m-l1-mlp_in --target m-l1-mlp_out --name alone")
    assert_same_weights(home, SET[1], "alone")
    again = sae(TRAIN, *PAIRS)
    assert all(f"{name}: finished already" in again.err for name in SET)


@pytest.mark.parametrize(
    ("data", "target", "sentence"),
    [
        ("m-l*-mlp_in", "m-l0-mlp_out", "--target lacks layers 1, 2:"),
        ("m-l[1-9]-mlp_in", "m-l*-mlp_out", "--data lacks layer 0:"),
        ("m-l0-*", "m-l0-mlp_out", "two stores of layer 0, m-l0-mlp_in and m-l0-mlp_out"),
        ("bare", "m-l0-mlp_out", "bare, which records no layer"),
        ("m-l0-mlp_in", "fewer-l0", "not row for row the same tokens"),
        ("m-l0-mlp_in", "none-*", "no activation store matches 'none-*'"),
    ],
)
def test_stores_that_are_no_pairs_are_refused_in_a_sentence(
    sae, home, model, data, target, sentence
):
    make_store(home, "bare", some_rows(100))
    options = {"dataset": str(home / "text.jsonl"), "context": LENGTH + 1, "dtype": "float32"}
    saecli.extract(
        str(model), layer=0, site="mlp_out", name="fewer-l0", rows=90, home=home, **options
    )
    done = sae(TRAIN, "--data", data, "--target", target)
    assert done.status in (1, 2) and sentence in done.err, done.err
    assert not (home / "runs").exists() or not [*(home / "runs").glob("[!.]*")]
