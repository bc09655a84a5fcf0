"""The effect on a language model of replacing its activations at a hook point by an SAE's reconstructions.

The windows of tokens are rebuilt from the token ids that a store keeps with its rows, so that neither the text nor the
network is needed. Special tokens (BOS) keep their own activations, and predictions from them are excluded from every
mean; but zero ablation applies to all tokens. SAELens' current evaluation does the same.

Shapes: B windows, T tokens, D = d_in, E = d_out, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError, StoreError
from ..extract.language_model import LanguageModel
from ..extract.model_source import ModelSource, find_model
from ..extract.options import HookPoint
from ..extract.windows import Windows
from ..sae.dictionary import SAE
from ..store.reader import Rows
from ..store.split import window_starts
from .measured import COLUMNS, Measured, by_rows

READ = 1 << 16  # rows of the columns per read
BATCH_LOGITS = 1 << 25  # logits per batch: 128 MB in float32, held a few times over


@dataclass(frozen=True)
class Splice:
    """One pass through a model."""

    members: list[int]  # indices of the SAEs on these rows
    model: LanguageModel  # with its head
    rows: Rows
    cutter: Windows
    read: HookPoint  # where activations are encoded
    written: HookPoint  # where they are replaced; for an SAE the same

    def effects(self, saes: Sequence[SAE], tokens: int, listener: Listener) -> list[dict[str, Any]]:
        windows = stored_windows(self.rows, self.cutter.prefix, tokens)
        with listener.progress(f"splicing into {self.model.source.name}", min(tokens, self.rows.rows),
                               "tokens") as show:
            return effects(self.model, windows, self.cutter.special, self.read, self.written, saes, show)


def splices(everything: Sequence[Measured], name: str, listener: Listener) -> list[Splice]:
    """The passes to make through a model for SAEs with their rows; all that cannot work is refused here."""
    source, groups = find_model(name), by_rows(everything)
    all_ends: list[list[Rows]] = []
    for one in (everything[members[0]] for members in groups):
        ends = [one.of_store, *([one.rows.target] if one.rows.target else [])]
        if len(one.rows.inputs) > 1:
            one.demand_reconstruction("the effect on a model")
        for rows in ends:
            check_rows(rows, source)
        all_ends.append(ends)
    model = LanguageModel(source, everything[0].sae.W_enc.device, head=True)
    found = []
    for ends, members in zip(all_ends, groups, strict=True):
        rows, origin = ends[0], ends[0].store.meta.source
        cutter = Windows(model.tokenizer, origin["context"])
        if (largest := _largest(rows, "token_id")) >= model.vocabulary:
            raise _unfit(rows, source, f"a token {largest}, got token ids below {model.vocabulary}")
        next(stored_windows(rows, cutter.prefix, 1))  # raises if no window is whole
        if origin["model"] != source.identity()["model"]:
            listener.note(f"{rows.name} came from {origin['model']}, and is run through {name}")
        places = [HookPoint(end.store.meta.source["layer"], end.store.meta.source["site"]) for end in ends]
        found.append(Splice(members, model, rows, cutter, places[0], places[-1]))
    return found


def check_rows(rows: Rows, source: ModelSource) -> None:
    """Refuse rows from which windows cannot be rebuilt, or that do not fit a model; loads no weights."""
    origin = rows.store.meta.source
    expected = f"{rows.name} cannot be run through a model: expected"
    if not {"model", "layer", "site", "context"} <= origin.keys():
        raise StoreError(f"{expected} a store that `sae extract` made, got one that names no layer; leave --model out, "
                         f"or name another store")
    if missing := [name for name in COLUMNS if name not in rows.store.meta.columns]:
        raise StoreError(f"{expected} a store that `sae extract` made, got one without {', '.join(missing)}; leave "
                         f"--model out, or name another store")
    if origin.get("positions") == "last":
        raise StoreError(f"{expected} every position of a window, got only the last; extract a store with "
                         f"--positions all")
    if source.d_model != rows.d_in:
        raise _unfit(rows, source, f"activations of {rows.d_in} dimensions, got {source.d_model}")
    if origin["layer"] >= source.layers:
        raise _unfit(rows, source, f"a layer {origin['layer']}, got layers 0 to {source.layers - 1}")
    if source.positions is not None and (longest := _largest(rows, "position") + 1) > source.positions:
        raise _unfit(rows, source, f"windows of {longest:,} tokens, got at most {source.positions:,}")


def _unfit(rows: Rows, source: ModelSource, expected: str) -> ConfigError:
    return ConfigError(f"{rows.name} cannot be run through {source.name}: expected {expected}; name the model that the "
                       "rows came from")


def _largest(rows: Rows, column: str) -> int:
    return max(int(part.max()) for part in rows.column(column, READ))


def stored_windows(rows: Rows, prefix: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """The token ids of the first windows, in stored order, of a store that keeps every position of its windows.

    A window from which the store dropped a token outside the prefix is skipped, since it cannot be rebuilt.

    Args:
        prefix: the special tokens before each window, which the store drops.
        tokens: number of tokens to stop at, not counting the prefix; the last window is whole.
    """
    found = 0
    for positions, token_ids in _spans(rows):
        if positions[0] != len(prefix) or positions[-1] - positions[0] + 1 != len(positions):
            continue
        yield [*prefix, *token_ids]
        found += len(token_ids)
        if found >= tokens:
            return
    if not found:
        raise StoreError(f"{rows.name} cannot be run through a model: expected windows with every token stored, got "
                         "none; name another store")


def _spans(rows: Rows) -> Iterator[tuple[list[int], list[int]]]:
    """The positions and token ids of each run of rows of one window."""
    waiting = np.empty((3, 0), np.int64)
    for columns in zip(*(rows.column(name, READ) for name in COLUMNS), strict=True):
        waiting = np.concatenate([waiting, np.stack(columns)], axis=1)
        *whole, waiting = np.split(waiting, window_starts(waiting[0], waiting[1]), axis=1)
        for span in whole:
            yield span[1].tolist(), span[2].tolist()
    if waiting.shape[1]:
        yield waiting[1].tolist(), waiting[2].tolist()


@torch.no_grad()
def effects(model: LanguageModel, windows: Iterable[list[int]], special: Tensor, read: HookPoint, written: HookPoint,
            saes: Sequence[SAE], show: Callable[[int], None]) -> list[dict[str, Any]]:
    """Splice SAEs, or transcoders, into a model, one at a time.

    Args:
        special: token ids whose activations are not replaced, and whose predictions do not count.
        read: the hook point whose activations are encoded.
        written: the hook point whose activations are replaced; for an SAE the same.
        show: called after each batch with the number of tokens done.

    Returns:
        For each SAE: tokens, the number that counted; ce_clean, ce_spliced and ce_zero, the next token's mean
        cross-entropy in nats, of the model itself, with the SAE's predictions, and with zeros at the hook point
        written; ce_recovered, `(ce_zero - ce_spliced) / (ce_zero - ce_clean)`; kl, the mean KL(clean || spliced) in
        nats.

    Cost: 2 forward passes, and one more per SAE.
    """
    most = BATCH_LOGITS // model.source.config.get_text_config().vocab_size
    sums = torch.zeros(len(saes), 2, dtype=torch.float64)  # cross-entropy, KL
    shared = torch.zeros(2, dtype=torch.float64)  # cross-entropy clean, with zeros
    tokens = predictions = 0
    for batch in in_batches(windows, most):
        token_ids, mask = padded(batch)
        plain = is_plain(token_ids, mask, special).to(model.device)
        scored = plain[:, :-1] & mask[:, 1:].bool().to(model.device)  # has a next token
        clean = model.logits(token_ids, mask).log_softmax(-1)
        following = token_ids[:, 1:].to(model.device)

        def logits_with(replace: Callable[[Tensor], Tensor], token_ids: Tensor = token_ids,
                        mask: Tensor = mask) -> Tensor:
            with model.intercepted(*written, replace):
                return model.logits(token_ids, mask).log_softmax(-1)

        def spliced_with(sae: SAE, plain: Tensor = plain, logits_with: Callable[..., Tensor] = logits_with) -> Tensor:
            if read == written:
                return logits_with(lambda x: _replaced(sae, x, x, plain))
            seen: list[Tensor] = []

            def look(x: Tensor) -> Tensor:
                seen.append(x.clone())
                return x

            with model.intercepted(*read, look):
                return logits_with(lambda y: _replaced(sae, seen[0], y, plain))

        shared += torch.stack([_cross_entropy(clean, following, scored),
                               _cross_entropy(logits_with(torch.zeros_like), following, scored)]).cpu()
        for index, sae in enumerate(saes):
            spliced = spliced_with(sae)
            kl = (clean.exp() * (clean - spliced)).sum(-1)[plain].sum(dtype=torch.float64)
            sums[index] += torch.stack([_cross_entropy(spliced, following, scored), kl]).cpu()
        tokens += int(plain.sum())
        predictions += int(scored.sum())
        show(tokens)
    clean, zero = (shared / predictions).tolist()
    return [{"ce_clean": clean, "ce_spliced": float(own[0] / predictions), "ce_zero": zero,
             "ce_recovered": float((shared[1] - own[0]) / (shared[1] - shared[0])), "kl": float(own[1] / tokens),
             "tokens": tokens} for own in sums]


def in_batches(windows: Iterable[list[int]], most: int) -> Iterator[list[list[int]]]:
    """The windows in lists of at most `most` tokens when padded, or of one window."""
    pending: list[list[int]] = []
    for window in windows:
        longest = max(len(other) for other in [*pending, window])
        if pending and (len(pending) + 1) * longest > most:
            yield pending
            pending = []
        pending.append(window)
    if pending:
        yield pending


def padded(windows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, T) each, padded on the right with token 0 under mask 0."""
    length = max(map(len, windows))
    token_ids = torch.zeros(len(windows), length, dtype=torch.int64)
    mask = torch.zeros(len(windows), length, dtype=torch.int64)
    for row, window in enumerate(windows):
        token_ids[row, : len(window)] = torch.tensor(window)
        mask[row, : len(window)] = 1
    return token_ids, mask


def is_plain(token_ids: Tensor, mask: Tensor, special: Tensor) -> Tensor:
    """Whether each token is neither padding nor special, (B, T), bool."""
    return (mask == 1) & ~torch.isin(token_ids, special)


def _cross_entropy(log_probabilities: Tensor, following: Tensor, scored: Tensor) -> Tensor:
    """Summed over the scored tokens, float64."""
    chosen = log_probabilities[:, :-1].gather(-1, following[..., None])[..., 0]
    return -chosen[scored].sum(dtype=torch.float64)


def _replaced(sae: SAE, x: Tensor, y: Tensor, plain: Tensor) -> Tensor:
    """The activations y, (B, T, E), replaced at plain tokens by the SAE's predictions from x, (B, T, D)."""
    result = y.clone()
    result[plain] = sae(x[plain].to(sae.W_enc)).to(y)
    return result
