"""What every activation is: a configuration that owns its parameters, its gradient and its penalties.

Shapes: B rows, F = d_sae. Latent i is active on a row when its code is not zero.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..codes import Codes
from ..config import Config
from ..errors import ConfigError

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Activation(Config):
    """Base of all activations: phi, applied to pre-activations `x @ W_enc + b_enc`.

    `sparsities` names the penalties that the activation offers, its default first; besides `none`, each is
    a method `penalty_NAME(pre, codes, W_dec, parameters)` that gives the mean over the rows of a batch, hyphens in its
    name as underscores.
    `opposites` says whether `phi(v) - phi(-v) = v`: two latents of opposite directions are then linear together.
    `exact_zeros` says whether codes are sparse by being zero, so that L0 tells how sparse.
    """

    panel: ClassVar[str] = "Activation"
    name: ClassVar[str]
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1", "l1-codes")
    opposites: ClassVar[bool] = False
    exact_zeros: ClassVar[bool] = True

    def check(self, d_sae: int) -> None:
        """Refuse settings that cannot work with `d_sae` latents.

        Raises:
            ConfigError: they cannot.
        """

    def check_sparsity(self, sparsity: str) -> None:
        """Refuse a penalty that the activation does not offer, or settings that do nothing with the penalty.

        Raises:
            ConfigError: there are such.
        """
        if sparsity not in self.sparsities:
            raise ConfigError("sparsity", "{given} cannot be used with {act} {name}", "use one of {others}",
                              given=sparsity, name=self.name, others=", ".join(self.sparsities))

    @property
    def estimates(self) -> tuple[str, ...]:
        """The parameters that no gradient reaches: they stay as they are, or follow `estimated`."""
        return ()

    @property
    def default_sparsity(self) -> str:
        """The penalty when the user names none."""
        return self.sparsities[0]

    def parameters(self, d_sae: int) -> Parameters:
        """The parameters at the start of training; none for most activations."""
        return {}

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of pre-activations.

        Args:
            pre: pre-activations, (B, F).
            parameters: what `parameters` returned, trained since.

        Returns:
            Codes, (B, F): sparse where their entries are known (`encoding.at`), or selected by a mask
            (`encoding.where`);
            else `DenseCodes`.
        """
        raise TypeError(f"{type(self).__name__} does not say what its codes are")

    def training_codes(self, pre: Tensor, parameters: Parameters) -> Codes:
        """The codes of a training batch, (B, F), where they depend on the batch as a whole; else those of a call."""
        return self(pre, parameters)

    def estimated(self, codes: Codes, parameters: Parameters) -> Parameters:
        """New values of those of `estimates` that a training step moves; several processes take the mean of theirs.

        Args:
            codes: what `training_codes` gave for this process' rows of the step's batch, (B, F).
            parameters: as they stand.
        """
        return {}

    def calibrated(self, pre: Tensor, parameters: Parameters) -> Parameters:
        """The values of those of `estimates` that suit some rows best.

        Args:
            pre: pre-activations of the rows, (n, F).
            parameters: as they stand.
        """
        return {}

    def norm_weights(self, sparsity: str, codes: Codes, W_dec: Tensor) -> Tensor:
        """How much of a penalty each decoder norm carries: its derivative in `||W_dec_i||`, summed over rows, (F,).

        Args:
            sparsity: one of `sparsities`.
            codes: codes of some rows, (B, F).
            W_dec: decoder weights, (F, D).
        """
        return codes.map(torch.abs).sums() if sparsity == "l1" else W_dec.new_zeros(len(W_dec))

    def rescaled(self, parameters: Parameters, factor: float) -> Parameters | None:
        """The parameters with which pre-activations `factor` > 0 times as large give codes `factor` times as large;
        None where none do."""
        return parameters

    def default_weight(self, sparsity: str, d_in: int) -> float:
        """The penalty's weight when the user gives none, for rows of mean squared norm `d_in`."""
        return {"none": 0.0, "l1": 0.1 * math.sqrt(d_in), "l1-codes": 0.1 * math.sqrt(d_in)}[sparsity]

    def penalty_l1(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """Scale-free L1, `mean over rows of sum_i |z_i| ||W_dec_i||`: shrinking codes against a growing decoder
        gains nothing."""
        return (codes.map(torch.abs).sums() / len(pre)) @ W_dec.norm(dim=1)

    def penalty_l1_codes(self, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """L1 of the codes alone, `mean over rows of sum_i |z_i|`, blind to the decoder's size."""
        return codes.values.abs().sum() / len(pre)

    def penalty(self, sparsity: str, pre: Tensor, codes: Codes, W_dec: Tensor, parameters: Parameters) -> Tensor:
        """The penalty of a batch, a mean over its rows, unweighted.

        Args:
            sparsity: one of `sparsities`, not `none`.
            pre: pre-activations, (B, F).
            codes: their codes, (B, F).
            W_dec: decoder weights, (F, D).
            parameters: the activation's own.
        """
        return getattr(self, f"penalty_{sparsity.replace('-', '_')}")(pre, codes, W_dec, parameters)
