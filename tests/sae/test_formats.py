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
from homes import MLP, CommandLine, make_store, make_transcoder, random_sae
from published import PLACES, ROWS, WIDE_ROWS, D, E, F, K, Published
from safetensors.torch import load_file, save_file

from saecli.base.errors import FormatError
from saecli.sae.activations import ACTIVATIONS, Activation, BatchTopK, Gated, JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, SavedSAE, load, recognise, save, stand_in
from saecli.store.split import is_test

X = torch.from_numpy(ROWS).float()
ORIGIN = {
    "model": "some/model",
    "layer": 3,
    "site": "resid_post",
    "context": 128,
    "prepend_bos": True,
}
KEPT = {  # fields of an origin that a format keeps; all by default
    "sparsify": (),
    "dictionary-learning": ("model", "layer", "site"),
    "gemma-scope": (),
    "gemma-scope-2": ("model", "layer", "site", "target_layer", "target_site"),
}
GPT2 = {"model": "gpt2", "layer": 8, "site": "mlp_out", "context": 64, "prepend_bos": False}
GEMMA = {"model": "google/gemma-3-4b-pt", "layer": 17}
QWEN = "SAE-Res-Qwen3-8B-Base-W64K-L0_4"


def to_mlp(layer: int) -> dict[str, Any]:
    return {"layer": layer, "site": "mlp_in", "target_layer": layer, "target_site": "mlp_out"}


def qwen(folder: Path, name: str, **config: Any) -> Published:
    return published.qwen_scope(folder / name, **config)


def at(write: Callable[..., Published], *args: Any, **settings: Any) -> Callable[[Path], Published]:
    return lambda folder: write(folder, *args, **settings)


SAELENS, SPARSIFY, LEARNING, SCOPE2, CROSSCODER, LLAMA, TRACER = (
    published.saelens,
    published.sparsify,
    published.dictionary_learning,
    published.gemma_scope_2,
    published.gemma_scope_2_crosscoder,
    published.llama_scope,
    published.circuit_tracer,
)
HOOKS = {
    "model_name": "gpt2",
    "hook_name": "blocks.8.ln2.hook_normalized",
    "hook_name_out": "blocks.8.hook_mlp_out",
}
READ: list[tuple[str, Callable[[Path], Published], dict[str, Any]]] = [
    *(
        ("saelens", at(SAELENS, kind, subtract=one, apply_b_dec_to_input=one), GPT2)
        for kind in ("standard", "gated")
        for one in (True, False)
    ),
    ("saelens", at(SAELENS, subtract=True), GPT2),  # where the configuration is silent
    ("saelens", at(SAELENS, "jumprelu", subtract=True), GPT2),
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
    (
        "saelens",
        at(
            published.saelens_5,
            {"scaling_factor": np.ones(F)},
            activation_fn_str="relu",
            hook_point="blocks.8.hook_resid_pre",
            model_name="gpt2",
            normalize_activations=False,
            context_size=128,
        ),
        {"model": "gpt2", "layer": 8, "site": "resid_pre", "context": 128},
    ),
    (
        "saelens",
        at(
            published.saelens_5,
            subtract=False,
            architecture="standard",
            activation_fn_str="topk",
            activation_fn_kwargs={"k": K},
            apply_b_dec_to_input=False,
        ),
        {},
    ),
    ("saelens", at(published.saelens_5, {"scaling_factor": np.ones(F)}, architecture="gated"), {}),
    *(
        ("sparsify", at(SPARSIFY, transcode, skip), {})
        for transcode, skip in ((False, False), (True, False), (True, True))
    ),
    *(
        ("dictionary-learning", at(LEARNING, name=name), {"model": "gpt2", "layer": 8})
        for name in (
            "AutoEncoder",
            "AutoEncoderNew",
            "AutoEncoderTopK",
            "BatchTopKSAE",
            "MatryoshkaBatchTopKSAE",
            "JumpReluAutoEncoder",
            "GatedAutoEncoder",
        )
    ),
    (
        "dictionary-learning",
        at(LEARNING, trainer_class="PAnnealTrainer", p_end=0.2),
        {"model": "gpt2", "layer": 8},
    ),
    ("gemma-scope", published.gemma_scope, {}),
    ("gemma-scope-2", SCOPE2, GEMMA | {"site": "resid_post"}),
    *(
        (
            "gemma-scope-2",
            at(SCOPE2, kind="transcoder", affine=affine, width=width),
            GEMMA | to_mlp(17),
        )
        for affine in (False, True)
        for width in (D, E)
    ),
    *(
        (
            "gemma-scope-2",
            at(CROSSCODER, stacked=stacked),
            {"model": "google/gemma-3-270m", "layer": 5, "site": "resid_post"},
        )
        for stacked in (False, True)
    ),
    *(
        (
            "llama-scope",
            at(LLAMA, moved=moved, transcodes=transcodes),
            to_mlp(15) | {"site": "ln2.hook_normalized"}
            if transcodes
            else {"layer": 15, "site": "resid_post"},
        )
        for moved in (False, True)
        for transcodes in (False, True)
    ),
    ("llama-scope", at(LLAMA, dtype=torch.bfloat16), {"layer": 15, "site": "resid_post"}),
    *(
        (
            "qwen-scope",
            at(qwen, name=name),
            ({"model": "Qwen/Qwen3-8B-Base"} if QWEN in name else {})
            | {"layer": 5, "site": "resid_post"},
        )
        for name in (QWEN, "run-k4", "L0_4", f"models--Qwen--{QWEN}/snapshots/0b")
    ),
    (
        "qwen-scope",
        at(qwen, name="run-k7", k=K, base_model="Qwen/Qwen3-1.7B-Base"),
        {"model": "Qwen/Qwen3-1.7B-Base", "layer": 5, "site": "resid_post"},
    ),
    *(
        (
            "circuit-tracer",
            at(TRACER, kind=kind, skip=skip),
            {"model": "google/gemma-2-2b"} | to_mlp(5),
        )
        for kind in ("relu", "jumprelu", "topk")
        for skip in (False, True)
    ),
]


@pytest.mark.parametrize(("form", "write", "origin"), READ)
def test_a_folder_is_read_by_its_formula(
    tmp_path: Path, form: str, write: Callable, origin: dict
) -> None:
    one = write(tmp_path)
    assert 0.02 < (one.codes != 0).mean() < 0.9
    found = load(one.path)
    assert recognise(one.path) == form and found.origin == origin
    assert found.is_transcoder == (
        found.sae.d_out != found.sae.d_in
        or "target_layer" in origin
        or (form == "sparsify" and json.loads((one.path / "cfg.json").read_text())["transcode"])
    )
    x = torch.from_numpy(WIDE_ROWS if found.sae.widths else ROWS).float()
    np.testing.assert_allclose(found.sae.encode(x), one.codes, rtol=1e-4, atol=5e-5)
    assert np.abs(found.sae(x).numpy() - one.predicted).max() < 1e-5 * np.abs(one.predicted).max()
    assert {tensor.dtype for tensor in found.sae.tensors().values()} == {torch.float32}


def made(kind: type[Activation], skip: bool = False, width: int = D) -> SAE:
    w = {
        name: torch.from_numpy(array).float()
        for name, array in published.weights(width, skip).items()
    }
    activation = kind(k=K) if "k" in kind.__dataclass_fields__ else kind()
    generator = torch.Generator().manual_seed(1)
    learned = {
        name: torch.rand(start.shape, generator=generator)
        for name, start in activation.parameters(F).items()
    }
    return SAE(
        w["W_enc"], w["b_enc"], w["W_dec"], w["b_dec"], activation, learned, W_skip=w.get("W_skip")
    )


CASES = [
    (name, kind, transcodes, skip, width)
    for name in FORMATS
    for kind in ACTIVATIONS.values()
    for transcodes, skip, width in (
        (False, False, D),
        (True, False, D),
        (True, True, D),
        (True, True, E),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "transcodes", "skip", "width"), CASES)
def test_an_sae_comes_back_from_a_format_or_is_refused(
    tmp_path: Path, name: str, kind: type[Activation], transcodes: bool, skip: bool, width: int
) -> None:
    sae, form, origin = made(kind, skip, width), FORMATS[name], MLP if transcodes else ORIGIN
    written = JumpRelu if kind is Gated and name != "native" else kind
    if written not in (form.transcoders if transcodes else form.activations) or (
        form.one_width and width != D
    ):
        with pytest.raises(
            FormatError, match=f"^{name} cannot express .*it can be written as .*native"
        ):
            save(SavedSAE(sae, origin), name, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
        return
    save(SavedSAE(sae, origin), name, tmp_path / "out")
    found = load(tmp_path / "out")
    assert recognise(tmp_path / "out") == name and found.is_transcoder == transcodes
    assert found.origin == {
        key: value for key, value in origin.items() if key in KEPT.get(name, origin)
    }
    torch.testing.assert_close(found.sae(X), sae(X), atol=1e-4, rtol=1e-5)
    if (name, kind) != ("dictionary-learning", Relu):  # whose codes are scaled
        torch.testing.assert_close(found.sae.encode(X), sae.encode(X), atol=1e-4, rtol=1e-5)
    if name == "native":
        assert found.sae.activation == sae.activation
        assert all(
            torch.equal(found.sae.tensors()[key], tensor) for key, tensor in sae.tensors().items()
        )


def text_in(
    write: Callable[[Path], Published], name: str, text: str
) -> Callable[[Path], Published]:
    """The folder with a text in the place of a file."""

    def folder(path: Path) -> Published:
        one = write(path)
        (path / name).write_text(text)
        return one

    return folder


def without(
    write: Callable[[Path], Published], file: str, tensor: str | None = None
) -> Callable[[Path], Published]:
    """The folder without a file, or without one of its tensors."""

    def folder(path: Path) -> Published:
        one = write(path)
        tensors = load_file(path / file) if tensor else {}
        (path / file).unlink()
        if tensor:
            save_file({key: value for key, value in tensors.items() if key != tensor}, path / file)
        return one

    return folder


def two_layers(path: Path) -> Published:
    published.circuit_tracer(path)
    return published.circuit_tracer(path, layer=6)


AFFINE, LAYER = at(SCOPE2, kind="transcoder", affine=True), "params_layer_1.safetensors"
YAML = [
    ("model_kind: cross_layer_transcoder", "model_kind 'cross"),
    ("- a\n- b", "expected the keys and values"),
    ("model_kind: transcoder_set\nactivation: topk", "k must be a whole number"),
    ("a: &a [1]\nb: *c", "yaml"),
    ("model_kind: transcoder_set\nactivation: topk\nk: 31", "31"),
    ("model_kind: [transcoder_set]", "model_kind"),
    ('a: "\\U7fffffff"', "config.yaml"),
    ("[" * 100_000, "config.yaml"),
]
REFUSED: list[tuple[Callable[[Path], Published], str]] = [
    (at(SAELENS, architecture="x"), "'x'"),
    (at(SAELENS, "gated", changed={"r_mag": np.ones(F + 1)}), "r_mag"),
    (at(SAELENS, "transcoder", apply_b_dec_to_input=True), "apply_b_dec_to_input True"),
    (at(SAELENS, normalize_activations="layer_norm"), "normalize_activations 'layer_norm'"),
    (at(SAELENS, normalize_activations="expected_average_only_in"), "expected_average_only_in"),
    (at(SAELENS, "topk", k=1000), "1000"),
    (at(SAELENS, "topk"), "k must be a whole number, got None"),
    (without(SAELENS, "sae_weights.safetensors", "b_dec"), "missing"),
    (without(at(SAELENS, "skip_transcoder"), "sae_weights.safetensors", "W_skip"), "missing"),
    (at(SAELENS, "transcoder", changed={"W_skip": np.ones((D, D))}), "unexpected"),
    (at(SAELENS, width=E), "expected W_dec of shape"),
    (at(SAELENS, changed={"b_enc": np.ones(F + 1)}), "b_enc"),
    (at(SAELENS, changed={"W_enc": np.ones(D)}), "W_enc"),
    (at(SAELENS, changed={"b_dec": np.full(D, np.nan)}), "finite"),
    (at(published.saelens_5, activation_fn_str="tanh"), "'tanh'"),
    (at(published.saelens_5, architecture="x"), "'x'"),
    (at(published.saelens_5, normalize_activations=True), "expected_average_only_in"),
    (at(published.saelens_5, activation_fn_str="topk"), "k must be a whole number, got None"),
    (at(published.saelens_5, {"scaling_factor": np.full(F, 2.0)}), "unexpected"),
    (text_in(SAELENS, "cfg.json", '{"hidden_size": 5}'), "d_in and d_sae"),
    (text_in(SAELENS, "cfg.json", "[]"), "cfg"),
    (at(SPARSIFY, transcode=1), "transcode 1"),
    (at(SPARSIFY, skip_connection=True), "skip_connection True"),
    (at(SPARSIFY, activation="groupmax"), "activation 'groupmax'"),
    (at(SPARSIFY, signed=True), "signed True"),
    (at(SPARSIFY, True, skip_connection=True), "missing"),
    (at(SPARSIFY, True, True, skip_connection=False), "unexpected"),
    (text_in(LEARNING, "config.json", '{"trainer": {"dict_class": "CrossCoder"}}'), "'CrossCoder'"),
    (text_in(LEARNING, "config.json", "{}"), "config"),
    (text_in(LEARNING, "ae.pt", ""), "ae.pt"),
    (text_in(LEARNING, "ae.pt", "PK\3\4garbage"), "ae.pt"),
    (text_in(published.gemma_scope, "params.npz", ""), "npz"),
    (at(SCOPE2, architecture="topk"), "architecture 'topk'"),
    (at(SCOPE2, type="clt"), "type 'clt'"),
    (at(SCOPE2, affine_connection=True), "missing"),
    (at(SCOPE2, type="crosscoder"), "each of the 1 layers"),
    (without(AFFINE, "params.safetensors", "threshold"), "missing"),
    (without(AFFINE, "params.safetensors", "affine_skip_connection"), "missing"),
    (without(CROSSCODER, LAYER), "each of the 3 layers"),
    (at(CROSSCODER, type="sae"), "there is no file"),
    (at(CROSSCODER, hf_hook_point_in="x"), "the 0 layers"),
    (at(CROSSCODER, stacked=True, hf_hook_point_in=None), "the 0 layers"),
    (at(CROSSCODER, stacked=True, hf_hook_point_in="model.layers.{5,9}.output"), "the 2 layers"),
    (at(LLAMA, act_fn="topk"), "act_fn"),
    (at(LLAMA, norm_activation="token-wise"), "norm_activation"),
    (at(LLAMA, use_glu_encoder=True), "use_glu_encoder"),
    (at(LLAMA, d_model=9), "9"),
    (at(LLAMA, jump_relu_threshold=-1), "at least 0"),
    (at(LLAMA, dataset_average_activation_norm={"in": 0, "out": 1}), "positive"),
    (at(LLAMA, dataset_average_activation_norm={"in": 1}), "positive"),
    (text_in(LLAMA, "hyperparams.json", "{}"), "d_model"),
    (text_in(LLAMA, "hyperparams.json", "[" * 9999), "hyper"),
    (text_in(LLAMA, "checkpoints/final.safetensors", ""), "final.safetensors"),
    (at(qwen, name="qwen"), "does not say k"),
    (at(qwen, name="L0_50"), "20"),
    (at(qwen, name="k4", k="4"), "k must be a whole number"),
    *((at(TRACER, text=text), said) for text, said in YAML),
    (two_layers, "name it"),
    (at(TRACER, layer="x"), "layer_L"),
    (at(TRACER, kind="jumprelu", threshold=-0.5), "below 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "said"), REFUSED)
def test_files_that_cannot_be_expressed_are_refused_in_one_sentence(
    tmp_path: Path, write: Callable[[Path], Published], said: str
) -> None:
    one = write(tmp_path)
    with pytest.raises(FormatError) as refused:
        load(one.path)
    assert (
        said in str(refused.value)
        and str(tmp_path) in str(refused.value)
        and "\n" not in str(refused.value)
    )


def test_hook_points_that_circuit_tracer_cannot_express(tmp_path: Path) -> None:
    for origin, said in (
        (MLP | {"target_layer": 4}, "from layer 3 to layer 4"),
        ({"layer": 3}, "without site, target_layer, target_site"),
    ):
        with pytest.raises(FormatError, match=said):
            save(SavedSAE(made(Relu, True), origin), "circuit-tracer", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hook", "site"),
    [
        ("hook_mlp_out", "mlp_out"),
        ("hook_attn_out", "attn_out"),
        ("mlp.hook_in", "mlp_in"),
        ("hook_resid_pre", "resid_pre"),
        ("ln2.hook_normalized", "ln2.hook_normalized"),  # of an unknown model
        ("mlp.hook_out", "mlp.hook_out"),
        ("hook_mlp_in", "hook_mlp_in"),
        ("hook_resid_mid", "hook_resid_mid"),
        ("attn.hook_z", "attn.hook_z"),
        ("ln1.hook_normalized", "ln1.hook_normalized"),
        ("not a hook", None),
    ],
)
def test_saelens_hook_names_that_are_sites(tmp_path: Path, hook: str, site: str | None) -> None:
    hooks = {"hook_name": f"blocks.8.{hook}", "hook_name_out": f"blocks.9.{hook}"}
    saved = load(published.saelens(tmp_path, "transcoder", metadata=hooks).path)
    assert saved.origin == (
        {"layer": 8, "site": site, "target_layer": 9, "target_site": site} if site else {}
    )
    save(saved, "saelens", tmp_path / "out")
    assert load(tmp_path / "out").origin == saved.origin


@pytest.mark.parametrize(
    ("hook", "origin"),
    [
        ("model.layers.3.post_feedforward_layernorm.output", {"layer": 3, "site": "mlp_out"}),
        (
            "model.layers.3.self_attn.o_proj.input",
            {"layer": 3, "site": "self_attn.o_proj.input"},
        ),
        ("model.layers.{all}.output", {}),
        (None, {}),
        (5, {}),
    ],
)
def test_gemma_scope_2_modules_that_are_sites(tmp_path: Path, hook: object, origin: dict) -> None:
    found = load(
        published.gemma_scope_2(tmp_path, hf_hook_point_in=hook, hf_hook_point_out=hook).path
    )
    assert found.origin == {"model": "google/gemma-3-4b-pt"} | origin


@pytest.mark.parametrize(
    ("name", "read_as"),
    [("saelens", JumpRelu()), ("dictionary-learning", BatchTopK(k=K)), ("gemma-scope", JumpRelu())],
)
def test_batchtopk_is_written_with_its_one_threshold(
    tmp_path: Path, name: str, read_as: Activation
) -> None:
    sae = made(BatchTopK)
    sae.activation_parameters["threshold"].fill_(1.5)
    save(SavedSAE(sae), name, tmp_path / "out")
    found = load(tmp_path / "out").sae
    assert found.activation == read_as
    assert torch.equal(
        found.activation.thresholds(found.activation_parameters, F), torch.full((F,), 1.5)
    )


def test_files_have_the_names_that_other_loaders_ask_for(tmp_path: Path) -> None:
    sae = made(BatchTopK, skip=True)
    for name in ("circuit-tracer", "gemma-scope-2"):
        save(SavedSAE(sae, MLP), name, tmp_path / name)
    tensors = load_file(tmp_path / "circuit-tracer" / "layer_3.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "W_enc": (F, D),
        "b_enc": (F,),
        "W_dec": (F, D),
        "b_dec": (D,),
        "W_skip": (D, D),
        "activation_function.threshold": (F,),
    }
    assert torch.equal(tensors["W_skip"], sae.W_skip.T)
    assert yaml.safe_load((tmp_path / "circuit-tracer" / "config.yaml").read_text()) == {
        "model_name": "gpt2",
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out",
    }
    tensors = load_file(tmp_path / "gemma-scope-2" / "params.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "w_enc": (D, F),
        "b_enc": (F,),
        "w_dec": (F, D),
        "b_dec": (D,),
        "threshold": (F,),
        "affine_skip_connection": (D, D),
    }
    assert json.loads((tmp_path / "gemma-scope-2" / "config.json").read_text()) == {
        "architecture": "jump_relu",
        "type": "transcoder",
        "width": F,
        "affine_connection": True,
        "model_name": "gpt2",
        "hf_hook_point_in": "model.layers.3.pre_feedforward_layernorm.output",
        "hf_hook_point_out": "model.layers.3.post_feedforward_layernorm.output",
    }


def test_dictionary_learning_gets_unit_decoder_rows_even_if_one_is_zero(tmp_path: Path) -> None:
    sae = made(Relu)
    sae.W_dec[5] = 0
    save(SavedSAE(sae), "dictionary-learning", tmp_path / "out")
    state = torch.load(tmp_path / "out" / "ae.pt", weights_only=True)
    torch.testing.assert_close(state["decoder.weight"].norm(dim=0), torch.ones(F))
    torch.testing.assert_close(load(tmp_path / "out").sae(X), sae(X), atol=1e-4, rtol=1e-5)


def test_a_native_file_from_before_an_option_has_its_default(tmp_path: Path) -> None:
    sae = made(JumpRelu)
    header = {
        "format_version": 1,
        "origin": {},
        "activation": {"name": "jumprelu"},
    }
    save_file(sae.tensors(), tmp_path / "sae.safetensors", {"saecli": json.dumps(header)})
    assert load(tmp_path).sae.activation == JumpRelu()


def test_topk_and_its_stand_in_differ_only_with_few_positive_ones() -> None:
    sae = made(TopK)
    sae.b_enc.sub_(6)
    short = (sae.pre_activations(X) > 0).sum(1) < K
    differ = (stand_in(SavedSAE(sae)).sae.encode(X) != sae.encode(X)).any(1)
    assert 0 < short.sum() < len(X) and torch.equal(differ, short)


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    class Trace:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "trace",)

    one, layer = (
        published.dictionary_learning(tmp_path / "ae").path,
        published.qwen_scope(tmp_path / "k4").path,
    )
    for path in (one / "ae.pt", layer):
        for dump in (torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, 2))):
            dump({"W_enc": Trace()}, path)
            with pytest.raises(FormatError, match=str(path)):
                load(path if path == layer else one)
    bomb = "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
    )
    text = (
        f"model_kind: transcoder_set\nrun: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'trace'}]\n"
        f"a: &a [lol]\n{bomb}model_name: *l\n"
    )
    assert load(published.circuit_tracer(tmp_path / "yaml", text=text).path).origin == {"layer": 5}
    assert not (tmp_path / "trace").exists()


def test_a_folder_without_an_sae_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(
        FormatError,
        match=r"expected cfg.json and sae_weights.safetensors \(saelens\).*got model.bin",
    ):
        load(tmp_path)
    with pytest.raises(FormatError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(FormatError, match="expected an empty or a new folder"):
        save(SavedSAE(made(Relu)), "saelens", tmp_path)
    (tmp_path / "empty").mkdir()
    save(SavedSAE(made(Relu)), "saelens", tmp_path / "empty")
    assert recognise(tmp_path / "empty") == "saelens"


def test_one_of_several_layers_is_named_by_its_file(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", ROWS.astype(np.float32))
    for layer in (5, 11):
        one = published.qwen_scope(tmp_path / QWEN, layer)
        assert load(one.path).origin["layer"] == layer
        (found,) = sae("eval", one.path, "--data", "rows", "--split", "all", "--json").json["runs"]
        x = ROWS.astype(np.float32).astype(float)
        assert found["fvu"] == pytest.approx(
            ((one.predicted - x) ** 2).sum() / ((x - x.mean(0)) ** 2).sum(), rel=1e-4
        )
    done = sae("eval", tmp_path / QWEN, "--data", "rows")
    assert done.status == 1 and "name it, such as .../layer11.sae.pt" in done.err
    done = sae("eval", tmp_path / QWEN / "config.json")
    assert (done.status, done.err.count("\n")) == (1, 1)


def test_a_crosscoder_is_measured_on_its_stores_and_cannot_be_exported(
    sae: CommandLine, tmp_path: Path
) -> None:
    one, rows, words = (
        published.gemma_scope_2_crosscoder(tmp_path / "crosscoder"),
        WIDE_ROWS.astype(np.float32),
        [],
    )
    for place in range(PLACES):
        make_store(sae.home, f"place{place}", rows[:, place * D : (place + 1) * D])
        words += ["--data", f"place{place}"]
    (found,) = sae("sparsity", one.path, *words, "--split", "all", "--json").json["runs"]
    error, spread = (one.predicted - WIDE_ROWS) ** 2, (WIDE_ROWS - WIDE_ROWS.mean(0)) ** 2
    assert [place["width"] for place in found["places"]] == [D] * PLACES
    assert [place["fvu"] for place in found["places"]] == pytest.approx(
        [
            error[:, own].sum() / spread[:, own].sum()
            for own in np.split(np.arange(PLACES * D), PLACES)
        ],
        rel=1e-4,
    )
    assert found["l0"] == pytest.approx((one.codes != 0).sum(1).mean(), rel=1e-3)
    done = sae("export", one.path, "--to", "gemma-scope-2", "--out", tmp_path / "out")
    assert (
        done.status == 1
        and "cannot express a crosscoder" in done.err
        and not (tmp_path / "out").exists()
    )


@pytest.mark.parametrize("name", ["saelens", "sparsify", "circuit-tracer"])
def test_an_exported_transcoder_is_measured_as_its_run_is(
    sae: CommandLine, tmp_path: Path, name: str
) -> None:
    make_transcoder(sae.home, "run", random_sae().changed(W_skip=torch.eye(8) / 2))
    assert sae("export", "run", "--to", name, "--out", tmp_path / "out").status == 0
    (before,) = sae("eval", "run", "--split", "all", "--json").json["runs"]
    (after,) = sae(
        "eval", tmp_path / "out", "--data", "x", "--target", "y", "--split", "all", "--json"
    ).json["runs"]
    assert after["fvu"] == pytest.approx(before["fvu"], rel=1e-5)
    done = sae("eval", tmp_path / "out", "--data", "x")
    assert done.status == 2 and "is a transcoder" in done.err


def test_a_run_on_two_stores_is_a_transcoder(sae: CommandLine, tmp_path: Path) -> None:
    make_transcoder(sae.home, "run", random_sae(), {})
    assert sae("export", "run", "--to", "saelens", "--out", tmp_path / "out").status == 0
    assert json.loads((tmp_path / "out" / "cfg.json").read_text())["architecture"] == "transcoder"
    for name, status in (
        ("gemma-scope", 1),
        ("circuit-tracer", 1),
        ("llama-scope", 2),
        ("qwen-scope", 2),
    ):
        assert sae("export", "run", "--to", name, "--out", tmp_path / "other").status == status
    assert not (tmp_path / "other").exists()


def test_a_signed_topk_is_written_clipped_and_the_difference_measured(
    sae: CommandLine, tmp_path: Path
) -> None:
    mine = random_sae(TopK(k=4)).changed(W_skip=torch.eye(8) / 2)
    mine.b_enc.sub_(4)
    x, y = (
        torch.from_numpy(rows[is_test(np.arange(3000))])
        for rows in make_transcoder(sae.home, "run", mine)
    )
    done = sae("export", "run", "--to", "sparsify", "--out", tmp_path / "out", "--json")
    assert done.json["written_as"] == "relu-topk" and "topk here keeps their signs" in done.err
    fvu = (mine(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert done.json["deviation"]["fvu"] == pytest.approx(fvu.item(), rel=1e-4)
    done = sae("export", "run", "--to", "saelens", "--out", tmp_path / "other")
    assert done.status == 1 and "use sparsify" in done.err
