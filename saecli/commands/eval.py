"""`sae eval`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import ConfigError
from ..metrics import reconstruction
from ..report import table
from ..store import Rows
from .options import Device, Json, Plot, Runs, Session, start
from .subjects import Data, Measured, SplitName, all_measured

if TYPE_CHECKING:  # transformers takes seconds to import, and only --model needs it
    from ..harvest import Windows
    from ..language_model import LanguageModel

RECONSTRUCTION = ("rows", "mse", "fvu", "explained_variance", "cosine", "l0", "l1", "dead_fraction")
EFFECT = ("tokens", "ce_clean", "ce_spliced", "ce_zero", "ce_recovered", "kl")

Model = Annotated[str | None, typer.Option(
    "--model", help="Hub id or folder of the language model that the store's rows came from, to measure what splicing "
                    "the SAE into it does.", show_default="none, which leaves that out")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="How many of the split's tokens --model is run over.")]


def command(ctx: typer.Context, runs: Runs = None, data: Data = None, split: SplitName = "test", model: Model = None,
            tokens: Tokens = 16_384, device: Device = "auto", plot: Plot = None, json: Json = False) -> None:
    """Measure reconstruction, sparsity and the effect on the model.

    RUN is a run's name, or a folder with an SAE that this tool, SAELens, sparsify, dictionary_learning or Gemma Scope
    saved. Several make one table, best first.

    Example: sae eval first second --model google/gemma-2-2b --plot frontier.png
    """
    session = start(ctx, json, plot)
    if model is None and ctx.get_parameter_source("tokens").name != "DEFAULT":
        raise ConfigError("--tokens does nothing without --model; leave it out, or name the language model")
    everything = all_measured(session, list(dict.fromkeys(runs or ())), data, split, device)
    splices = [] if model is None else _splices(session, everything, model)
    found = [one.heading | reconstruction(one.sae, one.batches(session)) for one in everything]
    if model is not None:
        measured_in_it = _effects(session, everything, splices, tokens)
        found = [run | effect for run, effect in zip(found, measured_in_it, strict=True)]
    ranked = sorted(found, key=lambda run: (math.isnan(run["fvu"]), run["fvu"]))
    if plot is not None:
        from ..plots import frontier  # matplotlib takes a second to import

        frontier(plot, {run["run"]: (run["l0"], run["fvu"]) for run in ranked})
        session.report.note(f"drew {plot}")
    shown = [comparison(ranked, ["data", "split", *RECONSTRUCTION], None)]
    if model is not None:
        shown.append(comparison(ranked, list(EFFECT), f"with the SAE's reconstructions in {model}; in nats a token"))
    session.report.result({"runs": found}, *shown)


def comparison(ranked: list[dict[str, Any]], columns: list[str], title: str | None) -> Table:
    """A table that people see: a run a line, the best first and marked where there are several."""
    several = len(ranked) > 1
    rows = [[run["run"] + (" *" if several and not place else ""), *(run[column] for column in columns)]
            for place, run in enumerate(ranked)]
    best = "best (*) first: least variance unexplained (fvu)" if several and title is None else title
    return table(best, ["run", *(column.replace("_", " ") for column in columns)], rows)


@dataclass(frozen=True)
class _Splice:
    """One pass through the model: the places of the SAEs that share their rows, and what they are spliced into."""

    members: list[int]
    model: "LanguageModel"
    rows: Rows
    cutter: "Windows"


def _splices(session: Session, everything: list[Measured], name: str) -> list[_Splice]:
    """The passes to make through the model; what cannot work is refused here, before the rows are measured."""
    from ..harvest import Windows
    from ..language_model import LanguageModel, find_model
    from ..splice import check_rows, check_tokens

    groups: dict[tuple, list[int]] = {}
    for index, one in enumerate(everything):
        groups.setdefault(one.chosen_rows, []).append(index)
    every_rows = [everything[members[0]].rows for members in groups.values()]
    place = find_model(name)
    for rows in every_rows:
        check_rows(rows, place)
    model = LanguageModel(place, everything[0].sae.W_enc.device, head=True)
    found = []
    for rows, members in zip(every_rows, groups.values(), strict=True):
        source = rows.store.meta.source
        cutter = Windows(model.tokenizer, source["context"])
        check_tokens(rows, model, cutter.prefix)
        if source["model"] != place.identity()["model"]:
            session.report.note(f"{rows.store.name} came from {source['model']}, and is run through {name}")
        found.append(_Splice(members, model, rows, cutter))
    return found


def _effects(session: Session, everything: list[Measured], splices: list[_Splice], tokens: int) -> list[dict[str, Any]]:
    """What each SAE does to the model."""
    from ..splice import effects, stored_windows

    results: list[dict[str, Any]] = [{} for _ in everything]
    for splice in splices:
        model, rows, source = splice.model, splice.rows, splice.rows.store.meta.source
        windows = stored_windows(rows, splice.cutter.prefix, tokens)
        with session.report.progress(f"splicing into {model.source.name}", min(tokens, rows.rows), "tokens") as show:
            measures = effects(model, windows, splice.cutter.special, source["layer"], source["site"],
                               [everything[index].sae for index in splice.members], show)
        for index, measure in zip(splice.members, measures, strict=True):
            results[index] = measure
    session.report.note("special tokens keep their own activations and are left out of the means")
    return results
