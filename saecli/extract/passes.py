"""A language model's forward pass in two parts: blocks, also from a later one on; then its head, on some rows.

A pass that changes activations at a hook point repeats what the blocks below it returned, and logits, V per token, are
never held for all tokens. Both use the model's own code, with forward methods of its blocks replaced for a time, so
that whatever it does around its blocks and to its logits (soft caps, factors) stays what it is.

Shapes: B windows, T tokens, n rows, D = d_model, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import ModelError
from .language_model import LanguageModel, Reached
from .options import HookPoint
from .special import affixes

PROBED = 16  # tokens on which a pass that repeats blocks is compared with a whole one
ALIKE = 1e-4  # relative difference of one pass and another by rounding
Hook = Callable[[HookPoint, Tensor], Tensor]


class Below(NamedTuple):
    """The first blocks of a pass, to be repeated instead of run."""

    blocks: int
    output: Any  # what the last of them returned


class Passes:
    """The two parts of a language model's forward pass; it must be loaded with its head."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self._head = model, model.model.get_output_embeddings()
        if self._head is None:
            raise ModelError(
                f"{model.source.name} has no head: expected a causal language model, got a "
                f"{type(model.model).__name__}; use another model"
            )
        self.suffix = affixes(model.tokenizer).suffix  # what the tokenizer adds after a text
        self._repeatable: dict[int, bool] = {}
        self._one_token: Below | None = None

    def states(
        self,
        token_ids: Tensor,
        mask: Tensor,
        hooks: Mapping[HookPoint, Hook] | None = None,
        keep: Collection[int] = (),
        below: Below | None = None,
    ) -> tuple[Tensor, dict[int, Below]]:
        """The head's inputs, (B, T, D), with activations at hook points replaced by `hook(point, activations)`, and
        differentiable in what replaces them; the first blocks, for each number in `keep`, to be given as `below` to
        other passes over the same tokens."""
        kept: dict[int, Below] = {}
        reached: list[Tensor] = []

        def note(blocks: int, module: nn.Module, args: Any, output: Any) -> None:
            kept[blocks] = Below(blocks, _copied(output))

        def reach(module: nn.Module, args: tuple[Tensor]) -> None:
            reached.append(args[0])
            raise Reached

        with ExitStack() as opened:
            if below is not None:
                opened.enter_context(_repeating(self.model.blocks, below))
            for blocks in keep:
                last = self.model.blocks[blocks - 1]
                opened.callback(last.register_forward_hook(partial(note, blocks)).remove)
            for point, hook in (hooks or {}).items():
                opened.enter_context(
                    self.model.intercepted(point.layer, point.site, partial(hook, point))
                )
            opened.callback(self._head.register_forward_pre_hook(reach).remove)
            try:
                self.model.forward(token_ids, mask)
            except Reached:
                return reached[0], kept
        raise ModelError(f"{self.model.source.name} never ran its head; use another model")

    def logits(self, states: Tensor) -> Tensor:
        """The logits, (n, V), of the head's inputs, (n, D), in the model's dtype; differentiable in them."""
        token_ids = torch.zeros(1, 1, dtype=torch.int64)
        mask = torch.ones_like(token_ids)
        if self._one_token is None:
            blocks = self.model.source.layers
            with torch.no_grad():
                self._one_token = self.states(token_ids, mask, keep=(blocks,))[1][blocks]

        def swap(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (states[None],)

        with _repeating(self.model.blocks, self._one_token), ExitStack() as opened:
            opened.callback(self._head.register_forward_pre_hook(swap).remove)
            return self.model.forward(token_ids, mask).logits[0]

    @torch.no_grad()
    def repeatable(self, points: Sequence[HookPoint], token_ids: Tensor) -> int:
        """The number of first blocks that a pass with activations replaced at these hook points need not run: 0 where
        later blocks read more of them than the residual stream, as in models whose layers share keys and values. Found
        by trying it on some of the tokens, (B, T)."""
        blocks = min(point.layer + (point.site == "resid_post") for point in points)
        if blocks and blocks not in self._repeatable:
            few = token_ids[:1, :PROBED]
            whole, kept = self.states(few, torch.ones_like(few), keep=(blocks,))
            try:
                repeated, _ = self.states(few, torch.ones_like(few), below=kept[blocks])
            except ModelError:
                repeated = torch.full_like(whole, torch.nan)
            worst = (repeated - whole).abs().max()
            self._repeatable[blocks] = bool(worst <= ALIKE * whole.abs().max())
        return blocks if self._repeatable.get(blocks) else 0


@contextmanager
def _repeating(blocks: nn.ModuleList, below: Below) -> Iterator[None]:
    """While open, the first of the blocks do nothing, and return a copy of what the last of them returned."""
    repeating = list(blocks)[: below.blocks]
    before = [vars(block).get("forward") for block in repeating]

    def repeat(*args: Any, **kwargs: Any) -> Any:
        return _copied(below.output)  # a model may add to it in place

    for block in repeating:
        vars(block)["forward"] = repeat
    try:
        yield
    finally:
        for block, forward in zip(repeating, before, strict=True):
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward


def _copied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach().clone()
    return (output[0].detach().clone(), *output[1:])
