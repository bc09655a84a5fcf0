"""examples/cross_layer.py: the decoder against lstsq, the set spliced in against plain hooks, and its refusals."""

import json
import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from homes import make_run
from launching import HERE, captured, python_with
from plain_hooks import replaced
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import saecli
from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.model import TINY_GEMMA2
from saecli.sae.activations import Activation, Relu, TopK
from saecli.sae.codes import Codes

ASSETS = Path(saecli.__file__).parent / "assets"
EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))
from cross_layer import LayerSet, export, main, moments_of, on_held_out_rows  # noqa: E402
from cross_layer_decoder import Moments, left_out, solve  # noqa: E402
from cross_layer_descent import Descent  # noqa: E402
from cross_layer_descent import main as main_of_descent  # noqa: E402

LAYERS, ROWS, E, ALPHA = 3, 200, 4, 0.1
SIZES = (5, 3, 6)


def problem() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Codes of each layer, sparse, of different scales and widths, one latent dead; targets far from 0, (N, L, E)."""
    generator = torch.Generator().manual_seed(0)
    codes = [
        10.0**layer * torch.randn(ROWS, size, generator=generator, dtype=torch.float64).relu()
        for layer, size in enumerate(SIZES)
    ]
    codes[1][:, 2] = 0
    mixed = torch.cat(codes, 1).sqrt() @ torch.randn(
        sum(SIZES), LAYERS * E, generator=generator, dtype=torch.float64
    )
    return codes, 100 + mixed.view(ROWS, LAYERS, E)


def collected(codes: list[torch.Tensor], y: torch.Tensor) -> Moments:
    moments = Moments(SIZES, y.mean(0), (y - y.mean(0)).square().sum(0), len(y))
    for block in torch.arange(len(y)).split(64):
        moments.add([Codes(own[block]) for own in codes], y[block])
    return moments


def sources_of(target: int, growth: float) -> range:
    return range(target if math.isinf(growth) else 0, target + 1)


def oracle(
    codes: list[torch.Tensor], y: torch.Tensor, target: int, growth: float, kept: torch.Tensor
) -> torch.Tensor:
    """One layer's predictions by lstsq on the kept rows: codes, ones, and below them the ridge's roots, of all rows."""
    sources = sources_of(target, growth)
    design = torch.cat([*(codes[source] for source in sources), torch.ones(len(y), 1).double()], 1)
    roots = []
    for source in sources:
        scale = (codes[source] - codes[source].mean(0)).square().sum(0).mean()
        distance = target - source
        roots += [(ALPHA * scale * (growth**distance if distance else 1)).sqrt()] * SIZES[source]
    ridge = torch.diag(torch.stack([*roots, torch.zeros(()).double()]))[:-1]
    right = torch.cat([y[kept, target], torch.zeros(len(ridge), E).double()])
    solution = torch.linalg.lstsq(torch.cat([design[kept], ridge]), right, driver="gelsd").solution
    return design @ solution


@pytest.mark.parametrize("growth", [1.0, 4.0, math.inf])
def test_decoders_of_all_layers_are_those_of_one_lstsq_per_layer(growth: float):
    codes, y = problem()
    decoders = solve(collected(codes, y), growth, ALPHA, torch.float64)
    joint = [Codes(own) for own in codes]
    for target in range(LAYERS):
        expected = oracle(codes, y, target, growth, torch.arange(ROWS))
        torch.testing.assert_close(decoders.predict(target, joint), expected)
        assert [*decoders.weights[target]] == [*sources_of(target, growth)]


@pytest.mark.parametrize("growth", [1.0, 4.0])
def test_one_pass_gives_the_leave_one_out_error_of_every_layer(growth: float):
    codes, y = problem()
    measured = left_out(collected(codes, y), ALPHA, growth)
    for target in range(LAYERS):
        errors = []
        for row in range(ROWS):
            kept = torch.arange(ROWS) != row
            y_hat = oracle(codes, y, target, growth, kept)[row]
            errors.append((y_hat - y[row, target]).square().sum().item())
        variance = (y[:, target] - y[:, target].mean(0)).square().sum(1).mean().item()
        assert measured[target] == pytest.approx(np.mean(errors) / variance)


def test_alpha_has_a_lower_leave_one_out_error_than_its_neighbours():
    codes, y = problem()
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moments = collected(codes, y + 5 * noise)
    alpha = solve(moments, 2.0).alpha

    def error(alpha: float) -> float:
        return float(np.mean(left_out(moments, alpha, 2.0)))

    assert error(alpha) < min(error(3 * alpha), error(alpha / 3))
    assert math.log(alpha, 3) == pytest.approx(round(math.log(alpha, 3)))


TRAIN = "train --each --act batchtopk --k 8 --d-sae 64 --steps 60 --name t"
TOKENS, DEPTH, WIDTH = 300, 4, 128
SITES = ["mlp_in", "mlp_out"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with stores of MLP inputs and outputs of all layers of tiny-gemma2, and the set `t-*`."""
    home = tmp_path_factory.mktemp("home")
    for name, rows in (("m", 3000), ("few", 1500)):
        saecli.extract(TINY_GEMMA2, layer="all", site=SITES, rows=rows, name=name, home=home)
    pairs = ["--data", "m-l*-mlp_in", "--target", "m-l*-mlp_out"]
    captured(["sae", "--home", home, *TRAIN.split(), *pairs], env=HERE, check=True)
    return home


def make_set(
    home: Path,
    name: str,
    activation: Activation | None = None,
    model: str = TINY_GEMMA2,
    stores: str = "m",
    **changes: Any,
) -> None:
    """Runs NAME-0, ... as the set `t-*`, with another activation, model, stores or other tensors, once."""
    if (home / "runs" / f"{name}-0").exists():
        return
    for layer in range(DEPTH):
        data, target = (f"{stores}-l{layer}-{site}" for site in SITES)
        made = saecli.load_sae(f"t-m-l{layer}-mlp_in", home).changed(activation, **changes)
        origin = {"model": model, "layer": layer, "site": SITES[0]}
        origin |= {"target_layer": layer, "target_site": SITES[1]}
        make_run(home, f"{name}-{layer}", made, data=data, origin=origin, target=target)


def example(home: Path, *words: str | Path) -> Any:
    command = [sys.executable, EXAMPLES / "cross_layer.py", "--home", home, *words]
    return captured([*command, "--model", TINY_GEMMA2, "--tokens", str(TOKENS)], env=HERE)


def measured(home: Path, *words: str) -> dict[str, Any]:
    path = home / "measures.json"
    done = example(home, *words, "--json", path)
    assert done.returncode == 0, done.stderr
    return {document["decoder"]: document for document in json.loads(path.read_text())}


def plain_kl(home: Path, clt: Path) -> float:
    """KL(clean || spliced) on held-out tokens, by hooks that read the files for circuit-tracer."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / TINY_GEMMA2)
    layers = range(len(model.model.layers))
    files = [load_file(clt / f"W_enc_{layer}.safetensors") for layer in layers]
    decoders = [load_file(clt / f"W_dec_{layer}.safetensors")[f"W_dec_{layer}"] for layer in layers]
    codes: dict[int, torch.Tensor] = {}

    def encode(x: torch.Tensor, layer: int) -> torch.Tensor:
        names = ("W_enc", "b_enc", "threshold")
        W_enc, b_enc, threshold = (files[layer][f"{name}_{layer}"] for name in names)
        pre = x.float() @ W_enc.T + b_enc
        codes[layer] = pre * (pre > threshold)
        return x

    def predict(output: torch.Tensor, layer: int, at_rows: torch.Tensor) -> torch.Tensor:
        parts = [codes[source] @ decoders[source][:, layer - source] for source in range(layer + 1)]
        y_hat = sum(parts) + files[layer][f"b_dec_{layer}"]
        return torch.where(at_rows[None, :, None], y_hat.to(output), output)

    store = saecli.open_store(home / "activations" / "m-l0-mlp_in")
    total, count = 0.0, 0
    for token_ids, is_row in store.split("test").windows():
        ids, at_rows = torch.from_numpy(token_ids)[None], torch.from_numpy(is_row)
        with torch.no_grad(), ExitStack() as hooks:
            clean = model(ids).logits.float().log_softmax(-1)[0, at_rows]
            for layer, block in enumerate(model.model.layers):
                hooks.enter_context(replaced(block.mlp, partial(encode, layer=layer), "in"))
                own = partial(predict, layer=layer, at_rows=at_rows)
                hooks.enter_context(replaced(block.post_feedforward_layernorm, own))
            changed = model(ids).logits.float().log_softmax(-1)[0, at_rows]
        total += (clean.exp() * (clean - changed)).sum().item()
        count += int(at_rows.sum())
        if count >= TOKENS:
            break
    return total / count


@pytest.mark.slow
def test_the_set_across_layers_beats_each_alone_and_reads_as_written(trained: Path, tmp_path: Path):
    clt = tmp_path / "clt"
    by_name = measured(trained, "t-*", "--out", str(clt))
    own, alone, across = by_name.values()
    assert [*by_name] == ["own", "g = inf", "g = 1"]
    words = ["eval", "t-*", "--model", TINY_GEMMA2, "--together", "--tokens", str(TOKENS)]
    evaluated = captured(["sae", "--home", trained, *words, "--json"], env=HERE)
    document = json.loads(evaluated.stdout)
    assert own["kl"] == pytest.approx(document["together"]["kl"], rel=1e-4)
    assert own["fvu"] == pytest.approx([run["fvu"] for run in document["runs"]], rel=1e-3)
    assert own["l0"] == alone["l0"] == across["l0"]
    assert alone["own_fraction"] == pytest.approx([1] * DEPTH)
    for layer, fvu in enumerate(alone["fvu"]):
        data, target = (f"m-l{layer}-{site}" for site in SITES)
        refitted = saecli.refit(f"t-{data}", home=trained)
        again = saecli.evaluate(refitted, data, target=target, home=trained)
        assert fvu == pytest.approx(again["fvu"], rel=1e-2)  # but for its alpha
    assert across["fvu"][0] == pytest.approx(alone["fvu"][0], rel=2e-2)  # but for its alpha
    assert all(less < more for less, more in zip(across["fvu"][1:], alone["fvu"][1:], strict=True))
    assert across["kl"] == pytest.approx(plain_kl(trained, clt), rel=1e-2)  # may be bfloat16
    assert yaml.safe_load((clt / "config.yaml").read_text())["model_kind"] == (
        "cross_layer_transcoder"
    )


@pytest.mark.slow
def test_a_ridge_that_grows_with_distance_moves_the_outputs_to_their_own_codes(trained: Path):
    make_set(trained, "relu", Relu())
    words = [word for growth in ("1", "100", "inf") for word in ("--growth", growth)]
    measures = measured(trained, "relu-*", *words)
    near, middle, far = (
        np.mean(measures[f"g = {growth}"]["own_fraction"][1:]) for growth in ("1", "100", "inf")
    )
    assert near < middle < far == pytest.approx(1)


@pytest.mark.slow
def test_descent_and_closed_form_each_lower_the_error_of_training_rows(trained: Path):
    set_of_runs = LayerSet.of(Home.at(trained), ["t-*"], Silent())
    descent = Descent(replace(set_of_runs, held_out=set_of_runs.training), rounds=8, lr=0.03)
    before = descent.layers()  # with thresholds for k active latents
    moments = moments_of(before, Silent())
    decoders = solve(moments, 1.0, ALPHA)
    for epoch in range(8):
        descent.descend(decoders, moments.variances, epoch)
    after = descent.layers()
    solved = solve(moments_of(after, Silent()), 1.0, ALPHA)
    old, moved, new = (
        on_held_out_rows(layers, own)
        for layers, own in ((before, decoders), (after, decoders), (after, solved))
    )
    assert np.mean(new["fvu"]) < np.mean(moved["fvu"]) < 0.99 * np.mean(old["fvu"])
    assert np.mean([old["l0"], new["l0"]], 1) == pytest.approx(8, rel=0.02)  # k
    loaded = saecli.load_sae("t-m-l0-mlp_in", trained)
    assert torch.equal(before.saes[0].W_enc, loaded.W_enc)  # not changed in place


@pytest.mark.slow
def test_the_script_of_descent_begins_at_the_decoders_in_closed_form(trained, monkeypatch, capsys):
    make_set(trained, "relu", Relu())
    layers = LayerSet.of(Home.at(trained), ["relu-*"], Silent())
    begun = on_held_out_rows(layers, solve(moments_of(layers, Silent()), 1.0))
    words = ["relu-*", "--home", trained, "--model", TINY_GEMMA2, "--tokens", TOKENS]
    words += ["--rounds", 1, "--growth", 1]
    monkeypatch.setattr(sys, "argv", ["cross_layer_descent.py", *map(str, words)])
    main_of_descent()
    *_, first, last = (row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines())
    assert first[:2] == ["1", "0"] and last[:2] == ["1", "1"]
    assert float(first[2]) == pytest.approx(np.mean(begun["fvu"]), rel=1e-3)
    assert float(last[2]) < float(first[2])
    assert float(last[5]) > 0  # KL


@pytest.mark.slow
def test_what_makes_no_cross_layer_set_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch):
    make_set(trained, "topk", TopK(k=8))
    make_set(trained, "skip", W_skip=torch.zeros(WIDTH, WIDTH))
    make_set(trained, "other", model="gpt2")
    make_set(trained, "few", stores="few")
    refusals = {
        "t-m-l1-mlp_in topk-1": "t-m-l1-mlp_in and topk-1 are both of layer 1: expected one run",
        "t-* --growth inf --out new": "expected a finite last --growth, got inf and new",
        "t-m-l1-mlp_in --out new": "each layer from 0 on, once each: got layers [1]",
        "topk-* --out new": "topk-0 has topk; train with --act batchtopk",
        "skip-*": "skip-0 has a skip: expected transcoders that predict from codes alone",
        "t-m-l0* other-1": "expected the same model, got tiny-gemma2 and gpt2",
        "t-m-l0* few-1": "not row for row the same tokens",
        "t-* --growth 0.5": "expected a growth of at least 1, got 0.5",
        "none-*": "no run matches 'none-*'",
    }
    for words, sentence in refusals.items():
        argv = ["cross_layer.py", *words.split(), "--home", str(trained), "--model", TINY_GEMMA2]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            main()
        assert isinstance(stop.value.code, str) and sentence in stop.value.code
    assert not Path("new").exists()


READ = """
import sys
from pathlib import Path
import numpy as np, torch
from circuit_tracer.utils.caching import load_transcoders_from_cache
folder, rows = Path(sys.argv[1]), torch.from_numpy(np.load(sys.argv[2]))
clt, config = load_transcoders_from_cache(folder.name, cache_dir=folder.parent, lazy_decoder=False)
assert (config["feature_input_hook"], config["feature_output_hook"]) == ("mlp.hook_in", "hook_mlp_out")
with torch.no_grad():
    codes = clt.encode(rows)
    np.savez(sys.argv[3], codes=codes.numpy(), y_hat=clt.decode(codes.to_sparse()).numpy())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t", "relu"])
def test_circuit_tracer_reads_the_same_codes_and_y_hat(trained: Path, tmp_path: Path, name: str):
    python = python_with("circuit-tracer")
    make_set(trained, "relu", Relu())
    layers = LayerSet.of(Home.at(trained), [f"{name}-*"], Silent())
    decoders = solve(moments_of(layers, Silent()))
    export(layers, decoders, tmp_path / "clt")
    codes, y = next(layers.blocks(layers.held_out))
    rows = next(layers.held_out.sequential(len(y)))[:, : DEPTH * WIDTH]
    np.save(tmp_path / "rows.npy", rows.reshape(-1, DEPTH, WIDTH).swapaxes(0, 1))
    words = [tmp_path / "clt", tmp_path / "rows.npy", tmp_path / "read.npz"]
    captured([python, "-c", READ, *words], env=HERE, check=True)
    read = np.load(tmp_path / "read.npz")
    for layer, own in enumerate(codes):
        np.testing.assert_allclose(read["codes"][layer], own.dense(), rtol=1e-4, atol=1e-4)
        y_hat = decoders.predict(layer, codes)
        np.testing.assert_allclose(read["y_hat"][layer], y_hat, rtol=1e-4, atol=1e-4)
        assert (y_hat - y[:, layer]).norm() < 0.9 * (y[:, layer] - y[:, layer].mean(0)).norm()
