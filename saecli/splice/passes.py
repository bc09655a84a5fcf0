"""A language model's forward pass in parts, with activations replaced.

A pass that changes activations at a hook point repeats what the blocks before it returned in another pass, and logits,
V per token, are computed for some rows at a time. Both run the model's own code, its blocks' forward methods replaced,
so that whatever it does around its blocks and to its logits (soft caps, factors) stays.

Shapes: B windows, T tokens, n of them rows, D = d_in, E = d_out, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..base.errors import ModelError
from ..model.blocks import Reached, calling, with_first
from ..model.language_model import LanguageModel
from ..model.tokenizer import affixes
from ..model.windows import padded
from ..store.origin import HookPoint
from ..store.values import TextWindow

PROBED = 16  # tokens on which a pass that repeats blocks is compared with a whole one
PASS_TOLERANCE = 1e-4  # relative difference of one pass and another by rounding
Hook = Callable[[HookPoint, Tensor], Tensor]
LOGITS_AT_ONCE = 1 << 25  # computed: 128 MB in float32
CACHED_LOGITS = 1 << 20  # measured at once on a CPU, to stay in its cache: 4 MB in float32
NO_NEXT = -1
MASKED = 0.15  # of the rows, as BERT and ESM-2 were trained


class FirstBlocks(NamedTuple):
    number: int
    output: Any  # what the last of them returned


class Passes:
    """A language model's forward pass in two parts; needs the head."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self._head = model, model.model.get_output_embeddings()
        if self._head is None:
            raise ModelError(
                f"{model.source.name} has no head: expected a causal language model, got a "
                f"{type(model.model).__name__}; use another model"
            )
        self.suffix = affixes(model.tokenizer).suffix  # what the tokenizer adds after a text
        self._is_repeatable: dict[int, bool] = {}  # by number of blocks
        self._one_token: FirstBlocks | None = None

    def states(
        self,
        token_ids: Tensor,
        mask: Tensor,
        hooks: Mapping[HookPoint, Hook] | None = None,
        repeated: FirstBlocks | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The head's inputs, (B, T, D), with activations replaced by `hook(point, activations)`, in which they are
        differentiable; `repeated` blocks of another pass over the same tokens do not run. `mask` and `positions` as of
        `LanguageModel.forward`."""
        reached: list[Tensor] = []

        def reach(module: nn.Module, args: tuple[Tensor]) -> None:
            reached.append(args[0])
            raise Reached

        with ExitStack() as opened:
            if repeated is not None:
                opened.enter_context(self._repeating(repeated))
            for point, hook in (hooks or {}).items():
                opened.enter_context(self.model.modules.intercepted(point, partial(hook, point)))
            opened.enter_context(self._head.register_forward_pre_hook(reach))
            try:
                self.model.forward(token_ids, mask, positions)
            except Reached:
                return reached[0]
        raise ModelError(f"{self.model.source.name} never ran its head; use another model")

    @contextmanager
    def recording(self, counts: Collection[int]) -> Iterator[dict[int, FirstBlocks]]:
        """While open, passes record their first blocks, by these numbers of them."""
        recorded: dict[int, FirstBlocks] = {}

        def record(count: int, module: nn.Module, args: Any, output: Any) -> None:
            recorded[count] = FirstBlocks(count, _copied(output))

        with ExitStack() as opened:
            for count in counts:
                last = self.model.blocks[count - 1]
                opened.enter_context(last.register_forward_hook(partial(record, count)))
            yield recorded

    def _repeating(self, first: FirstBlocks) -> AbstractContextManager[None]:

        def repeat(*args: Any, **kwargs: Any) -> Any:
            return _copied(first.output)  # a model may add to it in place

        return calling(dict.fromkeys([*self.model.blocks][: first.number], repeat))

    def logits(self, states: Tensor) -> Tensor:
        """The logits, (n, V), of the head's inputs, (n, D), in the model's dtype; differentiable."""
        token_ids = torch.zeros(1, 1, dtype=torch.int64)
        mask = torch.ones_like(token_ids)
        if self._one_token is None:
            count = self.model.source.layers
            with torch.no_grad(), self.recording([count]) as recorded:
                self.states(token_ids, mask)
            self._one_token = recorded[count]

        swapped = self._head.register_forward_pre_hook(lambda *_: (states[None],))
        with swapped, self._repeating(self._one_token):
            return self.model.forward(token_ids, mask).logits[0]

    @torch.no_grad()
    def repeatable(self, points: Sequence[HookPoint], token_ids: Tensor) -> int:
        """The number of first blocks that a pass with activations replaced at hook points need not run: 0 where later
        blocks read more of them than the residual stream, such as shared keys and values. Tried on some of the tokens,
        (B, T)."""
        count = min(_blocks_before(point) for point in points)
        if count and count not in self._is_repeatable:
            few = token_ids[:1, :PROBED]
            mask = torch.ones_like(few)
            with self.recording([count]) as recorded:
                whole = self.states(few, mask)
            try:
                in_part = self.states(few, mask, repeated=recorded[count])
            except ModelError:
                in_part = torch.full_like(whole, torch.nan)
            worst = (in_part - whole).abs().max()
            self._is_repeatable[count] = bool(worst <= PASS_TOLERANCE * whole.abs().max())
        return count if self._is_repeatable.get(count) else 0


def _blocks_before(point: HookPoint) -> int:
    layer = point.layer or 0
    return layer + 1 if point.site == "resid_post" else layer


def _copied(output: Any) -> Any:
    return with_first(output, lambda x: x.detach().clone())


class CleanPass:
    """A batch of windows run through a model as it is; m is n, or of a masked model the number of tokens predicted.

    activations: at each hook point read or written, (n, its width).
    states: inputs of the head, (m, d_model).
    next_tokens: to be predicted, (m,) int64, NO_NEXT at the end of a window's text.
    """

    def __init__(
        self,
        passes: Passes,
        windows: Sequence[TextWindow],
        reads: tuple[HookPoint, ...],
        writes: tuple[HookPoint, ...],
        parts: Sequence[tuple[HookPoint, ...]] = (),
    ) -> None:
        """`parts`: hook points replaced at once, if not all written."""
        self.passes, self.reads, self.writes = passes, reads, writes
        self._token_ids, self._mask, is_row = padded(windows)  # (B, T); mask 0 at padding
        passes.model.check_tokens(self._token_ids)
        if passes.model.mask_token is None:
            scored, next_tokens = is_row, self._next_tokens(windows)[is_row]
        else:
            scored = hidden_tokens(windows, is_row)
            next_tokens = self._token_ids[scored]
            self._token_ids[scored] = passes.model.mask_token
        self.next_tokens = next_tokens.to(passes.model.device)
        self._replaced, self._scored = (which.to(passes.model.device) for which in (is_row, scored))
        counts = {passes.repeatable(part, self._token_ids) for part in parts or [writes]} - {0}
        self.activations: dict[HookPoint, Tensor] = {}

        def look(point: HookPoint, activations: Tensor) -> Tensor:
            self.activations[point] = self.replaced_rows(activations)
            return activations

        hooks = dict.fromkeys((*reads, *writes), look)
        with torch.no_grad(), passes.recording(counts) as self._first_blocks:
            states = passes.states(self._token_ids, self._mask, hooks)
        self.states = states[self._scored]
        for point in hooks:
            if point not in self.activations:
                raise passes.model.modules.never_ran(point)

    @property
    def x(self) -> Tensor:
        """The activations read, side by side, (n, D)."""
        return torch.cat([self.activations[point] for point in self.reads], 1)

    @property
    def y(self) -> Tensor:
        """The activations written, side by side, (n, E)."""
        return torch.cat([self.activations[point] for point in self.writes], 1)

    def _next_tokens(self, windows: Sequence[TextWindow]) -> Tensor:
        next_tokens = functional.pad(self._token_ids[:, 1:], (0, 1))
        of_text = self._mask.clone()
        for row, window in enumerate(windows):
            text_end = window.length - len(self.passes.suffix)
            if window.token_ids[text_end:].tolist() == self.passes.suffix:
                of_text[row, text_end:] = 0  # added after the window's text, perhaps mid-document
        has_next = functional.pad(of_text[:, 1:], (0, 1)).bool()
        return torch.where(has_next, next_tokens, NO_NEXT)

    def spliced(self, y_hat: Tensor) -> Tensor:
        """The inputs of the head, (n, d_model), with y_hat, (n, E), in place of y; differentiable in it."""
        widths = [self.activations[point].shape[1] for point in self.writes]
        return self.filled(dict(zip(self.writes, y_hat.split(widths, 1), strict=True)))

    def filled(self, values: Mapping[HookPoint, Tensor]) -> Tensor:
        """The inputs of the head with values, (n, width) or (width,), at hook points."""
        return self.changed(
            (*values,), lambda point, activations: self.with_rows(activations, values[point])
        )

    def replaced_rows(self, activations: Tensor) -> Tensor:
        """The windows' rows, (n, D), of activations, (B, T, D)."""
        return activations[self._replaced]

    def with_rows(self, activations: Tensor, rows: Tensor) -> Tensor:
        """Activations with others, (n, D) or (D,), at the windows' rows."""
        return activations.index_put((self._replaced,), rows.to(activations))

    def zeroed(self, writes: tuple[HookPoint, ...]) -> Tensor:
        return self.changed(writes, lambda _, activations: torch.zeros_like(activations))

    def changed(
        self, writes: tuple[HookPoint, ...], replace: Callable[[HookPoint, Tensor], Tensor]
    ) -> Tensor:
        repeated = self._first_blocks.get(self.passes.repeatable(writes, self._token_ids))
        hooks = dict.fromkeys(writes, replace)
        states = self.passes.states(self._token_ids, self._mask, hooks, repeated)
        return states[self._scored]

    def losses(self, states: Tensor) -> Tensor:
        """The cross-entropy of the next token, (n,) float32, given inputs of the head; 0 where there is none."""
        losses = [
            self._losses(logits.float().log_softmax(-1), rows)
            for block in self._blocks()
            for rows, logits in self._cached(block, self.passes.logits(states[block]))
        ]
        return torch.cat(losses) if losses else states.new_empty(0, dtype=torch.float32)

    def compared(self, others: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The `losses` of the clean pass; and, with each of other inputs of the head, the sums of losses and of
        KL(clean || other), float64."""
        losses = [torch.empty(0, device=self.states.device)]
        sums = torch.zeros(2, len(others), dtype=torch.float64, device=self.states.device)
        for block in self._blocks():
            clean = self.passes.logits(self.states[block]).float()
            for rows, log_p in self._cached(block, clean):
                log_p.copy_(log_p.log_softmax(-1))
                losses.append(self._losses(log_p, rows))
            for number, other in enumerate(others):
                logits = self.passes.logits(other[block])
                for rows, log_p, part in self._cached(block, clean, logits):
                    log_q = part.float().log_softmax(-1)
                    sums[0, number] += self._losses(log_q, rows).sum()
                    sums[1, number] += log_q.sub_(log_p).mul_(log_p.exp()).sum().neg()
        return torch.cat(losses), *sums

    def descent(self, states: Tensor, objective: str) -> tuple[Tensor, Tensor]:
        """The sum over inputs of the head, (n, d_model), of `kl`, KL(clean || them), or of `ce`, the next token's
        cross-entropy, float64; and its gradient with respect to them."""
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        gradient = torch.empty_like(states)
        for block in self._blocks():
            inputs = states[block].detach().requires_grad_()
            logits = self.passes.logits(inputs)
            slopes = torch.empty_like(logits)
            with torch.no_grad():
                clean = self.passes.logits(self.states[block]) if objective == "kl" else logits
            parts = self._cached(block, logits.detach(), clean, slopes)
            for rows, part, clean_part, slope_part in parts:
                log_q = part.float().log_softmax(-1)
                if objective == "kl":
                    log_p = clean_part.float().log_softmax(-1)
                    p = log_p.exp()
                    total += log_p.sub_(log_q).mul_(p).sum()
                    slope = log_q.exp_().sub_(p)
                else:
                    total += self._losses(log_q, rows).sum()
                    slope = log_q.exp_()
                    slope -= functional.one_hot(self.next_tokens[rows].clamp(min=0), slope.shape[1])
                    slope[self.next_tokens[rows] == NO_NEXT] = 0
                slope_part.copy_(slope)
            (gradient[block],) = torch.autograd.grad(logits, inputs, slopes)
        return total, gradient

    def _losses(self, log_probabilities: Tensor, rows: slice) -> Tensor:
        return functional.nll_loss(
            log_probabilities, self.next_tokens[rows], ignore_index=NO_NEXT, reduction="none"
        )

    def _blocks(self) -> Iterator[slice]:
        yield from _slices(0, len(self.states), LOGITS_AT_ONCE // self.passes.model.vocabulary)

    def _cached(self, block: slice, *logits: Tensor) -> Iterator[tuple[Any, ...]]:
        """Rows of a block, and their part of its logits, that stay in a CPU's cache."""
        at_once = CACHED_LOGITS if logits[0].device.type == "cpu" else LOGITS_AT_ONCE
        for rows in _slices(block.start, block.stop, at_once // logits[0].shape[1]):
            part = slice(rows.start - block.start, rows.stop - block.start)
            yield rows, *(of_block[part] for of_block in logits)


def hidden_tokens(windows: Sequence[TextWindow], is_row: Tensor) -> Tensor:
    """The tokens that a masked model predicts, (B, T) bool: `MASKED` of each window's rows, at least one, seeded by
    its tokens."""
    hidden = torch.zeros_like(is_row)
    for row, window in enumerate(windows):
        rows = np.flatnonzero(window.is_row)
        chosen = np.random.default_rng(crc32(window.token_ids.tobytes()))
        count = max(1, round(MASKED * len(rows)))
        hidden[row, chosen.choice(rows, count, replace=False)] = True
    return hidden


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
