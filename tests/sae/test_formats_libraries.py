"""SAE formats against the real libraries, each in an environment of its own; `launching` says which.

python -m venv /tmp/saelens && /tmp/saelens/bin/pip install sae-lens==6.54.12
SAECLI_TEST_SAELENS=/tmp/saelens/bin/python pytest -m slow tests/sae/test_formats_libraries.py
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import homes
import numpy as np
import pytest
import torch
from homes import load, with_origin
from launching import captured, python_with
from model_hub import WRITER, serving
from tiny_models import LAYERS, WIDTH, save_model
from transformers import LlamaForCausalLM

from saecli.sae.activations import Activation, BatchTopK, JumpRelu, ReluTopK, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, Format, SavedSAE, save, save_all

pytestmark = pytest.mark.slow
LIBRARIES = ("saelens", "sparsify", "dictionary-learning", "circuit-tracer")  # and their formats
D, E, F, K = 24, 17, 60, 6
ORIGIN = {"model": "gpt2", "layer": 8, "site": "resid_post", "context": 128, "prepend_bos": True}
MLP = homes.MLP | {"layer": 0, "target_layer": 0}
SCRIPTS = Path(__file__).parents[1] / "libraries"


@dataclass(frozen=True)
class Exchange:
    """A folder in which a library has read what this tool wrote, and written SAEs of its own."""

    library: str
    folder: Path
    rows: torch.Tensor
    ours: dict[str, SAE]


def sae_with(kind: type[Activation], width: int = D) -> SAE:
    generator = torch.Generator().manual_seed(1)
    activation = homes.activation_of(kind.name, K)
    shapes = ((D, F), (F,), (F, width), (width,))
    parameters = {
        name: torch.rand(start.shape, generator=generator) * 4
        for name, start in activation.parameters(F).items()
    }
    return SAE(*(torch.randn(size, generator=generator) for size in shapes), activation, parameters)


def transcoders(form: Format) -> dict[str, SAE]:
    """One for each activation that the format can express, with a skip and without."""
    saes = {}
    for kind in form.transcoders:
        plain = sae_with(kind, D if form.one_width else E)
        skip = torch.randn(D, plain.d_out, generator=torch.Generator().manual_seed(3))
        saes[f"transcoder-{kind.name}"] = plain
        saes[f"transcoder-{kind.name}-skip"] = plain.changed(W_skip=skip)
    return saes


@pytest.fixture(scope="module", params=LIBRARIES)
def exchange(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    python = python_with(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "theirs").mkdir()
    rows = torch.randn(500, D, generator=torch.Generator().manual_seed(2))
    rows += torch.linspace(-3, 3, D)
    np.save(folder / "rows.npy", rows.numpy())
    ours = {kind.name: sae_with(kind) for kind in FORMATS[request.param].activations}
    if request.param == "dictionary-learning":  # which has a class of its own for prefixes
        ours["nested"] = sae_with(BatchTopK)
        ours["nested"].prefixes = (7, 20, F)
    ours |= transcoders(FORMATS[request.param])
    for name, sae in ours.items():
        origin = MLP if name.startswith("transcoder") else ORIGIN
        save(with_origin(sae, origin), request.param, folder / "ours" / name)
    if request.param == "circuit-tracer":
        save_all(the_set("gpt2", D), request.param, folder / "ours" / "set")
    script = [f"{request.param.replace('-', '_')}.py"]
    if request.param == "saelens":
        script.append("formats")
    captured([python, *script, folder], cwd=SCRIPTS, check=True)
    return Exchange(request.param, folder, rows, ours)


def the_set(model: str, width: int) -> list[SavedSAE]:
    """A transcoder for each layer, with a skip."""
    saves = []
    for layer in range(LAYERS):
        generator = torch.Generator().manual_seed(layer)
        shapes = ((width, F), (F,), (F, width), (width,), (width, width))
        *tensors, skip = (torch.randn(shape, generator=generator) for shape in shapes)
        sae = SAE(*tensors, JumpRelu(), {"threshold": torch.full((F,), 1.0)}, W_skip=skip)
        saves.append(
            with_origin(sae, MLP | {"model": model, "layer": layer, "target_layer": layer})
        )
    return saves


def assert_agree(x_hat: torch.Tensor, theirs: np.ndarray) -> None:
    assert np.abs(x_hat.numpy() - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_the_library_reconstructs_alike_from_what_is_written_here(exchange: Exchange) -> None:
    assert exchange.ours
    for name, sae in exchange.ours.items():
        with np.load(exchange.folder / "ours" / f"{name}.npz") as theirs:
            assert_agree(sae(exchange.rows), theirs["x_hat"])


def test_circuit_tracer_opens_a_set_with_the_codes_of_each_layer(exchange: Exchange) -> None:
    if exchange.library != "circuit-tracer":
        pytest.skip("others have no sets")
    with np.load(exchange.folder / "ours" / "set.npz") as theirs:
        codes = theirs["codes_of_all"]
    for own, layer in zip(codes, the_set("gpt2", D), strict=True):
        np.testing.assert_allclose(own, layer.sae.encode(exchange.rows).numpy(), atol=1e-4)


@pytest.mark.long
def test_circuit_tracer_attributes_a_prompt_to_the_latents_of_a_set(tmp_path: Path) -> None:
    python, prompt = python_with("circuit-tracer"), "abcdefg"
    model = save_model(tmp_path / "model", "llama")
    config = (
        model / "tokenizer_config.json"
    )  # transformers 4, which circuit-tracer needs, has no such class
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    saves = the_set(str(model), WIDTH)
    save_all(saves, "circuit-tracer", tmp_path / "set")
    words = [python, SCRIPTS / "attribution.py", tmp_path, model, prompt]
    captured(words, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True)
    with np.load(tmp_path / "graph.npz") as arrays:
        graph = dict(arrays)
    llama, x = LlamaForCausalLM.from_pretrained(model), []
    for block in llama.model.layers:
        block.mlp.register_forward_pre_hook(lambda module, args: x.append(args[0][0].detach()))
    llama(input_ids=torch.from_numpy(graph["tokens"])[None])
    codes = torch.stack([saved.sae.encode(rows) for saved, rows in zip(saves, x, strict=True)])
    codes[:, 0] = 0  # as circuit-tracer does, at BOS
    torch.testing.assert_close(torch.from_numpy(graph["codes"]), codes, atol=1e-4, rtol=1e-4)
    layer, position, latent = graph["features"].T
    assert len(layer) == int((codes != 0).sum()) > 100
    np.testing.assert_allclose(graph["activations"], codes[layer, position, latent], atol=1e-4)
    assert np.isfinite(graph["edges"]).all() and graph["edges"].any(1).sum() > len(layer) / 2


@pytest.mark.long
def test_saebench_takes_an_sae_with_unit_decoder_vectors_and_its_reconstructions(tmp_path: Path):
    python = python_with("sae-bench")
    rows = torch.randn(6, 50, D, generator=torch.Generator().manual_seed(2))
    np.save(tmp_path / "rows.npy", rows.numpy())
    saes = {kind.name: sae_with(kind) for kind in (TopK, BatchTopK, JumpRelu)}
    saes["topk"].W_dec[3] = 0
    for name, sae in saes.items():
        save(with_origin(sae, ORIGIN), "native", tmp_path / "runs" / name)
    words = [python, SCRIPTS / "sae_bench.py", tmp_path]
    captured(words, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parents[1])}, check=True)
    for name, sae in saes.items():
        with np.load(tmp_path / f"{name}.npz") as theirs:
            assert_agree(sae(rows), theirs["x_hat"])
            np.testing.assert_array_equal(theirs["decoded"], theirs["x_hat"])
            assert_agree(sae.encode(rows) * sae.W_dec.norm(dim=1), theirs["codes"])
            assert str(theirs["hook"]) == "blocks.8.hook_resid_post"


def test_what_the_library_wrote_reconstructs_alike_here(exchange: Exchange) -> None:
    folders = [path for path in (exchange.folder / "theirs").iterdir() if path.is_dir()]
    assert folders
    for path in folders:
        sae = load(path).sae
        with np.load(path.with_suffix(".npz")) as theirs:
            assert_agree(sae(exchange.rows), theirs["x_hat"])
            assert np.abs(sae.encode(exchange.rows).numpy() - theirs["codes"]).max() < 1e-4
            assert 0 < (theirs["codes"] != 0).mean() < 1


def test_eval_sparsity_and_geometry_take_what_the_library_wrote(exchange, sae):
    homes.make_store(sae.home, "rows", exchange.rows.numpy())
    for path in (exchange.folder / "theirs").iterdir():
        if not path.is_dir():
            continue
        with np.load(path.with_suffix(".npz")) as arrays:
            theirs = dict(arrays)
        x = exchange.rows.numpy().astype(np.float64)
        if load(path).is_transcoder:
            y = x[:, ::-1][:, : theirs["x_hat"].shape[1]]
            homes.make_store(sae.home, path.name, y.astype(np.float32))
            stores = ("--data", "rows", "--target", path.name)
            (measures,) = sae("eval", path, *stores, "--split", "all", "--json").json["runs"]
            expected = ((theirs["x_hat"] - y) ** 2).sum(1).mean() / y.var(0).sum()
            assert measures["fvu"] == pytest.approx(expected, rel=1e-5)
            assert measures["fvu"] == pytest.approx(float(theirs.get("fvu", expected)), rel=1e-5)
            continue
        codes, error, spread = theirs["codes"], theirs["x_hat"] - x, x.var(0).sum()
        (measures,) = sae("eval", path, "--data", "rows", "--split", "all", "--json").json["runs"]
        assert measures["fvu"] == pytest.approx((error**2).sum(1).mean() / spread, rel=1e-5)
        if "fvu" in theirs:  # sparsify's own
            assert measures["fvu"] == pytest.approx(float(theirs["fvu"]), rel=1e-5)
        # dictionary_learning's own, which leaves out the mean error.
        if "frac_variance_explained" in theirs:
            left_out = (error.mean(0) ** 2).sum() / spread
            unexplained = 1 - float(theirs["frac_variance_explained"])
            assert measures["fvu"] - left_out == pytest.approx(unexplained, rel=1e-4)
        assert measures["l0"] == pytest.approx((codes != 0).sum(1).mean(), rel=1e-4)
        (measures,) = sae(f"sparsity {path} --data rows --split all --json").json["runs"]
        assert measures["silent"] == (codes == 0).all(0).sum()
        assert sae(f"geometry {path} --data rows --split all --json").json["rows"] == len(x)


@pytest.mark.parametrize(
    ("library", "activation"),
    [
        ("saelens", BatchTopK(k=4)),
        pytest.param("sparsify", ReluTopK(k=4), marks=pytest.mark.long),
        pytest.param("circuit-tracer", JumpRelu(), marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_pushed_run_loads_from_the_hub_in_the_library_and_here(tmp_path, library, activation):
    python = python_with(library)
    rows, mine = homes.some_rows(), homes.random_sae(activation)
    if library == "circuit-tracer":
        rows, _ = homes.make_transcoder(tmp_path / "home", "first", mine, MLP)
    else:
        homes.make_store(tmp_path / "home", "rows", rows)
        homes.make_run(tmp_path / "home", "first", mine)
    np.save(tmp_path / "rows.npy", rows)
    with serving() as hub:
        environment = hub.environment(tmp_path / "home", HF_TOKEN=WRITER)
        settings = {"env": environment, "cwd": tmp_path}
        use = "geometry someone/saes/first@main --rows 200"
        if library == "circuit-tracer":
            use = "eval someone/saes/first@main --data x --target y"
        for line in (f"push first someone/saes --format {library}", use):
            done = captured([sys.executable, "-m", "saecli", *line.split()], **settings, check=True)
            assert WRITER not in done.stdout + done.stderr
        words = (library, "someone/saes", "first", tmp_path / "rows.npy", tmp_path / "x_hat.npy")
        captured([python, SCRIPTS / "from_hub.py", *words], **settings, check=True)
        card = hub.repos["someone/saes"].files["README.md"].decode()
        assert "sae eval someone/saes/first" in card
    x_hat = mine(torch.from_numpy(rows)).numpy()
    assert np.abs(np.load(tmp_path / "x_hat.npy") - x_hat).max() <= 1e-5 * np.abs(x_hat).max()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(WRITER.encode() in content for content in written)
