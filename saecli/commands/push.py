"""`sae push`."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from .. import formats
from ..errors import ConfigError
from ..formats import SavedSAE
from ..hub import Address, Entry, Repository, card_with
from .conversions import Conversion, can_be_written, converted
from .eval import Model, Tokens
from .eval_measures import evaluated
from .options import Device, Json, Session, run_names, start
from .subjects import Data, Measured, measured

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run name, or folder that holds an SAE.",
                                    autocompletion=run_names)]
Repo = Annotated[str, typer.Argument(metavar="USER/REPO", help="Repository on the Hugging Face hub, which is made if "
                                     "need be; /FOLDER after it names the folder in it, else a folder of RUN's name.")]
Private = Annotated[bool, typer.Option("--private", help="Make the repository private; one that is there and public is "
                                                         "refused.")]
Form = Annotated[Literal["auto", "saelens", "native", "sparsify", "dictionary-learning", "gemma-scope"], typer.Option(
    "--format", help="Format of the files. auto: saelens, where that reconstructs all held-out rows alike, else "
                     "native.")]


def command(ctx: typer.Context, run: Run, repo: Repo, private: Private = False, form: Form = "auto", data: Data = None,
            model: Model = None, tokens: Tokens = 16_384, device: Device = "auto", json: Json = False) -> None:
    """Put a run on the Hugging Face hub, with a model card.

    The SAE is measured as by `sae eval` on its held-out rows, and the card holds the table. A folder that is there is
    replaced, in one commit; of a card that is there only what this command wrote is. The token is that of
    `hf auth login` or of HF_TOKEN, and is written nowhere.

    Example: sae push first someone/my-saes --private
    """
    session = start(ctx, json)
    address = _address(repo, run)
    if model is None and ctx.get_parameter_source("tokens").name != "DEFAULT":
        raise ConfigError("--tokens does nothing without --model; leave it out, or name the language model")
    one = measured(session, run, data, "test", device)
    there = Repository.find(address, private)
    found = _conversion(session, one, form, data)
    (measures,) = evaluated(session, [replace(one, saved=found.written)], model, tokens)
    card = card_with(_entry(address, found, one, measures), there.card)
    if card is None:
        session.console.note(f"README.md of {address.repo} was not written by `sae push` and is left as it is")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sae"
        formats.save(found.written, found.format, folder)
        files = sorted(path.name for path in folder.iterdir())
        url = there.push(folder, card, private, f"Add {address.folder or 'an SAE'} with sae push")
    if found.told is not None:
        session.console.note(found.told)
    document = {"run": one.subject.name, "repo": address.repo, "folder": address.folder, "format": found.format,
                "written_as": found.written.sae.activation.name, "deviation": found.deviation, "files": files,
                "card": card is not None, "url": url, "measures": measures}
    session.console.result(document, f"pushed {one.subject.name} to {address} as {found.format}: {', '.join(files)}",
                          url)


def _address(text: str, run: str) -> Address:
    """Where to push to; the folder is the run's name where none is given.

    Raises:
        ConfigError: the text names no repository, or a revision of one.
    """
    expected = "expected USER/REPO or USER/REPO/FOLDER"
    address = Address.parse(text)
    if address is None:
        raise ConfigError(f"cannot push to {text!r}: {expected}, such as someone/my-saes")
    if address.revision is not None:
        raise ConfigError(f"cannot push to the revision {address.revision} of {address.repo}: {expected}, whose newest "
                          f"state is added to; leave the revision out")
    if address.folder:
        return address
    named = Address.parse(f"{address.repo}/{Path(run).resolve().name}")
    if named is None:
        raise ConfigError(f"{run!r} gives no name to a folder on the hub: {expected}, with a folder")
    return named


def _conversion(session: Session, one: Measured, form: str, data: str | None) -> Conversion:
    """The SAE in the format asked for."""
    run, saved = one.subject.name, _public(one.saved)
    if form != "auto":
        return converted(session, run, saved, form, data)
    why = f"saelens has no {saved.sae.activation.name}"
    if can_be_written(saved.sae, "saelens"):
        found = converted(session, run, saved, "saelens", data)
        if found.deviation is None or not found.deviation["rows_that_differ"]:
            return found
        why += (f", and with {found.written.sae.activation.name} {found.deviation['rows_that_differ']:,} of "
                f"{found.deviation['rows']:,} held-out rows differ; --format saelens writes that all the same")
    session.console.note(f"{run} is written as native: {why}")
    return converted(session, run, saved, "native", data)


def _public(saved: SavedSAE) -> SavedSAE:
    """The SAE without a path of this machine: a model in a folder goes by the folder's name."""
    model = saved.origin.get("model")
    if model is None or not Path(model).is_absolute():
        return saved
    return replace(saved, origin=saved.origin | {"model": Path(model).name})


def _entry(address: Address, found: Conversion, one: Measured, measures: dict[str, Any]) -> Entry:
    from ..language_model import BUNDLED  # imports transformers, which takes seconds

    sae, origin, source = found.written.sae, one.saved.origin, one.rows.store.meta.source
    model = origin.get("model")
    on_hub = model is not None and not Path(model).is_absolute() and model not in BUNDLED
    place = [found.written.origin.get("model"), f"layer {origin['layer']}" if "layer" in origin else None,
             origin.get("site")]
    kept = f" {sae.activation.k}" if hasattr(sae.activation, "k") else ""
    trained_here = one.subject.data is not None
    return Entry(address, found.format, ", ".join(filter(None, place)) or one.rows.store.name,
                 sae.activation.name + kept, sae.d_in, sae.d_sae, measures, found.told,
                 base_model=model if on_hub else None,
                 dataset=source["dataset"] if trained_here and "dataset_revision" in source else None)
