"""Where rows come from: the model, its hook points, the text. Imports no NumPy: help pages are fast."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from annotated_types import Ge

from ..base.errors import ConfigError
from ..base.files import NonzeroFraction, parse_json, to_json

Layer = Annotated[int, Ge(0)]


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
    """A side of a module: `layer`, from 0, of its block, and as `site` one of `SITES`, or its name in the block, then
    `:in` or `:out`; without a layer its name in the model. `model` numbers one of several models.

    resid_pre     the block's input: `hidden_states[layer]`, which the paper's code takes
    resid_post    the block's output: Gemma Scope's layer L, SAELens' `blocks.L.hook_resid_post`
    resid_mid     the residual stream after attention, before the MLP's norm
    attn_z        the input of attention's output projection: `attn.hook_z`, its heads side by side
    attn_out      attention's addition to the residual stream
    mlp_in        the MLP's input, after its norm
    mlp_out       the MLP's addition to the residual stream
    """

    layer: int | None = None
    site: str = ""  # empty if unknown
    model: int = 0

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
        """Whether activations there are as wide as the residual stream."""
        return ":" not in self.site and self.site != "attn_z"

    def to_json(self) -> dict[str, Any]:
        """What is known; the layer is null outside of blocks."""
        if self.site:
            return {"layer": self.layer, "site": self.site}
        return {} if self.layer is None else {"layer": self.layer}


def last_layer(points: Iterable[HookPoint]) -> int | None:
    """The last layer that a pass up to these points needs; None for all, as outside of blocks."""
    layers = [point.layer for point in points]
    return None if None in layers else max(layer for layer in layers if layer is not None)


class ModelName(NamedTuple):
    name: str  # hub id, folder or name of a language model
    revision: str | None = None  # its commit on the hub

    @property
    def spec(self) -> str:
        """NAME@REVISION, as `find_model` takes it."""
        return f"{self.name}@{self.revision}" if self.revision else self.name

    def to_json(self) -> dict[str, str]:
        return {"model": self.name} | ({"revision": self.revision} if self.revision else {})


@dataclass(frozen=True)
class InputEntries:
    """A crosscoder's input as JSON: its model is named only where models differ."""

    model: str | None = None
    revision: str | None = None
    layer: Layer | None = None
    site: str | None = None


@dataclass(frozen=True)
class OriginEntries(InputEntries):
    """An `Origin` as JSON, the first input's layer and site at its top; unknown entries are left out."""

    dataset: str | None = None
    context: int | None = None
    prepend_bos: bool | None = None
    target_layer: Layer | None = None
    target_site: str | None = None
    inputs: tuple[InputEntries, ...] | None = None
    data: str | None = None
    data_hash: str | None = None
    beside: tuple[str, ...] | None = None
    target: str | None = None
    split_seed: Annotated[int, Ge(0)] | None = None
    fraction: NonzeroFraction | None = None


ENTRIES = tuple(entry.name for entry in fields(OriginEntries))
# The fields that an `Origin` has under the same names.
SAME = (
    "dataset",
    "context",
    "prepend_bos",
    "data",
    "data_hash",
    "target",
    "split_seed",
    "fraction",
)
STORED = ENTRIES[: ENTRIES.index("prepend_bos") + 1]  # in a store's source
STORES = ("data", "data_hash", "beside", "target")  # which mean something in one home alone


@dataclass(frozen=True)
class Origin:
    """Where an SAE's or a store's rows came from; None where unknown."""

    models: tuple[ModelName, ...] = ()  # several only of a crosscoder
    read: tuple[HookPoint, ...] = (HookPoint(),)  # of each input, in order
    written: HookPoint | None = None  # of a transcoder's targets
    dataset: str | None = None
    context: int | None = None  # tokens in a window
    prepend_bos: bool | None = None  # whether windows begin with special tokens
    # References of the first store, of further inputs' and of the targets'; `Joined.hash` of all.
    data: str | None = None
    data_hash: str | None = None
    beside: tuple[str, ...] = ()
    target: str | None = None
    split_seed: int | None = None
    fraction: float | None = None  # of the training rows that was trained on

    @classmethod
    def of(cls, entries: OriginEntries) -> Self:
        inputs = entries.inputs or (InputEntries(layer=entries.layer, site=entries.site),)
        first = None if entries.model is None else ModelName(entries.model, entries.revision)
        named = [
            first if each.model is None else ModelName(each.model, each.revision) for each in inputs
        ]
        models = tuple(name for name in dict.fromkeys(named) if name is not None)
        read = tuple(
            HookPoint(each.layer, each.site or "", models.index(name) if name else 0)
            for each, name in zip(inputs, named, strict=True)
        )
        target = HookPoint(entries.target_layer, entries.target_site or "")
        written = None if target == HookPoint() else target
        same = {name: getattr(entries, name) for name in SAME}
        return cls(models, read, written, beside=entries.beside or (), **same)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Further entries are ignored; ValueError for one of another type."""
        known = {name: document[name] for name in ENTRIES if name in document}
        return cls.of(parse_json(to_json(known), OriginEntries))

    @classmethod
    def joined(cls, origins: Sequence[Self]) -> Self:
        """The first, with the hook points of all if these are known."""
        models = tuple(dict.fromkeys(model for origin in origins for model in origin.models))
        points = [
            origin.read[0]._replace(model=models.index(origin.models[0]) if origin.models else 0)
            for origin in origins
        ]
        if HookPoint() in points:
            return origins[0]
        return replace(origins[0], models=models, read=tuple(points))

    @property
    def model(self) -> str | None:
        return self.models[0].name if self.models else None

    @property
    def spec(self) -> str | None:
        """`ModelName.spec` of the first model."""
        return self.models[0].spec if self.models else None

    def hook_points(self) -> tuple[list[str], str | None]:
        """Known hook points of inputs and of the target, in words."""
        names = []
        for point in self.read:
            model = f" of {self.models[point.model].name}" if len(self.models) > 1 else ""
            if point.site:
                names.append(point_words(point.layer, point.site, " ") + model)
        if self.written is None or not self.written.site:
            return names, None
        return names, point_words(self.written.layer, self.written.site, " ")

    def trained(self, split_seed: int, fraction: float) -> Self:
        """The origin of an SAE trained on that fraction of a split's rows."""
        if self.data is None:  # of no store, without a split
            return self
        return replace(self, split_seed=split_seed, fraction=fraction)

    def published(self) -> Self:
        """For others: without names of stores, and of each path only its last part."""
        entries = {name: value for name, value in self.to_json().items() if name not in STORES}
        return self.from_json(without_folders(entries))

    def to_json(self) -> dict[str, Any]:
        """The known ones of `OriginEntries`."""
        inputs = []
        for point in self.read:
            model = self.models[point.model].to_json() if len(self.models) > 1 else {}
            inputs.append(point.to_json() | model)
        written = {} if self.written is None else self.written.to_json()
        further = {name: getattr(self, name) for name in SAME} | {
            "inputs": inputs if len(inputs) > 1 else None,
            "beside": [*self.beside] or None,
        }
        entries = {
            **(self.models[0].to_json() if self.models else {}),
            **self.read[0].to_json(),
            **{f"target_{name}": value for name, value in written.items()},
            **{name: value for name, value in further.items() if value is not None},
        }
        return {name: entries[name] for name in ENTRIES if name in entries}


def without_folders(value: Any) -> Any:
    """A document for others: of each path only the last part."""
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    return " + ".join(map(_last_part, value.split(" + ")))  # the texts of a mixture


def _last_part(name: str) -> str:
    """Of a path; OWNER/NAME on the hub as it is."""
    is_path = re.match(r"[/~.]|.*\\|.*/.*/", name, re.DOTALL)
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] if is_path else name
