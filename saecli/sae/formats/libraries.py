"""The formats of SAELens (checked against 6.54.12), EleutherAI's sparsify (1.3) and dictionary_learning (0.1.0).

Their TopK clips at zero: `relu-topk` here. README.md has the files of each.

SAELens has this tool's names and shapes, but a skip is (E, D). A trained `batchtopk` is saved as a JumpReLU with one
threshold for all latents; checkpoints have the threshold alone, and the factor of rows in its own file. Transcoders
(`saes/transcoder.py`) clip at zero.

sparsify's encoder subtracts `b_dec`, and `relu` is written with `k` = d_sae. A transcoder (`transcode`) does not
subtract, and its targets are as wide as its rows. The folder, such as `layers.2.mlp`, is named by the module whose
output it reads, or a transcoder predicts from its input.

dictionary_learning: see `CLASSES`. Its AutoEncoder scales decoder rows to unit norm on loading.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import FormatError
from ...base.files import write_json
from ...store.origin import HookPoint
from ..activations import AbsTopK, Activation, BatchTopK, Gated, JumpRelu, Relu, ReluTopK
from ..codes import Prefixes
from ..dictionary import SAE
from . import common
from .common import SavedSAE

SAELENS_CONFIG, SAELENS_WEIGHTS = "cfg.json", "sae_weights.safetensors"
SAELENS_SCALER = "activation_scaler.json"  # of checkpoints of training
SCALED = "expected_average_only_in"
# SAELens converts a file that names no version, or one before 6, on loading.
SAELENS_VERSION = "6.54.12"

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
CHECKPOINTS = ("batchtopk", "matryoshka_batchtopk")  # which are saved as jumprelu at the end
TRANSCODERS: dict[type[Activation], tuple[str, str]] = {  # without and with a skip
    Relu: ("transcoder", "skip_transcoder"),
    JumpRelu: ("jumprelu_transcoder", "jumprelu_skip_transcoder"),
    BatchTopK: ("jumprelu_transcoder", "jumprelu_skip_transcoder"),
}


def load_saelens(folder: Path) -> SavedSAE:
    path, file = folder / SAELENS_CONFIG, folder / SAELENS_WEIGHTS
    config = common.read_config(path, dict[str, Any])
    if not isinstance(config.get("metadata"), dict):
        config = _from_before_6(path, config)
    config = {"architecture": None} | config
    metadata, activation = config["metadata"], _activation(path, config)
    transcodes = "transcoder" in config["architecture"]
    for key in ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm"):
        common.refuse_unless(path, config, key, *([False] if transcodes else [True, False]))
    # Other ways of normalising depend on each row's norm; rows are flat here either way.
    common.refuse_unless(path, config, "normalize_activations", "none", SCALED)
    common.refuse_unless(path, config, "reshape_activations", "none", "hook_z")
    stored, _ = common.read_safetensors(file)
    if "scaling_factor" in stored and (stored["scaling_factor"] == 1).all():
        del stored["scaling_factor"]  # versions before 6 wrote it whether or not it was in use
    names = common.PLAIN | {name: name for name in activation.parameters(1)}
    if isinstance(activation, BatchTopK):
        names = common.PLAIN | {"topk_threshold": "threshold"}
    elif isinstance(activation, Gated):
        names = common.GATED
    elif transcodes and config["architecture"] == TRANSCODERS[type(activation)][True]:
        names |= common.SKIP
    subtracts = not transcodes and config.get("apply_b_dec_to_input", True)
    tensors = common.renamed(file, stored, names)
    details = metadata.get("training_architecture_details") or {}
    prefixes = tuple(map(operator.index, details.get("matryoshka_widths", ())))
    sae = common.assemble(file, tensors, activation, subtracts, prefixes, transcodes)
    if config.get("rescale_acts_by_decoder_norm", False):
        sae = common.with_unit_rows(sae)
    of_one_head = metadata.get("hook_head_index") is not None  # whose rows are no site
    context, bos = metadata.get("context_size"), metadata.get("prepend_bos")
    origin = common.origin_of(
        metadata.get("model_name"),
        None if of_one_head else _point(metadata.get("hook_name")),
        _point(metadata.get("hook_name_out")) if transcodes else None,
        context=context if type(context) is int and context >= 0 else None,
        prepend_bos=bos if isinstance(bos, bool) else None,
    )
    scaled = config.get("normalize_activations") == SCALED
    scaler = folder / SAELENS_SCALER
    if scaled and scaler.is_file():
        factor = common.read_config(scaler, dict[str, Any])["scaling_factor"]
        sae, scaled = common.unscaled(sae, factor), False
    options = metadata.get("model_from_pretrained_kwargs")
    processing = options if isinstance(options, dict) else {}
    return SavedSAE(sae, origin, transcodes, scaled, processing)


def _point(hook: Any) -> HookPoint | None:
    """TransformerLens' hook point, or transformers' module, whose output SAELens then takes."""
    return common.point_of_hook(hook) or common.point_of_module(hook, "output")


def _from_before_6(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """As version 6 has it, with SAELens' defaults."""
    old = {OLD_KEYS.get(key, key): value for key, value in config.items()}
    if not {"d_in", "d_sae"} <= old.keys():
        raise FormatError(
            f"{path}: expected the keys d_in and d_sae of a SAELens configuration, got {sorted(config)}"
        )
    common.refuse_unless(path, old, "activation_fn", "relu", "topk")
    settings, scaled = old.get("activation_fn_kwargs"), old.get("normalize_activations")
    architecture = old.get("architecture", "standard")
    return {
        "architecture": "topk" if old.get("activation_fn") == "topk" else architecture,
        "k": settings.get("k") if isinstance(settings, dict) else None,
        "apply_b_dec_to_input": old.get("apply_b_dec_to_input", True),
        "normalize_activations": SCALED if scaled is True else scaled or "none",
        "metadata": old,
    }


def _activation(path: Path, config: Mapping[str, Any]) -> Activation:
    kinds = {name: kind for kind, name in ARCHITECTURES.items() if kind is not BatchTopK}
    for kind, names in TRANSCODERS.items():
        kinds |= {} if kind is BatchTopK else dict.fromkeys(names, kind)
    common.refuse_unless(path, config, "architecture", *kinds, *CHECKPOINTS)
    if config["architecture"] in CHECKPOINTS:  # whose k may be a fraction
        return common.with_config(path, BatchTopK, k=max(1, round(config["k"])))
    kind = kinds[config["architecture"]]
    settings = {"k": config.get("k")} if issubclass(kind, ReluTopK | AbsTopK) else {}
    return common.with_config(path, kind, **settings)


def save_saelens(saved: SavedSAE, folder: Path) -> None:
    """For SAELens' `SAE.load_from_disk`."""
    sae, origin = saved.sae, saved.origin
    metadata = {
        "sae_lens_version": SAELENS_VERSION,
        "sae_lens_training_version": None,
        "model_name": origin.model,
        "hook_name": common.hook_name(origin.read[0]),
        "context_size": origin.context,
        "prepend_bos": origin.prepend_bos,
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
        "reshape_activations": "hook_z" if origin.read[0].site in ("attn_z", common.Z) else "none",
        "metadata": metadata,
    }
    if saved.is_transcoder:
        config["architecture"] = TRANSCODERS[type(sae.activation)][sae.W_skip is not None]
        config["d_out"] = sae.d_out
        metadata["hook_name_out"] = common.hook_name(origin.written)
    else:
        config["architecture"] = ARCHITECTURES[type(sae.activation)]
    if isinstance(sae.activation, ReluTopK | AbsTopK):
        config |= {"k": sae.activation.k, "rescale_acts_by_decoder_norm": False}
    write_json(folder / SAELENS_CONFIG, config)
    names = common.PLAIN | common.SKIP
    if not isinstance(sae.activation, Relu):
        names |= common.THRESHOLD
    common.write_sae(folder / SAELENS_WEIGHTS, sae, names)


SPARSIFY_CONFIG, SPARSIFY_WEIGHTS = "cfg.json", "sae.safetensors"
SPARSIFY_NAMES = common.ENCODER | {"W_dec": "W_dec", "b_dec": "b_dec"}
SPARSIFY_WRITTEN: tuple[type[Activation], ...] = (ReluTopK, Relu)


def load_sparsify(folder: Path) -> SavedSAE:
    path, file = folder / SPARSIFY_CONFIG, folder / SPARSIFY_WEIGHTS
    config = common.read_config(path, dict[str, Any])
    common.refuse_unless(path, config, "activation", "topk")
    common.refuse_unless(path, config, "signed", False)
    common.refuse_unless(path, config, "transcode", False, True)
    transcodes = config.get("transcode", False)
    common.refuse_unless(path, config, "skip_connection", False, transcodes)
    activation = common.with_config(path, ReluTopK, k=config.get("k"))
    names = SPARSIFY_NAMES | (common.SKIP if config.get("skip_connection", False) else {})
    tensors = common.read_renamed(file, names)
    sae = common.assemble(file, tensors, activation, not transcodes, transcodes=transcodes)
    module = folder.absolute().name
    read = common.point_of_module(module, "input" if transcodes else "output")
    written = common.point_of_module(module, "output") if transcodes else None
    return SavedSAE(sae, common.origin_of(None, read, written), transcodes)


def save_sparsify(saved: SavedSAE, folder: Path) -> None:
    """For sparsify's `SparseCoder.load_from_disk`."""
    sae = saved.sae
    config = {
        "activation": "topk",
        "expansion_factor": max(1, sae.d_sae // sae.d_in),
        "normalize_decoder": False,
        "num_latents": sae.d_sae,
        "k": sae.k or sae.d_sae,
        "multi_topk": False,
        "skip_connection": sae.W_skip is not None,
        "transcode": saved.is_transcoder,
        "d_in": sae.d_in,
    }
    write_json(folder / SPARSIFY_CONFIG, config)
    names = SPARSIFY_NAMES | common.SKIP
    common.write_sae(folder / SPARSIFY_WEIGHTS, sae, names, subtracts=not saved.is_transcoder)


LEARNING_CONFIG, LEARNING_WEIGHTS = "config.json", "ae.pt"
BIASED = common.LINEAR | {"b_dec": "b_dec"}
INPUTS = {"resid_post": "resid_pre", "mlp_out": "mlp_in"}  # of the modules whose outputs they are


@dataclass(frozen=True)
class Trainer:
    """Entries of `config.json` that are used here."""

    dict_class: str
    lm_name: Any = None
    layer: Any = None
    submodule_name: Any = None
    k: Any = None  # of older files, which lack it among the tensors


@dataclass(frozen=True)
class LearningConfig:
    trainer: Trainer
    buffer: Any = None


@dataclass(frozen=True)
class StateDict:
    names: dict[str, str]  # as of `common.renamed`
    subtracts: bool  # the decoder bias from rows
    activation: type[Activation]
    extras: tuple[str, ...] = ()  # further entries
    trainer: str | None = None  # that a written config names; None if it is only read


CLASSES: dict[str, StateDict] = {
    "AutoEncoder": StateDict(
        common.LINEAR | {"bias": "b_dec"}, True, Relu, trainer="StandardTrainer"
    ),
    "AutoEncoderNew": StateDict(common.LINEAR | {"decoder.bias": "b_dec"}, False, Relu),
    "AutoEncoderTopK": StateDict(BIASED, True, ReluTopK, ("k", "threshold"), "TopKTrainer"),
    "BatchTopKSAE": StateDict(BIASED, True, BatchTopK, ("k", "threshold"), "BatchTopKTrainer"),
    "MatryoshkaBatchTopKSAE": StateDict(
        common.PLAIN,
        True,
        BatchTopK,
        ("k", "threshold", "group_sizes"),
        "MatryoshkaBatchTopKTrainer",
    ),
    "GatedAutoEncoder": StateDict(
        {"encoder.weight": "W_enc.T", "decoder.weight": "W_dec.T", "decoder_bias": "b_dec"}
        | {"gate_bias": "b_gate", "mag_bias": "b_enc", "r_mag": "r_mag"},
        True,
        Gated,
    ),
    "JumpReluAutoEncoder": StateDict(
        common.PLAIN | common.THRESHOLD, False, JumpRelu, trainer="JumpReluTrainer"
    ),
}
LEARNING_WRITTEN = tuple({layout.activation: None for layout in CLASSES.values() if layout.trainer})


def load_dictionary_learning(folder: Path) -> SavedSAE:
    """FormatError also for files whose loading would run code."""
    path, file = folder / LEARNING_CONFIG, folder / LEARNING_WEIGHTS
    config = common.read_config(path, LearningConfig)
    trainer = config.trainer
    if trainer.dict_class not in CLASSES:
        raise FormatError(
            f"{path}: dict_class {trainer.dict_class!r} cannot be expressed here; expected one of {', '.join(CLASSES)}"
        )
    layout, stored = CLASSES[trainer.dict_class], common.read_torch(file)
    optional = {"k"} if trainer.k is not None else set()  # older files lack these
    optional |= {"threshold"} if layout.activation is ReluTopK else set()
    extra = [name for name in layout.extras if name in stored or name not in optional]
    tensors = common.renamed(file, stored, layout.names | {name: name for name in extra})
    settings = {}
    if "k" in layout.extras:
        settings["k"] = tensors.pop("k").item() if "k" in extra else trainer.k
    activation = common.with_config(file, layout.activation, **settings)
    if "threshold" not in activation.parameters(1):
        tensors.pop("threshold", None)
    prefixes: Prefixes = ()
    if "group_sizes" in tensors:
        sizes = map(operator.index, tensors.pop("group_sizes").tolist())
        prefixes = tuple(accumulate(sizes)) or (0,)
    layer, site = trainer.layer, ""
    if isinstance(trainer.submodule_name, str):
        site = re.sub(r"_layer_?\d+", "", trainer.submodule_name)
        if isinstance(config.buffer, dict) and config.buffer.get("io") == "in":
            site = INPUTS.get(site, site)
    point = HookPoint(layer if type(layer) is int and layer >= 0 else None, site)
    sae = common.assemble(file, tensors, activation, layout.subtracts, prefixes)
    common.take_metric(sae, path.read_bytes())
    return SavedSAE(sae, common.origin_of(trainer.lm_name, point))


def _extra(sae: SAE, name: str) -> Tensor:
    if name == "k":
        return torch.tensor(sae.k, dtype=torch.int)
    if name == "group_sizes":
        return torch.diff(torch.tensor((0, *sae.prefixes), dtype=torch.int))
    if isinstance(sae.activation, BatchTopK):
        return sae.activation_parameters["threshold"].clamp(min=0)
    return torch.tensor(-1.0)


def save_dictionary_learning(saved: SavedSAE, folder: Path) -> None:
    """For `load_dictionary`; codes of `relu` are scaled, reconstructions the same."""
    sae, origin = saved.sae, saved.origin
    nested = bool(sae.prefixes) and isinstance(sae.activation, BatchTopK)
    (name,) = (
        name
        for name, layout in CLASSES.items()
        if layout.trainer
        and layout.activation is type(sae.activation)
        and ("group_sizes" in layout.extras) == nested
    )
    layout = CLASSES[name]
    trainer = {
        "dict_class": name,
        "trainer_class": layout.trainer,
        "activation_dim": sae.d_in,
        "dict_size": sae.d_sae,
        "lm_name": origin.model,
        "layer": origin.read[0].layer,
        "submodule_name": origin.read[0].site or None,
    }
    trainer |= {"k": sae.k} if sae.k else {}
    write_json(folder / LEARNING_CONFIG, {"trainer": trainer} | common.metric_of(sae))
    sae = common.with_unit_rows(sae) if isinstance(sae.activation, Relu) else sae
    tensors = common.disassembled(sae, layout.names, layout.subtracts)
    tensors |= {key: _extra(sae, key) for key in layout.extras}
    common.write_tensors(folder / LEARNING_WEIGHTS, tensors, save=torch.save)
