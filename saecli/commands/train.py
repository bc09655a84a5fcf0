"""`sae train`."""

import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..activations import ACTIVATIONS, activation_from_json
from ..distributed import communicator
from ..errors import ConfigError, RunError
from ..home import Home, checked_name, now, read_settings
from ..inventory.opening import open_store
from ..options import Given, Json, Session, configured, start, store_names, unfinished_names
from ..solvers import SOLVERS
from ..store import ActivationStore
from ..training import Plan, Run, TrainingConfig, claimed
from .training_runs import Job, train

Solver = Annotated[Literal[tuple(SOLVERS)], typer.Option("--solver", help="Training algorithm.")]
Act = Annotated[Literal[tuple(ACTIVATIONS)], typer.Option("--act", help="Activation.")]
Data = Annotated[str | None, typer.Option("--data", help="Activation store to train on.", show_default="the newest",
                                                autocompletion=store_names)]
DataHash = Annotated[str | None, typer.Option(
    "--data-hash", help="Hash of the store's origin, as a run's config.toml has it: where the store of that name has "
                        "another, a note says so.", show_default=False)]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run.",
                                          show_default="solver, activation and a number",
                                          autocompletion=unfinished_names)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run --name, else with the newest unfinished "
                                                       "one, from its last checkpoint, bit for bit.")]

@configured(TrainingConfig, repeated=True, advanced={"data_hash"}, solver=SOLVERS, act=ACTIVATIONS)
def command(ctx: typer.Context, options: tuple[Given, ...], solver: Solver = "pam-sgd", act: Act = "relu",
            data: Data = None, data_hash: DataHash = None, name: Name = None, resume: Resume = False,
            json: Json = False) -> None:
    """Train a sparse autoencoder from a store.

    Writes a folder into runs/ of the home: the SAE (acting on raw activations), a checkpoint after every epoch,
    metrics.jsonl, loss.png, and config.toml, which --config takes to train the same again. A run that was stopped or
    killed goes on with --resume.

    Options marked "..." can be given several times (--seed 0 --seed 1): one run for each combination of their values,
    trained together from one reading of the store, each the same as alone.

    Example: sae train --solver pam-sgd --act topk --k 32
    """
    session = start(ctx, json)
    processes = communicator()
    with ExitStack() as claims:
        try:
            if resume:
                jobs = [Job(*processes.main_first(lambda: _resumed(session, ctx, name)))]
                if processes.is_main:
                    claims.enter_context(claimed(jobs[0].folder, new=False))
            else:
                names = _names(name, [each.varied for each in options])
                store = processes.main_first(lambda: open_store(session.home, data, session.console))
                checked_name(store.name, "the name of the store's folder")
                runs = [_planned(store, each, solver, act) for each in options]
                _look_at_hash(session, ctx, runs[0], data_hash)
                folders = processes.broadcast_object(
                    lambda: [_new_folder(session.home, one, f"{solver}-{act}", claims) for one in names])
                jobs = [Job(*job) for job in zip(folders, runs, options, strict=True)]
        except KeyboardInterrupt:
            session.console.note("stopped before training began; nothing was changed")
            raise
        train(session, jobs, processes)


def _planned(store: ActivationStore, options: Given, solver: str, act: str) -> Run:
    """A new run, with every default filled in."""
    training = options.config(TrainingConfig)
    chosen_solver = options.choose(SOLVERS, "solver", solver)
    activation = options.choose(ACTIVATIONS, "act", act)
    plan = Plan.resolved(training.rows_of(store), training.test_rows_of(store), training, chosen_solver, activation)
    return Run(store, plan, now())


def _look_at_hash(session: Session, ctx: typer.Context, run: Run, data_hash: str | None) -> None:
    """Say so where the store is not the one that a file of options was written for."""
    chosen = {name: ctx.get_parameter_source(name).name for name in ("data", "data_hash")}
    if chosen["data"] == "COMMANDLINE" != chosen["data_hash"]:
        return  # another store than the file's was asked for
    if data_hash not in (None, run.store.meta.request_hash):
        session.console.note(f"{run.store.name} is not the store that --data-hash {data_hash} is of, though it has its "
                             "name; the weights will be others")


def _names(name: str | None, varied: list[Mapping[str, Any]]) -> list[str | None]:
    """The names of runs, None for one that is made up; of several, the name's tell their values too.

    Raises:
        ConfigError: they cannot be folders, or are not all different.
    """
    names = [None if name is None else checked_name("-".join([name, *map(_words, values.items())]))
             for values in varied]
    if len(set(names)) < len(names) and name is not None:
        raise ConfigError("name", "{given} makes one name of several runs: their values differ in characters that a "
                                  "name cannot hold", "leave {name} out", given=name)
    return names


def _words(value: tuple[str, Any]) -> str:
    """An option and its value as a part of a run's name: seed1, sparsity_weight0.3."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", f"{value[0]}{value[1]:g}" if isinstance(value[1], float) else
                  f"{value[0]}{value[1]}")


def _new_folder(home: Home, name: str | None, stem: str, claims: ExitStack) -> Path:
    """The folder of a new run, claimed until `claims` are closed; two runs of made-up names that begin at once get two.

    Raises:
        RunError: there is a run of that name.
    """
    runs = home.runs.path
    if name is None:
        for folder in (runs / f"{stem}-{number}" for number in count(1)):
            with suppress(FileExistsError, RunError):
                claims.enter_context(claimed(folder))
                return folder
    try:
        claims.enter_context(claimed(runs / name))
    except FileExistsError:
        raise RunError(f"there is a run named {name!r} already; give another --name, or where it is not finished go on "
                       "with it by --resume") from None
    return runs / name


def _resumed(session: Session, ctx: typer.Context, name: str | None) -> tuple[Path, Run]:
    """A run that was begun before, and its folder first."""
    given = [p for p in ctx.params if ctx.get_parameter_source(p).name == "COMMANDLINE"]
    other = sorted(set(given) - {"name", "resume", "json"})
    if other:
        raise ConfigError(other[0], "does nothing with {resume}, which goes on with the settings of the run",
                          "leave it out")
    runs = session.home.runs
    if name is None:
        unfinished = runs.unfinished()
        if not unfinished:
            raise RunError(f"there is no unfinished run in {runs.path}; start one with `sae train`")
        name = unfinished[0]
        session.console.note(f"going on with {name}")
    folder = runs.find(name)
    path = folder / runs.marker
    document = read_settings(path)
    if document["complete"]:
        raise RunError(f"{name} is finished; there is nothing to resume, start a new run with `sae train`")
    store = open_store(session.home, document["data"], session.console)
    try:
        settings = dict(document["solver"])
        training = TrainingConfig.from_json(document["training"])
        plan = Plan.resolved(training.rows_of(store), training.test_rows_of(store), training,
                             SOLVERS[settings.pop("name")].from_json(settings),
                             activation_from_json(document["activation"]))
        if plan.training != training:  # defaults are filled in when a run is begun, and may be others by now
            raise ConfigError(None, "not all of its settings are filled in")
        run, trained_on = Run(store, plan, document["created"]), document["data_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"cannot go on with {name}: {path} is not what this version of `sae train` writes "
                       f"({error}); train it anew") from error
    if trained_on != store.meta.request_hash:
        raise RunError(f"cannot go on with {name}: {store.name} is not the store that it was begun on, though it has "
                       f"its name; make that store again, or train anew")
    return folder, run
