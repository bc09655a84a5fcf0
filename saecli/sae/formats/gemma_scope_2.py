"""Gemma Scope 2: `config.json` and `params.safetensors`, JumpReLU SAEs and transcoders of Gemma 3 on raw activations.

Tensors are w_enc (D, F), b_enc (F,), w_dec (F, E), b_dec (E,), threshold (F,), and with `affine_connection`
affine_skip_connection (D, E), applied as `x @ affine_skip_connection`. The config names the places as Gemma 3's modules
in transformers (`hf_hook_point_in`, `hf_hook_point_out`).

A crosscoder of n layers, `model.layers.{5,9,12,15}.output`, is weakly causal: file `params_layer_I.safetensors` has
latents that read place I alone, w_enc (D, F), and write to all n, w_dec (F, n, D); b_dec (D,) is place I's. The same
tensors stacked in one `params.safetensors`, as the release's own class holds them, are read too. Here it is one SAE of
n F latents over the places side by side, whose encoder is zero outside its diagonal blocks.

Checked against what SAELens 6.54 reads (its loader `gemma_3`, which has no crosscoders).
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import FormatError
from ...base.files import write_json
from ..activations import JumpRelu
from .common import (
    TO_FIT,
    SavedSAE,
    assemble,
    check_memory,
    expect_names,
    origin_from,
    read_config,
    read_safetensors,
    refuse_unless,
    write_safetensors,
)
from .gemma_scope import WRITTEN, arrays_of

__all__ = ["CONFIG", "TENSORS", "WRITTEN", "load_gemma_scope_2", "read_config_of", "save_gemma_scope_2"]

CONFIG, WHOLE, PLACES = "config.json", "params.safetensors", "params_layer_*.safetensors"
TENSORS = f"{WHOLE}|{PLACES}"
SKIP = "affine_skip_connection"
NAMES = {"w_enc": "W_enc", "b_enc": "b_enc", "w_dec": "W_dec", "b_dec": "b_dec", "threshold": "threshold"}
SITES = {"output": "resid_post", "pre_feedforward_layernorm.output": "mlp_in",
         "post_feedforward_layernorm.output": "mlp_out"}  # attention is read before its output weights: no site here

_HOOK = re.compile(r"model\.layers\.(\d{1,9}|\{\d{1,9}(?:, ?\d{1,9})*\})\.(.+)")


def read_config_of(folder: Path) -> dict[str, Any]:
    """The configuration in a folder; FormatError if it is damaged, or of a kind that cannot be expressed here, as
    cross-layer transcoders."""
    path = folder / CONFIG
    config = read_config(path, dict[str, Any])
    refuse_unless(path, config, "architecture", "jump_relu")
    refuse_unless(path, config, "type", "sae", "transcoder", "crosscoder")
    refuse_unless(path, config, "affine_connection", False, True)
    return config


def load_gemma_scope_2(folder: Path) -> SavedSAE:
    """Read an SAE, a transcoder or a crosscoder of Gemma Scope 2; FormatError if the files are damaged, or hold other
    tensors than the configuration says."""
    config = read_config_of(folder)
    ends = [config.get(f"hf_hook_point_{end}") for end in ("in", "out")]
    origin = {"model": config.get("model_name"), **_origin(ends[0])}
    if config.get("type") == "crosscoder":
        tensors, widths = _side_by_side(folder, len(_layers(ends[0])))
        return SavedSAE.of(assemble(folder, tensors, JumpRelu(), widths=widths), origin_from(origin))
    path = folder / WHOLE
    found, _ = read_safetensors(path)
    expect_names(path, found, {*NAMES, *([SKIP] if config.get("affine_connection", False) else [])})
    transcodes = config.get("type") == "transcoder" or SKIP in found or (None not in ends and ends[0] != ends[1])
    tensors = {ours: found[theirs] for theirs, ours in (NAMES | {SKIP: "W_skip"}).items() if theirs in found}
    sae = assemble(path, tensors, JumpRelu(), transcodes=transcodes)
    return SavedSAE.of(sae, origin_from(origin | (_origin(ends[1], "target_") if transcodes else {})), transcodes)


def _side_by_side(folder: Path, places: int) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The tensors of a crosscoder over all its places, and the places' widths."""
    there = {path.name for path in folder.glob(PLACES)}
    files = [folder / PLACES.replace("*", str(place)) for place in range(places)]
    if not there and (folder / WHOLE).is_file():
        parts = _unstacked(folder / WHOLE, places)
        files = [folder / WHOLE] * places
    elif there != {path.name for path in files}:
        raise FormatError(f"{folder}: expected a file {PLACES} for each layer in hf_hook_point_in, of which there are "
                          f"{places}, got {', '.join(sorted(there))}; fetch the whole folder again")
    else:
        parts = [read_safetensors(path)[0] for path in files]
        for path, part in zip(files, parts, strict=True):
            expect_names(path, part, set(NAMES))
    width, latents = parts[0]["b_dec"].numel(), parts[0]["b_enc"].numel()
    shapes = {"w_enc": (width, latents), "b_enc": (latents,), "w_dec": (latents, places, width), "b_dec": (width,),
              "threshold": (latents,)}
    for path, part in zip(files, parts, strict=True):
        for name, shape in shapes.items():
            if tuple(part[name].shape) != shape:
                raise FormatError(f"{path}: expected {name} of shape {shape} for each place, got "
                                  f"{tuple(part[name].shape)}")
    entries = places**2 * width * latents  # of either matrix
    check_memory(str(folder), 2 * entries * parts[0]["w_enc"].dtype.itemsize, TO_FIT)
    stacked = {ours: torch.cat([part[theirs].flatten(1) if theirs == "w_dec" else part[theirs] for part in parts])
               for theirs, ours in NAMES.items() if theirs != "w_enc"}
    return stacked | {"W_enc": torch.block_diag(*(part["w_enc"] for part in parts))}, (width,) * places


def _unstacked(path: Path, places: int) -> list[dict[str, Tensor]]:
    """The tensors of each place, in a file of all."""
    found, _ = read_safetensors(path)
    expect_names(path, found, set(NAMES))
    for name, tensor in found.items():
        if not tensor.ndim or len(tensor) != places or not places:
            raise FormatError(f"{path}: expected {name} of a crosscoder with one entry for each layer in "
                              f"hf_hook_point_in, of which there are {places}, got shape {tuple(tensor.shape)}")
    return [{name: tensor[place] for name, tensor in found.items()} for place in range(places)]


def _layers(hook: Any) -> list[int]:
    """The layers in the name of a place, or of several; none in other names."""
    match = _HOOK.fullmatch(hook) if isinstance(hook, str) else None
    return [int(layer) for layer in match[1].strip("{}").split(",")] if match else []


def _origin(hook: Any, of: str = "") -> dict[str, Any]:
    """The layer and site that a place's name says, as `common.origin_of_hook` does for other names; of a crosscoder,
    its first layer."""
    layers = _layers(hook)
    site = SITES.get(_HOOK.fullmatch(hook)[2]) if layers else None
    return {f"{of}layer": layers[0], f"{of}site": site} if site else {}


def save_gemma_scope_2(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE or a transcoder, its activation one of `WRITTEN`, to an existing folder as Gemma Scope 2's are
    published, in float32, places that have no name there left out; FormatError if it is a crosscoder, whose latents
    read all its places."""
    if saved.sae.widths:
        raise FormatError("gemma-scope-2 cannot express a crosscoder whose latents read several places: expected an "
                          "SAE or a transcoder; use saelens, which takes it for an SAE of its rows side by side")
    sae, origin = saved.sae.copy_to(torch.float32), saved.origin
    modules = {site: module for module, site in SITES.items()}
    config = {"architecture": "jump_relu", "type": "transcoder" if saved.is_transcoder else "sae", "width": sae.d_sae,
              "affine_connection": sae.W_skip is not None, **({"model_name": origin["model"]} if "model" in origin
                                                              else {})}
    for end, of in (("in", ""), ("out", "target_" if saved.is_transcoder else "")):
        if f"{of}layer" in origin and origin.get(f"{of}site") in modules:
            config[f"hf_hook_point_{end}"] = f"model.layers.{origin[f'{of}layer']}.{modules[origin[f'{of}site']]}"
    write_json(folder / CONFIG, config)
    arrays = arrays_of(sae)
    tensors = {theirs: arrays[ours] for theirs, ours in NAMES.items()}
    write_safetensors(folder / WHOLE, tensors | ({} if sae.W_skip is None else {SKIP: sae.W_skip}))
