"""Rows of a language model for a control, in memory.

Shapes: N rows, B windows of a batch, T tokens, D = d_in, E the width of targets; 0 without.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..extract.forward import batch_tokens
from ..extract.hook_points import HookPoint
from ..extract.language_model import LanguageModel
from ..extract.windows import Windows
from ..store.joined import JoinedRows
from ..store.rows import Rows
from ..train.array_rows import ArrayRows
from .splice import in_batches, is_plain, padded, stored_windows


def of_model(model: LanguageModel, rows: Rows | JoinedRows, show: Callable[[float], None]) -> ArrayRows:
    """The activations of a model at the places, and of the tokens, that some rows came from, in stored order.

    Args:
        model: such as the rows' own with random weights.
        rows: of a store that `sae extract` made, or of one and its target; see `splice.check_rows`.
        show: called after each batch with the number of rows done.

    Returns:
        (N, D), with targets (N, E) if the rows have them. Rows of a window from which the store dropped a token are
        missing, since it cannot be rebuilt; see `splice.stored_windows`.

    Raises:
        StoreError: no window is whole.
        ConfigError: an activation is not finite.

    Cost: a forward pass over the tokens, up to the last of the places; 4 N (D + E) bytes.
    """
    first, *target = [rows] if isinstance(rows, Rows) else [*rows.inputs, rows.target]
    source = first.store.meta.source
    cutter = Windows(model.tokenizer, source["context"])
    places = [HookPoint(some.store.meta.source["layer"], some.store.meta.source["site"]) for some in (first, *target)]
    found, done = [np.empty((some.rows, some.d_in), np.float32) for some in (first, *target)], 0
    for windows in in_batches(stored_windows(first, cutter.prefix, first.rows),
                              batch_tokens(model, "auto", source["context"], places)):
        token_ids, mask = padded(windows)
        plain = is_plain(token_ids, mask, cutter.special).to(model.device)

        def take(activations: Tensor, plain: Tensor = plain) -> np.ndarray:
            return activations[plain].to("cpu", torch.float32).numpy()

        for all_rows, part in zip(found, model.read(token_ids, mask, places, take), strict=True):
            all_rows[done : done + len(part)] = part
        done += int(plain.sum())
        show(done)
    return ArrayRows(*(all_rows[:done] for all_rows in found))
