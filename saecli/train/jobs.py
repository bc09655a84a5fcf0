"""Runs to train: new ones, in folders named and claimed here, or one to resume."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ..base.console import Listener
from ..base.distributed import Communicator
from ..base.errors import ConfigError, RunError
from ..base.home import Home, checked_name, read_settings
from ..sae.activations import activation_from_json
from ..store.opening import open_joined
from .checkpoints import CHECKPOINT, claimed
from .config import TrainingConfig
from .plan import Plan
from .run import CONFIG, Run
from .solvers import SOLVERS
from .starting import Start


@dataclass(frozen=True)
class Job:
    """A run to train.

    Args:
        folder: the run's folder, claimed.
        run: what to train, on which store.
        given: the options that a new run was given; None for a resumed run.
        varied: with several runs, this run's options in which they differ.
        lengthened: the epochs that a resumed run had before it was given more; None if it was not.
    """

    folder: Path
    run: Run
    given: Mapping[str, Any] | None = None
    varied: Mapping[str, Any] = field(default_factory=dict)
    lengthened: int | None = None


def run_names(name: str | None, varied: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """The names of runs, with the varied values appended; None for a generated name. Raises ConfigError if they cannot
    be folders, or are not all different."""
    names = [None if name is None else checked_name("-".join([name, *map(_words, values.items())]))
             for values in varied]
    if len(set(names)) < len(names) and name is not None:
        raise ConfigError(f"--name {name} makes one name of several runs: their values differ in characters that a "
                          "name cannot hold; leave --name out", option="name")
    return names


def _words(value: tuple[str, Any]) -> str:
    """An option and its value in a run's name: seed1, sparsity_weight0.3."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", f"{value[0]}{value[1]:g}" if isinstance(value[1], float) else
                  f"{value[0]}{value[1]}")


def claimed_folders(home: Home, names: Sequence[str | None], stem: str, claims: ExitStack,
                    communicator: Communicator) -> list[Path]:
    """The folders of new runs, which rank 0 claims until `claims` is closed; a name of None is generated. Raises
    RunError if there is a run of one of those names."""
    return communicator.broadcast_object(lambda: [_new_folder(home, name, stem, claims) for name in names])


def _new_folder(home: Home, name: str | None, stem: str, claims: ExitStack) -> Path:
    """The folder of a new run, claimed until `claims` is closed; runs that start at once get different generated names.
    Raises RunError if there is a run of that name."""
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


def resumed_job(home: Home, name: str | None, listener: Listener, claims: ExitStack, communicator: Communicator,
                epochs: int | None = None) -> Job:
    """A run to resume, whose folder rank 0 claims.

    Args:
        home: the folder of stores and runs.
        name: the run's; by default the newest unfinished one, or the newest of all to lengthen.
        listener: receives notes.
        claims: until it is closed the folder is claimed.
        communicator: of the processes that take part.
        epochs: how many it is to have in all, more than it had; None to leave them as they are.

    Raises:
        RunError: there is none, it is finished, or it is being trained; or its settings, its store or the SAE that it
            starts from have changed.
        ConfigError: it cannot have so many epochs.
    """
    job = communicator.main_first(lambda: _begun_before(home, name, listener, epochs))
    if communicator.is_main:
        claims.enter_context(claimed(job.folder, new=False))
    plan = job.run.plan
    if plan.start is None or communicator.broadcast_object((job.folder / CHECKPOINT).exists):
        return job
    start = communicator.broadcast_object(lambda: plan.start.again(home, listener))
    return replace(job, run=replace(job.run, plan=replace(plan, start=start)))


def _begun_before(home: Home, name: str | None, listener: Listener, epochs: int | None) -> Job:
    runs = home.runs
    if name is None and epochs is not None:
        name = next(iter(runs.names()), None)
    elif name is None:
        unfinished = runs.unfinished()
        if not unfinished:
            raise RunError(f"there is no unfinished run in {runs.path}; start one with `sae train`")
        name = unfinished[0]
        listener.note(f"going on with {name}")
    folder = runs.find(name)
    document = read_settings(folder / runs.marker)
    if document["complete"] and epochs is None:
        raise RunError(f"{folder.name} is finished; there is nothing to resume, lengthen it by `sae train --resume "
                       f"--name {folder.name} --epochs`, or start from its SAE by `sae train --init {folder.name}`")
    job = Job(folder, run_again(home, folder, document, listener, "go on with"))
    if epochs is None or (epochs == job.run.plan.training.epochs and not document["complete"]):
        return job
    return _longer(job, epochs)


def _longer(job: Job, epochs: int) -> Job:
    """A run with more epochs; those that it has count. Schedules are fractions of all steps, the new ones included."""
    plan = job.run.plan
    had = plan.training.epochs
    if had is None:
        raise ConfigError(f"--epochs cannot lengthen {job.folder.name}, which was given --steps; start from its SAE "
                          "by --init", option="epochs")
    if epochs <= had:
        raise ConfigError(f"--epochs must be above {had} to lengthen {job.folder.name}, which has so many, got "
                          f"{epochs}", option="epochs")
    plan = replace(plan, training=replace(plan.training, epochs=epochs))
    return replace(job, run=replace(job.run, plan=plan), lengthened=had)


def run_again(home: Home, folder: Path, document: Mapping[str, Any], listener: Listener, purpose: str) -> Run:
    """The training of a run folder as it was begun, its stores and its plan; an SAE that it started from is not opened.

    Args:
        home: the folder of stores and runs.
        folder: the run's.
        document: all entries of its `run.json`.
        listener: receives notes on its stores.
        purpose: what it is for, in an error: "cannot PURPOSE NAME".

    Raises:
        RunError: its settings are not those of this version, or its store is another now.
        StoreError: its store is missing or damaged.
    """
    name, path = folder.name, folder / home.runs.marker
    if "streamed" in document:
        raise RunError(f"cannot {purpose} {name}: its rows came from a model as it trained, and are not stored; train "
                       f"it again by `sae train --config {folder / CONFIG}`, or on a store, made by `sae extract`")
    stores = open_joined(home, [document["data"], *document.get("beside", [])], document.get("target"), listener)
    try:
        settings = dict(document["solver"])
        training = TrainingConfig.from_json(document["training"])
        plan = Plan.resolved(training.rows_of(stores), training.test_rows_of(stores), training,
                             SOLVERS[settings.pop("name")].from_json(settings),
                             activation_from_json(document["activation"]))
        if plan.training != training:  # a setting was missing, and today's default would be filled in
            raise ConfigError("not all of its settings are filled in")
        if "init" in document:
            plan = replace(plan, start=Start(document["init"]["name"], document["init"]["hash"], None))
        run, trained_on = Run(stores, plan, document["created"]), document["data_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"cannot {purpose} {name}: {path} is not what this version of `sae train` writes "
                       f"({error}); train it anew") from error
    if trained_on != stores.hash:
        what = ("is not the store that it was begun on, though it has its name" if stores.is_single else
                "are not the stores that it was begun on, though they have their names")
        raise RunError(f"cannot {purpose} {name}: {stores.name} {what}; make them again, or train anew")
    return run
