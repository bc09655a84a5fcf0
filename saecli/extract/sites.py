"""Sites of a model's blocks, and module hooks that read or replace their activations.

Shapes: B windows, T tokens, D = the site's width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..base.errors import ConfigError

# The first of these parts that a block has: its input is mlp_in, its output mlp_out or attn_out. Norms before the
# residual stream come first (Gemma 2, GLM 4), then last layers, where attention or MLP return their sum with the
# residual stream (BLOOM, MPT); fc1 and fc2 stand in blocks that have no module for the MLP (OPT).
PARTS = {
    "mlp_in": ("mlp", "feed_forward", "ffn", "fc1", "block_sparse_moe", "shared_mlp"),
    "mlp_out": (
        "post_feedforward_layernorm",
        "post_mlp_layernorm",
        "mlp.dense_4h_to_h",
        "ffn.down_proj",
        "mlp",
        "feed_forward",
        "ffn",
        "fc2",
        "block_sparse_moe",
        "shared_mlp",
    ),
    "attn_out": (
        "post_self_attn_layernorm",
        "self_attention.dense",
        "self_attn",
        "attention",
        "attn",
        "self_attention",
    ),
}
# Both add to the residual stream at once (Falcon-H1, Granite with shared experts): neither alone is the site.
PAIRS = {
    "attn_out": {"mamba", "self_attn"},
    "mlp_in": {"block_sparse_moe", "shared_mlp"},
    "mlp_out": {"block_sparse_moe", "shared_mlp"},
}


def _module_at(block: nn.Module, site: str) -> nn.Module | None:
    """The module whose input (resid_pre, mlp_in) or output is the site; None if the block has none."""
    parts = dict(block.named_modules())
    if site in PAIRS and parts.keys() >= PAIRS[site]:
        return None
    normed = site == "attn_out" and "post_feedforward_layernorm" in parts
    # "" is the block itself.
    paths = ("post_attention_layernorm",) if normed else PARTS.get(site, ("",))
    return next((parts[path] for path in paths if path in parts), None)


@contextmanager
def intercepted(
    block: nn.Module, site: str, replace: Callable[[Tensor], Tensor], blocks: nn.ModuleList
) -> Iterator[None]:
    """While open, forward passes replace the activations, (B, T, D), at a site of a block by `replace(activations)`;
    ConfigError, which names those of all `blocks` that have the site, if it has not."""
    if (module := _module_at(block, site)) is None:
        having = [str(layer) for layer, other in enumerate(blocks) if _module_at(other, site)]
        raise ConfigError(
            f"--site {site} is unknown in a {type(block).__name__}: expected "
            f"{'attention' if site == 'attn_out' else 'an MLP'} alone, got {', '.join(dict(block.named_children()))}; "
            "use " + (f"--layer {' or '.join(having)}" if having else "resid_post or resid_pre")
        )
    shape: list[int] = []

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape[:] = (args[0] if args else kwargs["hidden_states"]).shape

    def replaced(activations: Tensor) -> Tensor:
        if activations.dim() > 3:
            raise ConfigError(
                f"--site {site} of a {type(block).__name__} is not defined: expected activations (batch, "
                f"tokens, d_in), got {tuple(activations.shape)}; use another site"
            )
        # Mixtures of experts and OPT flatten them to (B T, D).
        rows = activations.reshape(*shape[-3:-1], -1)
        return replace(rows).reshape(activations.shape)

    def on_input(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if args:
            return (replaced(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": replaced(kwargs["hidden_states"])}

    def on_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (replaced(output[0]), *output[1:]) if isinstance(output, tuple) else replaced(output)

    with ExitStack() as hooks:
        hooks.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
        hooks.callback(
            (
                module.register_forward_pre_hook(on_input, with_kwargs=True)
                if site in ("resid_pre", "mlp_in")
                else module.register_forward_hook(on_output)
            ).remove
        )
        yield
