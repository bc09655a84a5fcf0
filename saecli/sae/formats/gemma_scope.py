"""Gemma Scope: `params.npz`, a JumpReLU SAE on raw activations, its model named by repository and folders alone.

Gemma Scope 2: `config.json` and `params.safetensors`, SAEs and transcoders of Gemma 3, the skip applied as
`x @ affine_skip_connection`. The config names hook points as Gemma 3's modules in transformers.

A crosscoder of n layers, `model.layers.{5,9,12,15}.output`, is weakly causal: file `params_layer_I.safetensors` has
latents that read layer I alone, w_enc (D, F), and write to all n, w_dec (F, n, D); b_dec (D,) is layer I's. The same
tensors stacked in one `params.safetensors`, as the release's own class holds them, are read too. Here it is one SAE of
n F latents on concatenated rows, whose encoder is zero outside its diagonal blocks.

A `relu` is written with thresholds of zero, and a trained `batchtopk` with equal thresholds. Checked against what
SAELens 6.54 reads (its loader `gemma_3`, which has no crosscoders).
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import FormatError
from ...base.files import appearing_whole, write_json
from ..activations import Activation, BatchTopK, JumpRelu, Relu
from .common import (
    PLAIN,
    TO_FIT,
    SavedSAE,
    assemble,
    check_memory,
    origin_from,
    ours,
    read_config,
    read_npz,
    read_safetensors,
    refuse_unless,
    theirs,
    thresholds_of,
    write_safetensors,
)

ARRAYS = "params.npz"
CONFIG, WHOLE, LAYERS = "config.json", "params.safetensors", "params_layer_*.safetensors"
TENSORS = f"{WHOLE}|{LAYERS}"
WRITTEN: tuple[type[Activation], ...] = (Relu, JumpRelu, BatchTopK)
NAMES = {"w_enc": "W_enc", "b_enc": "b_enc", "w_dec": "W_dec", "b_dec": "b_dec", "threshold": "threshold"}
SKIP = {"affine_skip_connection": "W_skip"}
SITES = {"output": "resid_post", "pre_feedforward_layernorm.output": "mlp_in",
         "post_feedforward_layernorm.output": "mlp_out"}  # attention is read before its output weights: no site here

_HOOK = re.compile(r"model\.layers\.(\d{1,9}|\{\d{1,9}(?:, ?\d{1,9})*\})\.(.+)")


def load_gemma_scope(folder: Path) -> SavedSAE:
    """Read an SAE of Gemma Scope."""
    path = folder / ARRAYS
    return SavedSAE(assemble(path, read_npz(path), JumpRelu()))


def save_gemma_scope(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE as Gemma Scope's are published."""
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in theirs(
        saved.sae.tensors() | {"threshold": thresholds_of(saved.sae)}, PLAIN | {"threshold": "threshold"}).items()}
    with appearing_whole(folder / ARRAYS) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def read_config_of(folder: Path) -> dict[str, Any]:
    """Gemma Scope 2's configuration; FormatError for kinds that cannot be expressed, as cross-layer transcoders."""
    path = folder / CONFIG
    config = read_config(path, dict[str, Any])
    refuse_unless(path, config, "architecture", "jump_relu")
    refuse_unless(path, config, "type", "sae", "transcoder", "crosscoder")
    refuse_unless(path, config, "affine_connection", False, True)
    return config


def load_gemma_scope_2(folder: Path) -> SavedSAE:
    """Read an SAE, a transcoder or a crosscoder of Gemma Scope 2."""
    config = read_config_of(folder)
    ends = [config.get(f"hf_hook_point_{end}") for end in ("in", "out")]
    origin = {"model": config.get("model_name"), **_origin(ends[0])}
    if config.get("type") == "crosscoder":
        tensors, widths = _concatenated(folder, len(_layers_and_module(ends[0])[0]))
        return SavedSAE.of(assemble(folder, tensors, JumpRelu(), widths=widths), origin_from(origin))
    path = folder / WHOLE
    skip = SKIP if config.get("affine_connection", False) else {}
    tensors = ours(path, read_safetensors(path)[0], NAMES | skip)
    transcodes = config.get("type") == "transcoder" or bool(skip) or (None not in ends and ends[0] != ends[1])
    sae = assemble(path, tensors, JumpRelu(), transcodes=transcodes)
    return SavedSAE.of(sae, origin_from(origin | (_origin(ends[1], "target_") if transcodes else {})), transcodes)


def _concatenated(folder: Path, layers: int) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """A crosscoder's tensors over all its layers, and their widths."""
    there = {path.name for path in folder.glob(LAYERS)}
    files = [folder / LAYERS.replace("*", str(layer)) for layer in range(layers)]
    if not there and (folder / WHOLE).is_file():
        parts = _unstacked(folder / WHOLE, layers)
        files = [folder / WHOLE] * layers
    elif there != {path.name for path in files}:
        raise FormatError(f"{folder}: expected a file {LAYERS} for each of the {layers} layers in hf_hook_point_in, "
                          f"got {', '.join(sorted(there))}; fetch the whole folder again")
    else:
        parts = [ours(path, read_safetensors(path)[0], NAMES) for path in files]
    width, latents = parts[0]["b_dec"].numel(), parts[0]["b_enc"].numel()
    shapes = {"W_enc": (width, latents), "b_enc": (latents,), "W_dec": (latents, layers, width), "b_dec": (width,),
              "threshold": (latents,)}
    for path, part in zip(files, parts, strict=True):
        for name, shape in shapes.items():
            if tuple(part[name].shape) != shape:
                raise FormatError(f"{path}: expected {name.lower()} of shape {shape} for each layer, got "
                                  f"{tuple(part[name].shape)}")
    entries = layers**2 * width * latents  # of either matrix
    check_memory(str(folder), 2 * entries * parts[0]["W_enc"].dtype.itemsize, TO_FIT)
    stacked = {name: torch.cat([part[name].flatten(1) if name == "W_dec" else part[name] for part in parts])
               for name in shapes if name != "W_enc"}
    return stacked | {"W_enc": torch.block_diag(*(part["W_enc"] for part in parts))}, (width,) * layers


def _unstacked(path: Path, layers: int) -> list[dict[str, Tensor]]:
    """The tensors of each layer, in a file of all."""
    found = ours(path, read_safetensors(path)[0], NAMES)
    for name, tensor in found.items():
        if not tensor.ndim or len(tensor) != layers or not layers:
            raise FormatError(f"{path}: expected {name.lower()} of a crosscoder with one entry for each of the "
                              f"{layers} layers in hf_hook_point_in, got shape {tuple(tensor.shape)}")
    return [{name: tensor[layer] for name, tensor in found.items()} for layer in range(layers)]


def _layers_and_module(hook: Any) -> tuple[list[int], str]:
    """The layers and the module in a hook point's name, if any."""
    match = _HOOK.fullmatch(hook) if isinstance(hook, str) else None
    return ([int(layer) for layer in match[1].strip("{}").split(",")], match[2]) if match else ([], "")


def _origin(hook: Any, of: str = "") -> dict[str, Any]:
    """As `common.origin_of_hook`, for these names; of a crosscoder, its first layer."""
    layers, module = _layers_and_module(hook)
    return {f"{of}layer": layers[0], f"{of}site": SITES[module]} if module in SITES else {}


def save_gemma_scope_2(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE or a transcoder as published, without hook points that have no name there."""
    sae, origin = saved.sae, saved.origin
    if sae.widths:
        raise FormatError("gemma-scope-2 cannot express a crosscoder whose latents read several hook points: expected "
                          "an SAE or a transcoder; use saelens, which takes it for an SAE of concatenated rows")
    modules = {site: module for module, site in SITES.items()}
    config = {"architecture": "jump_relu", "type": "transcoder" if saved.is_transcoder else "sae", "width": sae.d_sae,
              "affine_connection": sae.W_skip is not None, **({"model_name": origin["model"]} if "model" in origin
                                                              else {})}
    for end, of in (("in", ""), ("out", "target_" if saved.is_transcoder else "")):
        if f"{of}layer" in origin and origin.get(f"{of}site") in modules:
            config[f"hf_hook_point_{end}"] = f"model.layers.{origin[f'{of}layer']}.{modules[origin[f'{of}site']]}"
    write_json(folder / CONFIG, config)
    write_safetensors(folder / WHOLE, theirs(sae.tensors() | {"threshold": thresholds_of(sae)}, NAMES | SKIP))
