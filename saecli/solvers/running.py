"""What a decoder step takes from the rows without a pass over them: the codes that encoder steps have computed.

Shapes: B rows in a batch, D = d_in, F = d_sae.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ridge import Moments
from ..sae import SAE
from .gather import BLOCK_ROWS, Gathered, gathered_on_first
from .portions import Portion, joined

LATEST_ROWS = 1024  # that stand for all that have been counted


class Running:
    """Sums over the rows of the latest encoder steps, for a decoder step that needs no pass of its own.

    Codes are those of the encoder as it was at their step. Older rows count for less, so that at any time about
    `window` rows count: enough for a decoder that holds for others, few enough that the encoder has hardly moved since.
    Batches are summed some thousand rows at a time, since each sum goes through all of the Gram matrix.

    Args:
        sae: gives sizes, device and the activation.
        sparsity: the penalty, or `none`.
        window: rows.
    """

    def __init__(self, sae: SAE, sparsity: str, window: int) -> None:
        self.window = window
        self._activation, self._sparsity, self._device = sae.activation, sparsity, sae.W_enc.device
        self._sizes = sae.d_in, sae.d_sae
        self._moments = Moments(*self._sizes, self._device)
        self._norm_weights = torch.zeros(sae.d_sae, dtype=torch.float64, device=self._device)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._begin()

    @torch.no_grad()
    def add(self, z: Tensor, portion: Portion, decoder: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Count a batch: this process' codes z, (b, F), and its portion of the rows; a penalty weighs the norms of the
        decoder, (F, D)."""
        if self._solved:
            keep = max(0.0, 1 - self._rows / self.window)
            self._moments.fade(keep, self._factor)
            self._norm_weights *= keep * self._factor
            self._begin()
        x = portion.x
        self._rows += portion.size
        if self._sparsity != "none":
            self._norm_weights += self._activation.norm_weights(self._sparsity, z, decoder()[0])
        self._fired |= (z != 0).any(0)
        self._pending.append((z, x))
        self._latest.append((z, portion))
        while sum(portion.size for _, portion in self._latest[1:]) >= LATEST_ROWS:
            del self._latest[0]
        if sum(len(x) for _, x in self._pending) >= BLOCK_ROWS:
            self._flush()

    def gathered(self) -> Gathered:
        """What has been counted; what comes next counts towards the next decoder step."""
        self._flush()
        self._solved = True
        latest = joined([portion for _, portion in self._latest])
        return gathered_on_first(self._moments, torch.cat([z for z, _ in self._latest]), latest.x, latest.numbers(),
                                self._norm_weights, self._fired)

    def rescale(self, factor: float) -> None:
        """Take the encoder's codes to have been multiplied by a factor since."""
        self._factor *= factor

    def _begin(self) -> None:
        self._rows, self._factor, self._solved = 0, 1.0, False
        self._fired = torch.zeros(self._sizes[1], dtype=torch.bool, device=self._device)
        self._latest: list[tuple[Tensor, Portion]] = []

    def _flush(self) -> None:
        if self._pending:
            self._moments.add(*(torch.cat(parts) for parts in zip(*self._pending, strict=True)))
            self._pending = []
