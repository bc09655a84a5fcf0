"""Changes at copies of tokens against plain passes up to the token, with an own hook."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_hooks import blocks, log_p_with
from tiny_models import VOCABULARY, WIDTH, loaded, save_model

import saecli
from saecli.splice.copies import effects_at_copies, longest_window
from saecli.splice.passes import Passes
from saecli.store.origin import HookPoint

TOKENS = torch.randint(4, VOCABULARY, (9,), generator=torch.Generator().manual_seed(0))
AT = torch.tensor([1, 5, 5, 8, 3])


@pytest.mark.parametrize("site", ["resid_post", "mlp_out"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt-neox", "gemma2"])
def test_a_change_at_a_copy_is_a_change_at_the_last_token(tmp_path: Path, kind: str, site: str):
    model = loaded(save_model(tmp_path / kind, kind), head=True)
    passes, point = Passes(model), HookPoint(1, site)
    token_ids = TOKENS[: longest_window(passes, len(TOKENS))]
    at = AT.clamp(max=len(token_ids) - 1)
    draw = torch.Generator().manual_seed(1)
    changes = torch.randn(len(at), WIDTH, generator=draw)
    changes[2] = 0
    followed = torch.randint(0, VOCABULARY, (len(at), 3), generator=draw)
    kl, rise = effects_at_copies(passes, point, token_ids, at, changes, followed)
    block: Any = blocks(model.model)[1]
    after_mlp = "post_feedforward_layernorm" if kind == "gemma2" else "mlp"
    module = block if site == "resid_post" else getattr(block, after_mlp)
    for number, place in enumerate(at.tolist()):
        clean, changed = (
            log_p_with(model.model, module, token_ids[: place + 1], change)
            for change in (torch.zeros(WIDTH), changes[number])
        )
        expected = (clean.exp() * (clean - changed)).sum()
        assert float(kl[number]) == pytest.approx(float(expected), rel=1e-3, abs=2e-6)
        moved = (changed - clean)[followed[number]].mean()
        assert float(rise[number]) == pytest.approx(float(moved), rel=1e-3, abs=1e-5)
    assert kl[0] > 0.01 and abs(kl[2]) < 1e-6
    alone = effects_at_copies(passes, point, token_ids, at, changes, followed[:, :0])
    assert torch.equal(alone[0], kl) and not alone[1].any()


def test_windows_that_a_mask_of_copies_does_not_fit_are_refused(tmp_path: Path):
    passes = Passes(loaded(save_model(tmp_path / "gemma2", "gemma2"), head=True))
    sliding = passes.model.source.config.sliding_window
    assert longest_window(passes, len(TOKENS)) == sliding < len(TOKENS)
    assert longest_window(passes, 2) == 2
    nothing = torch.zeros(1, WIDTH), torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(saecli.SaeError, match="cannot be changed at single tokens"):
        effects_at_copies(passes, HookPoint(1, "resid_post"), TOKENS, AT[:1], *nothing)
