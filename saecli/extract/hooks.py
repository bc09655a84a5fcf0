"""Hook points in a model: one side, input or output, of a module; the sites of a block are known ones.

A module has its name in the model with a head, as in `model.layers.3.self_attn.o_proj`; `:in` or `:out` is its side.

Shapes: B windows, T tokens, D = d_in.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from os.path import commonpath
from typing import Any, cast

from torch import Tensor, nn

from ..base.errors import ConfigError, ModelError
from .options import HookPoint
from .reads import BEFORE_MLP

MLPS, EXPERTS = ("mlp", "feed_forward", "ffn"), ("block_sparse_moe", "shared_mlp")
ATTENTIONS = ("self_attn", "attention", "attn", "self_attention")
PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "attention.out_proj", "output.dense", "Wo")
# Norms before the residual stream (Gemma 2, GLM 4); last layers, where attention or MLP return their sum with the
# residual stream (BLOOM, MPT).
NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")
LAST_LAYERS = ("mlp.dense_4h_to_h", "ffn.down_proj")
# The first of these parts of a block that it has; "" is the block itself. fc1 and fc2 stand in blocks that have no
# module for the MLP (OPT).
PARTS: dict[str, tuple[str, list[str]]] = {
    "resid_pre": ("in", [""]),
    "resid_post": ("out", [""]),
    "resid_mid": ("in", [*BEFORE_MLP]),
    "mlp_in": ("in", [*MLPS, "fc1", *EXPERTS]),
    "mlp_out": ("out", [*NORMS, *LAST_LAYERS, *MLPS, "fc2", *EXPERTS]),
    "attn_out": ("out", ["post_self_attn_layernorm", "self_attention.dense", *ATTENTIONS]),
    "attn_z": ("in", [".".join(names) for names in product(ATTENTIONS, PROJECTIONS)]),
}
# Both add to the residual stream at once (Falcon-H1, Granite with shared experts): neither alone is the site.
PAIRS = {"attn_out": {"mamba", "self_attn"}, "mlp_in": {*EXPERTS}, "mlp_out": {*EXPERTS}}
EXPECTED = {
    "resid_mid": "a norm between attention and the MLP",
    "attn_out": "attention alone",
    "attn_z": "attention with an output projection",
}


class Modules:
    """The modules of a model, whose blocks are the list at `path`; `all_blocks` has those that are not loaded too."""

    def __init__(self, model: Any, path: str, all_blocks: nn.ModuleList | None = None) -> None:
        self.model, self.path = model, path
        self.blocks = cast(nn.ModuleList, model.get_submodule(path))
        self.all_blocks = all_blocks or self.blocks

    def at(self, point: HookPoint) -> tuple[str, str]:
        """The path of a hook point's module, and its side; ConfigError, which names the layers that have it, if its
        block has none."""
        block = self.blocks[point.layer]
        part = _part_at(block, point.site)
        if part is None:
            having = [
                str(layer)
                for layer, other in enumerate(self.all_blocks)
                if _part_at(other, point.site)
            ]
            raise ConfigError(
                f"--site {point.site} is unknown in a {type(block).__name__}: expected "
                f"{EXPECTED.get(point.site, 'an MLP alone')}, got "
                f"{', '.join(dict(block.named_children()))}; "
                "use " + (f"--layer {' or '.join(having)}" if having else "resid_post or resid_pre")
            )
        inner, side = part
        return ".".join(filter(None, (self.path, str(point.layer), inner))), side

    @contextmanager
    def intercepted(self, point: HookPoint, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While open, forward passes replace the activations, (B, T, D), at a hook point by `replace(activations)`."""
        path, side = self.at(point)
        block, module = self.blocks[point.layer], self.model.get_submodule(path)
        windows: list[int] = []  # B, T

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            windows[:] = given[_first_tensor(given)].shape[-3:-1]

        def replaced(activations: Tensor) -> Tensor:
            if activations.dim() > 3:
                raise ConfigError(
                    f"--site {point.site} of a {type(block).__name__} is not defined: expected activations "
                    f"(batch, tokens, d_in), got {tuple(activations.shape)}; use another site"
                )
            # Mixtures of experts and OPT flatten them to (B T, D).
            rows = activations.reshape(*windows, -1)
            return replace(rows).reshape(activations.shape)

        def on_input(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            first = _first_tensor(given)
            given[first] = replaced(given[first])
            return tuple(given[index] for index in range(len(args))), {
                name: given[name] for name in kwargs
            }

        def on_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):
                return (replaced(output[0]), *output[1:])
            return replaced(output)

        with ExitStack() as hooks:
            hooks.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooks.callback(
                (
                    module.register_forward_pre_hook(on_input, with_kwargs=True)
                    if side == "in"
                    else module.register_forward_hook(on_output)
                ).remove
            )
            yield


def blocks_of(model: Any, layers: int, name: str) -> str:
    """The path of the transformer blocks of a model named `name`: of its module lists of length `layers` the one
    nearest to the embedding of tokens, since an image encoder may have as many, and the outermost."""
    modules, embedding = dict(model.named_modules()), model.get_input_embeddings()
    home = next((path for path, module in modules.items() if module is embedding), "")
    folders = {
        path: path.replace(".", "/")
        for path, module in modules.items()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    }
    if not folders:
        raise ModelError(
            f"cannot find the blocks of {name}: it has no module list of length {layers}, the number of "
            f"layers in its configuration"
        )
    return max(folders, key=lambda path: len(commonpath([home.replace(".", "/"), folders[path]])))


def _part_at(block: nn.Module, site: str) -> tuple[str, str] | None:
    """The part of a block, and its side, that a site is; None if the block has none."""
    modules = dict(block.named_modules())
    if site in PAIRS and modules.keys() >= PAIRS[site]:
        return None
    side, parts = PARTS[site]
    # Norms follow attention and MLP, as in Gemma 2; OLMo 2 has no others.
    if "post_feedforward_layernorm" in modules:
        if site == "attn_out":
            parts = ["post_attention_layernorm"]
        if site == "resid_mid":
            parts = ["pre_feedforward_layernorm", "mlp"]
    if site == "resid_mid" and getattr(block, "use_parallel_residual", False):  # Pythia
        return None
    return next(((part, side) for part in parts if modules.get(part) is not None), None)


def _first_tensor(given: Mapping[Any, Any]) -> Any:
    """The key of the activations among a module's arguments, by position or name."""
    tensors = [key for key, value in given.items() if isinstance(value, Tensor)]
    return "hidden_states" if 0 not in tensors and "hidden_states" in tensors else tensors[0]
