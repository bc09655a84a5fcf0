"""circuit-tracer (checked against 0.5.0): `config.yaml` and `layer_L.safetensors`, per-layer transcoders.

A folder of these is what circuit-tracer fetches from the hub (`load_transcoder_from_hub`) and keeps in its own cache,
once it holds the transcoders of all layers from 0: each export is one layer's, and their files go into one folder with
one config.yaml. The config has no `transcoders`, which would be paths from the working folder in the order of layers.
Source: `transcoder/single_layer_transcoder.py`, `utils/hf_utils.py` and `utils/caching.py` there.

Tensors are W_enc (F, D), b_enc, W_dec (F, D), b_dec, with thresholds `activation_function.threshold`, and with a skip
W_skip (D, D), applied as `x @ W_skip.T`; rows and targets are of one width and one layer. Versions after 0.5.0 read
`activation: topk` and `k`, signed as `topk` here; 0.5.0 would take such files for `relu`, so that they are read only.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...base.errors import ConfigError, FormatError, one_line
from ...base.files import appearing_whole, regular
from ..activations import Activation, BatchTopK, JumpRelu, Relu, TopK
from .common import (
    EXACT_MLP_IN_HOOK,
    WEIGHTS,
    SavedSAE,
    assemble,
    origin_from,
    origin_of_hook,
    read_safetensors,
    refuse_unless,
    transposed,
    write_safetensors,
)

CONFIG, TENSORS = "config.yaml", "layer_*.safetensors"
THRESHOLD = "activation_function.threshold"
WRITTEN: tuple[type[Activation], ...] = (Relu, JumpRelu, BatchTopK)
PLACES = ("layer", "site", "target_layer", "target_site")

_LAYER = re.compile(r"layer_(\d{1,9})\.safetensors")


def load_circuit_tracer(file: Path) -> SavedSAE:
    """Read the transcoder of one layer from its file; FormatError if it or the configuration beside it is damaged, or
    is of a cross-layer transcoder, or thresholds are below zero, under which negative codes would pass."""
    path, match = file.parent / CONFIG, _LAYER.fullmatch(file.name)
    if match is None:
        raise FormatError(f"{file}: expected layer_L.safetensors, L the number of its layer")
    config = _read_yaml(path)
    refuse_unless(path, {"model_kind": config.get("model_kind")}, "model_kind", "transcoder_set")
    found, _ = read_safetensors(file)
    activation = _activation(path, config, found)
    tensors = {key.removeprefix("activation_function."): transposed(tensor) if key in ("W_enc", "W_skip") else tensor
               for key, tensor in found.items()}
    sae = assemble(file, tensors, activation, transcodes=True)
    if (lowest := float(sae.activation_parameters.get("threshold", torch.zeros(1)).min())) < 0:
        raise FormatError(f"{file}: thresholds below 0 cannot be expressed here, got {lowest:.3g}")
    hooks = {of: config.get(f"feature_{side}_hook") for of, side in (("", "input"), ("target_", "output"))}
    return SavedSAE.of(sae, origin_from({
        "model": config.get("model_name"), "layer": int(match[1]),
        **{name: value for of, hook in hooks.items() for name, value in
           origin_of_hook(f"blocks.{match[1]}.{hook}", of).items()}}), transcodes=True)


def _activation(path: Path, config: Mapping[str, str], found: Mapping[str, Tensor]) -> Activation:
    if config.get("activation") != "topk":
        return JumpRelu() if THRESHOLD in found else Relu()
    try:
        return TopK(k=int(config["k"]) if re.fullmatch(r"\d{1,18}", config.get("k", "")) else None)
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error


def _read_yaml(path: Path) -> dict[str, str]:
    """The entries of a YAML file that are texts or numbers, as texts; FormatError if it cannot be read."""
    import yaml  # takes 20 ms to import, and other formats do not need it

    try:
        document = yaml.load(regular(path).read_bytes(), yaml.BaseLoader)
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise FormatError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise FormatError(f"cannot read {path}: expected the keys and values of circuit-tracer's configuration, got "
                          f"{type(document).__name__}")
    return {key: value for key, value in document.items() if isinstance(key, str) and isinstance(value, str)}


def save_circuit_tracer(saved: SavedSAE, folder: Path) -> None:
    """Write a transcoder of one width, its activation one of `WRITTEN`, to an existing folder so that circuit-tracer
    reads it; FormatError if layer or sites are unknown, or the targets are of another layer."""
    import yaml

    sae, origin = saved.sae.copy_to(torch.float32), saved.origin
    if missing := [name for name in PLACES if name not in origin]:
        raise FormatError("circuit-tracer needs to know the layer and sites of rows and targets: expected a transcoder "
                          f"trained on stores that `sae extract` made, got one without {', '.join(missing)}")
    if origin["layer"] != origin["target_layer"]:
        raise FormatError(f"circuit-tracer cannot express a transcoder from layer {origin['layer']} to layer "
                          f"{origin['target_layer']}; expected rows and targets of one layer")
    hooks = {side: EXACT_MLP_IN_HOOK if site == "mlp_in" else f"hook_{site}"
             for side, site in (("input", origin["site"]), ("output", origin["target_site"]))}
    config = ({"model_name": origin["model"]} if "model" in origin else {}) | {
        "model_kind": "transcoder_set", **{f"feature_{side}_hook": hook for side, hook in hooks.items()}}
    with appearing_whole(folder / CONFIG) as temporary:
        temporary.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    tensors = {name: sae.tensors()[name] for name in WEIGHTS} | {"W_enc": sae.W_enc.T}
    if not isinstance(sae.activation, Relu):
        tensors[THRESHOLD] = sae.activation.thresholds(sae.activation_parameters, sae.d_sae)
    if sae.W_skip is not None:
        tensors["W_skip"] = sae.W_skip.T
    write_safetensors(folder / TENSORS.replace("*", str(origin["layer"])), tensors)
