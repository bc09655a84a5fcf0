"""What every activation is: a configuration that owns its parameters, its gradient and its penalties.

Shapes: B rows, F = d_sae. Latent i is active on a row when its code is not zero.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..config import Config

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
