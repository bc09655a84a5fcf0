"""Activations: what turns pre-activations into codes.

An activation is a configuration (its fields are its options), and owns everything that depends on it: its
learned parameters, its gradient, its sparsity penalties and the shape of its cells. To add one, write its
class here and a line in `ACTIVATIONS`.

Shapes: B rows, F = d_sae. Latent i is active on a row when its code is not zero.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .config import Config, option
from .errors import ConfigError

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Activation(Config):
    """Base of all activations: phi, applied to pre-activations `x @ W_enc + b_enc`.

    `sparsities` names the penalties that the activation offers, its default first; besides `none`, each is
    a method `penalty_NAME(pre, codes, decoder_norms, parameters)` that gives one number a row.
    """

    panel: ClassVar[str] = "Activation"
    name: ClassVar[str]
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1")

    def check(self, d_sae: int) -> None:
        """Refuse settings that cannot work with `d_sae` latents.

        Raises:
            ConfigError: they cannot.
        """

    def parameters(self, d_sae: int) -> Parameters:
        """The learned parameters at the start of training; none for most activations."""
        return {}

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """The codes of pre-activations.

        Args:
            pre: pre-activations, (B, F).
            parameters: what `parameters` returned, trained since.

        Returns:
            Codes, (B, F), dense.
        """
        raise TypeError(f"{type(self).__name__} does not say what its codes are")

    def norm_weights(self, sparsity: str, codes: Tensor) -> Tensor:
        """How much of a penalty each decoder norm carries: its derivative in `||W_dec_i||`, summed over rows, (F,)."""
        return codes.abs().sum(0) if sparsity == "l1" else codes.new_zeros(codes.shape[1])

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The parameters with which pre-activations `factor` > 0 times as large give codes `factor` times as large."""
        return parameters

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """The penalty's weight when the user gives none, for rows of mean squared norm `d_in`."""
        return {"none": 0.0, "l1": 0.1 * math.sqrt(d_in)}[sparsity]

    def penalty_l1(self, pre: Tensor, codes: Tensor, decoder_norms: Tensor, parameters: Parameters) -> Tensor:
        """Scale-free L1 of each row, `sum_i |z_i| ||W_dec_i||`, (B,): shrinking codes against a growing decoder
        gains nothing."""
        return codes.abs() @ decoder_norms

    def penalty(self, sparsity: str, pre: Tensor, codes: Tensor, decoder_norms: Tensor,
                parameters: Parameters) -> Tensor:
        """The penalty of each row, (B,), unweighted.

        Args:
            sparsity: one of `sparsities`, not `none`.
            pre: pre-activations, (B, F).
            codes: their codes, (B, F).
            decoder_norms: `||W_dec_i||` of each latent, (F,).
            parameters: the activation's own.
        """
        return getattr(self, f"penalty_{sparsity}")(pre, codes, decoder_norms, parameters)


@dataclass(frozen=True)
class Thresholded(Activation):
    """An activation whose latents switch each on its own: latent i is active where `pre_i > threshold_i`."""

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The pre-activation above which each latent is active, (F,)."""
        return torch.zeros(d_sae)


@dataclass(frozen=True)
class Relu(Thresholded):
    """`z = max(pre, 0)`."""

    name: ClassVar[str] = "relu"
    sparsities: ClassVar[tuple[str, ...]] = ("l1", "none")

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`max(pre, 0)`, (B, F)."""
        return pre.relu()


class _JumpReluGate(torch.autograd.Function):
    """`pre * H(pre - threshold)`, with the straight-through gradient of the threshold."""

    @staticmethod
    def forward(ctx, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        active = pre > threshold
        ctx.save_for_backward(pre, threshold, active)
        ctx.bandwidth = bandwidth
        return pre * active

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        pre, threshold, active = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.bandwidth / 2
        return grad * active, -(threshold / ctx.bandwidth) * (near * grad).sum(0), None


class _StepCount(torch.autograd.Function):
    """`sum_i H(pre_i - threshold_i)`, with the straight-through gradient of the threshold."""

    @staticmethod
    def forward(ctx, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        return (pre > threshold).sum(-1).to(pre.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        near = (pre - threshold).abs() < ctx.bandwidth / 2
        return None, -(near * grad[:, None]).sum(0) / ctx.bandwidth, None


@dataclass(frozen=True)
class JumpRelu(Thresholded):
    """`z = pre * H(pre - threshold)`, one learned threshold a latent.

    The threshold's gradient is the straight-through estimate with a rectangular kernel of width `bandwidth`.
    Source: Rajamanoharan et al., "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse
    Autoencoders" (2024), equations 8 to 12; the threshold itself is learned here, not its logarithm.
    """

    name: ClassVar[str] = "jumprelu"
    sparsities: ClassVar[tuple[str, ...]] = ("l0", "l1", "none")

    threshold: float = option(0.1, "Threshold of every latent at the start, in units of the normalised rows.",
                              minimum=0)
    bandwidth: float = option(0.3, "Width of the kernel in the threshold's gradient, in the same units.", above=0)

    def parameters(self, d_sae: int) -> Parameters:
        """The thresholds, (F,)."""
        return {"threshold": torch.full((d_sae,), self.threshold)}

    def thresholds(self, parameters: Parameters, d_sae: int) -> Tensor:
        """The thresholds, (F,); one that training pushed below zero acts as zero."""
        return parameters["threshold"].clamp(min=0)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`pre` where it exceeds its latent's threshold, else 0, (B, F)."""
        return _JumpReluGate.apply(pre, self.thresholds(parameters, pre.shape[-1]), self.bandwidth)

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters:
        """The thresholds grow with the pre-activations."""
        return {"threshold": parameters["threshold"] * factor}

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """An active latent costs a thousandth of a row's mean squared norm."""
        return 0.001 * d_in if sparsity == "l0" else super().default_weight(sparsity, d_in)

    def penalty_l0(self, pre: Tensor, codes: Tensor, decoder_norms: Tensor, parameters: Parameters) -> Tensor:
        """Active latents of each row, (B,), with the straight-through gradient of the thresholds."""
        return _StepCount.apply(pre, self.thresholds(parameters, pre.shape[-1]), self.bandwidth)


@dataclass(frozen=True)
class Largest(Activation):
    """An activation that keeps `k` pre-activations of each row and sets the others to zero."""

    k: int = option(32, "Latents kept in each row.", minimum=1)

    def check(self, d_sae: int) -> None:
        """Refuse to keep more latents than there are."""
        if self.k > d_sae:
            raise ConfigError(f"--k must be at most --d-sae, {d_sae}, got {self.k}; lower --k or raise --d-sae")

    def ranking(self, pre: Tensor) -> Tensor:
        """What the `k` largest are taken of, (B, F)."""
        return pre

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`pre` at the `k` latents that rank highest, else 0, (B, F)."""
        kept = self.ranking(pre).topk(self.k, dim=-1, sorted=False).indices  # (B, k)
        return torch.zeros_like(pre).scatter(-1, kept, pre.gather(-1, kept))


@dataclass(frozen=True)
class TopK(Largest):
    """The `k` largest pre-activations of each row, with their signs; source: the paper's TopK."""

    name: ClassVar[str] = "topk"


@dataclass(frozen=True)
class ReluTopK(Largest):
    """The `k` largest pre-activations of each row, those below zero clipped to zero: what SAELens, sparsify and
    dictionary_learning call TopK. It is `topk` except on rows with fewer than `k` positive pre-activations."""

    name: ClassVar[str] = "relu-topk"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Tensor:
        """`max(pre, 0)` at the `k` latents that rank highest, else 0, (B, F)."""
        return super().__call__(pre, parameters).relu()


@dataclass(frozen=True)
class AbsTopK(Largest):
    """The `k` pre-activations largest in magnitude, with their signs: what the paper's own code computes."""

    name: ClassVar[str] = "abs-topk"

    def ranking(self, pre: Tensor) -> Tensor:
        """The magnitudes."""
        return pre.abs()


ACTIVATIONS: dict[str, type[Activation]] = {kind.name: kind for kind in (Relu, JumpRelu, TopK, ReluTopK, AbsTopK)}


def sparsity_names() -> tuple[str, ...]:
    """Every penalty that some activation offers."""
    return tuple(dict.fromkeys(name for kind in ACTIVATIONS.values() for name in ("none", *kind.sparsities)))


def activation_to_json(activation: Activation) -> dict:
    """The activation as a JSON object: its name and its settings."""
    return {"name": activation.name, **activation.to_json()}


def activation_from_json(document: dict) -> Activation:
    """The activation that `activation_to_json` wrote.

    Raises:
        ConfigError: no activation of that name is known, or its settings do not fit.
    """
    settings = dict(document)
    name = settings.pop("name", None)
    if name not in ACTIVATIONS:
        raise ConfigError(f"no activation named {name!r}; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name].from_json(settings)
