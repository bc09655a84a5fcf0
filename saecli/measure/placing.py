"""Where in a language model an SAE acts: the model, and the places that it reads and predicts."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.console import Listener
from ..base.errors import ConfigError, unknown_choice
from ..base.home import Home
from ..extract.hook_points import SITES, HookPoint
from ..extract.model_source import ModelSource, find_model
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject, open_sae


@dataclass(frozen=True)
class Placed:
    """An SAE, and where it acts.

    Args:
        subject: where the SAE comes from.
        saved: the SAE with its origin.
        read: the place whose activations it encodes.
        written: the place that it predicts; of an SAE the same.
    """

    subject: Subject
    saved: SavedSAE
    read: HookPoint
    written: HookPoint

    @property
    def sae(self) -> SAE:
        """The autoencoder."""
        return self.saved.sae


def placed(home: Home, sae: SAELike, layer: int | None, site: str | None, what: str, listener: Listener) -> Placed:
    """Open an SAE, or a transcoder, with its places.

    Args:
        home: the folder of stores and runs.
        sae: see `SAELike`.
        layer, site: where it reads, if its file does not say.
        what: it is for, in an error: "WHAT with NAME is not defined".
        listener: notes the choices that the user did not make.

    Raises:
        RunError, FormatError, HubError: it is missing or cannot be read.
        ConfigError: it is a crosscoder, its places are unknown, or others than those given.
    """
    subject, saved = open_sae(home, sae, listener)
    origin = saved.origin
    if saved.sae.widths:
        raise ConfigError(f"{what} with {subject.name} is not defined: expected an SAE or a transcoder, which read "
                          f"one place, got a crosscoder of {len(saved.sae.widths)} places; name another run")
    if site is not None and site not in SITES:
        raise unknown_choice("site", site, SITES)
    for name, value in (("layer", layer), ("site", site)):
        known = origin.get(name)
        if value is not None and known is not None and value != known:
            raise ConfigError(f"--{name} must be that of {subject.name}, {known}, got {value}; leave --{name} out",
                              option=name)
    read = [origin.get("layer", layer), origin.get("site", site)]
    if None in read:
        raise ConfigError(f"{subject.name} does not say where it reads: expected a block and a site, got "
                          f"{'neither' if read == [None, None] else 'one of them'}; give --layer and --site")
    written = [origin.get("target_layer"), origin.get("target_site")]
    for named in (read[1], written[1]):
        if named is not None and named not in SITES:
            raise ConfigError(f"{subject.name} names a place in its file that is none of a block: expected "
                              f"{', '.join(SITES)}, got {named!r}; use another SAE, or correct its file")
    if saved.is_transcoder and None in written:
        raise ConfigError(f"{subject.name} is a transcoder that does not say what it predicts: expected a block and "
                          "a site in its file, got none; name a run of `sae train`")
    return Placed(subject, saved, HookPoint(*read), HookPoint(*(written if saved.is_transcoder else read)))


def check_width(one: Placed, width: int, model: str) -> None:
    """Refuse a model of another width than the SAE's, by a ConfigError."""
    for got in (one.sae.d_in, one.sae.d_out):
        if got != width:
            raise ConfigError(f"{one.subject.name} does not fit {model}: expected an SAE of the model's width, "
                              f"{width}, got {got}; name the model that its rows came from")


def model_of(everything: Sequence[Placed], name: str | None, listener: Listener) -> ModelSource:
    """The language model that SAEs act in, with a note if theirs is another; loads no weights.

    Args:
        everything: the SAEs.
        name: hub id or folder; None for the one that their files name.
        listener: receives the note.

    Raises:
        ModelError: it is missing, or cannot be read.
        ConfigError: none is named, or several are; or it has another width than an SAE, or too few layers.
    """
    named = {one.subject.name: one.saved.origin.get("model") for one in everything}
    if name is None:
        found = set(named.values())
        if None in found or len(found) > 1:
            raise ConfigError(f"--model is needed: expected one model in the files of {' and '.join(named)}, got "
                              f"{' and '.join(sorted(str(one or 'none') for one in found))}; name it with --model",
                              option="model")
        (name,) = found
    source = find_model(name)
    for one in everything:
        check_width(one, source.d_model, source.name)
        for place in (one.read, one.written):
            source.check_layer(place.layer)
        theirs = named[one.subject.name]
        if theirs not in (None, name, source.identity()["model"]):
            listener.note(f"{one.subject.name} was trained on activations of {theirs}, and is used in {name}")
    return source
