"""Where in a language model activations are read or replaced. The sites of block L, counted from 0:

    resid_pre     the block's input: `hidden_states[L]`, which the paper's code takes
    resid_post    the block's output: Gemma Scope's layer L, SAELens' `blocks.L.hook_resid_post`
    attn_out      attention's addition to the residual stream
    mlp_in        the MLP's input, after its norm
    mlp_out       the MLP's addition to the residual stream
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.errors import ConfigError

if TYPE_CHECKING:  # commands name sites without torch
    from torch import Tensor, nn

SITES = ("resid_post", "resid_pre", "mlp_in", "mlp_out", "attn_out")
MLP = ("mlp", "feed_forward", "ffn")  # names of a block's MLP in various architectures


class HookPoint(NamedTuple):
    """A site of a block: `layer` from 0, `site` one of `SITES`."""

    layer: int
    site: str


def module_at(block: "nn.Module", site: str) -> "tuple[nn.Module, bool]":
    """The module whose output (or input, where the flag is set) is the site.

    Gemma-2 and its successors normalise the outputs of attention and MLP before adding them, so those norms' outputs
    are the sites; such a block has a `post_feedforward_layernorm`.
    """
    is_input = site in ("resid_pre", "mlp_in")
    if site in ("resid_pre", "resid_post"):
        return block, is_input
    normed = hasattr(block, "post_feedforward_layernorm")
    names = {"mlp_in": MLP,
             "mlp_out": ("post_feedforward_layernorm",) if normed else MLP,
             "attn_out": ("post_attention_layernorm",) if normed else ("self_attn", "attention", "attn",
                                                                       "self_attention")}[site]
    for name in names:
        if hasattr(block, name):
            return getattr(block, name), is_input
    raise ConfigError(f"--site {site} is unknown in {type(block).__name__}, which has no part named "
                      f"{' or '.join(names)}; use resid_post or resid_pre", option="site")


@contextmanager
def intercepted(block: "nn.Module", site: str, replace: "Callable[[Tensor], Tensor]") -> Iterator[None]:
    """While open, forward passes replace the activations, (B, T, D), at a site of a block by `replace(activations)`."""
    module, is_input = module_at(block, site)

    def on_input(module: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (replace(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": replace(kwargs["hidden_states"])}

    def on_output(module: "nn.Module", args: tuple[Any, ...], output: Any) -> Any:
        return (replace(output[0]), *output[1:]) if isinstance(output, tuple) else replace(output)

    handle = (module.register_forward_pre_hook(on_input, with_kwargs=True) if is_input
              else module.register_forward_hook(on_output))
    try:
        yield
    finally:
        handle.remove()
