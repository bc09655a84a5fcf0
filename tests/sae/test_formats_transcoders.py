"""Transcoders in the layouts of SAELens, sparsify and circuit-tracer, against their formulas in numpy float64."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from homes import MLP, CommandLine, make_transcoder, random_sae
from safetensors.torch import load_file, save_file

from saecli.base.errors import FormatError
from saecli.sae.activations import ACTIVATIONS, Activation, BatchTopK, JumpRelu, Relu, ReluTopK, Swish, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, SavedSAE, load, recognise, save
from saecli.store.split import is_test

D, E, F, K = 12, 7, 30, 4
ROWS = torch.randn(200, D, generator=torch.Generator().manual_seed(9)) + 2
THRESHOLD = torch.linspace(0, 2, F)
WIDTHS = [(name, kind, skip, width) for name, form in FORMATS.items() for kind in form.transcoders
          for skip in (False, True) for width in (D, E) if width == D or not form.one_width]


def made(kind: type[Activation], skip: bool = False, width: int = D) -> SAE:
    generator = torch.Generator().manual_seed(1)
    activation = kind(k=K) if "k" in kind.__dataclass_fields__ else kind()
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, width), "b_dec": (width,)}
    shapes |= {"W_skip": (D, width)} if skip else {}
    parameters = {name: torch.rand(start.shape, generator=generator) * 2
                  for name, start in activation.parameters(F).items()}
    return SAE(**{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
               activation=activation, activation_parameters=parameters)


def relu(pre: np.ndarray) -> np.ndarray:
    return np.maximum(pre, 0)


def jumprelu(pre: np.ndarray) -> np.ndarray:
    return relu(pre) * (pre > THRESHOLD.numpy())


def largest(pre: np.ndarray) -> np.ndarray:
    kept = np.argsort(-pre, axis=1)[:, :K]
    codes = np.zeros_like(pre)
    np.put_along_axis(codes, kept, np.take_along_axis(pre, kept, 1), 1)
    return codes


def expected(sae: SAE, act: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    w = {name: tensor.double().numpy() for name, tensor in sae.tensors().items()}
    x = ROWS.double().numpy()
    return act(x @ w["W_enc"] + w["b_enc"]) @ w["W_dec"] + w["b_dec"] + (x @ w["W_skip"] if "W_skip" in w else 0)


def saelens_folder(folder: Path, sae: SAE, architecture: str, **metadata: Any) -> Path:
    document = {"architecture": architecture, "d_in": D, "d_out": sae.d_out, "d_sae": F, "dtype": "float32",
                "device": "cpu", "apply_b_dec_to_input": False, "normalize_activations": "none",
                "reshape_activations": "none", "metadata": {"sae_lens_version": "6.54.12", **metadata}}
    folder.mkdir(exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(document))
    tensors = sae.tensors() | ({"threshold": THRESHOLD} if "jumprelu" in architecture else {})
    save_file({name: (tensor.T if name == "W_skip" else tensor).contiguous() for name, tensor in tensors.items()},
              folder / "sae_weights.safetensors")
    return folder


def sparsify_folder(folder: Path, sae: SAE, **config: Any) -> Path:
    (folder / "cfg.json").write_text(json.dumps(
        {"activation": "topk", "num_latents": F, "k": K, "d_in": D, "transcode": True,
         "skip_connection": sae.W_skip is not None} | config))
    tensors = {"encoder.weight": sae.W_enc.T, "encoder.bias": sae.b_enc, "W_dec": sae.W_dec, "b_dec": sae.b_dec,
               **({} if sae.W_skip is None else {"W_skip": sae.W_skip.T})}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "sae.safetensors")
    return folder


def circuit_tracer_folder(folder: Path, sae: SAE, text: str = "", thresholds: torch.Tensor | None = None,
                          layer: int = 5) -> Path:
    (folder / "config.yaml").write_text(text or "\n".join([
        'model_name: "google/gemma-2-2b"', "model_kind: transcoder_set", "feature_input_hook: mlp.hook_in",
        "feature_output_hook: hook_mlp_out", "scan: gemma-2-2b", "transcoders:", "- hf://a/b/layer_0.safetensors"]))
    tensors = {"W_enc": sae.W_enc.T, "b_enc": sae.b_enc, "W_dec": sae.W_dec, "b_dec": sae.b_dec,
               **({} if sae.W_skip is None else {"W_skip": sae.W_skip.T}),
               **({} if thresholds is None else {"activation_function.threshold": thresholds})}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"layer_{layer}.safetensors")
    return folder


def assert_predicts(folder: Path, reference: np.ndarray) -> SavedSAE:
    saved = load(folder)
    assert saved.is_transcoder
    assert np.abs(saved.sae(ROWS).numpy() - reference).max() < 1e-5 * np.abs(reference).max()
    return saved


@pytest.mark.parametrize(("name", "kind", "skip", "width"), WIDTHS, ids=lambda value: getattr(value, "name", value))
def test_what_is_written_in_a_format_predicts_alike_when_read_back(tmp_path: Path, name: str, kind: type[Activation],
                                                                   skip: bool, width: int) -> None:
    sae = made(kind, skip, width)
    save(SavedSAE(sae, MLP), name, tmp_path / "out")
    found = load(tmp_path / "out")
    assert recognise(tmp_path / "out") == name and found.is_transcoder
    assert found.origin == ({} if name == "sparsify" else MLP)
    assert (found.sae.d_out, found.sae.W_skip is not None) == (width, skip)
    torch.testing.assert_close(found.sae.encode(ROWS), sae.encode(ROWS), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.sae(ROWS), sae(ROWS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("width", [D, E])
@pytest.mark.parametrize(("architecture", "act"), [
    ("transcoder", relu), ("skip_transcoder", relu), ("jumprelu_transcoder", jumprelu),
    ("jumprelu_skip_transcoder", jumprelu)])
def test_saelens_transcoders_match_their_formulas(tmp_path: Path, architecture: str, act: Callable, width: int) -> None:
    sae = made(Relu, "skip" in architecture, width)
    folder = saelens_folder(tmp_path, sae, architecture, model_name="gpt2", hook_name="blocks.8.ln2.hook_normalized",
                            hook_name_out="blocks.8.hook_mlp_out")
    assert assert_predicts(folder, expected(sae, act)).origin == {
        "model": "gpt2", "layer": 8, "site": "mlp_in", "target_layer": 8, "target_site": "mlp_out"}


@pytest.mark.parametrize("skip", [False, True])
def test_sparsify_transcoders_do_not_subtract_the_bias(tmp_path: Path, skip: bool) -> None:
    sae = made(Relu, skip)
    found = assert_predicts(sparsify_folder(tmp_path, sae), expected(sae, lambda pre: largest(relu(pre))))
    assert found.sae.activation == ReluTopK(k=K)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("thresholds", "act"), [(None, relu), (THRESHOLD, jumprelu)], ids=["relu", "jumprelu"])
def test_circuit_tracer_matches_its_formula(tmp_path: Path, skip: bool, thresholds: Any, act: Callable) -> None:
    sae = made(Relu, skip)
    found = assert_predicts(circuit_tracer_folder(tmp_path, sae, thresholds=thresholds), expected(sae, act))
    assert found.origin == {"model": "google/gemma-2-2b", "layer": 5, "site": "mlp_in", "target_layer": 5,
                            "target_site": "mlp_out"}


def test_circuit_tracers_topk_keeps_signs(tmp_path: Path) -> None:
    sae = made(Relu)
    sae.b_enc.sub_(9)
    text = (f"model_kind: transcoder_set\nfeature_input_hook: hook_resid_mid\nfeature_output_hook: mlp.hook_out\n"
            f"activation: topk\nk: {K}\n")
    found = assert_predicts(circuit_tracer_folder(tmp_path, sae, text), expected(sae, largest))
    assert found.sae.activation == TopK(k=K)
    assert found.origin == {"layer": 5, "site": "resid_mid"}  # for mlp.hook_out is before Gemma's second norm


@pytest.mark.parametrize(("hook", "origin"), [
    ("blocks.8.hook_mlp_out", {"site": "mlp_out"}), ("blocks.8.mlp.hook_in", {"site": "mlp_in"}),
    ("blocks.8.ln2.hook_normalized", {"site": "mlp_in"}), ("blocks.8.hook_resid_pre", {"site": "resid_pre"}),
    ("blocks.8.mlp.hook_out", {}), ("blocks.8.hook_mlp_in", {}), (None, {}), (3, {})])
def test_the_place_of_targets_is_known_from_the_hooks_that_name_a_site(tmp_path: Path, hook: Any, origin: dict) -> None:
    found = load(saelens_folder(tmp_path, made(Relu), "transcoder", hook_name_out=hook))
    assert found.is_transcoder
    assert found.origin == ({"target_layer": 8, "target_site": origin["site"]} if origin else {})


def test_circuit_tracer_files_are_what_its_own_loader_asks_for(tmp_path: Path) -> None:
    sae = made(BatchTopK, skip=True)
    save(SavedSAE(sae, MLP), "circuit-tracer", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.yaml", "layer_3.safetensors"}
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text()) == {
        "model_name": "gpt2", "model_kind": "transcoder_set", "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out"}
    tensors = load_file(tmp_path / "out" / "layer_3.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "W_enc": (F, D), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,), "W_skip": (D, D),
        "activation_function.threshold": (F,)}
    assert torch.equal(tensors["W_skip"], sae.W_skip.T)


@pytest.mark.parametrize(("sae", "origin", "name", "said"), [
    *((made(Relu), MLP, name, "a transcoder; it can be written as saelens or sparsify or gemma-scope-2 or "
                                             "circuit-tracer or native")
      for name in ("dictionary-learning", "gemma-scope")),
    (made(Relu, True), {}, "gemma-scope", "a transcoder; it can be written as saelens or"),
    (made(Relu), {"layer": 3, "site": "mlp_out"}, "circuit-tracer", "an SAE that is no transcoder; it can be written "
                                                                    "as saelens or sparsify or dictionary-learning"),
    (made(Relu, width=E), MLP, "sparsify", f"targets of {E} dimensions predicted from rows of {D}; expected equal "
                                           "widths; it can be written as saelens or gemma-scope-2 or native"),
    (made(Relu, width=E), MLP, "circuit-tracer", f"targets of {E} dimensions"),
    (made(ReluTopK), MLP, "saelens", "the activation relu-topk of a transcoder; expected one of relu, jumprelu, "
                                     "batchtopk; it can be written as sparsify or native"),
    (made(TopK), MLP, "circuit-tracer", "the activation topk of a transcoder; expected one of relu, jumprelu, batch"),
    (made(JumpRelu), MLP, "sparsify", "the activation jumprelu of a transcoder"),
    (made(Relu), MLP | {"target_layer": 4}, "circuit-tracer", "a transcoder from layer 3 to layer 4"),
    (made(Relu, True), {"layer": 3}, "circuit-tracer", "got one without site, target_layer, target_site"),
])
def test_what_a_format_lacks_is_refused_in_one_sentence(tmp_path: Path, sae: SAE, origin: dict, name: str,
                                                        said: str) -> None:
    with pytest.raises(FormatError) as refused:
        save(SavedSAE(sae, origin), name, tmp_path / "out")
    assert said in str(refused.value) and name in str(refused.value) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def crossing(folder: Path) -> Path:
    return circuit_tracer_folder(folder, made(Relu), "model_kind: cross_layer_transcoder")


def two_layers(folder: Path) -> Path:
    return circuit_tracer_folder(circuit_tracer_folder(folder, made(Relu)), made(Relu), layer=6)


def test_one_layer_of_several_is_opened_by_its_file(tmp_path: Path) -> None:
    folder = two_layers(tmp_path)
    for layer in (5, 6):
        assert load(folder / f"layer_{layer}.safetensors").origin["layer"] == layer
    assert recognise(folder / "config.yaml") is None


def renamed(folder: Path) -> Path:
    (circuit_tracer_folder(folder, made(Relu)) / "layer_5.safetensors").rename(folder / "layer_x.safetensors")
    return folder


@pytest.mark.parametrize(("folder", "said"), [
    (crossing, "model_kind 'cross_layer_transcoder' cannot be expressed here; expected 'transcoder_set'"),
    (two_layers, r"holds 2 files layer_\*.safetensors: expected one; name it, such as \.\.\./layer_5.safetensors$"),
    (renamed, "expected layer_L.safetensors, L the number"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), thresholds=THRESHOLD - 1), "thresholds below 0 cannot"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), "model_kind: transcoder_set\nactivation: topk"),
     "k must be a whole number, got None"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), "model_kind: transcoder_set\nactivation: topk\nk: 31"),
     "31"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), "- a\n- b"), "expected the keys and values of .* list"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), "model_kind: [transcoder_set]"), "model_kind None"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), "a: &a [1]\nb: *c"), "cannot read .*config.yaml"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), 'a: "\\U7fffffff"'), "cannot read .*config.yaml"),
    (lambda folder: circuit_tracer_folder(folder, made(Relu), "[" * 100_000), "cannot read .*config.yaml"),
    (lambda folder: saelens_folder(folder, made(Relu, True), "transcoder"), r"unexpected \['W_skip'\]"),
    (lambda folder: saelens_folder(folder, made(Relu), "skip_transcoder"), r"missing \['W_skip'\]"),
    (lambda folder: saelens_folder(folder, made(Relu, width=E), "standard"), "expected W_dec of shape"),
    (lambda folder: sparsify_folder(folder, made(Relu, True), skip_connection=False), r"unexpected \['W_skip'\]"),
    (lambda folder: sparsify_folder(folder, made(Relu), skip_connection=True), r"missing \['W_skip'\]"),
])
def test_files_that_cannot_be_expressed_are_refused_in_one_sentence(tmp_path: Path, folder: Callable,
                                                                    said: str) -> None:
    with pytest.raises(FormatError, match=said) as refused:
        load(folder(tmp_path))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_no_code_in_a_yaml_file_is_run_and_its_references_are_not_spelled_out(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    bomb = "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in
                   zip("abcdefghijk", "bcdefghijkl", strict=True))
    text = (f"model_kind: transcoder_set\nrun: !!python/object/apply:pathlib.Path.touch [{trace}]\na: &a [lol]\n{bomb}"
            "model_name: *l\n")
    assert load(circuit_tracer_folder(tmp_path, made(Relu), text)).origin == {"layer": 5}
    assert not trace.exists()


@pytest.mark.parametrize("name", ["saelens", "sparsify", "circuit-tracer"])
def test_an_exported_transcoder_is_measured_as_its_run_is(sae: CommandLine, tmp_path: Path, name: str) -> None:
    mine = random_sae().changed(W_skip=torch.eye(8) / 2)
    make_transcoder(sae.home, "run", mine)
    assert sae("export", "run", "--to", name, "--out", tmp_path / "out").status == 0
    (before,) = sae("eval", "run", "--split", "all", "--json").json["runs"]
    (after,) = sae("eval", tmp_path / "out", "--data", "x", "--target", "y", "--split", "all", "--json").json["runs"]
    assert after["fvu"] == pytest.approx(before["fvu"], rel=1e-5)
    done = sae("eval", tmp_path / "out", "--data", "x")
    assert (done.status, "is a transcoder: expected the store of what it predicts" in done.err) == (2, True)


def test_a_run_on_two_stores_is_a_transcoder_whatever_its_file_says(sae: CommandLine, tmp_path: Path) -> None:
    make_transcoder(sae.home, "run", random_sae(), {})
    assert sae("export", "run", "--to", "saelens", "--out", tmp_path / "out").status == 0
    assert json.loads((tmp_path / "out" / "cfg.json").read_text())["architecture"] == "transcoder"
    assert load(tmp_path / "out").is_transcoder
    done = sae("export", "run", "--to", "gemma-scope", "--out", tmp_path / "other")
    assert "cannot express a transcoder; use saelens or sparsify or gemma-scope-2 or circuit-tracer" in done.err
    done = sae("export", "run", "--to", "circuit-tracer", "--out", tmp_path / "other")
    assert (done.status, "stores that `sae extract` made" in done.err) == (1, True)
    assert not (tmp_path / "other").exists()


def test_a_signed_topk_of_a_transcoder_is_written_clipped_and_the_difference_measured_on_its_targets(
        sae: CommandLine, tmp_path: Path) -> None:
    mine = random_sae(TopK(k=4)).changed(W_skip=torch.eye(8) / 2)
    mine.b_enc.sub_(4)
    held_out = is_test(np.arange(3000))
    x, y = (torch.from_numpy(rows[held_out]) for rows in make_transcoder(sae.home, "run", mine))
    done = sae("export", "run", "--to", "sparsify", "--out", tmp_path / "out", "--json")
    assert done.json["written_as"] == "relu-topk"
    fvu = (mine(x) - y).square().sum() / (y - y.mean(0)).square().sum()
    assert done.json["deviation"]["fvu"] == pytest.approx(fvu.item(), rel=1e-4)
    assert "and topk here keeps their signs: wrote relu-topk, which sparsify calls topk" in done.err
    done = sae("export", "run", "--to", "saelens", "--out", tmp_path / "other")
    assert "saelens cannot express the activation topk of a transcoder" in done.err and "use sparsify" in done.err


def test_every_activation_of_a_transcoder_can_be_written_here() -> None:
    assert set(FORMATS["native"].transcoders) == set(ACTIVATIONS.values())
    assert not any(Swish in FORMATS[name].transcoders for name in FORMATS if name != "native")
