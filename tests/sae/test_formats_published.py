"""Files as other tools publish them: Gemma Scope's arrays, and SAELens' from before its version 6."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from saecli.base.errors import FormatError
from saecli.sae.activations import Activation, BatchTopK, JumpRelu, Relu, ReluTopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, load, save

D, F, K = 12, 30, 4
ROWS = torch.randn(200, D, generator=torch.Generator().manual_seed(9)) + 2


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(("activation", "parameters", "threshold"), [
    (Relu(), {}, np.zeros(F)),
    (JumpRelu(), {"threshold": torch.linspace(-1, 2, F)}, torch.linspace(-1, 2, F).clamp(min=0).numpy()),
    (BatchTopK(k=K), {"threshold": torch.tensor(1.5)}, np.full(F, 1.5))], ids=["relu", "jumprelu", "batchtopk"])
def test_params_npz_holds_gemma_scopes_five_arrays_whose_formula_gives_the_codes(
        tmp_path: Path, activation: Activation, parameters: dict, threshold: np.ndarray) -> None:
    sae = SAE(**weights(), activation=activation, activation_parameters=parameters)
    save(SavedSAE(sae), "gemma-scope", tmp_path / "out")
    with np.load(tmp_path / "out" / "params.npz", allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    assert {name: (array.shape, array.dtype) for name, array in found.items()} == {
        name: (shape, np.dtype(np.float32)) for name, shape in (
            ("W_enc", (D, F)), ("b_enc", (F,)), ("W_dec", (F, D)), ("b_dec", (D,)), ("threshold", (F,)))}
    np.testing.assert_allclose(found["threshold"], threshold, rtol=1e-6)
    pre = ROWS.numpy() @ found["W_enc"] + found["b_enc"]
    np.testing.assert_allclose(np.maximum(pre, 0) * (pre > found["threshold"]), sae.encode(ROWS), rtol=1e-4, atol=1e-5)


def old_folder(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (folder / "cfg.json").write_text(json.dumps({"d_in": D, "d_sae": F, "dtype": "torch.float32"} | config))
    save_file(tensors, folder / "sae_weights.safetensors")
    return folder


def test_saelens_before_6_is_read_with_its_defaults_and_its_old_names(tmp_path: Path) -> None:
    w = weights()
    folder = old_folder(tmp_path, w | {"scaling_factor": torch.ones(F)}, activation_fn_str="relu",
                        hook_point="blocks.8.hook_resid_pre", model_name="gpt2-small", normalize_activations=False,
                        context_size=128)
    found = load(folder)
    codes = ((ROWS - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
    torch.testing.assert_close(found.sae.encode(ROWS), codes, atol=1e-4, rtol=1e-5)
    assert found.origin == {"model": "gpt2-small", "layer": 8, "site": "resid_pre", "context": 128}


def test_saelens_before_6_says_topk_by_its_function(tmp_path: Path) -> None:
    folder = old_folder(tmp_path, weights(), architecture="standard", activation_fn_str="topk",
                        activation_fn_kwargs={"k": K}, apply_b_dec_to_input=False)
    assert load(folder).sae.activation == ReluTopK(k=K)


@pytest.mark.parametrize(("config", "extra", "named"), [
    ({"activation_fn_str": "tanh-relu"}, {}, "activation_fn 'tanh-relu' cannot be expressed here"),
    ({"normalize_activations": True}, {}, "normalize_activations 'expected_average_only_in' cannot"),
    ({"architecture": "gated"}, {}, "architecture 'gated' cannot"),
    ({"activation_fn_str": "topk"}, {}, "k must be a whole number, got None"),
    ({}, {"scaling_factor": torch.full((F,), 2.0)}, r"unexpected \['scaling_factor'\]"),
])
def test_saelens_before_6_what_cannot_be_expressed_is_refused_by_name(
        tmp_path: Path, config: dict, extra: dict, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        load(old_folder(tmp_path, weights() | extra, **config))


def test_a_configuration_of_something_else_is_named_as_such(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text('{"hidden_size": 5}')
    with pytest.raises(FormatError, match=r"expected the keys d_in and d_sae .*, got \['hidden_size'\]"):
        load(tmp_path)
