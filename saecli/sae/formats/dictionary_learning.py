"""dictionary_learning (checked against 0.1.0): `config.json` and `ae.pt`, a state_dict.

Its classes differ in the names and orientation of their weights and in whether they subtract the decoder bias; see the
table `CLASSES`. Its TopK clips at zero: `relu-topk` here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import ConfigError, FormatError
from ...base.files import write_json
from ..activations import Activation, BatchTopK, JumpRelu, KeepsK, Relu, ReluTopK
from ..codes import Prefixes
from ..dictionary import SAE
from .common import (
    LINEAR,
    WEIGHTS,
    SavedSAE,
    assemble,
    bias_with_subtraction,
    expect_names,
    origin_from,
    read_config,
    read_torch,
    renamed,
    write_torch,
)

CONFIG, TENSORS = "config.json", "ae.pt"

PLAIN = {name: name for name in WEIGHTS}


@dataclass(frozen=True)
class Trainer:
    """The entries of `config.json` that are used here."""

    dict_class: str
    lm_name: Any = None
    layer: Any = None


@dataclass(frozen=True)
class Config:
    """The contents of `config.json`."""

    trainer: Trainer


@dataclass(frozen=True)
class Layout:
    """The state_dict of one of the library's classes.

    Args:
        names: the class's name for each weight -> this tool's.
        subtracts: whether it subtracts the decoder bias from the rows.
        activation: extra entries -> the activation.
        extras: names of the entries beside the weights.
    """

    names: dict[str, str]
    subtracts: bool
    activation: Callable[[dict[str, Tensor]], Activation]
    extras: frozenset[str] = frozenset()


def _kept(extras: dict[str, Tensor]) -> int:
    k = extras["k"]
    if k.numel() != 1 or k.is_floating_point() or k.is_complex():
        raise ConfigError(f"--k must be a whole number, got {k.dtype} of shape {tuple(k.shape)}", option="k")
    return int(k)


def _top_k(extras: dict[str, Tensor]) -> Activation:
    return ReluTopK(k=_kept(extras))


def _batch_top_k(extras: dict[str, Tensor]) -> Activation:
    return BatchTopK(k=_kept(extras))


CLASSES: dict[str, Layout] = {
    "AutoEncoder": Layout(LINEAR | {"bias": "b_dec"}, True, lambda _: Relu()),
    "AutoEncoderNew": Layout(LINEAR | {"decoder.bias": "b_dec"}, False, lambda _: Relu()),
    "AutoEncoderTopK": Layout(LINEAR | {"b_dec": "b_dec"}, True, _top_k, frozenset({"k", "threshold"})),
    "BatchTopKSAE": Layout(LINEAR | {"b_dec": "b_dec"}, True, _batch_top_k, frozenset({"k", "threshold"})),
    "MatryoshkaBatchTopKSAE": Layout(PLAIN, True, _batch_top_k, frozenset({"k", "threshold", "group_sizes"})),
    "JumpReluAutoEncoder": Layout(PLAIN, False, lambda _: JumpRelu(), frozenset({"threshold"})),
}


def load_dictionary_learning(folder: Path) -> SavedSAE:
    """Read an SAE that dictionary_learning saved; FormatError if the files are damaged, hold objects whose loading runs
    code, or an SAE of a class that this tool cannot express."""
    path = folder / CONFIG
    trainer = read_config(path, Config).trainer
    name = trainer.dict_class
    if name not in CLASSES:
        raise FormatError(f"{path}: trainer.dict_class {name!r} cannot be expressed here; "
                          f"expected one of {', '.join(CLASSES)}")
    layout = CLASSES[name]
    found = read_torch(folder / TENSORS)
    expect_names(folder / TENSORS, found, {*layout.names, *layout.extras})
    extras = {key: found[key] for key in layout.extras}
    try:
        activation = layout.activation(extras)
    except ConfigError as error:
        raise FormatError(f"{folder / TENSORS}: {error}") from error
    tensors = renamed(found, layout.names)
    if "threshold" in activation.parameters(1):
        tensors["threshold"] = extras["threshold"]
    prefixes = _prefixes(folder / TENSORS, extras["group_sizes"]) if "group_sizes" in extras else ()
    return SavedSAE.of(assemble(folder / TENSORS, tensors, activation, layout.subtracts, prefixes),
                       origin_from({"model": trainer.lm_name, "layer": trainer.layer}))


def _prefixes(path: Path, sizes: Tensor) -> Prefixes:
    """The prefixes that groups of these sizes make up."""
    if sizes.ndim != 1 or sizes.is_floating_point() or sizes.is_complex():
        raise FormatError(f"{path}: expected whole numbers in group_sizes, got {sizes.dtype} of shape "
                          f"{tuple(sizes.shape)}")
    return tuple(sizes.cumsum(0).tolist()) if len(sizes) > 1 else ()


def _auto_encoder(sae: SAE) -> dict[str, Tensor]:
    """With decoder rows of unit norm, as the library normalises them on loading; since it divides by the norm, a latent
    with a zero decoder row is written as one that never fires."""
    norms = sae.W_dec.norm(dim=1)
    silent = norms == 0
    W_enc, b_enc = sae.W_enc * norms, sae.b_enc * norms
    W_dec = sae.W_dec / norms.masked_fill(silent, 1)[:, None]
    W_dec[silent, 0] = 1
    return {"encoder.weight": W_enc.T, "encoder.bias": bias_with_subtraction(b_enc, sae.b_dec, W_enc),
            "decoder.weight": W_dec.T, "bias": sae.b_dec}


def _auto_encoder_top_k(sae: SAE) -> dict[str, Tensor]:
    return {"encoder.weight": sae.W_enc.T, "encoder.bias": bias_with_subtraction(sae.b_enc, sae.b_dec, sae.W_enc),
            "decoder.weight": sae.W_dec.T, "b_dec": sae.b_dec,
            "k": torch.tensor(sae.activation.k, dtype=torch.int), "threshold": torch.tensor(-1.0)}


def _batch_top_k_sae(sae: SAE) -> dict[str, Tensor]:
    return _auto_encoder_top_k(sae) | {"threshold": sae.activation_parameters["threshold"].clamp(min=0)}


def _matryoshka_batch_top_k_sae(sae: SAE) -> dict[str, Tensor]:
    plain = _batch_top_k_sae(sae)
    return {"W_enc": sae.W_enc, "b_enc": plain["encoder.bias"], "W_dec": sae.W_dec, "b_dec": sae.b_dec, "k": plain["k"],
            "threshold": plain["threshold"],
            "group_sizes": torch.diff(torch.tensor((0, *sae.prefixes), dtype=torch.int))}


def _jump_relu_auto_encoder(sae: SAE) -> dict[str, Tensor]:
    return sae.tensors() | {"threshold": sae.activation.thresholds(sae.activation_parameters, sae.d_sae)}


WRITTEN_AS: dict[type[Activation], tuple[str, str, Callable[[SAE], dict[str, Tensor]]]] = {
    Relu: ("AutoEncoder", "StandardTrainer", _auto_encoder),
    ReluTopK: ("AutoEncoderTopK", "TopKTrainer", _auto_encoder_top_k),
    BatchTopK: ("BatchTopKSAE", "BatchTopKTrainer", _batch_top_k_sae),
    JumpRelu: ("JumpReluAutoEncoder", "JumpReluTrainer", _jump_relu_auto_encoder),
}
NESTED: dict[type[Activation], tuple[str, str, Callable[[SAE], dict[str, Tensor]]]] = {
    BatchTopK: ("MatryoshkaBatchTopKSAE", "MatryoshkaBatchTopKTrainer", _matryoshka_batch_top_k_sae)}


def save_dictionary_learning(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE so that dictionary_learning's `load_dictionary` reads it.

    Args:
        saved: the SAE, its activation one of `WRITTEN_AS`. With `relu`, codes are scaled by the norms of the decoder's
            rows, as that library scales them on loading; reconstructions are the same.
        folder: an existing folder.
    """
    sae, origin = saved.sae.copy_to(torch.float32), saved.origin
    classes = WRITTEN_AS | NESTED if sae.prefixes else WRITTEN_AS
    name, trainer, tensors_of = classes[type(sae.activation)]
    config: dict[str, Any] = {"dict_class": name, "trainer_class": trainer, "activation_dim": sae.d_in,
                              "dict_size": sae.d_sae, "lm_name": origin.get("model"), "layer": origin.get("layer"),
                              "submodule_name": origin.get("site")}
    if isinstance(sae.activation, KeepsK):
        config["k"] = sae.activation.k
    write_json(folder / CONFIG, {"trainer": config})
    write_torch(folder / TENSORS, tensors_of(sae))
