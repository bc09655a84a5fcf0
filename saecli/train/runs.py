"""Training runs, each in its own folder; several together from one reading of the store."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..base import interrupts
from ..base.console import Listener, Step
from ..base.distributed import Communicator
from ..base.errors import PeerError, SaeError, TrainingError
from ..base.files import appearing_whole
from ..base.options import toml_lines
from .checkpoints import CHECKPOINT
from .jobs import Job
from .loop import Loop
from .plan import doubts_at_start
from .run import CONFIG, Run, RunRecord
from .trainer import Record, Trainer


def train_runs(jobs: Sequence[Job], listener: Listener,
               communicator: Communicator) -> tuple[list[dict[str, Any]], dict[str, Exception]]:
    """Train runs to the end.

    Args:
        jobs: the runs; several differ only in numeric options of the SAE and its solver.
        listener: shows progress, and at the end warnings and notes.
        communicator: of the processes that take part.

    Returns:
        The document that `sae train --json` prints for each run that did not fail; and with several runs, the errors of
        the others, by name.

    Raises:
        KeyboardInterrupt: they were interrupted; those with a checkpoint can be resumed.
        SaeError: the error of the only run.
    """
    try:
        loop = Loop([_begun(job, len(jobs), listener, communicator) for job in jobs])
        documents = _trained(jobs, loop, listener)
    except (KeyboardInterrupt, PeerError) as stop:
        interrupts.told(stop)
        for job in jobs:
            name = job.folder.name
            listener.note(f"stopped; `sae train --resume --name {name}` goes on after the last whole epoch"
                          if (job.folder / CHECKPOINT).exists() else
                          f"stopped before the end of the first epoch; nothing was saved of {name}")
        raise
    finished = [job for job, trainer in zip(jobs, loop.trainers, strict=True) if trainer not in loop.errors]
    for job, document in zip(finished, documents, strict=True):
        _tell_notes(job, document, listener, f"{document['run']}: " if len(jobs) > 1 else "")
    return documents, {job.folder.name: _with_what_is_kept(job.folder.name, trainer, loop.errors[trainer])
                       for job, trainer in zip(jobs, loop.trainers, strict=True) if trainer in loop.errors}


def _begun(job: Job, trainings: int, listener: Listener, communicator: Communicator) -> Trainer:
    """Write a run folder's first files, and print what is trained there."""
    folder, run, plan = job.folder, job.run, job.run.plan
    if job.given is not None and communicator.is_main:
        _write_config(folder, run, job.given)  # before run.json, which marks a run that can be resumed
        run.write(folder, None)
    if job.lengthened is not None:
        listener.note(f"{folder.name}: {plan.training.epochs} epochs in place of {job.lengthened}; the learning rate "
                      "goes on where it would be in a run of so many")
        if communicator.is_main:
            _lengthen_config(folder, job.lengthened, plan.training.epochs)
            run.write(folder, None)
    trainer = Trainer(plan, RunRecord(run, folder, listener) if communicator.is_main else Record(), trainings=trainings,
                      communicator=communicator)
    listener.note(f"{folder.name}: {plan.solver.name}, {plan.activation.name}, {plan.training.d_sae} latents "
                  f"on {run.stores.d_in} dimensions, {trainer.train_rows.rows:,} training and "
                  f"{trainer.test_rows.rows:,} test rows, {trainer.steps:,} steps"
                  + ("" if plan.training.precision == "float32" else f", products in {plan.training.precision}")
                  + (f", from {plan.start.name}" if plan.start else ""))
    for warning in doubts_at_start(plan):
        listener.note(f"{folder.name}: warning: {warning}")
    return trainer


def _trained(jobs: Sequence[Job], loop: Loop, listener: Listener) -> list[dict[str, Any]]:
    """Train to the end, and finish the run folders; returns the documents of those that did not fail."""
    one = len(jobs) == 1
    title, total = ("training", loop.trainers[0].steps) if one else (f"training {len(jobs)} SAEs", None)
    with listener.progress(title, total, "steps") as show:
        progress = _Progress(show)
        for job, trainer in zip(jobs, loop.trainers, strict=True):
            trainer.show = show if one else progress.of(job.folder.name)
        try:
            saes = loop.train()
        except TrainingError as error:
            raise error.within(after=_what_is_kept(loop.trainers[0])) from error
        results = loop.results(saes) if saes else []
    finished = [job for job, trainer in zip(jobs, loop.trainers, strict=True) if trainer not in loop.errors]
    if loop.trainers[0].communicator.is_main:
        for job, result in zip(finished, results, strict=True):
            job.run.write(job.folder, result)
    return [{"run": job.folder.name, "path": str(job.folder), "solver": plan.solver.name, "act": plan.activation.name,
             "data": job.run.stores.name, "d_in": job.run.stores.d_in, "d_sae": plan.training.d_sae, **result,
             **({} if one else {"varied": dict(job.varied)})}
            for job, result in zip(finished, results, strict=True) for plan in [job.run.plan]]


class _Progress:
    """Progress of several trainings on one display."""

    def __init__(self, show: Step) -> None:
        self._show = show
        self._done: dict[str, float] = {}

    def of(self, name: str) -> Step:
        """The `show` of one of them."""

        def step(done: float, words: str = "") -> None:
            self._done[name] = done
            self._show(sum(self._done.values()), f"{name}: {words}")

        return step


def _with_what_is_kept(name: str, trainer: Trainer, error: Exception) -> Exception:
    """The error of one of several runs, with its name and a clause on what is left of it."""
    if not isinstance(error, SaeError):
        return error
    return error.within(name, _what_is_kept(trainer) if isinstance(error, TrainingError) else "")


def _what_is_kept(trainer: Trainer) -> str:
    """A clause on what is left of a failed run."""
    if not (kept := trainer.kept).epoch:
        return f"the run stops in epoch 1 of {trainer.epochs}, and nothing of it is kept"
    return (f"the run stops in epoch {kept.epoch + 1} of {trainer.epochs}; its checkpoint of epoch {kept.epoch}, step "
            f"{kept.step}, is kept")


def _tell_notes(job: Job, document: Mapping[str, Any], listener: Listener, before: str) -> None:
    """Print a run's notes, and its warnings that were not printed when it began."""
    said = doubts_at_start(job.run.plan)
    for warning in document["warnings"]:
        if warning not in said:
            listener.note(f"{before}warning: {warning}")
    for note in document["notes"]:
        listener.note(f"{before}{note}")


def _write_config(folder: Path, run: Run, given: Mapping[str, Any]) -> None:
    """Write a file for `--config` that repeats the run: the options given, and as comments those filled in."""
    plan = run.plan
    chosen = {"solver": plan.solver.name, "act": plan.activation.name, **run.stores.options(),
              "precision": plan.training.precision}  # of auto's, which is another on another device
    given = {name: value for name, value in given.items() if name != "precision"}
    if plan.start is not None:
        chosen |= {"init": plan.start.name, "init_hash": plan.start.hash}
    settled = plan.training.to_json() | plan.solver.to_json() | plan.activation.to_json()
    if settled["sparsity"] == "none":
        del settled["sparsity_weight"]
    heading = [f"sae train --config {CONFIG} trains this run again, to the same weights, on the same rows.",
               f"Options on the command line win. Written by saecli {version('saecli')}."]
    filled = {name: value for name, value in settled.items() if name not in {*given, *chosen}}
    lines = [*(f"# {line}" for line in heading), "", *toml_lines({**chosen, **given}), "",
             "# Not given, and so by default:", *(f"# {line}" for line in toml_lines(filled))]
    with appearing_whole(folder / CONFIG) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lengthen_config(folder: Path, had: int, epochs: int) -> None:
    """Have the file for `--config` say how many epochs the run has now, and that it was lengthened."""
    text = (folder / CONFIG).read_text(encoding="utf-8")
    note = f"# Lengthened from {had} epochs to {epochs}: trained again in one, the weights will be others.\n"
    text = re.sub(r"^(# )?epochs = \d+$", f"epochs = {epochs}", note + text, count=1, flags=re.MULTILINE)
    with appearing_whole(folder / CONFIG) as temporary:
        temporary.write_text(text, encoding="utf-8")
