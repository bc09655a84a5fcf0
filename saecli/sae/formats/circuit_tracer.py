"""circuit-tracer (checked against 0.5.0): `config.yaml` and `layer_L.safetensors`, per-layer transcoders.

circuit-tracer fetches a folder with one config.yaml and the transcoders of all layers from 0; each export is one
layer's. Source: `transcoder/single_layer_transcoder.py`, `utils/hf_utils.py` and `utils/caching.py` there.

Rows and targets are of one width and one layer; a skip is applied as `x @ W_skip.T`. Versions after 0.5.0 read
`activation: topk` and `k`, signed as `topk` here; 0.5.0 would take such files for `relu`, so they are read only.
"""

import re
from pathlib import Path

import torch

from ...base.errors import FormatError, one_line
from ...base.files import appearing_whole, regular
from ..activations import Activation, BatchTopK, JumpRelu, Relu, TopK
from .common import (
    EXACT_MLP_IN_HOOK,
    SavedSAE,
    assemble,
    configured,
    origin_from,
    origin_of_hook,
    ours,
    read_safetensors,
    refuse_unless,
    theirs,
    thresholds_of,
    write_safetensors,
)

CONFIG, TENSORS = "config.yaml", "layer_*.safetensors"
NAMES = {"W_enc": "W_enc.T", "b_enc": "b_enc", "W_dec": "W_dec", "b_dec": "b_dec"}
SKIP, THRESHOLD = {"W_skip": "W_skip.T"}, {"activation_function.threshold": "threshold"}
WRITTEN: tuple[type[Activation], ...] = (Relu, JumpRelu, BatchTopK)
PLACES = ("layer", "site", "target_layer", "target_site")

_LAYER = re.compile(r"layer_(\d{1,9})\.safetensors")


def load_circuit_tracer(file: Path) -> SavedSAE:
    """Read one layer's transcoder; FormatError for thresholds below zero, under which negative codes would pass."""
    path, match = file.parent / CONFIG, _LAYER.fullmatch(file.name)
    if match is None:
        raise FormatError(f"{file}: expected layer_L.safetensors, L the number of its layer")
    config = _read_yaml(path)
    refuse_unless(path, {"model_kind": config.get("model_kind")}, "model_kind", "transcoder_set")
    found, _ = read_safetensors(file)
    tensors = ours(file, found, NAMES | {name: own for name, own in (SKIP | THRESHOLD).items() if name in found})
    activation: Activation = JumpRelu() if "threshold" in tensors else Relu()
    if config.get("activation") == "topk":
        k = config.get("k", "")
        activation = configured(path, TopK, k=int(k) if re.fullmatch(r"\d{1,18}", k) else None)
    sae = assemble(file, tensors, activation, transcodes=True)
    if (lowest := float(sae.activation_parameters.get("threshold", torch.zeros(1)).min())) < 0:
        raise FormatError(f"{file}: thresholds below 0 cannot be expressed here, got {lowest:.3g}")
    origin = {"model": config.get("model_name"), "layer": int(match[1])}
    for of, side in (("", "input"), ("target_", "output")):
        origin |= origin_of_hook(f"blocks.{match[1]}.{config.get(f'feature_{side}_hook')}", of)
    return SavedSAE.of(sae, origin_from(origin), transcodes=True)


def _read_yaml(path: Path) -> dict[str, str]:
    """The entries of a YAML file that are texts or numbers, as texts."""
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
    """Write a transcoder of one width and one layer."""
    import yaml

    sae, origin = saved.sae, saved.origin
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
    thresholds = {} if isinstance(sae.activation, Relu) else {"threshold": thresholds_of(sae)}
    write_safetensors(folder / TENSORS.replace("*", str(origin["layer"])),
                      theirs(sae.tensors() | thresholds, NAMES | SKIP | (THRESHOLD if thresholds else {})))
