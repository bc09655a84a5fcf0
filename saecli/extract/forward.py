"""Running blocks through the model, in batches of windows of similar length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..base.devices import moved
from ..base.errors import ModelError
from ..base.memory import is_out_of_memory
from .places import Place
from .window_blocks import LOOK_AHEAD, Batch, Block

if TYPE_CHECKING:
    from .language_model import LanguageModel

CPU_TOKENS = 1 << 11  # tokens per forward pass on a CPU: more were no faster
SHORTEST = 7 / 8  # of a batch's longest window: a narrower range has less padding, but more passes
# Windows in the passes whose memory is measured; in the first, libraries allocate some for themselves.
PROBED = (1, 1, 3)
USED = 0.7  # fraction of the free memory that a batch may take


@dataclass(frozen=True)
class Found:
    """A block's activations at a place. Shapes: R rows, D the site's width, S special tokens.

    Args:
        rows: (R, D) in document order, float32, or bfloat16 as its bits in uint16.
        special_norms: norms at special tokens, (S,), float64.
    """

    rows: np.ndarray
    special_norms: np.ndarray


class Forward:
    """Runs blocks; if a batch does not fit in memory, it and the following ones are halved.

    Args:
        model: the language model.
        dtype: the stored type: `float32`, `float16` or `bfloat16`.
        tokens: most tokens in a batch, including padding; a longer window is a batch of its own.
        note: called with a message when batches are halved.
    """

    def __init__(self, model: "LanguageModel", dtype: str, tokens: int, note: Callable[[str], None]) -> None:
        # bfloat16 halves the copy from the device. float16 would overflow, and lose the norms of rows dropped for it.
        encoding = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self._model, self._dtype, self._tokens, self._note = model, encoding, tokens, note

    def __call__(self, block: Block, places: Sequence[Place], show: Callable[[int, int], None]) -> list[Found]:
        """A block's activations at some places.

        Args:
            block: the windows.
            places: where to read.
            show: called after each batch with its numbers of tokens and rows.

        Raises:
            ModelError: not even one window fits in memory.
        """
        found: list[tuple[Tensor, Tensor]] = []
        order = block.by_length()
        done = 0
        while done < len(order):
            windows = order[done : done + self._like(block.lengths[order[done:]])]
            batch = block.batch(windows)
            try:
                parts = self._read(batch, places)
                found = found or [(rows.new_empty(block.rows, rows.shape[1]), norms.new_empty(block.specials))
                                  for rows, norms in parts]
                for (all_rows, all_norms), (rows, norms) in zip(found, parts, strict=True):
                    all_rows.index_copy_(0, moved(batch.rows, rows.device), rows)
                    all_norms.index_copy_(0, moved(batch.specials, norms.device), norms)
                fits = True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            if fits:
                done += len(windows)
                show(int(batch.mask.sum()), len(batch.rows))
            else:  # outside the except clause, where the error has released the tensors of its frames
                self._halve(len(windows), int(block.lengths[windows[0]]))
        return [Found(_on_host(rows), norms.cpu().numpy()) for rows, norms in found]

    def _read(self, batch: Batch, places: Sequence[Place]) -> list[tuple[Tensor, Tensor]]:
        """A batch's rows, and its norms at special tokens, at each place."""
        kept, special = moved(batch.kept, self._model.device), moved(batch.special, self._model.device)

        def take(activations: Tensor) -> tuple[Tensor, Tensor]:
            flat = activations.flatten(0, 1)
            return flat.index_select(0, kept).to(self._dtype), flat.index_select(0, special).double().norm(dim=1)

        return self._model.read(batch.token_ids, batch.mask, places, take)

    def _like(self, lengths: np.ndarray) -> int:
        """How many of the next windows, whose lengths are descending, make a batch."""
        alike = np.searchsorted(-lengths, -SHORTEST * lengths[0], side="right")
        return int(max(1, min(alike, self._tokens // lengths[0])))

    def _halve(self, windows: int, longest: int) -> None:
        if windows == 1:
            raise ModelError(f"a window of {longest:,} tokens does not fit in the memory of {self._model.device}: "
                             f"expected room for one forward pass, got none; lower --context, or use --model-dtype "
                             f"bfloat16")
        self._tokens = windows // 2 * longest
        self._note(f"{windows} windows of {longest:,} tokens do not fit in the memory of {self._model.device}; "
                   f"going on with {windows // 2}")
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def batch_tokens(model: "LanguageModel", batch_size: int | str, context: int, places: Sequence[Place],
                 ahead: int = LOOK_AHEAD) -> int:
    """Tokens per batch.

    Args:
        model: the language model.
        batch_size: windows of `context` tokens in a batch; `auto` for what fits in a CUDA device's free memory, at most
            a block, and elsewhere for a fixed number of tokens.
        context: most tokens in a window.
        places: where the forward pass is read.
        ahead: tokens in a block.
    """
    if batch_size != "auto":
        return int(batch_size) * context
    if model.device.type != "cuda":
        return CPU_TOKENS
    try:
        _, few, more = (_peak_bytes(model, windows, context, places) for windows in PROBED)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return context
    window = max(1, (more - few) // (PROBED[-1] - PROBED[0]))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return tokens_that_fit(free, window, context, ahead)


def tokens_that_fit(free: int, window: int, context: int, ahead: int = LOOK_AHEAD) -> int:
    """Tokens per batch that fit in memory.

    A power of two of windows, so that slightly more or less memory does not change the batches, and with them the last
    bits of the rows.

    Args:
        free: free bytes.
        window: bytes that each window adds to a forward pass.
        context: tokens in a window.
        ahead: tokens in a block.
    """
    fitting = min(int(USED * free) // window, ahead // context)
    return (1 << max(0, fitting.bit_length() - 1)) * context


def _peak_bytes(model: "LanguageModel", windows: int, context: int, places: Sequence[Place]) -> int:
    """Peak memory of a forward pass, without the weights."""
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    token_ids = torch.zeros(windows, context, dtype=torch.int64)
    model.read(token_ids, torch.ones_like(token_ids), places, torch.clone)
    return torch.cuda.max_memory_allocated(model.device) - before


def _on_host(rows: Tensor) -> np.ndarray:
    if rows.device.type == "cuda":  # copying into pinned memory is several times faster
        rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
    rows = rows.cpu()
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()
