"""Sets of transcoders, one for each layer: trained, exported, pushed, and evaluated at once."""

import gzip
import json
import shutil
import sys
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from homes import (
    CommandLine,
    after_commands,
    assert_same_weights,
    fvu,
    make_run,
    make_store,
    some_rows,
    weights,
    with_origin,
)
from launching import captured
from model_hub import ModelHub
from plain_hooks import all_replaced, but_first
from safetensors.torch import load_file
from tiny_models import LAYERS, WIDTH, save_model
from torch.nn import functional
from transformers import LlamaForCausalLM
from tuning import LENGTH, written_texts

import saecli
from saecli.sae.activations import Activation, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import save_native

TRAIN = "train --each --solver sgd --act batchtopk --k 4 --d-sae 32 --steps 30 --batch-size 64"
PAIRS = ("--data", "m-l*-mlp_in", "--target", "m-l*-mlp_out", "--name", "t")
SET = [f"t-m-l{layer}-mlp_in" for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    home = tmp_path_factory.mktemp("home")
    options = written_texts(home / "text.jsonl")
    sites = ["mlp_in", "mlp_out"]
    saecli.extract(str(model), layer="all", site=sites, name="m", home=home, **options)
    return home


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, stores: Path) -> Path:
    """The stores with the set `t-*`."""
    home = shutil.copytree(stores, tmp_path_factory.mktemp("trained") / "home")
    return after_commands(home, " ".join([TRAIN, *PAIRS]))


@pytest.fixture
def set_home(sae: CommandLine, trained: Path) -> Path:
    return shutil.copytree(trained, sae.home)


@pytest.fixture
def home(sae: CommandLine, stores: Path) -> Path:
    shutil.copytree(stores, sae.home, dirs_exist_ok=True)
    return sae.home


def test_each_transcoder_of_a_set_is_that_of_its_two_stores_alone(sae, home):
    done = sae(TRAIN, *PAIRS, "--json")
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
        ("m-l*-mlp_in", "m-l0-mlp_out", "layers [0, 1, 2] and [0]"),
        ("m-l[1-9]-mlp_in", "m-l*-mlp_out", "layers [1, 2] and [0, 1, 2]"),
        ("m-l0-*", "m-l0-mlp_out", "layers [0, 0] and [0]"),
        ("bare", "m-l0-mlp_out", "layers [None] and [0]"),
        ("m-l0-mlp_in", "fewer-l0", "not row for row the same tokens"),
        ("m-l0-mlp_in", "none-*", "no activation store matches 'none-*'"),
    ],
)
def test_stores_that_are_no_pairs_are_refused(sae, home, model, data, target, sentence):
    make_store(home, "bare", some_rows(100))
    options = {"dataset": str(home / "text.jsonl"), "context": LENGTH + 1, "dtype": "float32"}
    options |= {"layer": 0, "site": "mlp_out", "name": "fewer-l0", "rows": 90, "home": home}
    saecli.extract(str(model), **options)
    done = sae(TRAIN, "--data", data, "--target", target)
    assert done.status in (1, 2) and sentence in done.err, done.err
    assert not (home / "runs").exists() or not [*(home / "runs").glob("[!.]*")]


def make_set(home: Path, model: str, activation: Activation, **changes: dict[int, dict]) -> None:
    """Runs `r-0`, `r-1`, ... of random transcoders; `changes` by layer: `layers` of origins, `d_sae`, `skip`, `act`."""
    for layer in range(LAYERS):
        generator = torch.Generator().manual_seed(layer)
        width = changes.get("d_sae", {}).get(layer, 20)
        shapes = ((WIDTH, width), (width,), (width, WIDTH), (WIDTH,))
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        parameters = {name: start + 1 for name, start in activation.parameters(width).items()}
        skip = torch.ones(WIDTH, WIDTH) if layer in changes.get("skip", {}) else None
        act = changes.get("act", {}).get(layer, activation)
        sae = SAE(*tensors, act, parameters, W_skip=skip)
        origin = {"model": model, "layer": layer, "site": "mlp_in"}
        origin |= {"target_layer": layer, "target_site": "mlp_out"}
        folder = make_run(home, f"r-{layer}", sae, data="m-l0-mlp_in")
        save_native(with_origin(sae, origin | changes.get("layers", {}).get(layer, {})), folder)


def test_a_set_is_one_folder_of_all_layers_that_reads_as_the_runs(sae, home, model, tmp_path):
    assert sae(TRAIN, *PAIRS, "--skip").status == 0
    done = sae("export", "t-*", "--to", "circuit-tracer", "--out", tmp_path / "set", "--json")
    assert [run["run"] for run in done.json["runs"]] == SET
    names = [f"layer_{layer}.safetensors" for layer in range(LAYERS)]
    assert done.json["files"] == ["config.yaml", *names]
    assert yaml.safe_load((tmp_path / "set" / "config.yaml").read_text()) == {
        "model_name": model.name,  # without its folder
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out",
    }
    x = torch.from_numpy(some_rows(50, WIDTH))
    for name, file in zip(SET, names, strict=True):
        tensors, own = load_file(tmp_path / "set" / file), weights(home, name)
        assert torch.equal(tensors["W_enc"], own["W_enc"].T)
        assert torch.equal(tensors["W_dec"], own["W_dec"])
        assert torch.equal(tensors["W_skip"], own["W_skip"].T)
        assert tensors["activation_function.threshold"].shape == (32,)
        again = saecli.load_sae(tmp_path / "set" / file)
        torch.testing.assert_close(again(x), saecli.load_sae(name, home)(x))


def test_topk_names_its_k(sae, home, model, tmp_path):
    make_set(home, str(model), TopK(k=3))
    sae("export", "r-*", "--to", "circuit-tracer", "--out", tmp_path / "set").succeeds()
    config = yaml.safe_load((tmp_path / "set" / "config.yaml").read_text())
    assert (config["activation"], config["k"]) == ("topk", 3)
    x = torch.from_numpy(some_rows(50, WIDTH))
    again = saecli.load_sae(tmp_path / "set" / "layer_2.safetensors")
    torch.testing.assert_close(again.encode(x), saecli.load_sae("r-2", home).encode(x))


@pytest.mark.parametrize(
    ("runs", "changes", "sentence"),
    [
        ("r-[12]", {}, "from 0 on, once each: got layers [1, 2]"),
        ("r-*", {"layers": {1: {"layer": 0, "target_layer": 0}}}, "got layers [0, 0, 2]"),
        ("r-*", {"layers": {2: {"site": "resid_pre"}}}, "layer 0 in feature_input_hook"),
        ("r-*", {"layers": {1: {"model": None}}}, "layer 0 in model_name"),
        ("r-*", {"d_sae": {2: 30}}, "layer 2 differs from layer 0 in d_sae"),
        ("r-*", {"skip": {1: True}}, "layer 0 in skip"),
        ("r-*", {"act": {1: TopK(k=3)}}, "layer 0 in activation, k"),
    ],
)
def test_what_is_no_set_is_refused(sae, home, model, tmp_path, runs, changes, sentence):
    make_set(home, str(model), Relu(), **changes)
    sae("export", runs, "--to", "circuit-tracer", "--out", tmp_path / "out").fails(1, sentence)
    assert not (tmp_path / "out").exists()


def test_other_formats_have_one_sae_in_a_folder(sae, home, model, tmp_path):
    make_set(home, str(model), Relu())
    done = sae("export", "r-*", "--to", "saelens", "--out", tmp_path / "out")
    done.fails(2, f"saelens has one SAE in a folder, got {LAYERS}")
    assert "native has one SAE" in sae("push", "r-*", "someone/saes", "--format", "native").err


@pytest.mark.slow
def test_a_sets_example_texts_are_where_circuit_tracer_looks(sae, set_home, model, tmp_path):
    sae("export", "t-*", "--to", "circuit-tracer", "--out", tmp_path / "set")
    script = Path(__file__).parents[2] / "examples" / "tracer_features.py"
    graphs = tmp_path / "graphs"
    words = ["t-*", tmp_path / "set", "--model", model, "--local", graphs, "--home", set_home]
    captured([sys.executable, script, *words], check=True)
    assert yaml.safe_load((tmp_path / "set" / "config.yaml").read_text())["scan"].startswith("./")
    index = json.loads(gzip.decompress((tmp_path / "set/features/index.json.gz").read_bytes()))
    assert [*index] == [*map(str, range(LAYERS))]
    store = saecli.open_store("m-l1-mlp_in", set_home).split("all")
    (rows,) = store.sequential(100_000)
    codes = saecli.load_sae(SET[1], set_home).encode(torch.from_numpy(rows.copy()))
    content, offsets = (tmp_path / "set/features/layer_1.bin").read_bytes(), index["1"]["offsets"]
    assert len(offsets) == 33 and offsets[-1] == len(content)
    for latent, (start, end) in enumerate(pairwise(offsets)):
        assert int.from_bytes(content[start : start + 4], "little") == end - start - 4
        document = json.loads(zlib.decompress(content[start + 4 : end]))
        pair = (1 + latent) * (2 + latent) // 2 + latent  # Cantor's
        assert json.loads((graphs / f"features/{pair}.json").read_text()) == document
        largest = codes[:, latent].max().item()
        assert document["act_max"] == pytest.approx(largest, rel=1e-5)
        best = document["examples_quantiles"][0]["examples"]
        assert len(best[0]["tokens"]) == len(best[0]["tokens_acts_list"])
        assert best[0]["tokens_acts_list"][best[0]["train_token_ind"]] == pytest.approx(largest)
        frequency = (codes[:, latent] != 0).double().mean().item()
        assert document["activation_frequency"] == pytest.approx(frequency)
        assert sum(document["histogram"]) == (codes[:, latent] != 0).sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_set_is_pushed_into_one_folder_with_a_row_for_each_layer(sae, set_home, hub: ModelHub):
    done = sae("push", "t-*", "someone/saes", "--json")
    assert (done.json["folder"], done.json["format"]) == ("set", "circuit-tracer")
    assert [run["run"] for run in done.json["runs"]] == SET
    files = hub.repos["someone/saes"].files
    own = {name.removeprefix("set/") for name in files if name.startswith("set/")}
    layers = {f"layer_{layer}.safetensors" for layer in range(LAYERS)}
    assert own == {"README.md", "config.yaml"} | layers
    card = files["set/README.md"].decode()
    fvu = [f"{run['measures']['fvu']:.4g}" for run in done.json["runs"]]
    rows = [line for line in card.splitlines() if "batchtopk" in line]
    assert len(rows) == LAYERS and all(f"| {x} |" in row for x, row in zip(fvu, rows, strict=True))
    assert 'load_transcoder_from_hub("someone/saes/set")' in card
    words = ("--data", "m-l2-mlp_in", "--target", "m-l2-mlp_out", "--json")
    (measured,) = sae("eval", "someone/saes/set/layer_2.safetensors", *words).json["runs"]
    assert measured["fvu"] == pytest.approx(done.json["runs"][2]["measures"]["fvu"], rel=1e-5)


def expected_together(model: Path, runs: list[SAE], texts: list[list[int]], own: str) -> dict:
    """By hooks of plain transformers: cross-entropies, KL, and each run's two errors, on all tokens but BOS; `own` is
    the module of each layer that its run reads and replaces, `mlp` or all of the layer."""
    llama = LlamaForCausalLM.from_pretrained(model)
    modules = [block.mlp if own == "mlp" else block for block in llama.model.layers]
    ids = torch.tensor(texts)

    def run(replace: Callable) -> tuple[torch.Tensor, list]:
        with torch.no_grad(), all_replaced(modules, replace) as seen:
            return llama(input_ids=ids).logits.log_softmax(-1), seen

    def ce(log_p: torch.Tensor) -> float:
        return functional.nll_loss(log_p[:, 1:-1].flatten(0, 1), ids[:, 2:].flatten()).item()

    clean, rows = run(lambda number, x, y: y)
    means = [y[:, 1:].mean((0, 1)) for _, y, _ in rows]
    spliced, changed = run(lambda n, x, y: but_first(y, runs[n](x if own == "mlp" else y)))
    clean_rows, y, y_hat = (
        [part[:, 1:].flatten(0, 1) for part in parts]
        for parts in ([y for _, y, _ in rows], *([own[at] for own in changed] for at in (1, 2)))
    )
    return {
        "ce_clean": ce(clean),
        "ce_spliced": ce(spliced),
        "ce_zero": ce(run(lambda number, x, y: torch.zeros_like(y))[0]),
        "ce_mean": ce(run(lambda number, x, y: but_first(y, means[number].expand_as(y)))[0]),
        "kl": (clean.exp() * (clean - spliced)).sum(-1)[:, 1:].mean().item(),
        "fvu_spliced": [*map(fvu, y_hat, y)],
        "fvu_clean": [*map(fvu, y_hat, clean_rows)],
    }


@pytest.mark.parametrize("own", [pytest.param("mlp", marks=pytest.mark.slow), "block"])
def test_a_set_spliced_at_once_is_that_of_hooks_on_every_layer(sae, home, model, own):
    if own == "mlp":
        assert sae(TRAIN, *PAIRS, "--skip").status == 0
    else:
        text = {"dataset": str(home / "text.jsonl"), "context": LENGTH + 1, "dtype": "float32"}
        saecli.extract(str(model), layer="all", site=["resid_post"], name="m", home=home, **text)
        assert sae(TRAIN, "--data", "m-l*-resid_post", "--name", "t").status == 0
    done = sae("eval", "t-*", "--model", model, "--together", "--split", "all", "--json")
    assert "different rows" not in done.err
    effect = done.json["together"]
    store = saecli.open_store(home / "activations" / "m-l0-mlp_in").split("all")
    texts = [token_ids.tolist() for token_ids, _ in store.windows()]
    names = [run["run"] for run in done.json["runs"]]
    assert [run["run"] for run in effect["runs"]] == names and "kl" not in done.json["runs"][0]
    expected = expected_together(model, [saecli.load_sae(name, home) for name in names], texts, own)
    for name in ("fvu_spliced", "fvu_clean"):
        found = [run[name] for run in effect["runs"]]
        assert found == pytest.approx(expected.pop(name), rel=1e-3), name
    assert effect["tokens"] == store.rows
    for name, value in expected.items():
        assert effect[name] == pytest.approx(value, rel=1e-3), name
    rise, left = (effect[name] - effect["ce_clean"] for name in ("ce_zero", "ce_spliced"))
    assert effect["ce_recovered"] == (pytest.approx(1 - left / rise) if rise > 0 else None)
    # Exact where nothing before it is replaced.
    (first,) = (run for run in done.json["runs"] if run["run"] == names[0])
    assert effect["runs"][0]["fvu_clean"] == pytest.approx(first["fvu"], rel=1e-3)
    shown = sae("eval", "t-*", "--model", model, "--together", "--split", "all").out
    assert f"all {LAYERS} runs at once" in shown and "fvu spliced" in shown


def test_runs_that_cannot_be_spliced_at_once_are_refused_in_a_sentence(sae, home, model):
    make_set(home, str(model), Relu(), layers={1: {"layer": 0, "target_layer": 0}})
    words = ("--model", model, "--together", "--data", "m-l0-mlp_in", "--target", "m-l0-mlp_out")
    sae("eval", "r-[01]", *words).fails(2, "r-0 and r-1 both replace layer 0, mlp_out")
    assert "--together does nothing without --model" in sae("eval", "r-0", "--together").err
