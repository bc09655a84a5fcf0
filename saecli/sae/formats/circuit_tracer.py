"""circuit-tracer's format (checked against 0.5.0): `config.yaml` and `layer_L.safetensors`, per-layer transcoders.

Rows and targets are of one width and layer; a skip is `x @ W_skip.T`. `mlp.hook_in`, after the norm's weight, is
`mlp_in` here. Versions after 0.5.0 read `activation: topk` and `k`, signed; 0.5.0 takes such files for `relu`.
Source: `transcoder/single_layer_transcoder.py`, `utils/hf_utils.py`, `utils/caching.py`, `replacement_model/` there.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...base.errors import FormatError, one_line
from ...base.files import appearing_whole
from ...store.origin import HookPoint
from ..activations import Activation, BatchTopK, JumpRelu, Relu, TopK
from . import common
from .common import SavedSAE

CONFIG, LAYER_FILES = "config.yaml", "layer_[0-9]*.safetensors"
CONFIGS = "*config.yaml"  # next to Qwen3's transcoders wandb-config.yaml, also spelt "wanb"
QWEN3 = {  # in place of a config.yaml, which they lack
    "model_kind": "transcoder_set",
    "feature_input_hook": "mlp.hook_in",
    "feature_output_hook": "hook_mlp_out",
}
NAMES = {"W_enc": "W_enc.T", "b_enc": "b_enc", "W_dec": "W_dec", "b_dec": "b_dec"}
TRACER_THRESHOLD = {"activation_function.threshold": "threshold"}
WRITTEN: tuple[type[Activation], ...] = (Relu, JumpRelu, BatchTopK, TopK)

_QWEN3 = re.compile(r"qwen3-([\d.]+b)-transcoders")


def load_circuit_tracer(file: Path) -> SavedSAE:
    path, layer = file.parent / CONFIG, int(re.findall(r"\d+", file.name)[0])
    if path.is_file():
        config = _read_yaml(path)
    else:
        size = _QWEN3.search(str(file.absolute()))
        config = QWEN3 | ({"model_name": f"Qwen/Qwen3-{size[1].upper()}"} if size else {})
    common.refuse_unless(path, {"model_kind": None} | config, "model_kind", "transcoder_set")
    stored, _ = common.read_safetensors(file)
    further = {
        name: ours for name, ours in (common.SKIP | TRACER_THRESHOLD).items() if name in stored
    }
    tensors = common.renamed(file, stored, NAMES | further)
    activation: Activation = JumpRelu() if "threshold" in tensors else Relu()
    common.refuse_unless(path, config, "activation", None, "topk", activation.name)
    if config.get("activation") == "topk":
        activation = common.with_config(path, TopK, k=config.get("k"))
    sae = common.assemble(file, tensors, activation, transcodes=True)
    lowest = sae.activation_parameters.get("threshold", torch.zeros(1)).min()
    if lowest < 0:  # where circuit-tracer's codes may be negative
        raise FormatError(f"{file}: expected thresholds of at least 0, got {lowest:g}")
    names = (config.get(f"feature_{side}_hook") for side in ("input", "output"))
    read, written = (name and common.point_of_hook(f"blocks.{layer}.{name}") for name in names)
    origin = common.origin_of(config.get("model_name"), read or HookPoint(layer), written or None)
    return SavedSAE(sae, origin, transcodes=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # takes 20 ms to import, and other formats do not need it

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FormatError(f"cannot read {path}: {one_line(error)}") from error


def save_circuit_tracer(saved: SavedSAE, folder: Path) -> tuple[int, dict[str, Any]]:
    """Returns a member of `demand_set`."""
    import yaml

    sae, config = saved.sae, _config(saved)
    with appearing_whole(folder / CONFIG) as temporary:
        temporary.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    names = NAMES | common.SKIP
    if not isinstance(sae.activation, Relu):
        names |= TRACER_THRESHOLD
    layer = saved.origin.read[0].layer
    assert layer is not None  # which `_config` demands
    common.write_sae(folder / f"layer_{layer}.safetensors", sae, names)
    return layer, in_common(saved)


def in_common(saved: SavedSAE) -> dict[str, Any]:
    """Entries that the transcoders of a set share; `examples/cross_layer.py` demands them too."""
    sae = saved.sae
    sizes = {"d_in": sae.d_in, "d_sae": sae.d_sae, "skip": sae.W_skip is not None}
    return _config(saved) | sizes


def _config(saved: SavedSAE) -> dict[str, Any]:
    """config.yaml; FormatError for hook points that it cannot name."""
    origin, activation = saved.origin, saved.sae.activation
    read, written = origin.read[0], origin.written or HookPoint()
    known = {
        "layer": read.layer,
        "site": read.site or None,
        "target_layer": written.layer,
        "target_site": written.site or None,
    }
    missing = [name for name, value in known.items() if value is None]
    if missing:
        raise FormatError(
            "circuit-tracer needs the layer and sites of rows and targets: expected a transcoder trained on "
            f"stores that `sae extract` made, got one without {', '.join(missing)}"
        )
    if read.layer != written.layer:
        raise FormatError(
            f"circuit-tracer cannot express a transcoder from layer {read.layer} to layer "
            f"{written.layer}; expected rows and targets of one layer"
        )
    config: dict[str, Any] = {} if origin.model is None else {"model_name": origin.model}
    config["model_kind"] = "transcoder_set"
    for side, point in (("input", read), ("output", written)):
        name = common.hook_name(point)
        if name is None or ":" in name:
            raise FormatError(
                f"circuit-tracer cannot name a transcoder's {side}: expected a site such as mlp_in or mlp_out, "
                f"got {point.site}; train one on stores of `sae extract --site`, or export it to native"
            )
        config[f"feature_{side}_hook"] = name.removeprefix(f"blocks.{read.layer}.")
    if isinstance(activation, TopK):
        config |= {"activation": "topk", "k": activation.k}
    return config


def demand_set(members: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """FormatError unless they, each a layer and its entries, are alike and of the layers from 0 on."""
    layers = sorted(layer for layer, _ in members)
    if layers != [*range(len(layers))]:
        raise FormatError(
            f"circuit-tracer needs a transcoder for each layer from 0 on, once each: got layers {layers}"
        )
    first, expected = members[0]
    for layer, entries in members:
        differing = [name for name in entries | expected if entries.get(name) != expected.get(name)]
        if differing:
            raise FormatError(
                f"circuit-tracer needs transcoders alike in all layers: layer {layer} differs from layer {first} in "
                f"{', '.join(differing)}"
            )
