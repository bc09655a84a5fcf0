"""Training runs to their ends, each in a folder of its own; several together from one reading of the store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import toml_lines
from ..console import Listener, Step
from ..distributed import Communicator
from ..errors import PeerError, SaeError, TrainingError
from ..files import appearing_whole
from .checkpoints import CHECKPOINT, read_metrics
from .doubts import doubts_at_start
from .jobs import Job
from .loop import Loop
from .run import CONFIG, Run, RunRecord
from .trainer import Record, Trainer


def train_runs(jobs: Sequence[Job], listener: Listener,
               communicator: Communicator) -> tuple[list[dict[str, Any]], dict[str, Exception]]:
    """Train runs to their ends.

    Args:
        jobs: the runs; several differ in numbers of the SAE and its solver alone.
        listener: told how far they have come, and at the end what their users should know.
        communicator: reaches the processes that take part.

    Returns:
        For each run that did not fail what `sae train --json` prints of it; and of several, what ended the others, by
        their names.

    Raises:
        KeyboardInterrupt: they were interrupted; those that have a checkpoint can be gone on with.
        SaeError: what ended the only run.
    """
    try:
        loop = Loop([_begun(job, len(jobs), listener, communicator) for job in jobs])
        documents = _trained(jobs, loop, listener)
    except (KeyboardInterrupt, PeerError):
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
    """Write what a run folder begins with, and say what is trained there."""
    folder, run, plan = job.folder, job.run, job.run.plan
    if job.given is not None and communicator.is_main:
        _write_config(folder, run, job.given)  # before run.json, by which a run is known that can be gone on with
        run.write(folder, None)
    trainer = Trainer(plan, RunRecord(run, folder) if communicator.is_main else Record(), trainings=trainings,
                      communicator=communicator)
    listener.note(f"{folder.name}: {plan.solver.name}, {plan.activation.name}, {plan.training.d_sae} latents "
                  f"on {run.store.d_in} dimensions, {trainer.train_rows.rows:,} training and "
                  f"{trainer.test_rows.rows:,} test rows, {trainer.steps:,} steps")
    for warning in doubts_at_start(plan):
        listener.note(f"{folder.name}: warning: {warning}")
    return trainer


def _trained(jobs: Sequence[Job], loop: Loop, listener: Listener) -> list[dict[str, Any]]:
    """Train to the end, and finish the run folders; returns what is to be told of those that did not fail."""
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
        from ..plots import loss_curves  # matplotlib takes a second to import

        for job, result in zip(finished, results, strict=True):
            loss_curves(job.folder / "loss.png", {job.folder.name: read_metrics(job.folder)})
            job.run.write(job.folder, result)  # last, so that whatever cuts this short, --resume completes it
    return [{"run": job.folder.name, "path": str(job.folder), "solver": plan.solver.name, "act": plan.activation.name,
             "data": job.run.store.name, "d_in": job.run.store.d_in, "d_sae": plan.training.d_sae, **result,
             **({} if one else {"varied": dict(job.varied)})}
            for job, result in zip(finished, results, strict=True) for plan in [job.run.plan]]


class _Progress:
    """How far several trainings have come, on one display."""

    def __init__(self, show: Step) -> None:
        self._show = show
        self._done: dict[str, float] = {}

    def of(self, name: str) -> Step:
        """What one of them tells its steps to."""

        def step(done: float, words: str = "") -> None:
            self._done[name] = done
            self._show(sum(self._done.values()), f"{name}: {words}")

        return step


def _with_what_is_kept(name: str, trainer: Trainer, error: Exception) -> Exception:
    """What ended one of several runs, with its name and what is left of it."""
    if not isinstance(error, SaeError):
        return error
    return error.within(name, _what_is_kept(trainer) if isinstance(error, TrainingError) else "")


def _what_is_kept(trainer: Trainer) -> str:
    """What is left of a run that has failed."""
    if not (kept := trainer.kept).epoch:
        return f"the run stops in epoch 1 of {trainer.epochs}, and nothing of it is kept"
    return (f"the run stops in epoch {kept.epoch + 1} of {trainer.epochs}; its checkpoint of epoch {kept.epoch}, step "
            f"{kept.step}, is kept")


def _tell_notes(job: Job, document: Mapping[str, Any], listener: Listener, before: str) -> None:
    """Say what there is to say at the end of a run; of its warnings those that were not said when it began."""
    said = doubts_at_start(job.run.plan)
    for warning in document["warnings"]:
        if warning not in said:
            listener.note(f"{before}warning: {warning}")
    for note in document["notes"]:
        listener.note(f"{before}{note}")


def _write_config(folder: Path, run: Run, given: Mapping[str, Any]) -> None:
    """Write what `--config` takes to train the same again: what was given, and as comments what was filled in."""
    plan = run.plan
    chosen = {"solver": plan.solver.name, "act": plan.activation.name, "data": run.store.name,
              "data_hash": run.store.meta.request_hash}
    settled = plan.training.to_json() | plan.solver.to_json() | plan.activation.to_json()
    if settled["sparsity"] == "none":
        del settled["sparsity_weight"]
    heading = [f"sae train --config {CONFIG} trains this run again, to the same weights, on the same rows.",
               f"Options on the command line win. Written by saecli {__version__}."]
    filled = {name: value for name, value in settled.items() if name not in given}
    lines = [*(f"# {line}" for line in heading), "", *toml_lines({**chosen, **given}), "",
             "# Not given, and so by default:", *(f"# {line}" for line in toml_lines(filled))]
    with appearing_whole(folder / CONFIG) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
