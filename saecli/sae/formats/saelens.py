"""SAELens (checked against 6.54.12): `cfg.json` and `sae_weights.safetensors` of version 6; older ones are read too.

The weights have this tool's names and shapes, but for a skip, (E, D). SAELens' TopK clips at zero: `relu-topk` here;
its `abstopk` is `abs-topk`; `gated` is read as `gated`. A trained `batchtopk` is saved as a JumpReLU with one threshold
for all latents, as SAELens saves its own. A signed `topk` has no counterpart there. Transcoders (`saes/transcoder.py`)
clip at zero, with thresholds or without; `hook_name_out` names the hook point of their targets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import FormatError
from ...base.files import write_json
from ..activations import AbsTopK, Activation, BatchTopK, Gated, JumpRelu, Relu, ReluTopK
from . import common, hooks
from .common import SavedSAE

CONFIG, TENSORS = "cfg.json", "sae_weights.safetensors"
SCALED = "expected_average_only_in"
# SAELens converts a file that names no version, or one before 6, on loading.
WRITTEN_FOR = "6.54.12"

SKIP = {"W_skip": "W_skip.T"}
# Keys before version 6.
OLD_KEYS = {"hook_point": "hook_name", "activation_fn_str": "activation_fn"}

ARCHITECTURES: dict[type[Activation], str] = {
    Relu: "standard",
    BatchTopK: "jumprelu",
    JumpRelu: "jumprelu",
    ReluTopK: "topk",
    AbsTopK: "abstopk",
    Gated: "gated",  # only read: `formats.save` has made it a jumprelu
}
TRANSCODERS: dict[type[Activation], tuple[str, str]] = {  # without and with a skip
    Relu: ("transcoder", "skip_transcoder"),
    JumpRelu: ("jumprelu_transcoder", "jumprelu_skip_transcoder"),
    BatchTopK: ("jumprelu_transcoder", "jumprelu_skip_transcoder"),
}


def load_saelens(folder: Path) -> SavedSAE:
    """Read an SAE or a transcoder; FormatError for kinds that cannot be expressed."""
    path, file = folder / CONFIG, folder / TENSORS
    config = common.read_config(path, dict[str, Any])
    if not isinstance(config.get("metadata"), dict) or "architecture" not in config:
        config = _from_before_6(path, config)
    metadata, activation = config["metadata"], _activation(path, config)
    transcodes = config["architecture"] not in ARCHITECTURES.values()
    for key in ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm"):
        common.refuse_unless(path, config, key, *((False,) if transcodes else (True, False)))
    # Other ways of normalising depend on each row's norm; rows are flat here either way.
    common.refuse_unless(path, config, "normalize_activations", "none", SCALED)
    common.refuse_unless(path, config, "reshape_activations", "none", "hook_z")
    stored, _ = common.read_safetensors(file)
    if "scaling_factor" in stored and (stored["scaling_factor"] == 1).all():
        del stored["scaling_factor"]  # versions before 6 wrote it whether or not it was in use
    names = common.PLAIN | {name: name for name in activation.parameters(1)}
    if isinstance(activation, Gated):
        names = common.GATED
    elif transcodes and config["architecture"] == TRANSCODERS[type(activation)][True]:
        names |= SKIP
    subtracts = not transcodes and config.get("apply_b_dec_to_input", True)
    tensors = common.renamed(file, stored, names)
    sae = common.assemble(file, tensors, activation, subtracts, transcodes=transcodes)
    if config.get("rescale_acts_by_decoder_norm", False):
        sae = common.with_unit_rows(sae)
    origin = {
        "model": metadata.get("model_name"),
        **_origin(metadata.get("hook_name")),
        **(_origin(metadata.get("hook_name_out"), "target_") if transcodes else {}),
        "context": metadata.get("context_size"),
        "prepend_bos": metadata.get("prepend_bos"),
    }
    scaled = config.get("normalize_activations") == SCALED
    processing = metadata.get("model_from_pretrained_kwargs")
    processing = processing if isinstance(processing, dict) else {}
    return SavedSAE(sae, common.origin_from(origin), transcodes, scaled, processing)


def _origin(hook: Any, of: str = "") -> dict[str, Any]:
    """Of TransformerLens' hook point, or of a module of transformers, whose output SAELens then takes."""
    return hooks.origin_of_hook(hook, of) or hooks.origin_of_module(hook, "output", of)


def _from_before_6(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration from before version 6 as version 6 has it, with SAELens' defaults."""
    old = {OLD_KEYS.get(key, key): value for key, value in config.items()}
    if not {"d_in", "d_sae"} <= old.keys():
        raise FormatError(
            f"{path}: expected the keys d_in and d_sae of a SAELens configuration, got {sorted(config)}"
        )
    common.refuse_unless(path, old, "activation_fn", "relu", "topk")
    kept, scaled = old.get("activation_fn_kwargs"), old.get("normalize_activations")
    architecture = old.get("architecture", "standard")
    return {
        "architecture": "topk" if old.get("activation_fn") == "topk" else architecture,
        "k": kept.get("k") if isinstance(kept, dict) else None,
        "apply_b_dec_to_input": old.get("apply_b_dec_to_input", True),
        "normalize_activations": SCALED if scaled is True else scaled or "none",
        "metadata": old,
    }


def _activation(path: Path, config: Mapping[str, Any]) -> Activation:
    kinds = {name: kind for kind, name in ARCHITECTURES.items() if kind is not BatchTopK}
    for kind, names in TRANSCODERS.items():
        kinds |= {} if kind is BatchTopK else dict.fromkeys(names, kind)
    common.refuse_unless(path, config, "architecture", *kinds)
    kind = kinds[config["architecture"]]
    settings = {"k": config.get("k")} if issubclass(kind, ReluTopK | AbsTopK) else {}
    return common.configured(path, kind, **settings)


def save_saelens(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE or a transcoder so that SAELens' `SAE.load_from_disk` reads it."""
    saved = hooks.unsettled(saved)
    sae, origin = saved.sae, saved.origin
    metadata = {
        "sae_lens_version": WRITTEN_FOR,
        "sae_lens_training_version": None,
        "model_name": origin.get("model"),
        "hook_name": hooks.hook_name(origin),
        "context_size": origin.get("context"),
        "prepend_bos": origin.get("prepend_bos"),
        "model_from_pretrained_kwargs": {
            option: value for option, value in saved.processing.items() if value
        },
    }
    config = {
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata,
    }
    if saved.is_transcoder:
        config |= {
            "architecture": TRANSCODERS[type(sae.activation)][sae.W_skip is not None],
            "d_out": sae.d_out,
        }
        metadata["hook_name_out"] = hooks.hook_name(origin, "target_")
    else:
        config["architecture"] = ARCHITECTURES[type(sae.activation)]
    if isinstance(sae.activation, ReluTopK | AbsTopK):
        config |= {"k": sae.activation.k, "rescale_acts_by_decoder_norm": False}
    write_json(folder / CONFIG, config)
    tensors = sae.tensors()
    if "threshold" in tensors:
        tensors["threshold"] = common.thresholds_of(sae)
    common.write_tensors(
        folder / TENSORS,
        common.renamed_back(tensors, common.PLAIN | {"threshold": "threshold"} | SKIP),
    )
