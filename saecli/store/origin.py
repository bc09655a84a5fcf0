"""Where rows come from: the model, its hook points, the text. Imports no NumPy: help pages are fast."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from annotated_types import Ge

from ..base.documents import Fraction
from ..base.errors import ConfigError

Layer = Annotated[int, Ge(0)]
LOCAL = {"local": True}  # of a field: it means something in one home alone


@dataclass(frozen=True)
class Origin:
    """Where rows came from, as recorded in stores and the files of SAEs; None where unknown."""

    model: str | None = None  # hub id, folder or name of the language model
    revision: str | None = None  # its commit on the hub
    layer: Layer | None = None  # block, from 0
    site: str | None = None  # hook point in the block; a module's whole name without a layer
    dataset: str | None = None
    context: int | None = None  # tokens in a window
    prepend_bos: bool | None = None  # whether windows begin with special tokens
    target_layer: Layer | None = None  # of a transcoder
    target_site: str | None = None
    # Of a crosscoder, layer and site of each input, in order, and its model and revision where these differ.
    inputs: tuple[dict[str, Any], ...] | None = None
    # Reference of the (first) store, `Joined.hash` of the stores, references of further ones and of the targets'.
    data: str | None = field(default=None, metadata=LOCAL)
    data_hash: str | None = field(default=None, metadata=LOCAL)
    beside: tuple[str, ...] | None = field(default=None, metadata=LOCAL)
    target: str | None = field(default=None, metadata=LOCAL)
    split_seed: Annotated[int, Ge(0)] | None = None
    fraction: Fraction | None = None  # of the training rows that was trained on


def published(origin: Mapping[str, Any]) -> dict[str, Any]:
    """An origin for others: without fields that are `LOCAL`, and of each path only its last part."""
    names = [entry.name for entry in fields(Origin) if not entry.metadata]
    return {name: without_folders(origin[name]) for name in names if name in origin}


def without_folders(value: Any) -> Any:
    """A value of a document for others: of each path only the last part."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    return " + ".join(map(_last_part, value.split(" + ")))  # the texts of a mixture


def _last_part(name: str) -> str:
    """The last part of a path; a name on the hub, OWNER/NAME, as it is."""
    is_path = re.match(r"[/~.]|.*\\|.*/.*/", name, re.DOTALL)
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if is_path else name


def point_words(layer: int | None, site: str, between: str = ", ") -> str:
    """A hook point in a sentence: a block's, or a module outside of blocks."""
    return site if layer is None else f"layer {layer}{between}{site}"


Site = Literal["resid_post", "resid_pre", "resid_mid", "mlp_in", "mlp_out", "attn_out", "attn_z"]
SITES = get_args(Site)
SIDES = ("in", "out")  # of a module


def module_site(module: str) -> str:
    """A module's name with its side, by default the output."""
    path, colon, side = module.partition(":")
    if not path or (colon and side not in SIDES):
        raise ConfigError(
            "--module must be a module's name, then :in or :out, as in model.layers.3.mlp:out, got "
            f"{module!r}; see `sae extract --list-modules`"
        )
    return f"{path}:{side or 'out'}"


def place_given(
    layer: int | None, site: str | None, module: str | None
) -> tuple[int | None, str | None]:
    """Layer and site as the user gives them, or the site that is a module."""
    if module is None:
        return layer, site
    if layer is not None or site is not None:
        raise ConfigError(
            "cannot use both --module and --layer or --site at the same time; use one of them"
        )
    return None, module_site(module)


class HookPoint(NamedTuple):
    """A side of a module: `layer`, from 0, is that of its block, and `site` one of `SITES`, or its name in the block,
    then `:in` or `:out`; without a layer its name in the model. `model` is the number of its model among several.

    resid_pre     the block's input: `hidden_states[layer]`, which the paper's code takes
    resid_post    the block's output: Gemma Scope's layer L, SAELens' `blocks.L.hook_resid_post`
    resid_mid     the residual stream between them: attention is added, the MLP's norm has not acted
    attn_z        the input of attention's output projection: `attn.hook_z`, its heads side by side
    attn_out      attention's addition to the residual stream
    mlp_in        the MLP's input, after its norm
    mlp_out       the MLP's addition to the residual stream
    """

    layer: int | None
    site: str
    model: int = 0

    @classmethod
    def of(cls, origin: Mapping[str, Any], model: int = 0) -> Self:
        """The hook point in a store's or an input's record."""
        return cls(origin.get("layer"), origin["site"], model)

    def __str__(self) -> str:
        return point_words(self.layer, self.site)

    @property
    def is_known(self) -> bool:
        _, colon, side = self.site.partition(":")
        if colon:
            return side in SIDES
        return self.layer is not None and self.site in SITES

    @property
    def has_model_width(self) -> bool:
        """Whether activations there have as many dimensions as the residual stream."""
        return ":" not in self.site and self.site != "attn_z"

    @property
    def place(self) -> dict[str, Any]:
        return {"layer": self.layer, "site": self.site}


def last_layer(points: Iterable[HookPoint]) -> int | None:
    """The last layer that a pass up to these points needs; None for all, where a module is outside of blocks."""
    layers = [point.layer for point in points]
    return None if None in layers else max(layer for layer in layers if layer is not None)
