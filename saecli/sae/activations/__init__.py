"""Activations, which map pre-activations to codes.

An activation is a configuration (its fields are its options), and owns everything that depends on it: its parameters,
its gradient, its sparsity penalties and the shape of its cells. To add one, write its class here and a line in
`ACTIVATIONS`.
"""

from ...base.errors import unknown_choice
from .base import Activation, Parameters
from .jumprelu import JumpRelu
from .largest import AbsTopK, KeepsK, Largest, ReluTopK, TopK
from .smooth import SoftTopK, Swish
from .thresholded import BatchTopK, Relu, Thresholded

__all__ = ["ACTIVATIONS", "AbsTopK", "Activation", "BatchTopK", "JumpRelu", "KeepsK", "Largest", "Parameters", "Relu",
           "ReluTopK", "SoftTopK", "Swish", "Thresholded", "TopK", "activation_from_json", "activation_to_json",
           "sparsity_names"]

ACTIVATIONS: dict[str, type[Activation]] = {
    kind.name: kind for kind in (Relu, JumpRelu, TopK, ReluTopK, AbsTopK, BatchTopK, Swish, SoftTopK)}


def sparsity_names() -> tuple[str, ...]:
    """Every penalty that some activation offers."""
    return tuple(dict.fromkeys(name for kind in ACTIVATIONS.values() for name in ("none", *kind.sparsities)))


def activation_to_json(activation: Activation) -> dict:
    """The activation as a JSON object: its name and its settings."""
    return {"name": activation.name, **activation.to_json()}


def activation_from_json(document: dict) -> Activation:
    """The activation that `activation_to_json` wrote; ConfigError if its name is unknown or its settings do not fit."""
    settings = dict(document)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unknown_choice("act", str(name), ACTIVATIONS)
    return ACTIVATIONS[name].from_json(settings)
