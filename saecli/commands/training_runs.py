"""Trains the runs that `sae train` has planned, and tells what came of them."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__
from ..console import Step
from ..distributed import is_main
from ..errors import PeerError, SaeError, TrainingError
from ..tables import table
from ..training import CHECKPOINT, Record, Run, RunRecord, Share, Trainer, alone, doubts_at_start, in_step, read_metrics
from .config_file import CONFIG, write_config
from .options import Given, Session

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


def train(session: Session, jobs: Sequence[Job]) -> None:
    """Train runs to their ends, several of them together, and print what came of them.

    Raises:
        KeyboardInterrupt: they were interrupted; those that have a checkpoint can be gone on with.
        SaeError: what ended the only run, or the first of several; the others go on to their ends.
    """
    if len(jobs) == 1:
        (job,) = jobs
        document = _trained(session, job)
        _tell_notes(session, job, document)
        epochs = f"{document['epochs']} epoch{'s' * (document['epochs'] != 1)}"
        title = f"{document['run']}: {epochs}, {document['steps']:,} steps in {document['seconds']:.0f} s"
        measures = table(title, ["measure", "value", "rows"], [[key, value, _rows_of(key, document)] for key, value in
                                                               document["final"].items()])
        session.console.result(document, measures, f"saved in {document['path']}")
    else:
        _train_together(session, jobs)


def _train_together(session: Session, jobs: Sequence[Job]) -> None:
    """Train several runs from one reading of the store."""
    with session.console.progress(f"training {len(jobs)} SAEs", None, "steps") as show:
        progress = _Progress(show)
        outcomes = in_step([partial(_trained, session, job, len(jobs), progress) for job in jobs])
    errors = {job.folder.name: outcome.error for job, outcome in zip(jobs, outcomes, strict=True) if outcome.error}
    if any(isinstance(error, KeyboardInterrupt) for error in errors.values()):
        raise KeyboardInterrupt
    varied = [*jobs[0].options.varied]
    finished = [job for job in jobs if job.folder.name not in errors]
    done = [outcome.result | {"varied": dict(job.options.varied)}
            for job, outcome in zip(finished, (one for one in outcomes if not one.error), strict=True)]
    for job, document in zip(finished, done, strict=True):
        _tell_notes(session, job, document, f"{document['run']}: ")
    names = [name for name in SHOWN if name not in varied]
    rows = [[document["run"], *document["varied"].values(), *(document["final"].get(name) for name in names)]
            for document in done]
    title = (f"test: {_rows_of('test', done[0])} rows; train and dead: {_rows_of('train', done[0])} rows" if done
             else None)
    columns = ["run", *(name.replace("_", " ") for name in [*varied, *names])]
    session.console.result({"runs": done}, table(title, columns, rows), f"saved in {jobs[0].folder.parent}")
    for place, (name, error) in enumerate(errors.items()):
        if not isinstance(error, SaeError):
            raise error
        if place == len(errors) - 1:
            raise type(error)(f"{name}: {error}") from error
        session.console.note(f"{name}: {error}")


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


def _trained(session: Session, job: Job, trainings: int = 1, progress: _Progress | None = None,
             share: Share = alone) -> dict[str, Any]:
    """Train a run to its end; returns what is to be told of it.

    Args:
        session: the command's session.
        job: the run.
        trainings: how many are trained together.
        progress: the display that they share; None for one of its own.
        share: how passes over the rows are gone through.
    """
    folder, run, plan = job.folder, job.run, job.run.plan
    try:
        if job.options is not None and is_main():
            _write_config(folder, run, job.options)  # before run.json, by which a run is known that can be gone on with
            run.write(folder, None)
        trainer = Trainer(plan, RunRecord(run, folder) if is_main() else Record(), trainings)
        session.console.note(f"{folder.name}: {plan.solver.name}, {plan.activation.name}, {plan.training.d_sae} "
                             f"latents on {run.store.d_in} dimensions, {trainer.train_rows.rows:,} training and "
                             f"{trainer.test_rows.rows:,} test rows, {trainer.steps:,} steps")
        for warning in doubts_at_start(plan):
            session.console.note(f"{folder.name}: warning: {warning}")
        display = (session.console.progress("training", trainer.steps, "steps") if progress is None
                   else nullcontext(progress.of(folder.name)))
        with display as show:
            try:
                trained = trainer.train(show, share)
            except TrainingError as error:
                raise TrainingError(f"{error}; {_what_is_kept(trainer)}") from error
            result = trainer.result(trained)
        if is_main():
            from ..plots import loss_curves  # matplotlib takes a second to import

            loss_curves(folder / "loss.png", {folder.name: read_metrics(folder)})
            run.write(folder, result)  # last, so that whatever cuts this short, --resume completes it
    except (KeyboardInterrupt, PeerError):
        session.console.note(f"stopped; `sae train --resume --name {folder.name}` goes on after the last whole epoch"
                             if (folder / CHECKPOINT).exists() else
                             f"stopped before the end of the first epoch; nothing was saved of {folder.name}")
        raise
    return {"run": folder.name, "path": str(folder), "solver": plan.solver.name, "act": plan.activation.name,
            "data": run.store.name, "d_in": run.store.d_in, "d_sae": plan.training.d_sae, **result}


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
