"""SAE formats: folders as libraries write them against formulas in float64, round trips, refusals, and commands."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch
import yaml
from homes import (
    MLP,
    CommandLine,
    activation_of,
    crosscoder_of,
    load,
    make_store,
    make_transcoder,
    random_sae,
    with_origin,
)
from published import PLACES, ROWS, WIDE_ROWS, D, E, F, K, Published
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import saecli
from saecli.base.errors import ConfigError, FormatError
from saecli.sae.activations import ACTIVATIONS
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, SavedSAE, recognise, save

X = torch.from_numpy(ROWS).float()
ORIGIN = {"model": "some/model", "layer": 3, "site": "resid_post"}
ORIGIN |= {"context": 128, "prepend_bos": True}
KEPT = {  # fields of an origin that a format keeps; all by default
    "sparsify": (),
    "dictionary-learning": ("model", "layer", "site"),
}
GPT2 = {"model": "gpt2", "layer": 8, "site": "mlp_out", "context": 64, "prepend_bos": False}
GEMMA = {"model": "google/gemma-3-4b-pt", "layer": 17}


def to_mlp(layer: int) -> dict[str, Any]:
    return {"layer": layer, "site": "mlp_in", "target_layer": layer, "target_site": "mlp_out"}


def qwen(folder: Path, name: str) -> Published:
    return published.qwen_scope(folder / name)


def at(write: Callable[..., Published], *args: Any, **settings: Any) -> Callable[[Path], Published]:
    return lambda folder: write(folder, *args, **settings)


SAELENS, SAELENS_5 = published.saelens, published.saelens_5
SPARSIFY, LEARNING = published.sparsify, published.dictionary_learning
CHECKPOINT, CROSSCODER = published.saelens_checkpoint, published.gemma_scope_2_crosscoder
SCOPE2, LLAMA, TRACER = published.gemma_scope_2, published.llama_scope, published.circuit_tracer
TOPK_5 = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}
RELU_5 = {"activation_fn_str": "relu", "normalize_activations": False, "context_size": 128}
RELU_5 |= {"hook_point": "blocks.8.hook_resid_pre", "model_name": "gpt2"}
PRE = {"model": "gpt2", "layer": 8, "site": "resid_pre", "context": 128}
HOOKS = {
    "model_name": "gpt2",
    "hook_name": "blocks.8.ln2.hook_normalized",
    "hook_name_out": "blocks.8.hook_mlp_out",
}
# Those that test_registry.py does not read.
READ: list[tuple[str, Callable[[Path], Published], dict[str, Any]]] = [
    *(
        ("saelens", at(SAELENS, kind, subtract=subtract, apply_b_dec_to_input=subtract), GPT2)
        for kind in ("standard", "gated")
        for subtract in (True, False)
    ),
    ("saelens", at(SAELENS, "jumprelu", subtract=True), GPT2),  # where the configuration is silent
    ("saelens", at(SAELENS, "topk", shift=-6, k=K, apply_b_dec_to_input=False), GPT2),
    ("saelens", at(SAELENS, "topk", k=K, rescale_acts_by_decoder_norm=True, subtract=True), GPT2),
    ("saelens", at(SAELENS, "abstopk", k=K, apply_b_dec_to_input=False), GPT2),
    *(
        (
            "saelens",
            at(SAELENS, f"{kind}transcoder", width, metadata=HOOKS),
            {"model": "gpt2"} | to_mlp(8) | {"site": "ln2.hook_normalized"},
        )
        for kind in ("", "skip_", "jumprelu_", "jumprelu_skip_")
        for width in (D, E)
    ),
    ("saelens", at(SAELENS_5, {"scaling_factor": np.ones(F)}, **RELU_5), PRE),
    ("saelens", at(SAELENS_5, subtract=False, apply_b_dec_to_input=False, **TOPK_5), {}),
    ("saelens", at(SAELENS_5, architecture="gated"), {}),
    *(
        ("saelens", at(CHECKPOINT, factor=factor, widths=widths), {})
        for factor in (None, 0.4)
        for widths in ((), (5, F))
    ),
    *(
        ("sparsify", at(SPARSIFY, transcode, skip), {})
        for transcode, skip in ((False, False), (True, False), (True, True))
    ),
    *(
        ("dictionary-learning", at(LEARNING, name), {"model": "gpt2", "layer": 8})
        for name in ("AutoEncoderNew", "AutoEncoderTopK", "MatryoshkaBatchTopKSAE")
    ),
    *(
        ("gemma-scope-2", at(SCOPE2, "transcoder", affine, width), GEMMA | to_mlp(17))
        for affine in (False, True)
        for width in (D, E)
    ),
    (
        "gemma-scope-2-crosscoder",
        CROSSCODER,
        {"model": "google/gemma-3-270m", "layer": 5, "site": "resid_post"}
        | {"inputs": [{"layer": layer, "site": "resid_post"} for layer in (5, 9, 12)]},
    ),
    ("llama-scope", LLAMA, {"layer": 15, "site": "resid_post"}),
    (
        "llama-scope",
        at(LLAMA, transcodes=True, dtype=torch.bfloat16),
        to_mlp(15) | {"site": "ln2.hook_normalized"},
    ),
    *(
        ("qwen-scope", at(qwen, name=name), {"layer": 5, "site": "resid_post"})
        for name in ("run-k4", "L0_4")
    ),
    *(
        ("circuit-tracer", at(TRACER, kind, skip), {"model": "google/gemma-2-2b"} | to_mlp(5))
        for kind in ("relu", "jumprelu", "topk")
        for skip in (False, True)
    ),
]


@pytest.mark.parametrize(("form", "write", "origin"), READ)
def test_a_folder_is_read_by_its_formula(tmp_path: Path, form: str, write: Callable, origin: dict):
    expected = write(tmp_path)
    saved = load(expected.path)
    assert recognise(expected.path) == form and saved.origin.to_json() == origin
    transcodes = saved.sae.d_out != saved.sae.d_in or "target_layer" in origin
    if form == "sparsify":
        transcodes = json.loads((expected.path / "cfg.json").read_text())["transcode"]
    assert saved.is_transcoder == transcodes
    published.assert_reads(saved.sae, expected)
    assert {tensor.dtype for tensor in saved.sae.tensors().values()} == {torch.float32}


def made(act: str, skip: bool = False, width: int = D) -> SAE:
    arrays = published.weights(width, skip)
    tensors = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
    activation = activation_of(act, K)
    generator = torch.Generator().manual_seed(1)
    learned = {
        name: torch.rand(start.shape, generator=generator)
        for name, start in activation.parameters(F).items()
    }
    return SAE(**tensors, activation=activation, activation_parameters=learned)


KINDS = [(False, False, D), (True, False, D), (True, True, D), (True, True, E)]
CASES = [(name, act, *kind) for name in FORMATS for act in ACTIVATIONS for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "act", "transcodes", "skip", "width"), CASES)
def test_an_sae_comes_back_or_is_refused(tmp_path, name, act, transcodes, skip, width):
    sae, form, origin = made(act, skip, width), FORMATS[name], MLP if transcodes else ORIGIN
    written = ACTIVATIONS["jumprelu" if act == "gated" and name != "native" else act]
    able = form.transcoders if transcodes else form.activations
    if written not in able or (form.one_width and width != D):
        with pytest.raises(FormatError, match=f"^{name} cannot express .*written as .*native"):
            save(with_origin(sae, origin), name, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        return
    save(with_origin(sae, origin), name, tmp_path / "out")
    saved = load(tmp_path / "out")
    assert recognise(tmp_path / "out") == name and saved.is_transcoder == transcodes
    kept = KEPT.get(name, origin)
    assert saved.origin.to_json() == {key: value for key, value in origin.items() if key in kept}
    torch.testing.assert_close(saved.sae(X), sae(X), atol=1e-4, rtol=1e-5)
    if (name, act) != ("dictionary-learning", "relu"):  # whose codes are scaled
        torch.testing.assert_close(saved.sae.encode(X), sae.encode(X), atol=1e-4, rtol=1e-5)
    if name == "native":
        assert saved.sae.activation == sae.activation
        for key, tensor in sae.tensors().items():
            assert torch.equal(saved.sae.tensors()[key], tensor)


def test_a_native_file_has_no_layer_outside_of_blocks(tmp_path: Path) -> None:
    origin = {"model": "gpt2", "site": "transformer.wte:out"}
    save(with_origin(made("relu"), origin), "native", tmp_path)
    with safe_open(tmp_path / "sae.safetensors", "pt") as file:
        assert json.loads(file.metadata()["saecli"])["origin"] == origin


def test_a_transcoder_stays_one_without_hook_points(tmp_path: Path) -> None:
    read = saecli.load_sae(published.sparsify(tmp_path / "theirs", True).path)
    fitted = made("relu")
    fitted.metadata = {"data": "x", "target": "y"}  # stores of imported arrays
    for name, sae in (("read", read), ("fitted", fitted)):
        with pytest.raises(ConfigError, match="is a transcoder"):
            saecli.evaluate(sae, ROWS)
        for form in ("native", "sparsify"):
            saecli.save_sae(sae, tmp_path / name / form, form)
            assert load(tmp_path / name / form).is_transcoder


def text_in(
    write: Callable[[Path], Published], name: str, text: str
) -> Callable[[Path], Published]:
    """The folder with a text in the place of a file."""

    def written(path: Path) -> Published:
        expected = write(path)
        (path / name).write_text(text)
        return expected

    return written


def without(
    write: Callable[[Path], Published], file: str, tensor: str | None = None
) -> Callable[[Path], Published]:
    """The folder without a file, or without one of its tensors."""

    def written(path: Path) -> Published:
        expected = write(path)
        tensors = load_file(path / file) if tensor else {}
        (path / file).unlink()
        if tensor:
            del tensors[tensor]
            save_file(tensors, path / file)
        return expected

    return written


def two_layers(path: Path) -> Published:
    published.circuit_tracer(path)
    return published.circuit_tracer(path, layer=6)


YAML = [
    ("model_kind: cross_layer_transcoder", "model_kind 'cross"),
    ("model_kind: transcoder_set\nactivation: topk", "k must be a valid integer"),
    ("a: &a [1]\nb: *c", "yaml"),
]
REFUSED: list[tuple[Callable[[Path], Published], str]] = [
    (at(SAELENS, architecture="x"), "'x'"),
    (at(SAELENS, "gated", changed={"r_mag": np.ones(F + 1)}), "r_mag"),
    (at(SAELENS, "transcoder", apply_b_dec_to_input=True), "apply_b_dec_to_input True"),
    (at(SAELENS, normalize_activations="layer_norm"), "normalize_activations 'layer_norm'"),
    (at(SAELENS, "topk", k=1000), "1000"),
    (at(SAELENS, "topk"), "k must be a valid integer, got None"),
    (text_in(SAELENS, "cfg.json", '{"metadata": {}}'), "architecture None"),
    (without(SAELENS, "sae_weights.safetensors", "b_dec"), "missing"),
    (at(SAELENS, "transcoder", changed={"W_skip": np.ones((D, D))}), "unexpected"),
    (at(SAELENS, width=E), "expected W_dec of shape"),
    (at(SAELENS, changed={"W_enc": np.ones(D)}), "W_enc"),
    (at(SAELENS, changed={"b_dec": np.full(D, np.nan)}), "finite"),
    (at(SAELENS_5, activation_fn_str="tanh"), "'tanh'"),
    (at(SAELENS_5, normalize_activations=True), "expected_average_only_in"),
    (at(SAELENS_5, {"scaling_factor": np.full(F, 2.0)}), "unexpected"),
    (text_in(SAELENS, "cfg.json", '{"hidden_size": 5}'), "d_in and d_sae"),
    (at(SPARSIFY, transcode=1), "transcode 1"),
    (at(SPARSIFY, skip_connection=True), "skip_connection True"),
    (at(SPARSIFY, signed=True), "signed True"),
    (at(SPARSIFY, True, skip_connection=True), "missing"),
    (text_in(LEARNING, "config.json", '{"trainer": {"dict_class": "CrossCoder"}}'), "'CrossCoder'"),
    (text_in(LEARNING, "ae.pt", "PK\3\4garbage"), "ae.pt"),
    (text_in(published.gemma_scope, "params.npz", ""), "npz"),
    (at(SCOPE2, architecture="topk"), "architecture 'topk'"),
    (at(SCOPE2, type="clt"), "type 'clt'"),
    (at(SCOPE2, type="crosscoder"), "type 'crosscoder'"),
    (without(CROSSCODER, "params_layer_1.safetensors"), "there is no file"),
    (at(CROSSCODER, type="sae"), "type 'sae'"),
    (at(CROSSCODER, hf_hook_point_in="model.layers.{5,9}.output"), "W_dec of shape"),
    (at(CROSSCODER, hf_hook_point_in="model.layers.5.output"), "cannot read"),
    (at(CHECKPOINT, factor=-1.0), "positive factors"),
    (at(CHECKPOINT, widths=(5, 9)), "prefixes that rise to d_sae"),
    (at(CHECKPOINT, k="all"), "cannot read"),
    (at(CHECKPOINT, normalize_activations="covariance_whitening"), "'covariance_whitening'"),
    (at(LLAMA, act_fn="topk"), "act_fn"),
    (at(LLAMA, dataset_average_activation_norm={"in": 1}), "'out'"),
    (text_in(LLAMA, "hyperparams.json", "[" * 9999), "hyper"),
    (at(qwen, name="qwen"), "does not say k"),
    (at(qwen, name="L0_50"), "20"),
    *((at(TRACER, text=text), said) for text, said in YAML),
    (at(TRACER, text="model_kind: transcoder_set\nactivation: gelu"), "activation 'gelu'"),
    (at(TRACER, kind="jumprelu", threshold=-0.5), "thresholds of at least 0, got -0.5"),
    (two_layers, "name one"),
    (at(TRACER, layer="x"), "no SAE found"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "said"), REFUSED)
def test_files_that_cannot_be_expressed_are_refused_in_one_sentence(tmp_path, write, said):
    path = write(tmp_path).path
    with pytest.raises(FormatError) as refused:
        load(path)
    sentence = str(refused.value)
    assert said in sentence and str(tmp_path) in sentence and "\n" not in sentence


def test_hook_points_that_circuit_tracer_cannot_express(tmp_path: Path) -> None:
    for origin, said in (
        (MLP | {"target_layer": 4}, "from layer 3 to layer 4"),
        (MLP | {"site": "self_attn.q_proj:in"}, "cannot name .* input: .* got self_attn.q_proj:in"),
        (MLP | {"target_site": "mlp:out"}, "cannot name .* output: .* got mlp:out"),
        ({"layer": 3}, "without site, target_layer, target_site"),
    ):
        with pytest.raises(FormatError, match=said):
            save(with_origin(made("relu", True), origin), "circuit-tracer", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_names_that_circuit_tracer_asks_for(tmp_path: Path) -> None:
    sae = made("batchtopk", skip=True)
    save(with_origin(sae, MLP), "circuit-tracer", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "layer_3.safetensors")
    names = {"W_enc", "b_enc", "W_dec", "b_dec", "W_skip", "activation_function.threshold"}
    assert tensors.keys() == names and tensors["W_enc"].shape == (F, D)
    assert torch.equal(tensors["W_skip"], sae.W_skip.T)
    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert config == {"model_name": "gpt2", "model_kind": "transcoder_set"} | hooks


def test_dictionary_learning_gets_unit_decoder_rows_even_if_one_is_zero(tmp_path: Path) -> None:
    sae = made("relu")
    sae.W_dec[5] = 0
    save(SavedSAE(sae), "dictionary-learning", tmp_path / "out")
    state = torch.load(tmp_path / "out" / "ae.pt", weights_only=True)
    torch.testing.assert_close(state["decoder.weight"].norm(dim=0), torch.ones(F))
    torch.testing.assert_close(load(tmp_path / "out").sae(X), sae(X), atol=1e-4, rtol=1e-5)


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    class Trace:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "trace",)

    path = published.qwen_scope(tmp_path / "k4").path
    for dump in (torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, 2))):
        dump({"W_enc": Trace()}, path)
        with pytest.raises(FormatError, match=str(path)):
            load(path)
    text = f"run: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'trace'}]\n"
    with pytest.raises(FormatError, match=r"config\.yaml"):
        load(published.circuit_tracer(tmp_path / "yaml", text=text).path)
    assert not (tmp_path / "trace").exists()


def test_a_folder_without_an_sae_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(FormatError, match=r"sae_weights.safetensors \(saelens\).*got model.bin"):
        load(tmp_path)
    with pytest.raises(FormatError, match="got no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(FormatError, match="expected an empty or a new folder"):
        save(SavedSAE(made("relu")), "saelens", tmp_path)
    (tmp_path / "empty").mkdir()
    save(SavedSAE(made("relu")), "saelens", tmp_path / "empty")
    assert recognise(tmp_path / "empty") == "saelens"


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_threshold_that_training_has_not_set_is_a_warning(tmp_path: Path, threshold: float):
    expected = CHECKPOINT(tmp_path / "saelens", threshold)
    LEARNING(tmp_path / "learning", "BatchTopKSAE")
    path = tmp_path / "learning" / "ae.pt"
    torch.save(torch.load(path) | {"threshold": torch.tensor(threshold)}, path)
    for name in ("saelens", "learning"):
        said = rf"{name} has no threshold \({threshold:g}\).*every positive pre-activation fires, not 4 in"
        with pytest.warns(UserWarning, match=said):
            sae = saecli.load_sae(tmp_path / name)
        assert ((sae.encode(X) > 0) == (X @ sae.W_enc + sae.b_enc > 0)).all()
    published.assert_reads(load(expected.path).sae, expected)


def test_a_crosscoder_is_measured_on_its_stores(sae: CommandLine, tmp_path: Path) -> None:
    expected = CROSSCODER(tmp_path / "crosscoder")
    words = []
    for place, columns in enumerate(np.split(WIDE_ROWS.astype(np.float32), PLACES, 1)):
        make_store(sae.home, f"place{place}", columns)
        words += ["--data", f"place{place}"]
    (measures,) = sae("sparsity", expected.path, *words, "--split", "all", "--json").json["runs"]
    deviations = expected.predicted - WIDE_ROWS, WIDE_ROWS - WIDE_ROWS.mean(0)
    errors, spread = ((each**2).sum(0).reshape(PLACES, D).sum(1) for each in deviations)
    fvus = [place["fvu"] for place in measures["places"]]
    assert fvus == pytest.approx(errors / spread, rel=1e-4)
    assert measures["l0"] == pytest.approx((expected.codes != 0).sum(1).mean(), rel=1e-3)


def test_a_crosscoder_cannot_be_written_for_others(tmp_path: Path) -> None:
    sae = crosscoder_of([{"layer": 1, "site": "resid_post"}, {"layer": 2, "site": "resid_post"}])
    with pytest.raises(FormatError, match=r"cannot express a crosscoder.*written as native"):
        save(SavedSAE(sae), "saelens", tmp_path / "out")


@pytest.mark.parametrize("name", ["saelens", "sparsify", "circuit-tracer"])
def test_an_exported_transcoder_is_measured_as_its_run_is(sae, tmp_path, name):
    make_transcoder(sae.home, "run", random_sae().changed(W_skip=torch.eye(8) / 2))
    assert sae("export", "run", "--to", name, "--out", tmp_path / "out").status == 0
    words = ("--data", "x", "--target", "y", "--split", "all", "--json")
    before, after = sae("eval", "run", tmp_path / "out", *words).json["runs"]
    assert after["fvu"] == pytest.approx(before["fvu"], rel=1e-5)
    sae("eval", tmp_path / "out", "--data", "x").fails(2, "is a transcoder")
