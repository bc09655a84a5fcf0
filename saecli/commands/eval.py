"""`sae eval`."""

import math
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.table import Table

from ..errors import ConfigError, StoreError
from ..metrics import reconstruction
from ..report import table
from .options import Device, Json, Plot, Runs, Session, start
from .subjects import Data, Measured, SplitName, all_measured

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
    everything = all_measured(session, runs, data, split, device)
    found = [one.heading | reconstruction(one.sae, one.batches(session)) for one in everything]
    if model is not None:
        found = [run | effect for run, effect in zip(found, _effects(session, everything, model, tokens), strict=True)]
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


def _effects(session: Session, everything: list[Measured], name: str, tokens: int) -> list[dict[str, Any]]:
    """What each SAE does to the model; those that share their rows are spliced in one pass."""
    from ..harvest import Windows  # transformers takes seconds to import
    from ..language_model import LanguageModel, find_model
    from ..splice import effects, stored_windows

    for one in everything:
        if not {"model", "layer", "site", "context"} <= one.rows.store.meta.source.keys():
            raise StoreError(f"{one.rows.store.name} cannot be run through a model: expected a store that `sae "
                             f"extract` made, got one that names no layer; leave --model out, or name another store")
    place = find_model(name)
    model = LanguageModel(place, everything[0].sae.W_enc.device, head=True)
    results: list[dict[str, Any]] = [{} for _ in everything]
    by_rows = sorted(range(len(everything)), key=lambda index: everything[index].chosen_rows)
    for _, indices in groupby(by_rows, key=lambda index: everything[index].chosen_rows):
        members = list(indices)
        group = [everything[index] for index in members]
        rows = group[0].rows
        source = rows.store.meta.source
        if model.d_model != rows.d_in:
            raise ConfigError(f"{group[0].subject.name} cannot be spliced into {name}: expected activations of "
                              f"{rows.d_in} dimensions, got {model.d_model}; name the model that the rows came from")
        if source["model"] != place.identity()["model"]:
            session.report.note(f"{rows.store.name} came from {source['model']}, and is run through {name}")
        cutter = Windows(model.tokenizer, source["context"])
        windows = stored_windows(rows, cutter.prefix, tokens)
        with session.report.progress(f"splicing into {name}", min(tokens, rows.rows), "tokens") as show:
            measures = effects(model, windows, cutter.special, source["layer"], source["site"],
                               [one.sae for one in group], show)
        for index, measure in zip(members, measures, strict=True):
            results[index] = measure
    session.report.note("special tokens keep their own activations and are left out of the means")
    return results
