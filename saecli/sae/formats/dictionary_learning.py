"""dictionary_learning (checked against 0.1.0): `config.json` and `ae.pt`, a state_dict.

Its classes differ in names and orientation of weights, and in whether they subtract the decoder bias; see `CLASSES`.
Its TopK clips at zero: `relu-topk` here. Its AutoEncoder scales decoder rows to unit norm on loading.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import FormatError
from ...base.files import write_json
from ..activations import Activation, BatchTopK, JumpRelu, KeepsK, Relu, ReluTopK
from ..codes import Prefixes
from ..dictionary import SAE
from .common import (
    LINEAR,
    PLAIN,
    SavedSAE,
    assemble,
    bias_with_subtraction,
    configured,
    origin_from,
    ours,
    read_config,
    read_torch,
    theirs,
    thresholds_of,
    write_torch,
)

CONFIG, TENSORS = "config.json", "ae.pt"


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
    """The state_dict of a class: names as of `common.ours`, whether it subtracts the decoder bias from rows, the
    activation here, further entries, and the trainer that a written config names; None if it is only read."""

    names: dict[str, str]
    subtracts: bool
    activation: type[Activation]
    extras: tuple[str, ...] = ()
    trainer: str | None = None


CLASSES: dict[str, Layout] = {
    "AutoEncoder": Layout(LINEAR | {"bias": "b_dec"}, True, Relu, trainer="StandardTrainer"),
    "AutoEncoderNew": Layout(LINEAR | {"decoder.bias": "b_dec"}, False, Relu),
    "AutoEncoderTopK": Layout(LINEAR | {"b_dec": "b_dec"}, True, ReluTopK, ("k", "threshold"), "TopKTrainer"),
    "BatchTopKSAE": Layout(LINEAR | {"b_dec": "b_dec"}, True, BatchTopK, ("k", "threshold"), "BatchTopKTrainer"),
    "MatryoshkaBatchTopKSAE": Layout(PLAIN, True, BatchTopK, ("k", "threshold", "group_sizes"),
                                     "MatryoshkaBatchTopKTrainer"),
    "JumpReluAutoEncoder": Layout(PLAIN, False, JumpRelu, ("threshold",), "JumpReluTrainer")}
WRITTEN = tuple({layout.activation: None for layout in CLASSES.values() if layout.trainer})


def load_dictionary_learning(folder: Path) -> SavedSAE:
    """Read an SAE; FormatError also for files whose loading would run code."""
    path, file = folder / CONFIG, folder / TENSORS
    trainer = read_config(path, Config).trainer
    if trainer.dict_class not in CLASSES:
        raise FormatError(f"{path}: trainer.dict_class {trainer.dict_class!r} cannot be expressed here; "
                          f"expected one of {', '.join(CLASSES)}")
    layout = CLASSES[trainer.dict_class]
    tensors = ours(file, read_torch(file), layout.names | {name: name for name in layout.extras})
    extras = {name: tensors.pop(name) for name in layout.extras}
    k = {"k": _whole(file, "k", extras["k"], 1)[0]} if "k" in extras else {}
    activation = configured(file, layout.activation, **k)
    if "threshold" in activation.parameters(1):
        tensors["threshold"] = extras["threshold"]
    prefixes: Prefixes = ()
    if "group_sizes" in extras and len(sizes := _whole(file, "group_sizes", extras["group_sizes"])) > 1:
        prefixes = tuple(torch.tensor(sizes).cumsum(0).tolist())
    return SavedSAE.of(assemble(file, tensors, activation, layout.subtracts, prefixes),
                       origin_from({"model": trainer.lm_name, "layer": trainer.layer}))


def _whole(path: Path, name: str, numbers: Tensor, count: int | None = None) -> list[int]:
    if numbers.is_floating_point() or numbers.is_complex() or numbers.ndim > 1 or count not in (None, numbers.numel()):
        raise FormatError(f"{path}: {name} must be {'a whole number' if count else 'whole numbers'}, got "
                          f"{numbers.dtype} of shape {tuple(numbers.shape)}")
    return numbers.flatten().tolist()


def _with_unit_rows(sae: SAE) -> SAE:
    """The same reconstructions with unit decoder rows; a latent with a zero row becomes one that never fires."""
    norms = sae.W_dec.norm(dim=1)
    W_dec = sae.W_dec / norms.masked_fill(norms == 0, 1)[:, None]
    W_dec[norms == 0, 0] = 1
    return sae.changed(W_enc=sae.W_enc * norms, b_enc=sae.b_enc * norms, W_dec=W_dec)


def _extra(sae: SAE, name: str) -> Tensor:
    """An entry of `Layout.extras`."""
    if name == "k":
        return torch.tensor(sae.k, dtype=torch.int)
    if name == "group_sizes":
        return torch.diff(torch.tensor((0, *sae.prefixes), dtype=torch.int))
    if isinstance(sae.activation, BatchTopK):
        return sae.activation_parameters["threshold"].clamp(min=0)
    return thresholds_of(sae) if isinstance(sae.activation, JumpRelu) else torch.tensor(-1.0)


def save_dictionary_learning(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE so that `load_dictionary` reads it; codes of `relu` are scaled, reconstructions the same."""
    sae, origin = saved.sae, saved.origin
    nested = bool(sae.prefixes) and isinstance(sae.activation, BatchTopK)
    name, layout = next((name, layout) for name, layout in CLASSES.items() if layout.trainer and
                        layout.activation is type(sae.activation) and ("group_sizes" in layout.extras) == nested)
    config: dict[str, Any] = {"dict_class": name, "trainer_class": layout.trainer, "activation_dim": sae.d_in,
                              "dict_size": sae.d_sae, "lm_name": origin.get("model"), "layer": origin.get("layer"),
                              "submodule_name": origin.get("site")}
    if isinstance(sae.activation, KeepsK):
        config["k"] = sae.activation.k
    write_json(folder / CONFIG, {"trainer": config})
    sae = _with_unit_rows(sae) if isinstance(sae.activation, Relu) else sae
    tensors = sae.tensors()
    if layout.subtracts:
        tensors["b_enc"] = bias_with_subtraction(sae.b_enc, sae.b_dec, sae.W_enc)
    write_torch(folder / TENSORS, theirs(tensors, layout.names) | {key: _extra(sae, key) for key in layout.extras})
