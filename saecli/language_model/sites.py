"""Places in a language model whose activations can be read.

A site is a place in block L, counted from 0:

    resid_pre     the block's input: `hidden_states[L]`, which the paper's code takes
    resid_post    the block's output: Gemma Scope's layer L, SAELens' `blocks.L.hook_resid_post`
    attn_out      what attention adds to the residual stream
    mlp_out       what the MLP adds to the residual stream

They are read by hooks on the modules and not from `hidden_states`, whose last entry is normalised.
"""

from typing import NamedTuple

from torch import nn

from ..errors import ConfigError, ModelError

SITES = ("resid_post", "resid_pre", "mlp_out", "attn_out")


class Place(NamedTuple):
    """A site of a block.

    Args:
        layer: the block, from 0.
        site: one of `SITES`.
    """

    layer: int
    site: str


def blocks_of(model: nn.Module, name: str, layers: int) -> nn.ModuleList:
    """The model's list of transformer blocks: the outermost module list as long as the configuration says.

    Raises:
        ModelError: there is none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == layers]
    if not lists:
        raise ModelError(f"cannot find the blocks of {name}: expected a module list of length {layers}, "
                         f"as its configuration says, got none")
    return lists[0]


def hook_point(block: nn.Module, site: str) -> tuple[nn.Module, bool]:
    """The module whose output, or where the flag is set whose input, is the site.

    Gemma-2 and its heirs normalise what attention and MLP give before adding it, so that their sites are the
    outputs of those norms; the mark of such a block is `post_feedforward_layernorm`.

    Raises:
        ConfigError: the block has no part known to be there.
    """
    if site in ("resid_pre", "resid_post"):
        return block, site == "resid_pre"
    normed = hasattr(block, "post_feedforward_layernorm")
    names = {"mlp_out": ("post_feedforward_layernorm",) if normed else ("mlp", "feed_forward", "ffn"),
             "attn_out": ("post_attention_layernorm",) if normed else ("self_attn", "attention", "attn",
                                                                       "self_attention")}[site]
    for name in names:
        if hasattr(block, name):
            return getattr(block, name), False
    raise ConfigError("site", "{got} is unknown in {kind}: expected a part named {names}",
                      "use resid_post or resid_pre", got=site, kind=type(block).__name__, names=" or ".join(names))
