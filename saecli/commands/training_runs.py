"""Trains the runs that `sae train` has planned, and tells what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import flag_of
from ..console import Step
from ..distributed import Communicator
from ..errors import PeerError, SaeError, TrainingError
from ..options import CONFIG, Given, Session, write_config
from ..tables import table
from ..training import CHECKPOINT, Loop, Record, Run, RunRecord, Trainer, doubts_at_start, read_metrics

SHOWN = ("test_fvu", "test_l0", "train_fvu", "dead_fraction", "lr", "alpha")  # of several runs, where they have it


@dataclass(frozen=True)
class Job:
    """A run to train.

    Args:
        folder: the run's folder, which is claimed.
        run: what to train, on which store.
        options: what was given, of a new run; None for one that is gone on with.
    """

    folder: Path
    run: Run
    options: Given | None = None


def train(session: Session, jobs: Sequence[Job], communicator: Communicator) -> None:
    """Train runs to their ends, several of them together, and print what came of them.

    Raises:
        KeyboardInterrupt: they were interrupted; those that have a checkpoint can be gone on with.
        SaeError: what ended the only run, or the first of several; the others go on to their ends.
    """
    try:
        loop = Loop([_begun(session, job, len(jobs), communicator) for job in jobs])
        documents = _trained(session, jobs, loop)
    except (KeyboardInterrupt, PeerError):
        for job in jobs:
            name = job.folder.name
            session.console.note(f"stopped; `sae train --resume --name {name}` goes on after the last whole epoch"
                                if (job.folder / CHECKPOINT).exists() else
                                f"stopped before the end of the first epoch; nothing was saved of {name}")
        raise
    if len(jobs) == 1:
        (job,), (document,) = jobs, documents
        _tell_notes(session, job, document)
        epochs = f"{document['epochs']} epoch{'s' * (document['epochs'] != 1)}"
        title = f"{document['run']}: {epochs}, {document['steps']:,} steps in {document['seconds']:.0f} s"
        measures = table(title, ["measure", "value", "rows"], [[key, value, _rows_of(key, document)] for key, value in
                                                               document["final"].items()])
        session.console.result(document, measures, f"saved in {document['path']}")
        return
    _print_several(session, jobs, loop, documents)


def _begun(session: Session, job: Job, trainings: int, communicator: Communicator) -> Trainer:
    """Write what a run folder begins with, and say what is trained there."""
    folder, run, plan = job.folder, job.run, job.run.plan
    if job.options is not None and communicator.is_main:
        _write_config(folder, run, job.options)  # before run.json, by which a run is known that can be gone on with
        run.write(folder, None)
    trainer = Trainer(plan, RunRecord(run, folder) if communicator.is_main else Record(), trainings=trainings,
                      communicator=communicator)
    session.console.note(f"{folder.name}: {plan.solver.name}, {plan.activation.name}, {plan.training.d_sae} latents "
                        f"on {run.store.d_in} dimensions, {trainer.train_rows.rows:,} training and "
                        f"{trainer.test_rows.rows:,} test rows, {trainer.steps:,} steps")
    for warning in doubts_at_start(plan):
        session.console.note(f"{folder.name}: warning: {warning}")
    return trainer


def _trained(session: Session, jobs: Sequence[Job], loop: Loop) -> list[dict[str, Any]]:
    """Train to the end, and finish the run folders; returns what is to be told of those that did not fail."""
    one = len(jobs) == 1
    title, total = ("training", loop.trainers[0].steps) if one else (f"training {len(jobs)} SAEs", None)
    with session.console.progress(title, total, "steps") as show:
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
             "data": job.run.store.name, "d_in": job.run.store.d_in, "d_sae": plan.training.d_sae, **result}
            for job, result in zip(finished, results, strict=True) for plan in [job.run.plan]]


def _print_several(session: Session, jobs: Sequence[Job], loop: Loop, documents: list[dict[str, Any]]) -> None:
    """Print what came of several runs; raises what ended the last of those that failed."""
    errors = {job.folder.name: (trainer, loop.errors[trainer]) for job, trainer in
              zip(jobs, loop.trainers, strict=True) if trainer in loop.errors}
    varied = [*jobs[0].options.varied]
    finished = [job for job in jobs if job.folder.name not in errors]
    done = [document | {"varied": dict(job.options.varied)} for job, document in zip(finished, documents, strict=True)]
    for job, document in zip(finished, done, strict=True):
        _tell_notes(session, job, document, f"{document['run']}: ")
    names = [name for name in SHOWN if name not in varied]
    rows = [[document["run"], *document["varied"].values(), *(document["final"].get(name) for name in names)]
            for document in done]
    title = (f"test: {_rows_of('test', done[0])} rows; train and dead: {_rows_of('train', done[0])} rows" if done
             else None)
    columns = ["run", *(name.replace("_", " ") for name in [*varied, *names])]
    session.console.result({"runs": done}, table(title, columns, rows), f"saved in {jobs[0].folder.parent}")
    for number, (name, (trainer, error)) in enumerate(errors.items(), 1):
        if not isinstance(error, SaeError):
            raise error
        found = error.within(name, _what_is_kept(trainer) if isinstance(error, TrainingError) else "")
        if number == len(errors):
            raise found from error
        session.console.note(found.sentence(flag_of))


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


def _what_is_kept(trainer: Trainer) -> str:
    """What is left of a run that has failed."""
    if not (kept := trainer.kept).epoch:
        return f"the run stops in epoch 1 of {trainer.epochs}, and nothing of it is kept"
    return (f"the run stops in epoch {kept.epoch + 1} of {trainer.epochs}; its checkpoint of epoch {kept.epoch}, step "
            f"{kept.step}, is kept")


def _rows_of(measure: str, document: dict[str, Any]) -> str:
    """The rows that one of a run's final measures is of, in words; nothing for a setting."""
    if measure.startswith("test"):
        return f"{document['rows_test']:,} held-out"
    return f"{document['rows_train']:,} training" if measure.startswith(("train", "dead")) else ""


def _tell_notes(session: Session, job: Job, document: dict[str, Any], before: str = "") -> None:
    """Say what there is to say at the end of a run; of its warnings those that were not said when it began."""
    said = doubts_at_start(job.run.plan)
    for warning in document["warnings"]:
        if warning not in said:
            session.console.note(f"{before}warning: {warning}")
    for note in document["notes"]:
        session.console.note(f"{before}{note}")


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
