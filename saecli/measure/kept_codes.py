"""Codes of a store's rows in memory, so that each latent's texts are found when it is asked for.

Shapes: B rows of a block, C chosen latents, D = d_in, F = d_sae.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse import csc_array

from ..base.console import Listener
from .latents import Examples, LatentSurvey, SurveyBlock, at_random, row_blocks
from .measured import Measured
from .report import SAMPLED_TEXTS

MOST_PRODUCTS = 1 << 42  # of encoding: about a minute on two cores
LEAST_ROWS = 1 << 12
MOST_CODES = 1 << 26  # that are not zero: 512 MB


class KeptCodes:
    """The codes of a store's first rows: all of them, or as many as are encoded in about a minute and fit.

    Memory: 8 bytes for each code that is not zero, and 1.5 KB for each latent.
    """

    def __init__(self, run: Measured, listener: Listener) -> None:
        sae, self._has_tokens = run.sae, run.store.meta.windows
        rows = run.of_store.rows
        self.rows = min(rows, max(LEAST_ROWS, MOST_PRODUCTS // (sae.d_in * sae.d_sae)))
        none = Examples([], sae.d_sae, 1, self._has_tokens)
        self.totals = LatentSurvey(sae, self.rows, none, none)  # without examples
        self._blocks: list[tuple[SurveyBlock, csc_array]] = []
        self._keep(run, listener)

    @torch.no_grad()
    def _keep(self, run: Measured, listener: Listener) -> None:
        kept, codes_kept = 0, 0
        for block in row_blocks(run.inputs(listener), run.of_store, run.batch_rows):
            codes = run.sae.codes(block.x)
            z = codes.dense()
            self.totals.update(codes, z, block)
            of_block = csc_array(z.float().cpu().numpy())
            # The rows themselves are not kept.
            self._blocks.append((replace(block, x=block.x[:, :0].cpu()), of_block))
            kept += len(block.x)
            codes_kept += of_block.nnz
            if kept >= self.rows or codes_kept >= MOST_CODES:
                break
        self.rows = kept

    def survey(self, latents: Sequence[int], count: int) -> LatentSurvey:
        """The survey of all latents, with examples of chosen ones, ascending: `count` of each."""
        chosen = [*latents]
        strongest = Examples(chosen, len(chosen), count, self._has_tokens)
        samples = Examples(chosen, len(chosen), SAMPLED_TEXTS, self._has_tokens, at_random)
        for block, codes in self._blocks:
            z = torch.from_numpy(codes[:, chosen].toarray())
            strongest.update(z, block)
            samples.update(z, block)
        found = copy.copy(self.totals)
        found.examples, found.samples = strongest, samples
        return found

    def peak_tokens(self, count: int) -> list[list[int]]:
        """The tokens at each latent's `count` largest codes, F lists; empty for a store that keeps no tokens."""
        if not self._has_tokens:
            return [[] for _ in range(len(self.totals.magnitudes.means))]
        latents, sizes, tokens = map(np.concatenate, zip(*self._codes_of_tokens(), strict=True))
        order = np.lexsort((-sizes, latents))
        counts = np.bincount(latents, minlength=len(self.totals.magnitudes.means))
        parts = np.split(tokens[order], counts.cumsum()[:-1])
        return [part[:count].tolist() for part in parts]

    def _codes_of_tokens(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Latents, sizes and tokens of the codes of each block."""
        for block, codes in self._blocks:
            assert block.texts is not None
            of_rows = block.texts.token_ids[block.texts.stored]
            entries = codes.tocoo()
            yield entries.col, abs(entries.data), of_rows[entries.row]
