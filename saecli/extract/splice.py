"""Where an SAE acts in a language model, and the windows of tokens to run that model over.

A store keeps its windows with its rows, so measuring on them needs neither text nor network; windows are also made of
prompts and of streamed text.

Shapes: B windows, T tokens, n of them rows, D = d_in.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError, StoreError, unknown_choice
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import Subject
from ..store.reader import Rows
from .options import SITES, HookPoint, at_revision

if TYPE_CHECKING:  # transformers takes seconds to import
    from .language_model import LanguageModel
    from .model_source import ModelSource

ModelLike = str | torch.nn.Module  # a name, or a loaded model
READ = 1 << 16  # rows of the columns per read


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


def spec_of(origin: Mapping[str, Any]) -> str | None:
    """The model, and the hub commit if any, that a store or an SAE's file names."""
    model = origin.get("model")
    return None if model is None else at_revision(model, origin.get("revision"))


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


def model_given(model: Any, tokenizer: Any) -> Any:
    """A model, or a list of them, as `source_of` takes them: names, and of loaded models, with their tokenizer, their
    sources; None, or a choice whether to take the store's, as it is. ConfigError for what is neither."""
    if isinstance(model, bool | None):
        if tokenizer is not None:
            raise ConfigError(
                "tokenizer does nothing without a loaded model; leave it out, or give both"
            )
        return model
    from .model_objects import loaded_sources

    several = isinstance(model, list | tuple)
    models = list(model) if several else [model]
    sources = loaded_sources(models, tokenizer, (), "auto") or models
    return sources if several else sources[0]


def source_of(model: "str | ModelSource", recorded: Iterable[str | None]) -> "ModelSource":
    """A model from `model_given`, at the revision that one of the recorded specs has of it; loads no weights."""
    from .model_source import find_model

    return (
        find_model(model, recorded_revision(model, recorded)) if isinstance(model, str) else model
    )


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


def unlike(model: "LanguageModel", stored: Mapping[str, Any]) -> str | None:
    """How a model is not the one of a store's source, or may not be; None if it is, wherever its files are."""
    from .model_objects import LoadedSource, state_hash

    source, spec, known = model.source, spec_of(stored), stored.get("weights")
    given, recorded = isinstance(source, LoadedSource), "loaded" in stored
    if recorded and not given:
        same = stored.get("state") == state_hash(model.model, stored["model_dtype"])
    else:
        same = given == recorded and (known == source.dated or known == source.content)
    if known is not None and same:
        return None
    if spec != source.spec:
        return f"came from {spec}, and is run through {source.spec}"
    if given and not recorded:
        return f"came from {spec}, and is run through a loaded model: its weights may have changed since"
    change = "with other weights or hooks" if recorded else "before its files changed"
    return None if known is None else f"came from {spec} {change}: what it computes may differ"


def recorded_revision(name: str, recorded: Iterable[str | None]) -> str | None:
    """The revision of a model in the only one of the recorded specs that is of it."""
    own = {spec for spec in recorded if spec is not None and spec.startswith(f"{name}@")}
    return own.pop().removeprefix(f"{name}@") if len(own) == 1 else None


def check_rows(rows: Rows, source: "ModelSource") -> None:
    """Refuse rows without windows, or that do not fit a model; loads no weights."""
    origin = rows.store.meta.source
    expected = f"{rows.name} cannot be run through a model: expected"
    if not {"model", "site", "context"} <= origin.keys():
        raise StoreError(
            f"{expected} a store that `sae extract` made, got one that names no layer; leave --model out, "
            f"or name another store"
        )
    if not rows.store.meta.windows:
        raise StoreError(
            f"{expected} a store that keeps its windows of tokens, got one of an older version; make it "
            "anew by `sae extract`"
        )
    point = HookPoint.of(origin)
    if point.has_model_width and source.d_model != rows.d_in:
        raise _unfit(rows, source, f"activations of {rows.d_in} dimensions, got {source.d_model}")
    if point.layer is not None and point.layer >= source.layers:
        raise _unfit(rows, source, f"a layer {point.layer}, got layers 0 to {source.layers - 1}")
    longest, most = origin["context"], source.positions
    if most is not None and longest > most:
        raise _unfit(rows, source, f"windows of {longest:,} tokens, got at most {most:,}")


def _unfit(rows: Rows, source: "ModelSource", expected: str) -> ConfigError:
    return ConfigError(
        f"{rows.name} cannot be run through {source.name}: expected {expected}; name the model that the "
        "rows came from"
    )


class TextWindow(NamedTuple):
    """A window of tokens, and which of them are rows: only these are read, replaced and scored."""

    token_ids: np.ndarray  # (T,) int64, of the whole window, the prefix's too
    is_row: np.ndarray  # (T,) bool

    @property
    def length(self) -> int:
        return len(self.token_ids)


def stored_windows(rows: Rows, tokens: int, source: int | None = None) -> Iterator[TextWindow]:
    """The first windows that hold one of these rows, in stored order, until they hold `tokens` of them; of a mixture
    those of a `source`, which may be none."""
    rows_found = 0
    for token_ids, is_row in rows.windows(source):
        yield TextWindow(token_ids, is_row)
        rows_found += int(is_row.sum())
        if rows_found >= tokens:
            return


def stored_activations(
    model: "LanguageModel", windows: Iterable[TextWindow], points: Sequence[HookPoint], most: int
) -> Iterator[list[Tensor]]:
    """The activations at the rows of windows, at distinct hook points, (n, D) each, in batches of at most `most`
    tokens; the model runs up to the last of the points."""
    for batch in in_batches(windows, most):
        token_ids, mask, is_row = padded(batch)

        def take(activations: Tensor, is_row: Tensor = is_row) -> Tensor:
            return activations[is_row.to(activations.device)]

        yield model.read(token_ids, mask, points, take)


def in_batches(windows: Iterable[TextWindow], most: int) -> Iterator[list[TextWindow]]:
    """The windows in lists of at most `most` tokens when padded, or of one window."""
    pending: list[TextWindow] = []
    for window in windows:
        longest = max(other.length for other in [*pending, window])
        if pending and (len(pending) + 1) * longest > most:
            yield pending
            pending = []
        pending.append(window)
    if pending:
        yield pending


def padded(windows: Sequence[TextWindow]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask and `is_row`, (B, T) each, padded on the right with token 0 under mask 0."""
    lengths = torch.tensor([window.length for window in windows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    token_ids = torch.zeros(mask.shape, dtype=torch.int64)
    token_ids[mask] = torch.from_numpy(np.concatenate([window.token_ids for window in windows]))
    is_row = torch.zeros_like(mask)
    is_row[mask] = torch.from_numpy(np.concatenate([window.is_row for window in windows]))
    return token_ids, mask.long(), is_row
