from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..base import interrupts
from ..base.errors import ConfigError, SaeError, flag_of
from ..base.home import checked_name, now
from ..base.options import options_of
from ..base.processes import Communicator, communicator
from ..extract.options import TINY_GEMMA2, ExtractConfig
from ..sae.activations import ACTIVATIONS
from ..train import SOLVERS
from ..train.options import TrainingConfig
from .options import Given, Json, Session, SiteName, configured, home_of, is_given, run_names, start, store_names

if TYPE_CHECKING:
    from ..extract.streaming import Streamed
    from ..store.joined import Joined
    from ..store.reader import RowSource
    from ..train.runs import Job, Run
    from ..train.start import Start

    RowsOf = Callable[[TrainingConfig], tuple[RowSource, RowSource | None]]  # training rows and test rows

PANEL = "Rows of --model"
_HELP = {
    "model": f"Train without a store, on activations of this language model as it gives them: hub id, folder, or "
             f"{TINY_GEMMA2}; with --layer, --site, --dataset, --rows and others of `sae extract` (--help-all).",
    "rows": "Training rows, without held-out ones; fewer if the text ends first.",
}
# Rows in memory have one precision, and batches of the model leave room for the training.
FROM_MODEL = tuple(replace(one, help=_HELP.get(name, one.help), once=True, panel=None if name == "model" else PANEL,
                           default=None if name == "model" else one.default, advanced=name != "model")
                   for name, one in options_of(ExtractConfig).items()
                   if name not in ("dtype", "batch_size", "shard_rows"))
Data = Annotated[list[str] | None, typer.Option(
    "--data", help="Activation store to train on, by name or folder; several of the same tokens, for a crosscoder.",
    show_default="the newest", autocompletion=store_names)]
Target = Annotated[str | None, typer.Option(
    "--target", help="Store of the same tokens to predict from --data, for a transcoder.", show_default="--data itself",
    autocompletion=store_names)]
Init = Annotated[str | None, typer.Option(
    "--init", metavar="RUN", help="SAE to train on: run name, folder, or user/repo/folder@revision on the Hugging Face "
                                  "hub. d_sae and prefixes are inherited; act and k can be overridden. It is kept as "
                                  "it was if its loss on held-out rows does not fall.",
    show_default="random directions", autocompletion=run_names)]
Layer = Annotated[int | None, typer.Option("--layer", help="Block of --model to read, from 0.",
                                           show_default="the middle one", rich_help_panel=PANEL)]
Site = Annotated[SiteName, typer.Option("--site", help="Hook point in the block; see `sae extract`.",
                                        rich_help_panel=PANEL)]
if TYPE_CHECKING:  # a type checker cannot read tables
    SolverName = str
    ActName = str
else:
    SolverName, ActName = Literal[tuple(SOLVERS)], Literal[tuple(ACTIVATIONS)]
Solver = Annotated[SolverName, typer.Option("--solver", help="Training algorithm.")]
Act = Annotated[ActName, typer.Option(
    "--act", help="Activation. jumprelu and gated, with --target-l0, find the most features; matching-pursuit, with "
                  "--k, has the least error, in 2 to 3 times the time.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run.",
                                          show_default="solver, activation and a number",
                                          autocompletion=lambda ctx: home_of(ctx).runs.unfinished())]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run --name, else the newest unfinished one, from "
                                                       "its last checkpoint, as if never stopped.")]


@configured(TrainingConfig, repeated=True, advanced={"init", "layer", "site"},
            more=FROM_MODEL, solver=SOLVERS, act=ACTIVATIONS)
def command(ctx: typer.Context, options: tuple[Given, ...], solver: Solver = "pam-sgd", act: Act = "relu",
            data: Data = None, target: Target = None, init: Init = None, layer: Layer = None,
            site: Site = "resid_post", name: Name = None, resume: Resume = False, json: Json = False) -> None:
    """Train a sparse autoencoder from a store or a model.

    Writes a folder into runs/ of the home: the SAE (acting on raw activations), a checkpoint after every epoch,
    metrics.jsonl, loss.png, and config.toml, with which --config repeats the training. A run that was stopped or killed
    resumes with --resume.

    With --model google/gemma-2-2b --layer 12 --rows 1000000, rows go from the model through memory to the trainer: each
    comes once, nothing but the run is written, and a stopped run begins anew.

    Options marked "..." can be given several times (--seed 0 --seed 1): one run per combination of their values,
    trained together from one reading of the rows, each with the same result as alone.

    Example: sae train --solver pam-sgd --act topk --k 32
    """
    if not (resume or data or options[0].values["model"]):
        ctx.find_root().obj.stores.find(None)  # before torch is imported
    from ..train.runs import Job, claimed_folders, resumed_job
    from ..train.runs import run_names as names_of
    from ..train.start import Start

    session, processes = start(ctx, json), communicator()
    with ExitStack() as claims:
        with nothing_begun(session):
            if resume:
                demand_alone(ctx)
                jobs = [resumed_job(session.home, name, session.console, claims, processes)]
            else:
                names = names_of(name, [each.varied for each in options])
                stores, rows_of = _rows(ctx, session, options[0], claims, processes)
                begun = None if init is None else processes.broadcast_object(
                    lambda: Start.open(session.home, init, session.console))
                if begun is not None and not is_given(ctx, "act"):
                    act = begun.activation
                runs = [_planned(stores, rows_of, each, solver, act, begun) for each in options]
                folders = claimed_folders(session.home, names, f"{solver}-{act}", claims, processes)
                of_rows = {one.name for one in FROM_MODEL}  # not kept with the run
                jobs = [Job(folder, run, {name: value for name, value in each.values.items()
                                          if name in each.given - of_rows}, each.varied)
                        for folder, run, each in zip(folders, runs, options, strict=True)]
        trained(session, jobs, processes)


@contextmanager
def nothing_begun(session: Session) -> Iterator[None]:
    """While open, Ctrl-C says that training has not begun."""
    try:
        yield
    except KeyboardInterrupt as stop:
        interrupts.told(stop)
        session.console.note("stopped before training began; nothing was changed")
        raise


def demand_alone(ctx: typer.Context) -> None:
    """Refuse options that do nothing with `--resume`."""
    if others := sorted({name for name in ctx.params if is_given(ctx, name)} - {"name", "resume", "json"}):
        raise ConfigError(f"{flag_of(others[0])} does nothing with --resume, which goes on with the settings of the "
                          "run; leave it out", option=others[0])


def trained(session: Session, jobs: Sequence[Job], processes: Communicator) -> None:
    """Train runs in claimed folders, and print their results."""
    from ..show.tables import compared_tables, figures_table, results_table
    from ..train.runs import train_runs

    documents, errors = train_runs(jobs, session.console, processes)
    if processes.is_main:
        from ..show.pictures import loss_curves  # matplotlib takes a second to import
        from ..train.files import read_metrics

        for folder in (Path(document["path"]) for document in documents):
            loss_curves(folder / "loss.png", {folder.name: read_metrics(folder)})
    alone = len(jobs) == 1
    session.console.result(documents[0] if alone else {"runs": documents},
                           results_table(documents, [*jobs[0].varied]), *compared_tables(documents),
                           *([figures_table(documents)] if documents else []),
                           f"saved in {documents[0]['path']}; loss.png there has its curves" if alone else
                           f"saved in {jobs[0].folder.parent}; loss.png in each has its curves")
    for number, error in enumerate(errors.values(), 1):
        if number == len(errors):
            raise error
        session.console.note(error.sentence if isinstance(error, SaeError) else str(error))


def _rows(ctx: typer.Context, session: Session, options: Given, claims: ExitStack,
          processes: Communicator) -> tuple[Joined | Streamed, RowsOf]:
    """Stores, or a model that gives rows until `claims` is closed, and their training and test rows."""
    from ..extract.streaming import open_stream
    from ..store.opening import open_joined
    from ..train.live import LiveRows
    from ..train.rows import SAMPLED_ROWS

    given = {name for name in ctx.params if is_given(ctx, name)}
    if (model := options.values["model"]) is None:
        if idle := sorted(given & {"layer", "site", *(one.name for one in FROM_MODEL)}):
            raise ConfigError(f"{flag_of(idle[0])} does nothing without --model; name a model, or leave it out",
                              option=idle[0])
        stores = processes.main_first(lambda: open_joined(session.home, ctx.params["data"] or [], ctx.params["target"],
                                                          session.console))
        for store in stores.all:
            checked_name(store.name, "the name of the store's folder")
        return stores, lambda training: (training.rows_of(stores), training.test_rows_of(stores))
    if idle := sorted(given & {"data", "target", "fraction"}):
        raise ConfigError(f"{flag_of(idle[0])} does nothing with --model {model}, whose rows are not stored; leave "
                          "one of them out, or store rows by `sae extract`", option=idle[0])
    if processes.world_size > 1:
        raise ConfigError(f"--model goes with one process, got {processes.world_size}; run it without torchrun, or "
                          "make a store by `sae extract`, and train on that", option="model")
    training = options.config(TrainingConfig)
    extraction = ExtractConfig(**{one.name: options.values[one.name] for one in FROM_MODEL
                                  if one.name in options.given})
    stream, _ = open_stream(extraction, given=options.given, at=(ctx.params["layer"], ctx.params["site"]),
                            device=training.device, home=session.home, listener=session.console)
    rows = claims.enter_context(LiveRows(stream, extraction.rows, training.split_seed,
                                         SAMPLED_ROWS + training.batch_size, session.console))
    return stream, lambda _: (rows, rows.test_rows)


def _planned(stores: Joined | Streamed, rows_of: RowsOf, options: Given, solver: str, act: str,
             begun: Start | None) -> Run:
    """A new run, with every default resolved."""
    from ..train.plan import Plan
    from ..train.runs import Run

    if begun is not None:
        options = options.else_given(begun.settings(act, options.given))
    training = options.config(TrainingConfig)
    settings = options.choose(SOLVERS, "solver", solver), options.choose(ACTIVATIONS, "act", act)
    return Run(stores, Plan.resolved(*rows_of(training), training, *settings, begun), now())
