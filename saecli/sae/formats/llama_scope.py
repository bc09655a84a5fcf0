"""Llama Scope: `hyperparams.json` and `checkpoints/final.safetensors`, JumpReLU SAEs and transcoders of Llama 3.1 8B.

Weights act on rows scaled to a norm of about sqrt(D), `c_in * x` with c = `sqrt(d_model) /
dataset_average_activation_norm`, and predict `c_out * y`. Both scales are folded into the weights here.

`jump_relu_threshold` is one number, in units of the targets: a code z adds `z * W_dec / c_out` to the raw prediction,
and fires if the norm of this exceeds the threshold, as in OpenMOSS' own code, which scales latents to unit decoder norm
(`transform_to_unit_decoder_norm`) after folding the scales in. SAELens 6.54 takes decoder norms for one.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...base.errors import FormatError
from ..activations import JumpRelu
from .common import (
    LINEAR,
    SavedSAE,
    assemble,
    origin_from,
    origin_of_hook,
    ours,
    read_config,
    read_safetensors,
)

CONFIG = "hyperparams.json"
PLACES = ("checkpoints/final.safetensors", "final.safetensors")  # as published, or next to the hyperparameters
TENSORS = "|".join(PLACES)
NAMES = LINEAR | {"decoder.bias": "b_dec"}


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
    config = read_config(folder / CONFIG, Hyperparameters)
    norms, threshold = config.dataset_average_activation_norm, config.jump_relu_threshold
    if not all(0 < norms.get(end, math.nan) < math.inf for end in ("in", "out")):
        raise FormatError(f"{folder / CONFIG}: expected positive numbers `in` and `out` in "
                          f"dataset_average_activation_norm, got {norms}; the file is damaged")
    if not 0 <= threshold < math.inf:
        raise FormatError(f"{folder / CONFIG}: expected jump_relu_threshold of at least 0, got {threshold}; negative "
                          "codes cannot be expressed here")
    path = next(path for place in PLACES if (path := folder / place).is_file())
    tensors = ours(path, read_safetensors(path)[0], NAMES)
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
