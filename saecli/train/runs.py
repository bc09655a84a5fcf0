"""Training runs, each in its own folder; several together from one reading of the rows."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.console import Listener, Silent
from ..base.documents import RUN_VERSION, read_run
from ..base.errors import ConfigError, PeerError, RunError, SaeError, TrainingError
from ..base.files import appearing_whole, write_json
from ..base.home import RUN_MARKER, Home, checked_name
from ..base.machine import is_disk_full
from ..base.options import toml_lines
from ..base.processes import Communicator
from ..extract.streaming import Streamed
from ..sae.activations import activation_from_json, activation_to_json
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE, save_native
from ..sae.library import origin_of
from ..store.joined import Joined
from ..store.opening import open_joined
from . import SOLVERS
from .files import (
    CHECKPOINT,
    CONFIG,
    Log,
    Logged,
    MetricsLog,
    Progress,
    WandbRun,
    claimed,
    demand_wandb,
    load_checkpoint,
    save_checkpoint,
)
from .loop import Loop
from .options import TrainingConfig
from .plan import Plan, doubts_at_start
from .start import Start
from .training import Record, Training, start_training


@dataclass(frozen=True)
class Run:
    """A training on rows of stores, or of a model, and the time of its start."""

    command: ClassVar[str] = "train"

    stores: Joined | Streamed
    plan: Plan
    created: str

    def loop(self, trainings: Sequence[Training], alone: bool = True) -> Loop:
        return Loop(trainings, alone)

    @property
    def origin(self) -> dict[str, Any]:
        """The fields of `Origin` for the SAE's file."""
        return origin_of(self.stores, self.plan.training.split_seed, self.plan.training.fraction)

    @property
    def summary(self) -> str:
        """What is trained, for a line at the start."""
        plan = self.plan
        tests = 0 if plan.test_rows is None else plan.test_rows.rows
        return (
            f"{plan.solver.name}, {plan.activation.name}, {plan.training.d_sae} latents on {self.stores.d_in} "
            f"dimensions, {plan.train_rows.rows:,} training and {tests:,} test rows, {plan.steps:,} steps"
            + (
                ""
                if plan.training.precision == "float32"
                else f", products in {plan.training.precision}"
            )
            + (f", from {plan.start.name}" if plan.start else "")
        )

    def options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options that repeat the run: those to set, and all that are settled."""
        plan = self.plan
        chosen = {
            "solver": plan.solver.name,
            "act": plan.activation.name,
            **self.stores.options(),
            "precision": plan.training.precision,
        }  # which auto would choose anew on another device
        if plan.start is not None:
            chosen["init"] = plan.start.name
        settled = plan.training.to_json() | plan.solver.to_json() | plan.activation.to_json()
        if settled["sparsity"] == "none":
            del settled["sparsity_weight"]
        return chosen, settled

    def write(self, folder: Path, result: dict[str, Any] | None) -> None:
        """Write the run's `run.json`: complete if there is a result."""
        plan = self.plan
        start = (
            {}
            if plan.start is None
            else {"init": {"name": plan.start.name, "hash": plan.start.hash}}
        )
        write_json(
            folder / RUN_MARKER,
            {
                "format_version": RUN_VERSION,
                "created": self.created,
                "complete": result is not None,
                **self.stores.names(),
                "training": plan.training.to_json(),
                "solver": {"name": plan.solver.name, **plan.solver.to_json()},
                "activation": activation_to_json(plan.activation),
                **start,
                "result": result,
            },
        )

    def write_config(self, folder: Path, given: Mapping[str, Any]) -> None:
        """Write a file for `--config` that repeats the run: the options given, and as comments those filled in."""
        chosen, settled = self.options()
        shown = {**chosen, **{name: value for name, value in given.items() if name != "precision"}}
        filled = {name: value for name, value in settled.items() if name not in shown}
        lines = [
            f"# sae {self.command} --config {CONFIG} makes this run again, to the same weights, on the same rows.",
            f"# Options on the command line win. Written by saecli {version('saecli')}.",
            "",
            *toml_lines(shown),
            "",
            "# Not given, and so by default:",
            *(f"# {line}" for line in toml_lines(filled)),
        ]
        with appearing_whole(folder / CONFIG) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


class RunRecord(Record):
    def __init__(self, run: Run, folder: Path, listener: Listener) -> None:
        if run.plan.training.log_to is not None:
            demand_wandb()
        self.run, self.folder, self.listener = run, folder, listener
        self.logs: list[Log] = []

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        return load_checkpoint(self.folder)

    def begin(self, step: int) -> None:
        settings = self.run.stores.names() | self.run.plan.settings()
        logged = Logged(self.folder, self.run.created, settings, step, self.listener)
        self.logs.append(MetricsLog(logged))
        if self.run.plan.training.log_to is not None:
            self.logs.append(WandbRun(logged))

    def line(self, line: dict[str, Any]) -> None:
        for log in self.logs:
            log.write(line)

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        self._save(sae)
        save_checkpoint(self.folder, state, progress)

    def keep(self, sae: SAE) -> None:
        self._save(sae)

    def end(self) -> None:
        for log in self.logs:
            log.close()

    def _save(self, sae: SAE) -> None:
        save_native(SavedSAE(sae.copy_to(torch.float32), self.run.origin), self.folder)


@dataclass(frozen=True)
class Job:
    """A run to train in a claimed folder."""

    folder: Path
    run: Run
    given: Mapping[str, Any] | None = None  # the options of a new run; None for a resumed one
    varied: Mapping[str, Any] = field(default_factory=dict)  # options in which several runs differ
    result: Mapping[str, Any] | None = None  # of a finished run, which stays as it is

    @property
    def has_checkpoint(self) -> bool:
        return (self.folder / CHECKPOINT).exists()

    @property
    def remedy(self) -> str:
        """What to do after the run was stopped, in words."""
        if not self.has_checkpoint:
            return "run the same command again"
        resume = f"`sae {self.run.command} --resume --name {self.folder.name}`"
        return f"{resume} goes on from its last checkpoint"

    def document(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """What `sae train --json` prints."""
        stores, plan = self.run.stores, self.run.plan
        return {
            "run": self.folder.name,
            "path": str(self.folder),
            "solver": plan.solver.name,
            "act": plan.activation.name,
            "data": stores.name,
            "d_in": stores.d_in,
            "d_sae": plan.d_sae,
            **result,
            **({"varied": dict(self.varied)} if self.varied else {}),
        }


def run_names(name: str | None, varied: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """The names of runs, with the varied values appended; None for a generated name."""
    if name is None:
        return [None] * len(varied)
    names = [
        "-".join(
            [
                name,
                *(
                    re.sub(
                        r"[^A-Za-z0-9._+-]",
                        "_",
                        f"{key}{value:g}" if isinstance(value, float) else f"{key}{value}",
                    )
                    for key, value in values.items()
                ),
            ]
        )
        for values in varied
    ]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--name {name} makes one name of several runs: their values differ in characters that a "
            "name cannot hold; leave --name out"
        )
    return [checked_name(one) for one in names]


def claimed_folders(
    home: Home,
    names: Sequence[str | None],
    stem: str,
    claims: ExitStack,
    communicator: Communicator,
) -> list[Path]:
    """The folders of new runs, claimed by rank 0 until `claims` is closed; runs that start at once get different
    generated names."""

    def new_folder(name: str | None) -> Path:
        if name is None:
            for folder in (home.runs.path / f"{stem}-{number}" for number in count(1)):
                with suppress(FileExistsError, RunError):
                    claims.enter_context(claimed(folder))
                    return folder
        folder = home.runs.path / str(name)
        try:
            claims.enter_context(claimed(folder))
        except FileExistsError:
            raise RunError(
                f"there is a run named {name!r} already; give another --name, or if it is not finished "
                "continue it by --resume"
            ) from None
        return folder

    return communicator.broadcast_object(lambda: [new_folder(name) for name in names])


def resumed_job(
    home: Home, name: str | None, listener: Listener, claims: ExitStack, communicator: Communicator
) -> Job:
    """The run `name`, else the newest unfinished one, to resume; its folder is claimed until `claims` is closed."""

    def begun_before() -> Job:
        folder, document = unfinished_run(home, name, listener, "train")
        return Job(folder, run_again(home, folder, document, listener, "go on with"))

    job = communicator.main_first(begun_before)
    if communicator.is_main:
        claims.enter_context(claimed(job.folder, new=False))
    plan, begun = job.run.plan, job.run.plan.start
    if begun is None or communicator.broadcast_object((job.folder / CHECKPOINT).exists):
        return job
    start = communicator.broadcast_object(lambda: begun.reopened(home, listener))
    return replace(job, run=replace(job.run, plan=replace(plan, start=start)))


def known_job(
    home: Home, new: Job, listener: Listener, claims: ExitStack, communicator: Communicator
) -> Job | None:
    """The run that has the name of a new one, finished or to resume from its checkpoint; None if there is none.
    RunError if its options are others."""
    name, path = new.folder.name, new.folder / RUN_MARKER
    document = communicator.broadcast_object(
        lambda: read_run(path).settings if path.exists() else None
    )
    if document is None or not (
        document["complete"] or communicator.broadcast_object((new.folder / CHECKPOINT).exists)
    ):
        return None
    known = run_again(home, new.folder, document, Silent(), "go on with")
    if known.options() != new.run.options():
        raise RunError(
            f"there is a run named {name!r} already, with other options; give another --name"
        )
    if document["complete"]:
        listener.note(f"{name}: finished already")
        return replace(new, result=document["result"])
    return replace(resumed_job(home, name, listener, claims, communicator), varied=new.varied)


def unfinished_run(
    home: Home, name: str | None, listener: Listener, command: str
) -> tuple[Path, dict[str, Any]]:
    """The folder and document of the run `name`, else of the newest unfinished one that the command began."""
    runs = home.runs

    def began(document: Mapping[str, Any]) -> str:
        return "finetune" if document["solver"].get("name") == "finetune" else "train"

    if name is None:
        unfinished = [
            one
            for one in runs.unfinished()
            if began(read_run(runs.path / one / runs.marker).settings) == command
        ]
        if not unfinished:
            raise RunError(
                f"there is no unfinished run in {runs.path}; start one with `sae {command}`"
            )
        name = unfinished[0]
        listener.note(f"going on with {name}")
    folder = runs.find(name)
    document = read_run(folder / runs.marker).settings
    if document["complete"]:
        raise RunError(
            f"{folder.name} is finished; there is nothing to resume, start from its SAE by `sae train "
            f"--init {folder.name}`"
        )
    if began(document) != command:
        raise RunError(
            f"{folder.name} was begun by another command; go on by `sae {began(document)} --resume --name "
            f"{folder.name}`"
        )
    return folder, document


def run_again(
    home: Home, folder: Path, document: Mapping[str, Any], listener: Listener, purpose: str
) -> Run:
    """The run that a `run.json` describes, without the SAE it started from; RunError, "cannot PURPOSE NAME", if its
    settings are not of this version, or its store has changed."""
    name, path = folder.name, folder / home.runs.marker
    if "streamed" in document:
        raise RunError(
            f"cannot {purpose} {name}: its rows came from a model as it trained, and are not stored; train "
            f"it again by `sae train --config {folder / CONFIG}`, or on a store, made by `sae extract`"
        )
    stores = open_joined(
        home, [document["data"], *document.get("beside", [])], document.get("target"), listener
    )
    try:
        settings = dict(document["solver"])
        training = TrainingConfig.from_json(document["training"])
        parts = training.rows_of(stores, begun="init" in document)
        plan = Plan.resolved(
            parts.train,
            parts.test,
            training,
            SOLVERS[settings.pop("name")].from_json(settings),
            activation_from_json(document["activation"]),
            kept_out=parts.kept_out,
        )
        if (
            plan.training != training
        ):  # a setting was missing, and today's default would be filled in
            raise ConfigError("not all of its settings are filled in")
        if "init" in document:
            plan = replace(
                plan, start=Start(document["init"]["name"], document["init"]["hash"], None)
            )
        run, trained_on = Run(stores, plan, document["created"]), document["data_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot {purpose} {name}: {path} is not what this version of `sae train` writes "
            f"({error}); train it anew"
        ) from error
    if trained_on != stores.hash:
        what = "is not the store" if stores.is_single else "are not the stores"
        raise RunError(
            f"cannot {purpose} {name}: {stores.name} {what} that it was begun on; make the same again, or "
            "train anew"
        )
    return run


def train_runs(
    jobs: Sequence[Job], listener: Listener, communicator: Communicator, alone: bool
) -> tuple[list[dict[str, Any]], dict[str, Exception]]:
    """Train runs, which differ only in numeric options of the SAE and its solver, to the end.

    Returns the document that `sae train --json` prints for each run that did not fail, and the errors of the others, by
    name. The error of a run that is `alone`, or trained by several processes, is raised.
    """
    if (result := jobs[0].result) is not None:
        return [jobs[0].document(result)], {}
    try:
        for job in jobs:
            folder, run = job.folder, job.run
            if job.given is not None and communicator.is_main:
                run.write_config(
                    folder, job.given
                )  # before run.json, which marks a run that can be resumed
                run.write(folder, None)
            listener.note(f"{folder.name}: {run.summary}")
            for warning in doubts_at_start(run.plan):
                listener.note(f"{folder.name}: warning: {warning}")
        documents, errors = _trained(
            jobs, listener, communicator, alone or communicator.world_size > 1
        )
    except (KeyboardInterrupt, PeerError):
        for job in jobs:
            listener.note(
                f"stopped; {job.remedy}"
                if job.has_checkpoint
                else f"stopped before the first checkpoint; nothing was saved of {job.folder.name}"
            )
        raise
    except OSError as error:
        raise _in_words(error, jobs[0]) from error
    for job, document in zip(
        [job for job in jobs if job.folder.name not in errors], documents, strict=True
    ):
        before, said = (
            f"{document['run']}: " if len(jobs) > 1 else "",
            doubts_at_start(job.run.plan),
        )
        for warning in document["warnings"]:
            if warning not in said:
                listener.note(f"{before}warning: {warning}")
        for note in document["notes"]:
            listener.note(f"{before}{note}")
    return documents, errors


def _trained(
    jobs: Sequence[Job], listener: Listener, communicator: Communicator, alone: bool
) -> tuple[list[dict[str, Any]], dict[str, Exception]]:
    trainings: dict[str, Training] = {}
    errors: dict[str, Exception] = {}
    title, total = (
        ("training", jobs[0].run.plan.steps)
        if len(jobs) == 1
        else (f"training {len(jobs)} SAEs", None)
    )
    with listener.progress(title, total, "steps") as show:
        steps: dict[str, float] = {}

        def step(name: str, done: float, words: str = "") -> None:
            steps[name] = done
            show(sum(steps.values()), f"{name}: {words}")

        for job in jobs:
            name = job.folder.name
            try:
                record = (
                    RunRecord(job.run, job.folder, listener) if communicator.is_main else Record()
                )
                shared = next((training.rows for training in trainings.values()), None)
                trainings[name] = start_training(
                    job.run.plan,
                    record,
                    show if alone else partial(step, name),
                    len(jobs),
                    communicator,
                    shared,
                )
            except Exception as error:  # reported at the end, when the others have finished
                if alone:
                    raise
                errors[name] = error
        loop = jobs[0].run.loop([*trainings.values()], alone)
        try:
            saes = loop.train()
        except TrainingError as error:
            raise error.within(after=_what_is_kept(loop.trainings[0])) from error
        results = loop.results(saes) if saes else []
    for name, training in trainings.items():
        if training in loop.errors:
            failure = loop.errors[training]
            errors[name] = (
                failure.within(after=_what_is_kept(training))
                if isinstance(failure, TrainingError)
                else failure
            )
    for job in jobs:
        name = job.folder.name
        if name in errors:
            said = _in_words(errors[name], job)
            errors[name] = said.within(name) if isinstance(said, SaeError) else said
    finished = [job for job in jobs if job.folder.name not in errors]
    if communicator.is_main:
        for job, result in zip(finished, results, strict=True):
            job.run.write(job.folder, result)
    return [job.document(result) for job, result in zip(finished, results, strict=True)], errors


def _in_words(error: Exception, job: Job) -> Exception:
    """The error; in place of the system's about a full disk one that says how the run goes on."""
    if not is_disk_full(error):
        return error
    return TrainingError(
        f"the disk is full, writing {getattr(error, 'filename', None) or 'a file'}; nothing half-written "
        f"was kept: free some space, and {job.remedy}"
    )


def _what_is_kept(training: Training) -> str:
    kept, steps = training.progress.step, training.plan.steps
    stops = f"the run stops at step {training.solver.steps:,} of {steps:,}"
    if not kept:
        return f"{stops}, and nothing of it is kept"
    return f"{stops}; its checkpoint of step {kept:,} is kept"
