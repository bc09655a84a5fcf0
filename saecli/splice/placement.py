"""Where an SAE acts, and in which language model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.words import unknown_choice
from ..model.choice import ModelLike, model_given, source_of
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import Subject
from ..store.origin import SITES, HookPoint, Origin

if TYPE_CHECKING:  # transformers takes seconds to import
    from ..model.source import ModelSource


@dataclass(frozen=True)
class Placement:
    """An SAE, and the hook points that it reads and predicts: several of a crosscoder, two of a transcoder."""

    name: str
    sae: SAE
    models: tuple[str | None, ...]  # that its file names, with revisions; several of a crosscoder
    reads: tuple[HookPoint, ...]
    writes: tuple[HookPoint, ...]
    prepend_bos: bool  # whether windows of its rows begin with special tokens

    @property
    def origin(self) -> Origin:
        return Origin(read=self.reads, written=self.target)

    @property
    def target(self) -> HookPoint | None:
        """What a transcoder predicts."""
        return None if self.reads == self.writes else self.written

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


def placement(
    opened: tuple[Subject, SavedSAE], layer: int | None, site: str | None, what: str = ""
) -> Placement:
    """An SAE, from `open_sae`, with its hook points; `layer` and `site` if its file has none. With `what` a crosscoder
    of several models is refused: "WHAT NAME is not defined"."""
    subject, saved = opened
    name, origin = subject.name, saved.origin
    models = tuple(model.spec for model in origin.models) or (None,)
    if len(models) > 1 and what:
        raise ConfigError(
            f"{what} {name} is not defined: expected an SAE of one model, got a crosscoder whose codes "
            f"need the activations of {' and '.join(map(str, models))}; name another run"
        )
    is_crosscoder = bool(saved.sae.widths) or len(origin.read) > 1
    if is_crosscoder:
        _check_inputs(name, saved)
    first = _hook_point(name, origin.read[0], layer, site)
    reads = origin.read if is_crosscoder else (first,)
    writes = (_target(name, origin.written),) if saved.is_transcoder else reads
    for point in (*reads, *writes):
        if not point.is_known:
            raise ConfigError(
                f"{name} names an unknown site in its file: expected {', '.join(SITES)}, got "
                f"{point.site!r}; use another SAE, or correct its file"
            )
    prepend_bos = origin.prepend_bos is not False
    return Placement(name, saved.sae, models, reads, writes, prepend_bos)


def check_distinct(acts: Iterable[Placement]) -> None:
    """ConfigError if two SAEs replace the activations at one hook point."""
    written: dict[HookPoint, str] = {}
    for at in acts:
        if at.written in written:
            raise ConfigError(
                f"{written[at.written]} and {at.name} both replace {at.written}: expected one SAE there; leave one out"
            )
        written[at.written] = at.name


def _check_inputs(name: str, saved: SavedSAE) -> None:
    known = sum(bool(point.site) for point in saved.origin.read)
    if known != len(saved.sae.widths) or known != len(saved.origin.read):
        raise ConfigError(
            f"{name} is a crosscoder that does not say where it reads: expected "
            f"{len(saved.sae.widths)} hook points in its file, got {known}; name a run of `sae train`"
        )


def _hook_point(name: str, recorded: HookPoint, layer: int | None, site: str | None) -> HookPoint:
    """The hook point in an SAE's file, else the user's."""
    if site is not None and not HookPoint(0, site).is_known:
        raise unknown_choice("site", site, SITES)
    site_option = "module" if site is not None and ":" in site else "site"
    for option, value, known in (
        ("layer", layer, recorded.layer),
        (site_option, site, recorded.site or None),
    ):
        if value is not None and known is not None and value != known:
            raise ConfigError(
                f"--{option} must be {known}, as {name} says, got {value}; leave --{option} out"
            )
    layer = layer if recorded.layer is None else recorded.layer
    site = recorded.site or site
    if site is None or (layer is None and ":" not in site):
        raise ConfigError(f"{name} records no hook point; give --layer and --site, or --module")
    return HookPoint(layer, site)


def _target(name: str, written: HookPoint | None) -> HookPoint:
    if written is None or not written.site or (written.layer is None and ":" not in written.site):
        raise ConfigError(
            f"{name} is a transcoder that does not say what it predicts: expected a block and a site "
            "in its file, got none; name a run of `sae train`"
        )
    return written


def model_of(
    saes: Sequence[Placement],
    model: "ModelLike | ModelSource | None",
    listener: Listener,
    revision: str | None = None,
    tokenizer: Any = None,
) -> "ModelSource":
    """The language model that SAEs act in, by default that in their files, with a note if it differs; loads no
    weights."""
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
            f"--model is needed: expected one model in the files of {' and '.join(sae.name for sae in saes)}, got "
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
