"""Normal equations for a decoder step without a pass over the rows: from the codes of the latest encoder steps.

Shapes: B rows in a batch, b of them in this process, F = d_sae.
"""

import torch
from torch import Tensor

from ..batch import Batch
from ..codes import Codes, joined
from ..dictionary import Dictionary
from ..distributed import Communicator
from ..ridge import Sums
from .decoder_pass import Observed, in_order, put_together

LATEST_ROWS = 1024  # sample of the rows counted
BLOCK_ROWS = 4096  # summed at a time, at least: each sum goes through the whole Gram matrix


class Running:
    """Sums over the rows of the latest encoder steps, for a decoder step that needs no pass of its own.

    Codes are computed by the encoder at their step. Older rows have smaller weights, which sum to about `window`:
    enough rows for a decoder that generalises, few enough that the encoder has hardly moved since.

    Args:
        dictionary: in training.
        sparsity: the penalty, or `none`.
        window: rows.
        communicator: of the processes that have other rows.
    """

    def __init__(self, dictionary: Dictionary, sparsity: str, window: int, communicator: Communicator) -> None:
        self.window = window
        self._dictionary, self._sparsity, self._communicator = dictionary, sparsity, communicator
        device = dictionary.W_enc.device
        self._sums = Sums(dictionary.d_sae, len(dictionary.b_dec), device, dictionary.prefixes)
        self._norm_weights = torch.zeros(dictionary.d_sae, dtype=torch.float64, device=device)
        self._pending: list[tuple[Codes, Tensor]] = []
        self._begin()

    @torch.no_grad()
    def add(self, codes: Codes, batch: Batch) -> None:
        """Add a batch, with the codes of this process' rows, (b, F)."""
        if self._solved:
            keep = max(0.0, 1 - self._rows / self.window)
            self._sums.fade(keep if self._communicator.is_main else 0.0, self._factor)
            self._norm_weights *= keep * self._factor
            self._begin()
        self._rows += batch.size
        if self._sparsity != "none":
            weights = self._dictionary.activation.norm_weights(self._sparsity, codes, self._dictionary.decoder())
            self._norm_weights += weights
        self._fired |= codes.fired()
        self._pending.append((codes, batch.y))
        self._latest.append((codes, batch))
        while sum(batch.size for _, batch in self._latest[1:]) >= LATEST_ROWS:
            del self._latest[0]
        if sum(len(y) for _, y in self._pending) >= BLOCK_ROWS:
            self._flush()

    def observed(self) -> Observed:
        """The rows added so far; rows added next are for the next decoder step."""
        self._flush()
        self._solved = True
        latest = Batch.joined([batch for _, batch in self._latest])
        z, y = in_order(torch.cat([codes.dense() for codes, _ in self._latest]), latest.y, latest.numbers,
                        self._communicator)
        return put_together(self._sums, z, y, self._norm_weights, self._fired, self._communicator)

    def rescale(self, factor: float) -> None:
        """Note that the encoder's codes are scaled by a factor from now on."""
        self._factor *= factor

    def _begin(self) -> None:
        self._rows, self._factor, self._solved = 0, 1.0, False
        self._fired = torch.zeros_like(self._norm_weights, dtype=torch.bool)
        self._latest: list[tuple[Codes, Batch]] = []

    def _flush(self) -> None:
        if self._pending:
            self._sums.add(joined([codes for codes, _ in self._pending]), torch.cat([y for _, y in self._pending]))
            self._pending = []
