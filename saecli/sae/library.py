"""The SAE that a user names: in memory, a run, a folder, an address on the Hugging Face hub, or SAELens' release/id.

A run folder holds `run.json`, `config.toml`, `metrics.jsonl`, and from the first checkpoint on `sae.safetensors`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.console import Listener
from ..base.errors import ConfigError, FormatError, HubError, RunError
from ..base.files import expanded
from ..base.home import RUN_MARKER, Home
from ..base.words import did_you_mean, unknown_choice
from ..store.opening import Joined
from ..store.origin import Origin
from ..store.reader import ActivationStore
from . import formats
from .dictionary import SAE
from .formats import WRITABLE, SavedSAE
from .hub import NAME, Address, fetch
from .run_documents import read_run

# An SAE, a run's name or anything that `model.saes.load_sae` takes; None for the newest run.
SAELike = SAE | str | Path | None


@dataclass(frozen=True)
class Subject:
    """Where an SAE comes from; None where unknown."""

    name: str  # for tables: its run's name, its path below the runs, or the path that was given
    folder: Path | None = None  # of several layers' files its own; None for an SAE in memory
    data: str | None = None  # name of the (first) store that it was trained on
    split_seed: int = 0
    fraction: float = 1.0  # of the training rows that it was trained on, in (0, 1]
    complete: bool = True  # whether its training was finished
    data_hash: str | None = None  # `Joined.hash` of the stores
    dead_fraction: float | None = None  # of latents that fire on no training row
    beside: tuple[str, ...] = ()  # names of a crosscoder's further stores
    target: str | None = None  # name of the store of a transcoder's targets
    streamed: Mapping[str, Any] | None = None  # the options of rows from a model without a store
    # release/id in SAELens' registry, by which it was named, and what `formats.load` takes from there.
    registered: str | None = None
    row_scale: float | None = None
    processing: Mapping[str, Any] | None = None

    @property
    def path(self) -> Path:
        assert self.folder is not None  # only an SAE in memory has none
        return self.folder

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the stores that it reads; none where unknown."""
        return () if self.data is None else (self.data, *self.beside)


def note_if_remade(subject: Subject, stores: Joined, listener: Listener) -> None:
    """Warn of stores that have the names of those that an SAE was trained on, and are others."""
    has_their_names = (subject.data, *subject.beside, subject.target) == (
        *(store.reference for store in stores.inputs),
        stores.target and stores.target.reference,
    )
    if subject.data_hash is not None and has_their_names and subject.data_hash != stores.hash:
        listener.warn(
            f"{stores.name} is not the store that {subject.name} was trained on, though it has its name"
        )


def save_sae(
    sae: SAE,
    folder: str | Path,
    format: str = "native",
    store: ActivationStore | Joined | None = None,
) -> None:
    """Save an SAE in float32 in a new or empty folder, which appears whole or not at all.

    Args:
        format: native, saelens, sparsify, dictionary-learning or circuit-tracer.
        store: the training store, recorded with model, layer and site.
    """
    if format not in WRITABLE:
        raise unknown_choice("format", format, WRITABLE)
    saved = _in_memory(sae.copy_to("cpu", torch.float32))
    if store:
        joined = store if isinstance(store, Joined) else Joined((store,))
        saved = replace(saved, origin=joined.origin.trained(0, 1.0))
    formats.save(saved, format, expanded(folder))


def _in_memory(sae: SAE) -> SavedSAE:
    try:
        origin = Origin.from_json(sae.metadata)
    except ValueError as error:
        raise ConfigError(f"the SAE's metadata does not say where it came from: {error}") from error
    return SavedSAE(sae, origin, bool(sae.metadata.get("transcodes")))


def _settings(folder: Path) -> dict[str, Any]:
    """Options of the run in a folder, by name, and its stores."""
    document = read_run(folder / RUN_MARKER).settings
    solver, activation = dict(document["solver"]), dict(document["activation"])
    named = {name: document[name] for name in ("data", "beside", "target") if name in document}
    return {
        "solver": solver.pop("name"),
        "act": activation.pop("name"),
        **named,
        **document["training"],
        **solver,
        **activation,
    }


def read_sae(
    home: Home, sae: SAELike, listener: Listener, fold: formats.Fold
) -> tuple[Subject, SavedSAE]:
    """As `model.saes.open_sae`, which passes its own `fold`."""
    if isinstance(sae, SAE):
        saved = _in_memory(sae.copy_to(sae.W_enc.device))
        return _known(home, Subject("sae"), saved.origin), saved
    subject = find_subject(home, None if sae is None else str(sae), listener)
    if sae is None:
        listener.note(f"using the newest run, {subject.name}")
    if not subject.complete:
        listener.warn(f"{subject.name} is not finished; this is its last checkpoint")
    saved = formats.load(subject.path, subject.row_scale, subject.processing, fold)
    for remark in saved.remarks:
        listener.warn(f"{subject.name} {remark}")
    if subject.data is None:
        subject = _known(home, subject, saved.origin)
    settings = _settings(subject.path) if (subject.path / RUN_MARKER).exists() else {}
    transcodes = saved.is_transcoder or subject.target is not None
    further = {"transcodes": True} if transcodes else {}
    origin = {name: entry for name, entry in saved.origin.to_json().items() if entry is not None}
    saved.sae.metadata = settings | origin | further
    return subject, replace(saved, transcodes=transcodes)


def lasting_name(home: Home, sae: SAE | str | Path, subject: Subject) -> str:
    """A name that opens an SAE again from any working folder."""
    if isinstance(sae, SAE) or str(sae) in home.runs:
        return subject.name
    folder = expanded(sae)
    here = folder.is_dir() and subject.path.resolve() == folder.resolve()
    return str(folder.resolve()) if here else subject.registered or f"hf://{subject.name}"


def find_subject(home: Home, text: str | None, listener: Listener) -> Subject:
    """The SAE that a name of `model.saes.load_sae` means; after `hf://` only one on the hub."""
    if text is None or text in home.runs:
        folder = home.runs.find(text)
        return _run(folder, folder.name)
    address = Address.parse(text)
    if address is not None and text.startswith(("hf://", "https://")):
        return Subject(*fetch(address, listener))
    folder = expanded(text)
    if (folder / RUN_MARKER).is_file():
        return _run(folder, text)
    if formats.recognise(folder) is not None:
        return Subject(text, folder)
    if folder.exists():
        formats.load(folder)  # raises, with the files expected
    if listed := registered(text):
        listener.note(f"{text} is {listed.address} on the hub")
        name, folder = fetch(listed.address, listener)
        scale, processing = listed.row_scale, listed.processing
        return Subject(name, folder, registered=text, row_scale=scale, processing=processing)
    if address is not None:
        try:
            return Subject(*fetch(address, listener))
        except HubError as error:
            raise HubError(
                f"no run and no folder here is named {text!r}, and {error}{registry_hint(text)}"
            ) from error
    instead = home.runs.instead_of(text)
    raise RunError(f"there is no run and no folder named {text!r}; {instead}{registry_hint(text)}")


def _run(folder: Path, name: str) -> Subject:
    run = read_run(folder / RUN_MARKER)
    if formats.recognise(folder) is None:
        raise RunError(
            f"the run {name!r} holds no SAE yet: expected {formats.NATIVE_FILE} in {folder}, which the "
            f"first epoch writes; go on with it by `sae train --resume --name {folder.name}`"
        )
    return Subject(
        name,
        folder,
        data=run.data,
        split_seed=run.training.split_seed,
        fraction=run.training.fraction,
        complete=run.complete,
        data_hash=run.data_hash,
        dead_fraction=run.result.final.get("dead_fraction") if run.result else None,
        beside=run.beside,
        target=run.target,
        streamed=run.streamed,
    )


def _known(home: Home, subject: Subject, origin: Origin) -> Subject:
    """The subject with the stores and split of an origin whose stores are there."""
    names = [name for name in (origin.data, origin.target, *origin.beside) if name is not None]
    if origin.data is None or not all(name in home.stores or Path(name).is_dir() for name in names):
        return subject
    return replace(
        subject,
        data=origin.data,
        data_hash=origin.data_hash,
        beside=origin.beside,
        target=origin.target,
        split_seed=origin.split_seed or 0,
        fraction=1.0 if origin.fraction is None else origin.fraction,
    )


class Registered(NamedTuple):
    """An SAE in SAELens' registry, and what its file may lack, see `formats.SavedSAE`."""

    address: Address
    row_scale: float | None
    processing: dict[str, Any]


def registered(text: str) -> Registered | None:
    """The installed SAELens' SAE by release/id; FormatError if it cannot be expressed here."""
    name, _, wanted = text.partition("/")
    release = _release(name)
    entries = [entry for entry in release.get("saes", ()) if entry["id"] == wanted]
    if not entries:
        return None
    overrides = release.get("config_overrides") or {}
    scaling = overrides.get("normalize_activations", "none")
    if scaling != "none":
        raise FormatError(
            f"{text} cannot be expressed here: each row is scaled by its own norm ({scaling}); use SAELens"
        )
    return Registered(
        Address(release["repo_id"], str(entries[0]["path"])),
        entries[0].get("norm_scaling_factor"),
        overrides.get("model_from_pretrained_kwargs") or {},
    )


def registry_hint(text: str) -> str:
    """What SAELens' registry has instead of an unknown SAE, or what to install."""
    name, _, wanted = text.partition("/")
    ids = [entry["id"] for entry in _release(name).get("saes", ())]
    if ids:
        question = did_you_mean(wanted, ids) or f"its first is {ids[0]}"
        return f"; SAELens' release {name} has {len(ids):,} SAEs, and is named as {name}/ID: {question}"
    if "/" in text and find_spec("sae_lens") is None:
        return "; for a release and id of SAELens, install sae-lens or name its place on the hub"
    return ""


def _release(name: str) -> dict[str, Any]:
    """A release, else empty; found in the text: parsing all of it, or importing SAELens, takes seconds."""
    spec = find_spec("sae_lens")
    if spec is None or spec.origin is None or not re.fullmatch(NAME, name):
        return {}
    import yaml  # takes 20 ms to import, and most names are no release's

    path = Path(spec.origin).with_name("pretrained_saes.yaml")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    block = re.search(rf"^{re.escape(name)}:\n((?:[ -].*\n?)*)", text, re.MULTILINE)
    return yaml.load(block[1], getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if block else {}
