"""One pass over rows that gathers all that a report tells of an SAE's latents."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..dictionary import SAE
from ..metrics import Firing
from .blocks import Block
from .examples import Examples
from .magnitudes import Magnitudes


@dataclass(frozen=True)
class Survey:
    """What one pass has found.

    Args:
        firing: how often latents fire, and how many on a row.
        magnitudes: how large codes are.
        examples: where the chosen latents' codes are largest.
    """

    firing: Firing
    magnitudes: Magnitudes
    examples: Examples


@torch.no_grad()
def survey(sae: SAE, blocks: Iterable[Block], examples: Examples) -> Survey:
    """Encode rows once, and measure all latents on them.

    Args:
        sae: the autoencoder.
        blocks: the rows, of its dtype and device.
        examples: empty, for the latents whose examples are wanted.

    Cost: memory does not grow with the rows: 1.5 KB a latent, and those of `Examples`.
    """
    found = Survey(Firing(sae.d_sae), Magnitudes(sae.d_sae), examples)
    for block in blocks:
        codes = sae.codes(block.x)
        found.firing.update(codes)
        found.magnitudes.update(codes)
        found.examples.update(codes.dense(), block)
    return found
