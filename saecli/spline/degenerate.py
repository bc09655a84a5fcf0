"""What may be wrong with an encoder: latents that are no direction, or another latent's twin.

Weights that are no finite numbers are refused where an SAE is read, in `formats`.

Shapes: D = d_in, F = d_sae.
"""

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from ..activations import Thresholded
from ..dictionary import SAE


@dataclass(frozen=True)
class Degenerate:
    """How many latents bound no cell of their own, or add no direction.

    Args:
        zero_encoder: latents whose encoder weights are all zero: on whatever the row, or never.
        equal_encoder: latents whose encoder weights, bias and threshold are also another's: where either is kept is
            a tie.
        zero_decoder: latents whose dictionary vector is zero.
        equal_decoder: latents whose dictionary vector is also another's, zeros left out.
    """

    zero_encoder: int
    equal_encoder: int
    zero_decoder: int
    equal_decoder: int

    @classmethod
    def of(cls, sae: SAE) -> "Degenerate":
        """Count them.

        Cost: O(D F).
        """
        encoder = torch.cat([sae.W_enc, sae.b_enc[None]])
        if isinstance(sae.activation, Thresholded):
            thresholds = sae.activation.thresholds(sae.activation_parameters, sae.d_sae)
            encoder = torch.cat([encoder, thresholds.to(encoder)[None]])
        zero = (sae.W_dec == 0).all(1)
        return cls(int((sae.W_enc == 0).all(0).sum()), _in_groups(encoder.T), int(zero.sum()),
                   _in_groups(sae.W_dec[~zero]))


def _in_groups(rows: Tensor) -> int:
    """Rows, (F, any), that equal another."""
    # Adding zero makes one zero of the two that floats have.
    counts = Counter(blake2b(row, digest_size=16).digest() for row in (rows + 0.0).contiguous().numpy())
    return sum(count for count in counts.values() if count > 1)
