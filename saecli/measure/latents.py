"""Sizes of latents' codes, their neighbours, and the pass over rows that surveys them.

Shapes: B rows, n non-zeros, C chosen latents, D = d_in, F = d_sae.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..sae.codes import Codes, SparseCodes, in_cache
from ..sae.dictionary import SAE
from ..sae.metrics import Firing
from .cofiring import CoFiring
from .latent_examples import Block, Examples

OCTAVE = 4  # bins per power of two: the exponent of a size's fourth power is its bin's number
LOWEST, HIGHEST = -24, 24  # powers of two; sizes outside count in the first or last bin
BINS = (HIGHEST - LOWEST) * OCTAVE
EXPONENT_AT, BIAS = 23, 127  # of a float32's bits


def bin_edges() -> np.ndarray:
    """The edges of the bins, (BINS + 1,), in ratios of `2^(1/4)`: equally spaced on a logarithmic axis, on which wider
    bins would show as peaks."""
    return 2.0 ** (LOWEST + np.arange(BINS + 1) / OCTAVE)


class Magnitudes:
    """Histogram, sum and maximum of the sizes `|z|` of each latent's codes that are not zero.

    The bins are the same for all latents and fixed, so that one pass is enough at any scale of the codes. Memory: 192
    counts per latent.

    Args:
        d_sae: number of latents.
    """

    def __init__(self, d_sae: int) -> None:
        self._counts = torch.zeros(d_sae * (BINS + 1), dtype=torch.int64)  # each latent's first counts its zeros
        self._sums = torch.zeros(d_sae, dtype=torch.float64)
        self._largest = torch.zeros(d_sae)

    @torch.no_grad()
    def update(self, codes: Codes) -> None:
        """Count the codes of a batch, (B, F)."""
        z = codes.values
        if z.device != self._sums.device:
            self._counts, self._sums, self._largest = (t.to(z.device) for t in (self._counts, self._sums,
                                                                                self._largest))
        if isinstance(codes, SparseCodes):
            self._add(z, codes.indices)
            self._sums.index_add_(0, codes.indices, z.abs().double())
            self._largest.scatter_reduce_(0, codes.indices, z.abs().float(), "amax")
            return
        latents = torch.arange(codes.shape[1], device=z.device)
        for some in in_cache(z):
            sizes = some.abs()
            self._add(some, latents.expand(len(some), -1))
            self._sums += sizes.sum(0, dtype=torch.float64)
            self._largest = torch.maximum(self._largest, sizes.amax(0).float())

    def _add(self, values: Tensor, latents: Tensor) -> None:
        """Count values, each for its latent; zeros in a bin of their own."""
        fourth = values.float().square().square_()  # overflows or underflows only far outside the bins
        bins = (fourth.view(torch.int32) >> EXPONENT_AT).sub_(BIAS + OCTAVE * LOWEST)
        bins = bins.clamp_(0, BINS - 1).add_(1).mul_(values != 0)
        places = latents * (BINS + 1) + bins
        self._counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())

    @property
    def histograms(self) -> np.ndarray:
        """Number of codes in each bin, per latent, (F, BINS), int64; see `bin_edges`."""
        return self._counts.view(-1, BINS + 1)[:, 1:].cpu().numpy()

    @property
    def means(self) -> np.ndarray:
        """Mean size of each latent's non-zero codes, (F,), float64; 0 where there are none."""
        return self._sums.cpu().numpy() / np.maximum(self.histograms.sum(1), 1)

    @property
    def largest(self) -> np.ndarray:
        """The largest size of each latent's codes, (F,), float32; 0 where it never fires."""
        return self._largest.cpu().numpy()


BLOCK_COSINES = 1 << 24  # at a time: 64 MB in float32


@torch.no_grad()
def neighbours(W_dec: Tensor, chosen: Tensor, count: int, show: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """The nearest latents to some latents, by the cosine of their decoder vectors.

    Args:
        W_dec: decoder weights, (F, D).
        chosen: latents, (C,), int64.
        count: number of neighbours, at most F - 1.
        show: called after each block with the number of chosen latents done.

    Returns:
        The cosines, (C, count), in descending order, 0 for a vector of zeros, and the neighbours, (C, count), int64;
        both on the CPU. A latent is no neighbour of itself.

    Cost: `2 C F D` operations; `BLOCK_COSINES` cosines are held at a time.
    """
    directions = torch.nn.functional.normalize(W_dec, dim=1)
    count = min(count, len(W_dec) - 1)
    size = max(1, BLOCK_COSINES // len(W_dec))
    found: list[tuple[Tensor, Tensor]] = []
    for part in chosen.to(W_dec.device).split(size):
        cosines = directions[part] @ directions.T
        cosines.scatter_(1, part[:, None], -torch.inf)
        found.append(tuple(t.cpu() for t in cosines.topk(count, dim=1)))
        show(sum(len(cosine) for cosine, _ in found))
    cosines, latents = zip(*found, strict=True)
    return torch.cat(cosines), torch.cat(latents)


@dataclass(frozen=True)
class Survey:
    """The results of one pass.

    Args:
        firing: firing frequencies, and L0 per row.
        magnitudes: sizes of the codes.
        examples: where the chosen latents' codes are largest.
        samples: a random sample of where they fire.
        cofiring: on which rows the latents fire.
    """

    firing: Firing
    magnitudes: Magnitudes
    examples: Examples
    samples: Examples
    cofiring: CoFiring


@torch.no_grad()
def survey(sae: SAE, blocks: Iterable[Block], rows: int, examples: Examples, samples: Examples) -> Survey:
    """Encode rows once, and measure all latents on them.

    Args:
        sae: the autoencoder.
        blocks: the rows, of its dtype and device.
        rows: their number.
        examples: empty, for the latents whose examples are wanted.
        samples: empty, ranked at random.

    Memory: 1.5 KB per latent, and that of `Examples` and `CoFiring`; independent of the number of rows.
    """
    found = Survey(Firing(sae.d_sae), Magnitudes(sae.d_sae), examples, samples, CoFiring(sae.d_sae, rows))
    for block in blocks:
        codes = sae.codes(block.x)
        found.firing.update(codes)
        found.magnitudes.update(codes)
        z = codes.dense()
        found.examples.update(z, block)
        found.samples.update(z, block)
        found.cofiring.update(z)
    return found
