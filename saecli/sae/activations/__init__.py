"""Activations, which map pre-activations to codes.

An activation is a configuration (its fields are its options), and owns what depends on it: its parameters, gradient and
the penalties that it offers. To add one, write its class and a line in `ACTIVATIONS`.

    base.py         Activation, KeepsK, Thresholded, LearnsThresholds
    penalties.py    l1, l1-codes, kl, and what training to a target L0 has in common
    kinds.py        relu, jumprelu, gated, batchtopk, topk, relu-topk, abs-topk, matching-pursuit
    selection.py    codes of selected pre-activations, with sparse and straight-through gradients
"""

from typing import Any

from ...base.errors import unknown_choice
from .base import PENALTY_OPTIONS, Activation, KeepsK, LearnsThresholds, Thresholded
from .kinds import (
    AbsTopK,
    BatchTopK,
    Gated,
    JumpRelu,
    Largest,
    MatchingPursuit,
    Relu,
    ReluTopK,
    TopK,
)
from .penalties import Parameters, Penalty

__all__ = [
    "ACTIVATIONS",
    "PENALTY_OPTIONS",
    "AbsTopK",
    "Activation",
    "BatchTopK",
    "Gated",
    "JumpRelu",
    "KeepsK",
    "Largest",
    "LearnsThresholds",
    "MatchingPursuit",
    "Parameters",
    "Penalty",
    "Relu",
    "ReluTopK",
    "Thresholded",
    "TopK",
    "activation_from_json",
    "activation_to_json",
    "sparsity_names",
]

ACTIVATIONS: dict[str, type[Activation]] = {
    kind.name: kind
    for kind in (
        Relu,
        JumpRelu,
        Gated,
        TopK,
        ReluTopK,
        AbsTopK,
        BatchTopK,
        MatchingPursuit,
    )
}


def sparsity_names() -> tuple[str, ...]:
    """Every penalty that some activation offers."""
    return tuple(
        dict.fromkeys(
            name for kind in ACTIVATIONS.values() for name in ("none", *kind().penalties())
        )
    )


def activation_to_json(activation: Activation) -> dict[str, Any]:
    return {"name": activation.name, **activation.to_json()}


def activation_from_json(document: dict[str, Any]) -> Activation:
    """The activation that `activation_to_json` wrote; ConfigError for an unknown name or setting."""
    settings = dict(document)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unknown_choice("act", str(name), ACTIVATIONS)
    return ACTIVATIONS[name].from_json(settings)
