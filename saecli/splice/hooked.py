"""Where an SAE acts in a language model, and in which."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.words import unknown_choice
from ..model.choice import ModelLike, model_given, source_of, spec_of
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import Subject
from ..store.origin import SITES, HookPoint

if TYPE_CHECKING:  # transformers takes seconds to import
    from ..model.source import ModelSource


@dataclass(frozen=True)
class Hooked:
    """An SAE, and the hook points that it reads and predicts, several of a crosscoder; the same unless it is a
    transcoder."""

    name: str
    sae: SAE
    models: tuple[str | None, ...]  # that its file names, see `spec_of`; several of a crosscoder
    reads: tuple[HookPoint, ...]
    writes: tuple[HookPoint, ...]
    prepend_bos: bool  # whether windows of its rows begin with special tokens

    @property
    def origin(self) -> dict[str, Any]:
        """The fields of an SAE's `Origin` that say where it acts."""
        fields: dict[str, Any] = self.read.place
        if self.reads != self.writes:
            fields |= {f"target_{key}": value for key, value in self.written.place.items()}
        if len(self.reads) > 1:
            fields["inputs"] = [point.place for point in self.reads]
        return fields

    @property
    def read(self) -> HookPoint:
        return self.reads[0]

    @property
    def written(self) -> HookPoint:
        return self.writes[0]

    def check(self, width: int, layers: int, model: str) -> None:
        """Refuse a model of another width, or with too few layers."""
        widths = self.sae.widths or (self.sae.d_in, self.sae.d_out)
        for point, got in zip(dict.fromkeys((*self.reads, *self.writes)), widths, strict=False):
            if point.has_model_width and got != width:
                raise ConfigError(
                    f"{self.name} does not fit {model}: expected an SAE of the model's width, {width}, "
                    f"got {got}; name the model that its rows came from"
                )
        for point in (*self.reads, *self.writes):
            if point.layer is not None and not 0 <= point.layer < layers:
                raise ConfigError(
                    f"--layer must be from 0 to {layers - 1}, the last of {model}, got {point.layer}"
                )


def hooked(
    opened: tuple[Subject, SavedSAE], layer: int | None, site: str | None, what: str = ""
) -> Hooked:
    """An SAE, from `open_sae`, with its hook points; `layer` and `site` if its file does not say. With `what` a
    crosscoder of several models is refused: "WHAT NAME is not defined"."""
    subject, saved = opened
    name, origin = subject.name, saved.origin
    inputs = origin.get("inputs") or []
    specs = [spec_of(entry if "model" in entry else origin) for entry in inputs]
    models = tuple(dict.fromkeys(specs)) or (spec_of(origin),)
    if len(models) > 1 and what:
        raise ConfigError(
            f"{what} {name} is not defined: expected an SAE of one model, got a crosscoder whose codes "
            f"need the activations of {' and '.join(map(str, models))}; name another run"
        )
    reads: tuple[HookPoint, ...] = tuple(
        HookPoint.of(entry, models.index(spec))
        for entry, spec in zip(inputs, specs, strict=True)
        if "site" in entry
    )
    if len(reads) != len(saved.sae.widths):
        raise ConfigError(
            f"{name} is a crosscoder that does not say where it reads: expected "
            f"{len(saved.sae.widths)} hook points in its file, got {len(reads)}; name a run of `sae "
            "train`"
        )
    point = _hook_point(name, origin, layer, site)
    reads = reads or (point,)
    writes = (_target(name, origin),) if saved.is_transcoder else reads
    for point in (*reads, *writes):
        if not point.is_known:
            raise ConfigError(
                f"{name} names an unknown site in its file: expected {', '.join(SITES)}, got "
                f"{point.site!r}; use another SAE, or correct its file"
            )
    prepend_bos = origin.get("prepend_bos") is not False
    return Hooked(name, saved.sae, models, reads, writes, prepend_bos)


def demand_apart(acts: Iterable[Hooked]) -> None:
    """ConfigError if two SAEs replace the activations at one hook point."""
    written: dict[HookPoint, str] = {}
    for at in acts:
        if at.written in written:
            raise ConfigError(
                f"{written[at.written]} and {at.name} both replace {at.written}: expected one for each hook point; "
                "leave one out"
            )
        written[at.written] = at.name


def _hook_point(
    name: str, origin: Mapping[str, Any], layer: int | None, site: str | None
) -> HookPoint:
    """The hook point that an SAE's file names, or that the user gives where it names none."""
    if site is not None and not HookPoint(0, site).is_known:
        raise unknown_choice("site", site, SITES)
    site_option = "module" if site is not None and ":" in site else "site"
    for option, value, recorded in (
        ("layer", layer, origin.get("layer")),
        (site_option, site, origin.get("site")),
    ):
        if value is not None and recorded is not None and value != recorded:
            raise ConfigError(
                f"--{option} must be {recorded}, as {name} says, got {value}; leave --{option} out"
            )
    layer = layer if origin.get("layer") is None else origin["layer"]
    site = origin.get("site", site)
    if site is None or (layer is None and ":" not in site):
        raise ConfigError(f"{name} records no hook point; give --layer and --site, or --module")
    return HookPoint(layer, site)


def _target(name: str, origin: Mapping[str, Any]) -> HookPoint:
    layer, site = origin.get("target_layer"), origin.get("target_site")
    if site is None or (layer is None and ":" not in site):
        raise ConfigError(
            f"{name} is a transcoder that does not say what it predicts: expected a block and a site "
            "in its file, got none; name a run of `sae train`"
        )
    return HookPoint(layer, site)


def model_of(
    saes: Sequence[Hooked],
    model: "ModelLike | ModelSource | None",
    listener: Listener,
    revision: str | None = None,
    tokenizer: Any = None,
) -> "ModelSource":
    """The language model that SAEs act in, by default the one that their files name, with a note if theirs is another;
    loads no weights."""
    recorded = {sae.models[0] for sae in saes}
    wanted: Any = model
    if tokenizer is not None or isinstance(model, torch.nn.Module):
        wanted = model_given(model, tokenizer)
    if wanted is None and len(recorded) == 1:
        (wanted,) = recorded
        if wanted is not None and revision is not None:
            wanted = wanted.partition("@")[0]
    if wanted is None:
        raise ConfigError(
            "--model is needed: expected one model in the files of "
            f"{' and '.join(sae.name for sae in saes)}, got "
            f"{' and '.join(sorted(spec or 'none' for spec in recorded))}; name it with --model"
        )
    source = source_of(wanted, {f"{wanted}@{revision}"} if revision else recorded)
    for sae in saes:
        sae.check(source.d_model, source.layers, source.name)
        if sae.models[0] not in (None, wanted, source.id, source.spec):
            listener.warn(
                f"{sae.name} was trained on activations of {sae.models[0]}, and is used in {source.spec}"
            )
    return source
