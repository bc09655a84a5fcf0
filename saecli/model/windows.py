"""Windows of tokens in batches through a model.

Shapes: B windows, T tokens, n of them rows, D = d_in.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..store.origin import HookPoint
from ..store.reader import Rows
from ..store.values import TextWindow

if TYPE_CHECKING:  # transformers takes seconds to import
    from .language_model import LanguageModel

CPU_TOKENS = 1 << 11  # tokens per forward pass on a CPU: more were no faster
GPU_TOKENS = 1 << 14


def pass_tokens(device: torch.device) -> int:
    return GPU_TOKENS if device.type == "cuda" else CPU_TOKENS


def stored_windows(rows: Rows, tokens: int, source: int | None = None) -> Iterator[TextWindow]:
    """The first windows that hold these rows, as stored, until `tokens` rows; of a mixture those of a `source`."""
    found = 0
    for window in rows.windows(source):
        yield window
        found += int(window.is_row.sum())
        if found >= tokens:
            return


def stored_activations(
    model: "LanguageModel", windows: Iterable[TextWindow], points: Sequence[HookPoint], most: int
) -> Iterator[list[Tensor]]:
    """The activations at windows' rows, at distinct hook points, (n, D) each, in batches of at most `most` tokens."""
    for batch in in_batches(windows, most):
        token_ids, mask, is_row = padded(batch)

        def take(activations: Tensor, is_row: Tensor = is_row) -> Tensor:
            return activations[is_row.to(activations.device)]

        yield model.read(token_ids, mask, points, take)


def in_batches(windows: Iterable[TextWindow], most: int) -> Iterator[list[TextWindow]]:
    """Lists of at most `most` tokens when padded, or of one window."""
    pending: list[TextWindow] = []
    for window in windows:
        longest = max(other.length for other in [*pending, window])
        if pending and (len(pending) + 1) * longest > most:
            yield pending
            pending = []
        pending.append(window)
    if pending:
        yield pending


def padded(windows: Sequence[TextWindow]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask and `is_row`, (B, T) each, padded on the right."""
    lengths = torch.tensor([window.length for window in windows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    token_ids = torch.zeros(mask.shape, dtype=torch.int64)
    token_ids[mask] = torch.from_numpy(np.concatenate([window.token_ids for window in windows]))
    is_row = torch.zeros_like(mask)
    is_row[mask] = torch.from_numpy(np.concatenate([window.is_row for window in windows]))
    return token_ids, mask.long(), is_row
