"""Smooth activations: no code is exactly zero, and there are no cells. Shapes: B rows, F = d_sae."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..codes import Codes, DenseCodes
from ..config import option
from .base import Parameters
from .largest import KeepsK
from .rates import TargetsRate
from .subsets import SoftTopKCodes

ROWS = 256  # that soft-topk takes at a time, since it holds some twenty numbers for each of their codes
LEAST_TEMPERATURE = 1e-6  # soft-topk is topk long before, and what float32 rounds to zero divides nothing


@dataclass(frozen=True)
class Swish(TargetsRate):
    """`z = pre * sigmoid(pre)`, also called SiLU. Hardly a code is exactly zero, so l0 counts all d_sae latents.

    Source: Ramachandran, Zoph and Le, "Searching for Activation Functions" (2017), with beta = 1: another beta is
    the same SAE with the encoder beta times as large and the decoder as much smaller.
    """

    name: ClassVar[str] = "swish"
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1", "l1-codes", "kl")
    opposites: ClassVar[bool] = True
    exact_zeros: ClassVar[bool] = False

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre * sigmoid(pre)`, (B, F)."""
        return DenseCodes(pre * pre.sigmoid())

    def rescaled(self, parameters: Parameters, factor: float) -> None:
        """None: it bends where pre-activations are near 1."""
        return


@dataclass(frozen=True)
class SoftTopK(KeepsK):
    """`z_i = pre_i * P(i in S)`, S a random set of `k` latents, likelier the larger its pre-activations.

    `P(S)` is in proportion to `exp(sum_{j in S} pre_j / temperature)`. As the temperature falls it tends to `topk`.
    Computed exactly, in O(d_sae k) a row. The probabilities sum to `k`, but hardly one is exactly zero, so l0 counts
    up to all d_sae latents. Source: the paper's smooth TopK, rho_T.
    """

    name: ClassVar[str] = "soft-topk"
    exact_zeros: ClassVar[bool] = False

    temperature: float = option(0.1, "Softness of the choice of latents, in units of the codes: a latent's odds change "
                                     "e-fold over one temperature.", minimum=LEAST_TEMPERATURE, advanced=True)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre_i P(i in S)`, (B, F)."""
        if self.k == pre.shape[-1]:
            return DenseCodes(pre)
        return DenseCodes(torch.cat([SoftTopKCodes.apply(rows, self.k, self.temperature) for rows in pre.split(ROWS)]))

    def rescaled(self, parameters: Parameters, factor: float) -> None:
        """None: the temperature stays what the user asked for."""
        return
