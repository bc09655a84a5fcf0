"""Changes at single tokens, many in one forward pass.

Behind a window's T tokens stand copies of some of them, each at its token's position. A copy sees the tokens before its
own and itself, and no token sees a copy: a change at a copy leaves all others as they are, and what the model predicts
after it is what it would after its token.

Shapes: T tokens, C copies, D = d_model, E the width at the hook point, P tokens followed, V vocabulary.
"""

import torch
from torch import Tensor

from ..base.errors import ModelError
from ..model.blocks import with_first
from ..store.origin import HookPoint
from .passes import LOGITS_AT_ONCE, PASS_TOLERANCE, FirstBlocks, Passes

STEP = 0.05  # of a direction; halved, slopes change by what float32 rounds


def longest_window(passes: Passes, most: int) -> int:
    """At most `most` tokens, all of which a sliding window sees: the mask here knows none."""
    sliding = getattr(passes.model.source.config.get_text_config(), "sliding_window", None)
    return min(most, sliding or most)


@torch.no_grad()
def effects_at_copies(
    passes: Passes,
    point: HookPoint,
    token_ids: Tensor,
    at: Tensor,
    changes: Tensor,
    followed: Tensor,
) -> Tensor:
    """Of predictions after tokens `at`, (C,), of a window, (T,), with changes, (C, E), added to their activations:
    KL(clean || changed) in nats, and the rise of the mean log-probability of the tokens followed, ids (C, P), 0 without
    any: (2, C), on the CPU."""
    clean_states, states = _states(passes, point, token_ids, at, changes)
    places, number = at.unique(return_inverse=True)
    clean = passes.logits(clean_states[places]).float().log_softmax(-1)
    parts = []
    for part in torch.arange(len(at)).split(max(1, LOGITS_AT_ONCE // clean.shape[1])):
        log_p = clean[number[part]]
        rise = passes.logits(states[part]).float().log_softmax(-1) - log_p
        kl = (log_p.exp_() * rise).sum(1).neg().clamp(min=0)  # below by rounding
        of_followed = rise.gather(1, followed[part].to(rise.device)).sum(1)
        parts.append(torch.stack([kl, of_followed / max(1, followed.shape[1])]).cpu())
    return torch.cat(parts, 1)


@torch.no_grad()
def slopes_at_copies(
    passes: Passes, point: HookPoint, token_ids: Tensor, at: Tensor, directions: Tensor
) -> Tensor:
    """Derivatives of log-probabilities after tokens `at`, (C,), of a window, (T,), along directions, (C, E), by central
    differences: (C, V), on the CPU."""
    steps = STEP * directions
    changes = torch.cat([steps, -steps])
    _, states = _states(passes, point, token_ids, at.repeat(2), changes)
    log_p, other = (passes.logits(part).float().log_softmax(-1) for part in states.chunk(2))
    return ((log_p - other) / (2 * STEP)).cpu()


def _states(
    passes: Passes, point: HookPoint, token_ids: Tensor, at: Tensor, changes: Tensor
) -> tuple[Tensor, Tensor]:
    """The head's inputs at tokens, (T, D), and at changed copies, (C, D). ModelError if another copy, of the last
    token, which is not changed, has other predictions than its token."""
    window, length = token_ids[None], len(token_ids)
    source = torch.cat([torch.arange(length), at, torch.tensor([length - 1])])
    count = passes.repeatable([point], window)
    with passes.recording([count] if count else []) as recorded:
        clean = passes.states(window, torch.ones_like(window))[0]
    repeated = None
    if count:
        repeated = FirstBlocks(count, with_first(recorded[count].output, lambda x: x[:, source]))

    def add(_: HookPoint, activations: Tensor) -> Tensor:
        changed = activations.clone()
        changed[0, length:-1] += changes.to(activations)
        return changed

    dtype = passes.model.model.dtype
    sees = torch.arange(len(source)) < source[:, None]
    sees.fill_diagonal_(True)
    mask = torch.where(sees, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
    states = passes.states(window[:, source], mask, {point: add}, repeated, source[None])[0]
    tolerance = max(PASS_TOLERANCE, 8 * torch.finfo(dtype).eps)
    if not (states[-1] - clean[-1]).abs().max() <= tolerance * clean[-1].abs().max():
        raise ModelError(
            f"{passes.model.source.name} cannot be changed at single tokens: expected attention that takes a mask and "
            "positions, got other predictions at a copy of a token; use another model"
        )
    return clean, states[length:-1]
