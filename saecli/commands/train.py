"""`sae train`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import __version__
from ..activations import ACTIVATIONS, activation_from_json
from ..errors import ConfigError, RunError
from ..files import locked, make_folder
from ..home import Home, now
from ..machine import available_memory
from ..report import table
from ..runs import read_run
from ..solvers import SOLVERS
from ..training import CHECKPOINT, Plan, Run, RunRecord, Trainer, TrainingConfig, read_metrics
from .config_file import CONFIG, write_config
from .options import Given, Json, Session, configured, start, store_names, unfinished_names
from .stores import checked_name, open_store

Solver = Annotated[Literal[tuple(SOLVERS)], typer.Option("--solver", help="How to train.")]
Act = Annotated[Literal[tuple(ACTIVATIONS)], typer.Option("--act", help="The activation.")]
Data = Annotated[str | None, typer.Option("--data", help="Activation store.", show_default="the newest",
                                                autocompletion=store_names)]
DataHash = Annotated[str | None, typer.Option(
    "--data-hash", help="Hash of what the store was made from, out of a run's config.toml: a note says so where the "
                        "store of that name has another.", show_default=False)]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run.",
                                          show_default="solver, activation and a number",
                                          autocompletion=unfinished_names)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run of that --name, or else with the newest "
                                                       "unfinished one, from its last checkpoint, bit for bit.")]


@configured(TrainingConfig, solver=SOLVERS, act=ACTIVATIONS)
def command(ctx: typer.Context, options: Given, solver: Solver = "pam-sgd", act: Act = "relu", data: Data = None,
            data_hash: DataHash = None, name: Name = None, resume: Resume = False, json: Json = False) -> None:
    """Train a sparse autoencoder from a store.

    Writes a folder into runs/ of the home, with the SAE (acting on raw activations), a checkpoint after every epoch,
    metrics.jsonl, loss.png, and config.toml, which --config takes to train the same again. A run that was stopped or
    killed goes on with --resume.

    Example: sae train --solver pam-sgd --act topk --k 32
    """
    session = start(ctx, json)
    try:
        if resume:
            folder, run = _resumed(session, ctx, name)
        else:
            run = _planned(session, options, solver, act, data)
            _look_at_hash(session, ctx, run, data_hash)
            folder = _new_folder(session.home, name, f"{solver}-{act}")
    except KeyboardInterrupt:
        session.report.note("stopped before training began; nothing was changed")
        raise
    with _held(folder):
        result = _trained(session, run, folder, None if resume else options)
    for note in result["notes"]:
        session.report.note(note)
    plan = run.plan
    document = {"run": folder.name, "path": str(folder), "solver": plan.solver.name, "act": plan.activation.name,
                "data": run.store.name, "d_in": run.store.d_in, "d_sae": plan.training.d_sae, **result}
    epochs = f"{result['epochs']} epoch{'s' * (result['epochs'] != 1)}"
    title = f"{folder.name}: {epochs}, {result['steps']:,} steps in {result['seconds']:.0f} s"
    measures = table(title, ["measure", "value"], [[key, value] for key, value in result["final"].items()])
    session.report.result(document, measures, f"saved in {folder}")


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep other processes from training the same run; leave no folder behind that has nothing to go on from."""
    try:
        with locked(folder):
            try:
                yield
            finally:
                if not (folder / CHECKPOINT).exists():
                    shutil.rmtree(folder)
    except BlockingIOError as error:
        raise RunError(f"another process is training {folder.name}; wait for it, or stop it") from error


def _trained(session: Session, run: Run, folder: Path, options: Given | None) -> dict[str, Any]:
    """Train a run to its end; returns its result. A new one comes with its options."""
    try:
        if options is not None:
            run.write(folder, None)
            _write_config(folder, run, options)
        plan = run.plan
        trainer = Trainer(plan, RunRecord(run, folder))
        session.report.note(f"{folder.name}: {plan.solver.name}, {plan.activation.name}, {plan.training.d_sae} latents "
                            f"on {run.store.d_in} dimensions, {trainer.train_rows.rows:,} training and "
                            f"{trainer.test_rows.rows:,} test rows, {trainer.steps:,} steps")
        with session.report.progress("training", trainer.steps, "steps") as show:
            result = trainer.result(trainer.train(show))
        from ..plots import loss_curves  # matplotlib takes a second to import

        loss_curves(folder / "loss.png", {folder.name: read_metrics(folder)})
        run.write(folder, result)  # last, so that whatever cuts this short, --resume completes it
        return result
    except KeyboardInterrupt:
        session.report.note(f"stopped; `sae train --resume --name {folder.name}` goes on after the last whole epoch"
                            if (folder / CHECKPOINT).exists() else "stopped before the end of the first epoch; "
                            "nothing was saved")
        raise


def _planned(session: Session, options: Given, solver: str, act: str, data: str | None) -> Run:
    """A new run, with every default filled in."""
    training = options.config(TrainingConfig)
    chosen_solver = options.choose(SOLVERS, "solver", solver)
    activation = options.choose(ACTIVATIONS, "act", act)
    store = open_store(session, data)
    training.check_shuffle(store.stored_bytes, available_memory())
    plan = Plan.resolved(training.rows_of(store), training.test_rows_of(store), training, chosen_solver, activation)
    return Run(store, plan, now())


def _look_at_hash(session: Session, ctx: typer.Context, run: Run, data_hash: str | None) -> None:
    """Say so where the store is not the one that a file of options was written for."""
    chosen = {name: ctx.get_parameter_source(name).name for name in ("data", "data_hash")}
    if chosen["data"] == "COMMANDLINE" != chosen["data_hash"]:
        return  # another store than the file's was asked for
    if data_hash not in (None, run.store.meta.request_hash):
        session.report.note(f"{run.store.name} is not the store that --data-hash {data_hash} is of, though it has its "
                            "name; the weights will be others")


def _write_config(folder: Path, run: Run, options: Given) -> None:
    """Write what `--config` takes to train the same again: what was given, and as comments what was filled in."""
    plan = run.plan
    chosen = {"solver": plan.solver.name, "act": plan.activation.name, "data": run.store.name,
              "data_hash": run.store.meta.request_hash}
    given = {name: options.values[name] for name in options.values if name in options.given}
    settled = plan.training.to_json() | plan.solver.to_json() | plan.activation.to_json()
    if settled["sparsity"] == "none":
        del settled["sparsity_weight"]
    heading = [f"sae train --config {CONFIG} trains this run again, to the same weights, on the same rows.",
               f"Options on the command line win. Written by saecli {__version__}."]
    write_config(folder / CONFIG, heading, chosen | given,
                 {name: value for name, value in settled.items() if name not in given})


def _new_folder(home: Home, name: str | None, stem: str) -> Path:
    """Make the folder of a run; two that begin at once get two."""
    runs = home.runs.path
    given = None if name is None else runs / checked_name(name)
    make_folder(runs)
    for folder in (runs / f"{stem}-{number}" for number in count(1)) if given is None else [given]:
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise RunError(f"there is a run named {name!r} already; give another --name, or go on with it by --resume")


def _resumed(session: Session, ctx: typer.Context, name: str | None) -> tuple[Path, Run]:
    """A run that was begun before, and its folder first."""
    given = [p for p in ctx.params if ctx.get_parameter_source(p).name == "COMMANDLINE"]
    other = sorted(set(given) - {"name", "resume", "json"})
    if other:
        raise ConfigError(f"--{other[0].replace('_', '-')} does nothing with --resume, which goes on with the settings "
                          f"the run was begun with; leave it out")
    runs = session.home.runs
    if name is None:
        unfinished = [n for n, marker in runs.markers().items() if marker and not marker.get("complete")]
        if not unfinished:
            raise RunError(f"there is no unfinished run in {runs.path}; start one with `sae train`")
        name = unfinished[0]
        session.report.note(f"going on with {name}")
    folder = runs.find(name)
    path = folder / runs.marker
    document = read_run(path)
    if document["complete"]:
        raise RunError(f"{name} is finished; there is nothing to resume, start a new run with `sae train`")
    store = open_store(session, document["data"])
    try:
        settings = dict(document["solver"])
        training = TrainingConfig.from_json(document["training"])
        plan = Plan(training.rows_of(store), training.test_rows_of(store), training,
                    SOLVERS[settings.pop("name")].from_json(settings), activation_from_json(document["activation"]))
        run, trained_on = Run(store, plan, document["created"]), document["data_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"cannot go on with {name}: {path} is not what this version of `sae train` writes "
                       f"({error}); train it anew") from error
    if trained_on != store.meta.request_hash:
        raise RunError(f"cannot go on with {name}: {store.name} is not the store that it was begun on, though it has "
                       f"its name; make that store again, or train anew")
    return folder, run
