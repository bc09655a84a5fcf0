"""Smooth activations: no code is exactly zero, and there are no cells. The smooth TopK is computed in `soft_topk.py`.

Shapes: B rows, F = d_sae.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...base.options import option
from .base import Parameters, TargetsRate
from .largest import KeepsK

if TYPE_CHECKING:
    from torch import Tensor

    from ..codes import Codes

ROWS = 256  # of soft-topk at a time, since it holds some twenty numbers per code
LEAST_TEMPERATURE = 1e-6  # soft-topk equals topk long before, and float32 must not round it to zero


@dataclass(frozen=True)
class Swish(TargetsRate):
    """`z = pre * sigmoid(pre)`, also called SiLU. Hardly any code is exactly zero, so l0 counts all d_sae latents.

    Source: Ramachandran, Zoph and Le, "Searching for Activation Functions" (2017), with beta = 1: another beta is
    the same SAE with the encoder multiplied and the decoder divided by beta.
    """

    name: ClassVar[str] = "swish"
    sparsities: ClassVar[tuple[str, ...]] = ("none", "l1", "l1-codes", "kl")
    opposites: ClassVar[bool] = True
    exact_zeros: ClassVar[bool] = False

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre * sigmoid(pre)`, (B, F)."""
        from ..codes import DenseCodes

        return DenseCodes(pre * pre.sigmoid())

    def rescaled(self, parameters: Parameters, factor: float) -> None:
        """None: swish has a scale of its own."""
        return


@dataclass(frozen=True)
class SoftTopK(KeepsK):
    """`z_i = pre_i * P(i in S)`, S a random set of `k` latents, likelier the larger its pre-activations.

    `P(S)` is in proportion to `exp(sum_{j in S} pre_j / temperature)`. As the temperature falls it tends to `topk`.
    Computed exactly, in O(d_sae k) per row. The probabilities sum to `k`, but hardly any is exactly zero, so l0 counts
    up to all d_sae latents. Source: the paper's smooth TopK, rho_T.
    """

    name: ClassVar[str] = "soft-topk"
    of_codes: ClassVar[tuple[str, ...]] = ("k", "temperature")
    exact_zeros: ClassVar[bool] = False

    temperature: float = option(0.1, "Softness of the choice of latents, in units of the codes: a latent's odds change "
                                     "e-fold over one temperature.", minimum=LEAST_TEMPERATURE, advanced=True)

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        """`pre_i P(i in S)`, (B, F)."""
        import torch

        from ..codes import DenseCodes
        from .soft_topk import SoftTopKCodes

        if self.k == pre.shape[-1]:
            return DenseCodes(pre)
        return DenseCodes(torch.cat([SoftTopKCodes.apply(rows, self.k, self.temperature) for rows in pre.split(ROWS)]))

    def rescaled(self, parameters: Parameters, factor: float) -> None:
        """None: the temperature is fixed by the user."""
        return
