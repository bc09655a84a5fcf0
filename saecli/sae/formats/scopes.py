"""Llama Scope and Qwen-Scope, two suites that are read and not written.

Llama Scope has `hyperparams.json` and `checkpoints/final.safetensors`, JumpReLU SAEs and transcoders of Llama 3.1 8B.
Weights act on rows scaled to a norm of about sqrt(D), `c_in * x` with c = `sqrt(d_model) /
dataset_average_activation_norm`, and predict `c_out * y`. Both scales are folded into the weights here.

`jump_relu_threshold` is one number, in units of the targets: a code z adds `z * W_dec / c_out` to the raw prediction,
and fires if the norm of this exceeds the threshold, as in OpenMOSS' own code, which scales latents to unit decoder norm
(`transform_to_unit_decoder_norm`) after folding the scales in. SAELens 6.54 takes decoder norms for one.

Qwen-Scope has `layerL.sae.pt` for each layer of a Qwen model, a state_dict of a TopK SAE of its residual stream. Its
model card takes the k largest pre-activations with their signs: `topk` here, where SAELens 6.54 clips at zero. k and
the model are in the repository's name, such as `Qwen/SAE-Res-Qwen3-8B-Base-W64K-L0_50`, or in a `config.json`.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...base.errors import FormatError
from ..activations import JumpRelu, TopK
from .common import (
    LINEAR,
    SavedSAE,
    assemble,
    configured,
    origin_from,
    origin_of_hook,
    ours,
    read_config,
    read_safetensors,
    read_torch,
)

LLAMA_CONFIG = "hyperparams.json"
LLAMA_WEIGHTS = ("checkpoints/final.safetensors", "final.safetensors")  # as published, or next to the hyperparameters
LLAMA_NAMES = LINEAR | {"decoder.bias": "b_dec"}
QWEN_CONFIG, QWEN_WEIGHTS = "config.json", "layer*.sae.pt"
QWEN_NAMES = {"W_enc": "W_enc.T", "b_enc": "b_enc", "W_dec": "W_dec.T", "b_dec": "b_dec"}

_LAYER = re.compile(r"layer(\d{1,9})\.sae\.pt")
_K = re.compile(r"(?:.*[-_.])?(?:L0_|[kK]_?)(\d{1,9})")
_MODEL = re.compile(r"(?:.*--)?SAE-Res-(.+)-W\d+K-L0_\d+")


@dataclass(frozen=True)
class Hyperparameters:
    """The entries used here; a `Literal` is the one value that can be expressed."""

    d_model: int
    jump_relu_threshold: float
    dataset_average_activation_norm: dict[str, float]
    hook_point_in: Any = None
    hook_point_out: Any = None
    act_fn: Literal["jumprelu"] = "jumprelu"
    norm_activation: Literal["dataset-wise"] = "dataset-wise"
    sparsity_include_decoder_norm: Literal[True] = True
    use_decoder_bias: Literal[True] = True
    apply_decoder_bias_to_pre_encoder: Literal[False] = False
    use_glu_encoder: Literal[False] = False


def load_llama_scope(folder: Path) -> SavedSAE:
    """Read an SAE or a transcoder."""
    config = read_config(folder / LLAMA_CONFIG, Hyperparameters)
    norms, threshold = config.dataset_average_activation_norm, config.jump_relu_threshold
    if not all(0 < norms.get(end, math.nan) < math.inf for end in ("in", "out")):
        raise FormatError(f"{folder / LLAMA_CONFIG}: expected positive numbers `in` and `out` in "
                          f"dataset_average_activation_norm, got {norms}; the file is damaged")
    if not 0 <= threshold < math.inf:
        raise FormatError(f"{folder / LLAMA_CONFIG}: expected jump_relu_threshold of at least 0, got {threshold}; "
                          "negative codes cannot be expressed here")
    path = next(path for name in LLAMA_WEIGHTS if (path := folder / name).is_file())
    tensors = ours(path, read_safetensors(path)[0], LLAMA_NAMES)
    transcodes = config.hook_point_out not in (None, config.hook_point_in)
    sae = assemble(path, tensors | {"threshold": torch.zeros_like(tensors["b_enc"])}, JumpRelu(), transcodes=transcodes)
    if config.d_model != sae.d_in:
        raise FormatError(f"{path}: expected encoder.weight of d_model columns, {config.d_model}, got {sae.d_in}")
    scale_in, scale_out = (norms[end] / math.sqrt(sae.d_in) for end in ("in", "out"))
    written = sae.W_dec.norm(dim=1) * scale_out  # what a code of 1 adds to the raw prediction
    thresholds = threshold / written.masked_fill(written == 0, 1)
    folded = sae.changed(threshold=thresholds).on_raw_rows(
        *(sae.W_dec.new_full((width,), value) for width, value in (
            (sae.d_in, 0), (sae.d_in, scale_in), (sae.d_out, 0), (sae.d_out, scale_out))))
    return SavedSAE.of(folded, origin_from({
        **origin_of_hook(config.hook_point_in),
        **(origin_of_hook(config.hook_point_out, "target_") if transcodes else {})}), transcodes)


def load_qwen_scope(file: Path) -> SavedSAE:
    """Read one layer's SAE; k may be in the name of any folder above, as in the hub client's cache."""
    layer = _LAYER.fullmatch(file.name)
    if layer is None:
        raise FormatError(f"{file}: expected layerL.sae.pt, L the number of its layer")
    path = file.parent / QWEN_CONFIG
    config = read_config(path, dict[str, Any]) if path.is_file() else {}
    names = [folder.name for folder in file.absolute().parents]
    found = [int(match[1]) for name in names if (match := _K.fullmatch(name))]
    if "k" not in config and not found:
        raise FormatError(f"{file} does not say k, the number of latents that fire: expected a folder whose name ends "
                          f"with it, such as L0_50 or k50, got {names[0]!r}; rename the folder")
    activation = configured(path if "k" in config else file, TopK, k=config.get("k", next(iter(found), None)))
    tensors = ours(file, read_torch(file), QWEN_NAMES)
    models = [f"Qwen/{match[1]}" for name in names if (match := _MODEL.fullmatch(name))]
    return SavedSAE.of(assemble(file, tensors, activation), origin_from({
        "model": config.get("base_model", next(iter(models), None)),
        "layer": int(layer[1]), "site": "resid_post"}))
