"""`sae train`."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Literal

import typer

from ..activations import ACTIVATIONS
from ..config import flag_of
from ..console import Listener
from ..distributed import communicator
from ..errors import ConfigError, SaeError
from ..evaluation.starts import start_of
from ..home import checked_name, now
from ..inventory.filling import open_joined
from ..options import Given, Json, configured, run_names, start, store_names, unfinished_names
from ..solvers import SOLVERS
from ..store import Joined
from ..training import Job, Plan, Run, Start, TrainingConfig, claimed_folders, resumed_job, train_runs
from ..training import run_names as names_of
from ..training.tables import figures, results_table

Solver = Annotated[Literal[tuple(SOLVERS)], typer.Option("--solver", help="Training algorithm.")]
Act = Annotated[Literal[tuple(ACTIVATIONS)], typer.Option("--act", help="Activation.")]
Data = Annotated[list[str] | None, typer.Option(
    "--data", help="Activation store to train on, its name or folder; several, of the same tokens at other places, are "
                   "read side by side, for a crosscoder.", show_default="the newest", autocompletion=store_names)]
Target = Annotated[str | None, typer.Option(
    "--target", help="Store of the same tokens to predict from --data, for a transcoder.", show_default="--data itself",
    autocompletion=store_names)]
DataHash = Annotated[str | None, typer.Option(
    "--data-hash", help="Hash of the store's origin, as in a run's config.toml: a note is printed if the store of that "
                        "name has another.", show_default=False)]
Init = Annotated[str | None, typer.Option(
    "--init", metavar="RUN", help="Start from this SAE instead of random directions: a run's name, a folder that holds "
                                  "an SAE, or user/repo/folder@revision on the Hugging Face hub. --d-sae and "
                                  "--prefixes are its own, --act and --k too unless given.",
    show_default="random directions", autocompletion=run_names)]
InitHash = Annotated[str | None, typer.Option(
    "--init-hash", help="Hash of the SAE of --init, as in a run's config.toml: a note is printed if the SAE of that "
                        "name has another.", show_default=False)]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run.",
                                          show_default="solver, activation and a number",
                                          autocompletion=unfinished_names)]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run --name, else the newest unfinished one, from "
                                                       "its last checkpoint, bit for bit. With --epochs, lengthen it, "
                                                       "or the newest, finished or not.")]


@configured(TrainingConfig, repeated=True, advanced={"data_hash", "init", "init_hash"}, solver=SOLVERS,
            act=ACTIVATIONS)
def command(ctx: typer.Context, options: tuple[Given, ...], solver: Solver = "pam-sgd", act: Act = "relu",
            data: Data = None, target: Target = None, data_hash: DataHash = None, init: Init = None,
            init_hash: InitHash = None, name: Name = None, resume: Resume = False, json: Json = False) -> None:
    """Train a sparse autoencoder from a store.

    Writes a folder into runs/ of the home: the SAE (acting on raw activations), a checkpoint after every epoch,
    metrics.jsonl, loss.png, and config.toml, with which --config repeats the training. A run that was stopped or killed
    resumes with --resume.

    Options marked "..." can be given several times (--seed 0 --seed 1): one run per combination of their values,
    trained together from one reading of the store, each with the same result as alone.

    Example: sae train --solver pam-sgd --act topk --k 32
    """
    session, processes = start(ctx, json), communicator()
    with ExitStack() as claims:
        try:
            if resume:
                _demand_no_others(ctx)
                jobs = [resumed_job(session.home, name, session.console, claims, processes,
                                    lambda sae: start_of(session.home, sae, session.console),
                                    ctx.params["epochs"])]
            else:
                names = names_of(name, [each.varied for each in options])
                stores = processes.main_first(lambda: open_joined(session.home, data or [], target, session.console))
                for store in stores.all:
                    checked_name(store.name, "the name of the store's folder")
                begun = None if init is None else processes.broadcast_object(
                    lambda: start_of(session.home, init, session.console))
                if begun is not None and ctx.get_parameter_source("act").name == "DEFAULT":
                    act = begun.sae.activation.name
                runs = [_planned(stores, each, solver, act, begun) for each in options]
                what = "is not the store" if stores.is_single else "are not the stores"
                _note_hash(ctx, ("data", "target"), f"{stores.name} {what}", stores.hash, session.console)
                _note_hash(ctx, ("init",), f"{init} is not the SAE", begun and begun.hash, session.console)
                folders = claimed_folders(session.home, names, f"{solver}-{act}", claims, processes)
                jobs = [Job(folder, run, {key: each.values[key] for key in each.values if key in each.given},
                            each.varied) for folder, run, each in zip(folders, runs, options, strict=True)]
        except KeyboardInterrupt:
            session.console.note("stopped before training began; nothing was changed")
            raise
        documents, errors = train_runs(jobs, session.console, processes)
        if len(jobs) == 1:
            (document,) = documents
            session.console.result(document, results_table(documents), figures(document),
                                   f"saved in {document['path']}; loss.png there has its curves")
            return
        session.console.result({"runs": documents}, results_table(documents, [*jobs[0].varied]),
                               *(f"{document['run']}: {figures(document)}" for document in documents),
                               f"saved in {jobs[0].folder.parent}; loss.png in each has its curves")
        *others, last = [*errors.values()] or [None]
        for error in others:
            session.console.note(error.sentence(flag_of) if isinstance(error, SaeError) else str(error))
        if last is not None:
            raise last


def _planned(stores: Joined, options: Given, solver: str, act: str, begun: Start | None) -> Run:
    """A new run, with every default resolved."""
    if begun is not None:
        options = options.else_given(begun.settings(act))
    training = options.config(TrainingConfig)
    chosen_solver = options.choose(SOLVERS, "solver", solver)
    activation = options.choose(ACTIVATIONS, "act", act)
    plan = Plan.resolved(training.rows_of(stores), training.test_rows_of(stores), training, chosen_solver, activation,
                         begun)
    return Run(stores, plan, now())


def _note_hash(ctx: typer.Context, names: Sequence[str], words: str, found: str | None, listener: Listener) -> None:
    """Say so if the stores or the SAE that options name, of which the first has a hash, are not those that a file of
    options was written for, unless the command line names others."""
    name = names[0]
    wanted = ctx.params[f"{name}_hash"]
    if wanted is not None and found is None:
        raise ConfigError(f"{name}_hash", f"does nothing without {{{name}}}", "leave it out")
    on_line = {one for one in (*names, f"{name}_hash") if ctx.get_parameter_source(one).name == "COMMANDLINE"}
    if (on_line and f"{name}_hash" not in on_line) or wanted in (None, found):
        return
    listener.note(f"{words} that --{name}-hash {wanted} is of, though named alike; the weights will be others")


def _demand_no_others(ctx: typer.Context) -> None:
    """Refuse options beside --resume."""
    given = {name for name in ctx.params if ctx.get_parameter_source(name).name == "COMMANDLINE"}
    if others := sorted(given - {"name", "resume", "epochs", "json"}):
        raise ConfigError(others[0], "does nothing with {resume}, which goes on with the settings of the run",
                          "leave it out")
