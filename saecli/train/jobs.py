"""Runs to train: their names and folders, those to resume, and the training of one."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ..base.console import Listener, Silent
from ..base.errors import ConfigError, PeerError, RunError, TrainingError
from ..base.home import RUN_MARKER, Home, checked_name
from ..base.processes import communicator
from ..sae.run_documents import read_run
from .options import Finetune, SolverConfig
from .plan import doubts_at_start
from .runs import CHECKPOINT, Run, RunRecord, claimed, reopen_run
from .training import Record, Training, start_training


@dataclass(frozen=True)
class Job:
    folder: Path
    run: Run
    given: Mapping[str, Any] | None = None  # the options of a new run; None for a resumed one
    varied: Mapping[str, Any] = field(default_factory=dict)  # options in which several runs differ
    result: Mapping[str, Any] | None = None  # of a finished run, which stays as it is

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def has_checkpoint(self) -> bool:
        return (self.folder / CHECKPOINT).exists()

    def document(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """What `sae train --json` prints."""
        stores, plan = self.run.stores, self.run.plan
        document = {
            "run": self.name,
            "path": str(self.folder),
            "solver": plan.solver.name,
            "act": plan.activation.name,
            "data": stores.name,
            "d_in": stores.d_in,
            "d_sae": plan.d_sae,
            **result,
        }
        if self.varied:
            document["varied"] = dict(self.varied)
        return document


def run_names(name: str | None, varied: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Names with the varied values appended; None for a generated one."""
    if name is None:
        return [None] * len(varied)
    names = []
    for values in varied:
        words = [name]
        for option, value in values.items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(re.sub(r"[^A-Za-z0-9._+-]", "_", option + text))
        names.append(checked_name("-".join(words)))
    if len(set(names)) < len(names):
        raise ConfigError(f"--name {name} makes one name of several runs; leave --name out")
    return [*names]


def claim_folder(home: Home, name: str | None, stem: str, claims: ExitStack) -> Path:
    """The folder of a new run, claimed until `claims` is closed; without a name the next free one of `stem`."""

    def claim() -> Path:
        if name is None:
            for number in count(1):
                folder = home.runs.path / f"{stem}-{number}"
                with suppress(FileExistsError, RunError):
                    claims.enter_context(claimed(folder))
                    return folder
        folder = home.runs.path / str(name)
        try:
            claims.enter_context(claimed(folder))
        except FileExistsError:
            raise RunError(
                f"there is a run named {name!r} already; give another --name, or go on with it by --resume"
            ) from None
        return folder

    return communicator().broadcast_object(claim)


def resume_job(home: Home, name: str | None, listener: Listener, claims: ExitStack) -> Job:
    """The unfinished run `name`, else the newest; its folder is claimed until `claims` is closed."""

    def open_job() -> Job:
        folder, document = unfinished_run(home, name, listener, "train")
        return Job(folder, reopen_run(home, folder, document, listener, "go on with"))

    processes = communicator()
    job = processes.main_first(open_job)
    if processes.is_main:
        claims.enter_context(claimed(job.folder, new=False))
    plan, start = job.run.plan, job.run.plan.start
    if start is None or processes.broadcast_object(lambda: job.has_checkpoint):
        return job
    reopened = processes.broadcast_object(lambda: start.reopened(home, listener))
    return replace(job, run=replace(job.run, plan=replace(plan, start=reopened)))


def known_job(
    home: Home,
    name: str,
    run: Run,
    varied: Mapping[str, Any],
    listener: Listener,
    claims: ExitStack,
) -> Job | None:
    """The run of this name, finished or to resume; None if there is none. RunError if its options differ from
    `run`'s."""
    folder = home.runs.path / name
    path = folder / RUN_MARKER

    def read() -> dict[str, Any] | None:
        document = read_run(path).settings if path.exists() else {}
        can_continue = document.get("complete") or (folder / CHECKPOINT).exists()
        return document if document and can_continue else None

    document = communicator().broadcast_object(read)
    if document is None:
        return None
    known = reopen_run(home, folder, document, Silent(warns=False), "go on with")
    if known.options() != run.options():
        raise RunError(
            f"there is a run named {name!r} already, with other options; give another --name"
        )
    if document["complete"]:
        listener.note(f"{name}: finished already")
        return Job(folder, run, varied=varied, result=document["result"])
    return replace(resume_job(home, name, listener, claims), varied=varied)


def unfinished_run(
    home: Home, name: str | None, listener: Listener, command: str
) -> tuple[Path, dict[str, Any]]:
    """The folder and document of the run `name`, else of the newest unfinished one that the command began."""
    runs = home.runs

    def read(name: str) -> tuple[dict[str, Any], str]:  # and the command that began it
        run = read_run(runs.find(name) / runs.marker)
        command = Finetune.command if run.solver.name == Finetune.name else SolverConfig.command
        return run.settings, command

    if name is None:
        for candidate in runs.unfinished():
            with suppress(RunError):  # a damaged run must not block others
                document, began_by = read(candidate)
                is_gone = command == "train" and document.get("streamed")  # its rows came once
                if began_by == command and not is_gone:
                    name = candidate
                    break
        if name is None:
            raise RunError(
                f"there is no unfinished run in {runs.path}; start one with `sae {command}`"
            )
        listener.note(f"going on with {name}")
    document, began_by = read(name)
    if document["complete"]:
        raise RunError(
            f"{name} is finished, so cannot be resumed; start from its SAE by `sae train --init {name}`"
        )
    if began_by != command:
        raise RunError(
            f"{name} was begun by another command; go on by `sae {began_by} --resume --name {name}`"
        )
    return runs.find(name), document


def train_run(job: Job, listener: Listener) -> dict[str, Any]:
    """Train a run to the end; the document is `sae train --json`'s."""
    if job.result is not None:
        return job.document(job.result)
    try:
        _begin(job, listener)
        document = _trained(job, listener)
    except (KeyboardInterrupt, PeerError):
        if job.has_checkpoint:
            listener.note(
                f"stopped; `sae {job.run.command} --resume --name {job.name}` goes on from its last checkpoint"
            )
        else:
            listener.note(f"stopped before the first checkpoint; nothing was saved of {job.name}")
        raise
    shown = doubts_at_start(job.run.plan)
    for warning in document["warnings"]:
        if warning not in shown:
            listener.warn(f"warning: {warning}")
    for note in document["notes"]:
        listener.warn(note)
    return document


def _begin(job: Job, listener: Listener) -> None:
    run = job.run
    if job.given is not None and communicator().is_main:
        # run.json marks a run that can be resumed, so it is last.
        run.write_config(job.folder, job.given)
        run.write(job.folder, None)
    listener.note(f"{job.name}: {run.summary}")
    for warning in doubts_at_start(run.plan):
        listener.warn(f"{job.name}: warning: {warning}")


def _trained(job: Job, listener: Listener) -> dict[str, Any]:
    run, processes = job.run, communicator()
    record = RunRecord(run, job.folder) if processes.is_main else Record()
    with listener.progress("training", run.plan.steps, "steps") as show:
        training = start_training(run.plan, record, show, processes)
        try:
            sae = run.train(training)
        except TrainingError as error:
            raise _explained(error, training) from error
        result = run.result(training, sae)
    if processes.is_main:
        run.write(job.folder, result)
    return job.document(result)


def _explained(error: TrainingError, training: Training) -> TrainingError:
    kept, steps = training.progress.step, training.plan.steps
    stops = f"the run stops at step {training.solver.steps:,} of {steps:,}"
    if not kept:
        return error.within(after=f"{stops}, and nothing of it is kept")
    return error.within(after=f"{stops}; its checkpoint of step {kept:,} is kept")
