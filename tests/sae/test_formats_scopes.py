"""Gemma Scope 2, Llama Scope and Qwen-Scope: folders laid out as these are published, against their formulas in
float64, and against what SAELens makes of the same folders.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from environments import python_with
from homes import MLP, CommandLine, make_store, random_sae, sae_for
from published import (
    PLACES,
    ROWS,
    WIDE_ROWS,
    D,
    E,
    F,
    K,
    Published,
    gemma_scope_2,
    gemma_scope_2_crosscoder,
    llama_scope,
    qwen_scope,
)
from safetensors.torch import load_file, save_file

from saecli.base.errors import FormatError
from saecli.sae.activations import Activation, BatchTopK, JumpRelu, Relu, ReluTopK, TopK
from saecli.sae.formats import SavedSAE, load, recognise, save

QWEN = "SAE-Res-Qwen3-8B-Base-W64K-L0_4"
LIBRARY = Path(__file__).parents[1] / "libraries" / "saelens_scopes.py"


def assert_agrees(published: Published, rows: np.ndarray = ROWS) -> SavedSAE:
    saved = load(published.path)
    assert saved.sae.W_enc.dtype == torch.float32
    x = torch.from_numpy(rows).float()
    assert 0.02 < (published.codes != 0).mean() < 0.9
    np.testing.assert_allclose(saved.sae.encode(x), published.codes, rtol=1e-4, atol=2e-5)
    assert np.abs(saved.sae(x).numpy() - published.predicted).max() < 1e-5 * np.abs(published.predicted).max()
    return saved


def test_gemma_scope_2_saes_match_their_formula(tmp_path: Path) -> None:
    found = assert_agrees(gemma_scope_2(tmp_path))
    assert recognise(tmp_path) == "gemma-scope-2" and not found.is_transcoder
    assert found.sae.activation == JumpRelu()
    assert found.origin == {"model": "google/gemma-3-4b-pt", "layer": 17, "site": "resid_post"}


@pytest.mark.parametrize("width", [D, E])
@pytest.mark.parametrize("affine", [False, True])
def test_gemma_scope_2_transcoders_match_their_formula_with_a_skip_and_without(
        tmp_path: Path, affine: bool, width: int) -> None:
    found = assert_agrees(gemma_scope_2(tmp_path, "transcoder", affine, width))
    assert found.is_transcoder and (found.sae.W_skip is not None) == affine
    assert found.origin == {"model": "google/gemma-3-4b-pt", "layer": 17, "site": "mlp_in", "target_layer": 17,
                            "target_site": "mlp_out"}


@pytest.mark.parametrize("stacked", [False, True])
def test_a_gemma_scope_2_crosscoder_matches_its_formula_place_by_place(tmp_path: Path, stacked: bool) -> None:
    found = assert_agrees(gemma_scope_2_crosscoder(tmp_path, stacked), WIDE_ROWS)
    assert recognise(tmp_path) == "gemma-scope-2" and not found.is_transcoder
    assert (found.sae.widths, found.sae.d_sae) == ((D,) * PLACES, PLACES * F)
    assert found.origin == {"model": "google/gemma-3-270m-pt", "layer": 5, "site": "resid_post"}


@pytest.mark.parametrize(("hook", "origin"), [
    ("model.layers.3.post_feedforward_layernorm.output", {"layer": 3, "site": "mlp_out"}),
    ("model.layers.3.self_attn.o_proj.input", {}), ("model.layers.{all}.output", {}), (None, {}), (5, {})])
def test_a_gemma_scope_2_place_is_known_from_the_modules_that_are_sites(
        tmp_path: Path, hook: object, origin: dict) -> None:
    found = load(gemma_scope_2(tmp_path, hf_hook_point_in=hook, hf_hook_point_out=hook).path)
    assert found.origin == {"model": "google/gemma-3-4b-pt"} | origin


@pytest.mark.parametrize("activation", [Relu(), JumpRelu(), BatchTopK(k=K)], ids=lambda one: one.name)
def test_what_is_written_for_gemma_scope_2_has_its_names_and_places(tmp_path: Path, activation: Activation) -> None:
    sae = random_sae(activation)
    skipping = sae.changed(W_skip=torch.eye(D) / 2)
    save(SavedSAE(sae, {"model": "google/gemma-3-1b-pt", "layer": 3, "site": "resid_post"}), "gemma-scope-2",
         tmp_path / "sae")
    save(SavedSAE(skipping, MLP), "gemma-scope-2", tmp_path / "transcoder")
    save(SavedSAE(sae), "gemma-scope-2", tmp_path / "nowhere")
    assert {name: tuple(one.shape) for name, one in load_file(tmp_path / "transcoder" / "params.safetensors").items()} \
        == {"w_enc": (D, F), "b_enc": (F,), "w_dec": (F, D), "b_dec": (D,), "threshold": (F,),
            "affine_skip_connection": (D, D)}
    assert json.loads((tmp_path / "sae" / "config.json").read_text()) == {
        "architecture": "jump_relu", "type": "sae", "width": F, "affine_connection": False,
        "model_name": "google/gemma-3-1b-pt", "hf_hook_point_in": "model.layers.3.output",
        "hf_hook_point_out": "model.layers.3.output"}
    assert load(tmp_path / "nowhere").origin == {} and load(tmp_path / "transcoder").origin == MLP
    x = torch.from_numpy(ROWS).float()
    for name, one in (("sae", sae), ("transcoder", skipping), ("nowhere", sae)):
        torch.testing.assert_close(load(tmp_path / name).sae(x), one(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("moved", [False, True], ids=["published", "moved"])
@pytest.mark.parametrize("transcodes", [False, True], ids=["sae", "transcoder"])
def test_llama_scope_takes_and_predicts_raw_activations_as_its_formula_does(
        tmp_path: Path, transcodes: bool, moved: bool) -> None:
    found = assert_agrees(llama_scope(tmp_path, moved, transcodes))
    assert recognise(tmp_path) == "llama-scope" and found.is_transcoder == transcodes
    places = {"site": "mlp_in", "target_layer": 15, "target_site": "mlp_out"} if transcodes else {"site": "resid_post"}
    assert found.origin == {"layer": 15} | places


def test_llama_scope_in_bfloat16_is_read_in_float32(tmp_path: Path) -> None:
    assert_agrees(llama_scope(tmp_path, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", [QWEN, "run-k4", "L0_4", f"models--Qwen--{QWEN}/snapshots/0b1c"])
def test_qwen_scope_matches_its_formula_with_the_k_of_its_folders_name(tmp_path: Path, name: str) -> None:
    published = qwen_scope(tmp_path / name)
    assert (published.codes < 0).any() and ((published.codes != 0).sum(1) == K).all()
    found = assert_agrees(published)
    assert found.sae.activation == TopK(k=K)
    assert recognise(published.path) == recognise(published.path.parent) == "qwen-scope"
    assert found.origin == ({"model": "Qwen/Qwen3-8B-Base"} if QWEN in name else {}) | {
        "layer": 5, "site": "resid_post"}


def test_qwen_scopes_config_says_k_whatever_the_folder_is_called(tmp_path: Path) -> None:
    published = qwen_scope(tmp_path / "run-k7", k=K, base_model="Qwen/Qwen3-1.7B-Base")
    assert assert_agrees(published).origin["model"] == "Qwen/Qwen3-1.7B-Base"


def test_one_of_several_layers_is_named_by_its_file(sae: CommandLine, tmp_path: Path) -> None:
    make_store(sae.home, "rows", ROWS.astype(np.float32))
    folder = tmp_path / QWEN
    layers = {layer: qwen_scope(folder, layer) for layer in (5, 11)}
    for layer, published in layers.items():
        assert assert_agrees(published).origin["layer"] == layer
        (found,) = sae("eval", published.path, "--data", "rows", "--split", "all", "--json").json["runs"]
        x = ROWS.astype(np.float32).astype(float)
        assert found["fvu"] == pytest.approx(((published.predicted - x) ** 2).sum() / ((x - x.mean(0)) ** 2).sum(),
                                             rel=1e-4)
    done = sae("eval", folder, "--data", "rows")
    assert done.status == 1 and done.err == (
        f"sae: {folder} holds 2 files layer*.sae.pt: expected one; name it, such as .../layer11.sae.pt\n")
    done = sae("eval", folder / "config.json")
    assert (done.status, done.err.count("\n")) == (1, 1)


def test_a_crosscoder_is_measured_on_the_stores_of_its_places(sae: CommandLine, tmp_path: Path) -> None:
    published, rows = gemma_scope_2_crosscoder(tmp_path / "crosscoder"), WIDE_ROWS.astype(np.float32)
    words = []
    for place in range(PLACES):
        make_store(sae.home, f"place{place}", rows[:, place * D:(place + 1) * D])
        words += ["--data", f"place{place}"]
    (found,) = sae("sparsity", published.path, *words, "--split", "all", "--json").json["runs"]
    assert [place["width"] for place in found["places"]] == [D] * PLACES
    error, spread = (published.predicted - WIDE_ROWS) ** 2, (WIDE_ROWS - WIDE_ROWS.mean(0)) ** 2
    for place, one in enumerate(found["places"]):
        own = np.s_[:, place * D:(place + 1) * D]
        assert one["fvu"] == pytest.approx(error[own].sum() / spread[own].sum(), rel=1e-4)
    assert found["l0"] == pytest.approx((published.codes != 0).sum(1).mean(), rel=1e-3)


def test_a_crosscoder_is_refused_for_gemma_scope_2_whose_latents_read_one_place(sae: CommandLine,
                                                                                tmp_path: Path) -> None:
    folder = gemma_scope_2_crosscoder(tmp_path / "crosscoder").path
    done = sae("export", folder, "--to", "gemma-scope-2", "--out", tmp_path / "out")
    assert (done.status, done.err.count("\n")) == (1, 1) and "cannot express a crosscoder" in done.err
    assert not (tmp_path / "out").exists()


def without(name: str) -> Callable[[Path], Path]:
    """A Gemma Scope 2 transcoder without one of its tensors."""
    def folder(path: Path) -> Path:
        file = gemma_scope_2(path, "transcoder", affine=True).path / "params.safetensors"
        save_file({key: one for key, one in load_file(file).items() if key != name}, file)
        return path
    return folder


def without_a_place(path: Path) -> Path:
    (gemma_scope_2_crosscoder(path).path / "params_layer_1.safetensors").unlink()
    return path


def with_narrow_place(path: Path) -> Path:
    gemma_scope_2_crosscoder(path)
    tensors = load_file(path / "params_layer_2.safetensors")
    save_file(tensors | {"w_dec": tensors["w_dec"][:, :2].contiguous()}, path / "params_layer_2.safetensors")
    return path


def text_in(name: str, text: str) -> Callable[[Path], Path]:
    """Llama Scope's folder with a text in the place of a file."""
    def folder(path: Path) -> Path:
        (llama_scope(path).path / name).write_text(text)
        return path
    return folder


@pytest.mark.parametrize(("folder", "said"), [
    (lambda path: gemma_scope_2(path, architecture="topk").path, "architecture 'topk' cannot be expressed here"),
    (lambda path: gemma_scope_2(path, type="clt").path, "type 'clt' cannot be expressed here; expected 'sae' or 't"),
    (lambda path: gemma_scope_2(path, affine_connection=True).path, r"missing \['affine_skip_connection'\]"),
    (lambda path: gemma_scope_2(path, type="crosscoder").path,
     r"params.safetensors: expected .* with one entry for each of the 1 layers in hf_hook_point_in, got"),
    (lambda path: gemma_scope_2_crosscoder(path, type="sae").path, "there is no file .*/params.safetensors"),
    (lambda path: gemma_scope_2_crosscoder(path, hf_hook_point_in="x").path, "the 0 layers in"),
    (without("threshold"), r"params.safetensors: .*missing \['threshold'\]"),
    (without("affine_skip_connection"), r"missing \['affine_skip_connection'\]"),
    (without_a_place, "the 3 layers in .* got params_layer_0.safetensors, p"),
    (with_narrow_place,
     r"params_layer_2.safetensors: expected w_dec of shape \(20, 3, 8\) for each layer, got \(20, 2, 8\)"),
    (lambda path: gemma_scope_2_crosscoder(path, True, hf_hook_point_in=None).path, "the 0 layers in .*, got shape"),
    (lambda path: gemma_scope_2_crosscoder(path, True, hf_hook_point_in="model.layers.{5,9}.output").path,
     "the 2 layers in .*, got shape"),
    (lambda path: llama_scope(path, act_fn="topk").path, "act_fn: expected 'jumprelu', got 'topk'"),
    (lambda path: llama_scope(path, norm_activation="token-wise").path, "norm_activation: expected 'dataset-wise'"),
    (lambda path: llama_scope(path, use_glu_encoder=True).path, "use_glu_encoder: expected False"),
    (lambda path: llama_scope(path, d_model=9).path, "expected encoder.weight of d_model columns, 9, got 8"),
    (lambda path: llama_scope(path, jump_relu_threshold=-1).path, "jump_relu_threshold of at least 0, got -1"),
    (lambda path: llama_scope(path, dataset_average_activation_norm={"in": 0, "out": 1}).path,
     "expected positive numbers `in` and `out` in dataset_average_activation_norm, got {'in': 0.0, 'out': 1.0}"),
    (lambda path: llama_scope(path, dataset_average_activation_norm={"in": 1}).path, "got {'in': 1.0}"),
    (text_in("hyperparams.json", "{}"), "hyperparams.json: expected a field d_model, got none"),
    (text_in("hyperparams.json", "[" * 9999), "cannot read .*hyperparams.json"),
    (text_in("checkpoints/final.safetensors", ""), "cannot read .*final.safetensors"),
    (lambda path: qwen_scope(path / "qwen").path, "does not say k, .*, got 'qwen'; rename the folder"),
    (lambda path: qwen_scope(path / "L0_50").path, r"layer5.sae.pt: .*20"),
    (lambda path: qwen_scope(path / "k4", k="4").path, "config.json: k must be a whole number, got '4'"),
    (lambda path: qwen_scope(path / "k4").path.rename(path / "k4" / "layer.sae.pt"), "expected layerL.sae.pt, L the"),
])
def test_files_that_cannot_be_expressed_are_refused_in_one_sentence(
        tmp_path: Path, folder: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(FormatError, match=said) as refused:
        load(folder(tmp_path))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_no_code_in_a_qwen_scope_file_is_run(tmp_path: Path) -> None:
    class Trace:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "trace",)

    path = qwen_scope(tmp_path / "k4").path
    torch.save({"W_enc": Trace()}, path)
    with pytest.raises(FormatError, match=r"layer5\.sae\.pt"):
        load(path)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["llama-scope", "qwen-scope"])
def test_what_is_only_read_is_refused_as_a_format_to_write(tmp_path: Path, sae: CommandLine, name: str) -> None:
    with pytest.raises(FormatError, match=f"{name} cannot express an SAE that is no transcoder; it can be written as"):
        save(sae_for("native"), name, tmp_path / "out")
    assert sae("export", "run", "--to", name, "--out", tmp_path / "out").status == 2


@pytest.mark.slow
def test_saelens_makes_the_same_of_these_folders(tmp_path: Path) -> None:
    python = python_with("saelens")
    gemma = tmp_path / "gemma-scope-2-4b-pt"
    published = {
        "gemma": gemma_scope_2(gemma / "resid_post" / "layer_17_width_16k_l0_big"),
        "transcoder": gemma_scope_2(gemma / "transcoder" / "layer_17_width_16k_l0_big_affine", "transcoder", True),
        "llama": llama_scope(tmp_path / "Llama3_1-8B-Base-LXR-8x" / "Llama3_1-8B-Base-L15R-8x", unit_norms=True),
        "qwen": qwen_scope(tmp_path / QWEN)}
    for name, skip in (("gemma-ours", {}), ("transcoder-ours", {"W_skip": torch.eye(D) / 2})):
        ours, x = random_sae(JumpRelu()).changed(threshold=torch.rand(F), **skip), torch.from_numpy(ROWS).float()
        folder = gemma / ("transcoder" if skip else "mlp_out") / "layer_3_width_16k_l0_small"
        save(SavedSAE(ours, MLP if skip else {"model": "google/gemma-3-4b-pt", "layer": 3, "site": "mlp_out"}),
             "gemma-scope-2", folder)
        published[name] = Published(folder, ours.encode(x).numpy(), ours(x).numpy())
    np.save(tmp_path / "rows.npy", ROWS.astype(np.float32))
    words = [f"{name}={one.path.relative_to(tmp_path)}" for name, one in published.items()]
    done = subprocess.run([python, LIBRARY, tmp_path, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, one in published.items():
        with np.load(tmp_path / f"{name}.npz") as theirs:
            sae, x = assert_agrees(one).sae, torch.from_numpy(ROWS).float()
            if name == "qwen":  # whose negative codes SAELens makes 0
                sae = sae.changed(activation=ReluTopK(k=K))
            np.testing.assert_allclose(sae.encode(x), theirs["codes"], rtol=1e-4, atol=2e-5)
            assert np.abs(sae(x).numpy() - theirs["x_hat"]).max() < 1e-5 * np.abs(theirs["x_hat"]).max()
