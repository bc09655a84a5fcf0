"""Pushing an SAE to the Hugging Face hub, with a model card of its measures."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..sae import formats
from ..sae.dictionary import SAE
from ..sae.fetch import Address
from ..sae.formats import WRITABLE, SavedSAE
from ..sae.library import SAELike
from ..sae.upload import Entry, Repository, card_with
from .evaluate import check_tokens_of_model, evaluated
from .export import Conversion, can_be_written, converted
from .measured import Measured, RowsLike, measured

LOCAL = ("data", "data_hash", "beside", "target")  # of an origin: names in the home


@dataclass(frozen=True)
class PushOptions:
    """How to push; see `push`."""

    private: bool = False
    format: str = "auto"
    model: str | None = None
    tokens: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.format not in ("auto", *WRITABLE):
            raise ConfigError(f"--format must be one of {', '.join(('auto', *WRITABLE))}, got {self.format!r}",
                              option="format")
        check_tokens_of_model(self.tokens, self.model)


def push(sae: SAELike, repo: str, data: RowsLike = None, *, private: bool = False, format: str = "auto",
         model: str | None = None, tokens: int | None = None, device: str = "auto", home: str | Path | None = None,
         progress: bool = False) -> dict[str, Any]:
    """Push an SAE to the Hugging Face hub, as `sae push` does, with the token of `hf auth login` or of HF_TOKEN.

    Args:
        sae: as in `evaluate`.
        repo: `user/repo`, which is created if missing, or `user/repo/folder`; the default folder has the run's name.
        data: as in `evaluate`; a store, on whose held-out rows the SAE is measured.
        private: create the repository as private; an existing public one is refused.
        format: of the files; auto: saelens if it gives the same codes on all held-out rows, else native.
        model, tokens, device, home, progress: as in `evaluate`.

    Returns:
        The document that `sae push --json` prints.

    Raises:
        ConfigError: an invalid argument.
        HubError: the hub cannot be reached, or refuses.
        SaeError: as in `evaluate`.
    """
    options = PushOptions(private, formats.named(format), model, tokens, device)
    return pushed(Home.at(home), sae, repo, data, options, listening(progress))


def pushed(home: Home, sae: SAELike, repo: str, data: RowsLike, options: PushOptions,
           listener: Listener) -> dict[str, Any]:
    """As `push`, with a listener for notes and progress."""
    address = _address(repo, "sae" if sae is None or isinstance(sae, SAE) else str(sae))
    one = measured(home, sae, data, "test", options.device, listener)
    there = Repository.find(address, options.private)
    found = _conversion(one, options.format, listener)
    (measures,) = evaluated([replace(one, saved=found.written)], options.model, options.tokens, listener)
    card = card_with(_entry(address, found, one, measures), there.card)
    if card is None:
        listener.note(f"README.md of {address.repo} was not written by `sae push` and is left as it is")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sae"
        formats.save(found.written, found.format, folder)
        files = sorted(path.name for path in folder.iterdir())
        url = there.push(folder, card, options.private, f"Add {address.folder or 'an SAE'} with sae push")
    if found.remark is not None:
        listener.note(found.remark)
    return {"run": one.subject.name, "repo": address.repo, "folder": address.folder, "format": found.format,
            "written_as": found.written.sae.activation.name, "deviation": found.deviation, "files": files,
            "card": card is not None, "url": url, "measures": measures}


def _address(text: str, run: str) -> Address:
    """The address to push to, by default a folder of the run's name; ConfigError if the text names no repository, or a
    revision of one."""
    expected = "expected USER/REPO or USER/REPO/FOLDER"
    address = Address.parse(text)
    if address is None:
        raise ConfigError(f"cannot push to {text!r}: {expected}, such as someone/my-saes")
    if address.revision is not None:
        raise ConfigError(f"cannot push to the revision {address.revision} of {address.repo}: {expected}, whose "
                          "newest state is added to; leave the revision out")
    if address.folder:
        return address
    named = Address.parse(f"{address.repo}/{Path(run).resolve().name}")
    if named is None:
        raise ConfigError(f"{run!r} gives no name to a folder on the hub: {expected}, with a folder")
    return named


def _conversion(one: Measured, form: str, listener: Listener) -> Conversion:
    """The SAE in the requested format."""
    run, saved = one.subject.name, _public(one.saved)
    if form != "auto":
        return converted(saved, form, lambda: one, listener)
    why = f"saelens has no {'transcoder with ' if saved.is_transcoder else ''}{saved.sae.activation.name}"
    if can_be_written(saved, "saelens"):
        found = converted(saved, "saelens", lambda: one, listener)
        if found.deviation is None or not found.deviation["rows_that_differ"]:
            return found
        why += (f", and with {found.written.sae.activation.name} {found.deviation['rows_that_differ']:,} of "
                f"{found.deviation['rows']:,} held-out rows differ; --format saelens writes that all the same")
    listener.note(f"{run} is written as native: {why}")
    return converted(saved, "native", lambda: one, listener)


def _public(saved: SavedSAE) -> SavedSAE:
    """The SAE without what is local: paths of a model, names of stores."""
    origin = {name: value for name, value in saved.origin.items() if name not in LOCAL}
    return replace(saved, origin=origin | ({"model": Path(origin["model"]).name} if Path(
        origin.get("model", "")).is_absolute() else {}))


def _entry(address: Address, found: Conversion, one: Measured, measures: dict[str, Any]) -> Entry:
    from ..extract.places import BUNDLED  # imports transformers, which takes seconds

    sae, origin, source = found.written.sae, one.saved.origin, one.store.meta.source
    model = origin.get("model")
    on_hub = model is not None and not Path(model).is_absolute() and model not in BUNDLED
    place = [found.written.origin.get("model"), f"layer {origin['layer']}" if "layer" in origin else None,
             origin.get("site")]
    if "target_site" in origin:
        place.append(f"to layer {origin.get('target_layer')}, {origin['target_site']}")
    kept = f" {sae.activation.k}" if hasattr(sae.activation, "k") else ""
    trained_here = one.subject.data is not None
    return Entry(address, found.format, ", ".join(filter(None, place)) or one.store.name,
                 sae.activation.name + kept, sae.d_in, sae.d_sae, measures, found.remark,
                 base_model=model if on_hub else None,
                 dataset=source["dataset"] if trained_here and "dataset_revision" in source else None,
                 transcodes=one.saved.is_transcoder)
