"""One SAE in training: its solver, what it measures as it goes, and what is kept of each epoch."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..console import Step
from ..devices import device_named
from ..dictionary import SAE
from ..distributed import ALONE, Communicator
from ..errors import ConfigError, RunError, TrainingError
from ..memory import available_memory
from ..metrics import reconstruction
from ..solvers import Solver, StepReport, Task
from ..torchrun import local_world
from .checkpoints import Progress
from .config import DTYPES, Plan
from .doubts import doubts_at_end, doubts_at_start
from .rows import SUMMED_ROWS, Normalisation, TrainingRows, fit_normalisation, fitted_learning_rate, initial_sae

Measures = dict[str, Any]  # as of `metrics.reconstruction`

LOG_EVERY = 20  # steps between lines of measures, and between looks at whether training diverges
# Mean squared error over that of 0 for every row, above which training diverges. Steps against a decoder solved without
# a ridge reached 2e4 on the paper's settings, from which the next decoder step comes back.
DIVERGED = 1e6
ADVICE = "lower {lr}, or look at the data"


class Record:
    """What is kept of a training while it goes on: nothing. Subclasses keep it."""

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        """The state and the progress to go on from; None to begin."""
        return None

    def begin(self, step: int, epochs: int) -> None:
        """Training begins, or goes on after a step: what was kept of later ones is void. It will have so many
        epochs."""

    def line(self, line: dict[str, Any]) -> None:
        """Measures at a step, which is among them."""

    def epoch(self, sae: SAE, state: dict[str, Tensor], progress: Progress, test: Measures | None) -> None:
        """An epoch is over.

        Args:
            sae: the SAE as it stands, acting on raw activations.
            state: all that training goes on from.
            progress: how far it has come.
            test: what the SAE measures on the test rows.
        """

    def end(self) -> None:
        """Training is over, or stopped."""


class Trainer:
    """Trains one SAE, from its start or from its last checkpoint; `loop.train` pushes the rows.

    Args:
        plan: what to train.
        record: what is kept of it meanwhile.
        show: told the steps done, and a few words on how it goes.
        trainings: how many share the memory.
        communicator: reaches the processes that train on other parts of each batch.

    Raises:
        ConfigError: the solver needs more memory than is free, the device is unknown, or several processes cannot
            do together what is planned.
    """

    def __init__(self, plan: Plan, record: Record, show: Step = lambda done, words="": None, trainings: int = 1,
                 communicator: Communicator = ALONE) -> None:
        self.plan, self.record, self.show, self.communicator = plan, record, show, communicator
        training = plan.training
        self.train_rows, self.test_rows = plan.train_rows, plan.test_rows
        self.device = device_named(training.device)
        self._demand_processes(trainings)
        self.memory = self._demand_memory(trainings)
        self.batches = training.epoch_batches(self.train_rows.rows)
        per_epoch = self.batches * plan.solver.steps_per_batch
        self.steps = training.steps or training.epochs * per_epoch
        self.epochs = math.ceil(self.steps / per_epoch)
        self.kept = Progress()  # as of the last checkpoint
        self.rows: TrainingRows | None = None  # once it has begun

    def begin(self, shared: TrainingRows | None = None) -> None:
        """Make the solver, or bring it back from its checkpoint, on rows as another training that shares them has begun
        on them, so that they are not measured and sampled anew; a checkpoint has its own normalisation."""
        training = self.plan.training
        checkpoint = self.communicator.broadcast_object(self.record.checkpoint)
        self.rows = shared if checkpoint is None and shared else self._normalised_rows(checkpoint and checkpoint[0])
        sample, self.normalisation = self.rows.sample, self.rows.normalisation
        self.worst = DIVERGED * max(1.0, (sample.square().sum(1).mean() / self.normalisation.variance).item())
        lr = fitted_learning_rate(sample) if training.lr == "auto" else training.lr
        task = Task(self.train_rows.rows, self.steps, lr, training.sparsity, training.sparsity_weight,
                    sample, training.smoothing, training.seed, self.batches,
                    training.sparsity_warm_up, training.lr_warm_up, training.lr_decay, self.memory)
        initial = initial_sae(self.plan.activation, training.d_sae, sample, training.seed)
        self.solver: Solver = self.plan.solver.build(initial, task, self.communicator)
        self.progress = Progress()
        if checkpoint is not None:
            demand_shapes(checkpoint[0], {name: tuple(own.shape) for name, own in self.solver.state().items()})
            self.solver.restore(checkpoint[0])
            self.progress = replace(checkpoint[1])
        self.kept = replace(self.progress)
        self._pending: list[StepReport] = []
        self._seen = 0
        self.test: Measures | None = None
        self.record.begin(self.progress.step, self.epochs)

    def _normalised_rows(self, checkpoint: Mapping[str, Tensor] | None) -> TrainingRows:
        """The training rows, normalised as in a checkpoint, or as they are measured now."""
        training, d_in = self.plan.training, self.train_rows.d_in
        if checkpoint is None:
            spread = self.communicator.broadcast_object(self.train_rows.spread)
            normalisation = fit_normalisation(training.normalize, spread, DTYPES[training.dtype])
        else:
            shapes = {"mean": (d_in,), "scale": (d_in,), "variance": ()}
            demand_shapes(checkpoint, {f"normalisation.{name}": shape for name, shape in shapes.items()})
            normalisation = Normalisation(**{name: checkpoint[f"normalisation.{name}"] for name in shapes})
        return TrainingRows(self.train_rows, normalisation.to(self.device), training.batch_size,
                            training.shuffle_seed, self.communicator)

    @property
    def sae(self) -> SAE:
        """The SAE as it stands, acting on raw activations."""
        return on_raw_rows(self.solver.sae(), self.normalisation)

    def begin_epoch(self) -> None:
        """A pass over the rows begins."""
        self._began = time.monotonic()
        self.solver.begin_epoch()

    def step(self, batch: Batch) -> None:
        """Take a batch of the epoch."""
        self._look(self.solver.step(batch))

    def end_pass(self) -> None:
        """End a decoder step's pass."""
        try:
            self.solver.end_pass()
        except TrainingError:
            if self.communicator.world_size == 1:  # of several the others, which have not failed, do not look
                self._look([], now=True)  # a loss that is no number explains the failure better
            raise

    def end_epoch(self) -> None:
        """The pass over the rows is over; every loss has been looked at when this returns."""
        self._look(self.solver.end_epoch(), now=True)

    def keep(self, sae: SAE, test: Measures | None) -> None:
        """Keep the epoch, its decoder step included: the SAE that it has come to, and what that measures on the test
        rows, where there are any."""
        progress, solver = self.progress, self.solver
        progress.rows, self._seen = progress.rows + self._seen, 0
        progress.epoch, progress.step = progress.epoch + 1, solver.steps
        progress.seconds += time.monotonic() - self._began
        self.test = test
        tested = {f"test_{name}": test[name] for name in ("fvu", "l0")} if test else {}
        self.record.line({"step": solver.steps, "epoch": progress.epoch, **tested, **solver.record()})
        state = {f"normalisation.{name}": tensor for name, tensor in self.normalisation.tensors().items()}
        self.record.epoch(sae, solver.state() | state, progress, test)
        self.kept = replace(progress)

    def demand_convergence(self, sae: SAE) -> None:
        """Refuse what an epoch has come to, before it is kept, where training has diverged.

        Its last steps can do that, which no loss has shown yet. The decoder step can mend it, so that the SAE as it
        stands is measured, on the sample of training rows: test rows may be far off for want of training rows alone.

        Args:
            sae: what the epoch has come to, acting on raw rows.

        Raises:
            TrainingError: a weight is NaN or infinite, or the error too large.
        """
        solver = self.solver
        if any(not tensor.isfinite().all() for tensor in sae.tensors().values()):
            raise TrainingError(None, "the weights became NaN or infinite at step {step}", ADVICE, step=solver.steps)
        error = reconstruction(solver.dictionary, [solver.task.sample])["mse"] * sae.d_in
        demand_no_worse(error / self.normalisation.variance.item(), self.worst, f"at step {solver.steps}")

    def result(self, train: Measures, test: Measures) -> dict[str, Any]:
        """What came of the training.

        Args:
            train: what its SAE measures on the training rows.
            test: the same on the test rows.

        Returns:
            `rows_train, rows_test, epochs, steps, seconds, rows_per_second, warnings, notes, final`.
        """
        solver, progress = self.solver, self.progress
        warnings = [*doubts_at_start(self.plan), *doubts_at_end(self.plan, train, test)]
        rate = {} if solver.optimizer.to_tolerance else {"lr": solver.task.lr}
        return {
            "rows_train": self.train_rows.rows, "rows_test": self.test_rows.rows, "epochs": progress.epoch,
            "steps": progress.step, "seconds": progress.seconds,
            "rows_per_second": progress.rows / max(progress.seconds, 1e-9), "warnings": warnings,
            "notes": solver.notes(),
            "final": {"test_fvu": test["fvu"], "test_mse": test["mse"], "test_l0": test["l0"],
                      "train_fvu": train["fvu"], "dead_fraction": train["silent_fraction"], **rate, **solver.record()}}

    def _demand_processes(self, trainings: int) -> None:
        """Refuse what several processes cannot do together."""
        world_size, training = self.communicator.world_size, self.plan.training
        if world_size == 1:
            return
        if trainings > 1:
            raise ConfigError(None, "options given several times train {trainings} SAEs in one process: expected one, "
                              "got {world_size}", "run it without torchrun, or give each value to a command of its own",
                              trainings=trainings, world_size=world_size)
        if training.batch_size < world_size:
            raise ConfigError("batch_size", "must be at least the number of processes, {world_size}, which share every "
                              "batch, got {got}", world_size=world_size, got=training.batch_size)
        if training.sparsity == "kl":
            raise ConfigError("sparsity", "kl takes each batch as a whole, since its firing rates are those of one: "
                              "expected one process, got {world_size}", "run it without torchrun, or use another "
                              "penalty", world_size=world_size)

    def _demand_memory(self, trainings: int) -> int:
        """The bytes that are free for the solver, which is one of several trainings'."""
        solver, d_sae = self.plan.solver, self.plan.training.d_sae
        batch = 3 * 4 * max(self.plan.training.batch_size, SUMMED_ROWS) * d_sae  # codes, their gradients, a copy
        needed = solver.memory(self.train_rows.rows, self.plan.training.batch_size, self.train_rows.d_in, d_sae) + batch
        free = (torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else
                available_memory() // (local_world() if self.communicator.world_size > 1 else 1))
        free = int(self.communicator.all_reduce(torch.tensor([free], dtype=torch.float64), "min").item()) // trainings
        if needed > free:
            beside = "" if trainings == 1 else f" for each of {trainings} trainings"
            raise ConfigError("solver", "{name} with {d_sae} {latents} needs {needed:.1f} GiB of memory, {free:.1f} "
                              "GiB are free{beside}", solver.memory_advice, name=solver.name, latents=d_sae,
                              needed=needed / 2**30, free=free / 2**30, beside=beside)
        return free - batch

    def _look(self, reports: Sequence[StepReport], now: bool = False) -> None:
        """Log reports, `LOG_EVERY` at a time, or what there is of them now."""
        for report in reports:
            self._seen += report.rows
            self._pending.append(report)
            if len(self._pending) == LOG_EVERY:
                self._log()
        if now and self._pending:
            self._log()

    def _log(self) -> None:
        pending, self._pending = self._pending, []
        line = averages(pending, self.normalisation.variance * self.solver.smoothing.inflation, self.communicator)
        self.record.line(line)
        if len(pending) == LOG_EVERY:  # fewer may hold one batch of outliers, and the epoch's end looks again
            demand_no_worse(line["batch_fvu"], self.worst, f"over steps {pending[0].step} to {line['step']}")
        seconds = self.progress.seconds + time.monotonic() - self._began
        rate = (self.progress.rows + self._seen) / max(seconds, 1e-9)
        self.show(self.solver.steps, f"loss {line['loss']:.4g} fvu {line['batch_fvu']:.4f} l0 {line['batch_l0']:.1f} "
                                     f"{rate:,.0f} rows/s")


def averages(reports: list[StepReport], variance: Tensor, communicator: Communicator = ALONE) -> dict[str, Any]:
    """The means over the rows of some consecutive batches, as a line of `metrics.jsonl`.

    Args:
        reports: the reports, of this process' parts of the batches.
        variance: of the normalised rows, smoothed as the batches were, which squared errors are divided by.
        communicator: reaches the processes with the other parts.

    Raises:
        TrainingError: one of the losses is NaN or infinite; names the step.
    """
    parts = torch.stack([torch.stack([report.loss, report.squared_error, report.l0.to(report.loss)])
                         for report in reports])
    losses, errors, l0s = communicator.all_reduce(parts.double()).unbind(1)
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = reports[int(bad[0])]
        raise TrainingError(None, "the loss became {loss} at step {step}", ADVICE, loss=first.loss.item(),
                            step=first.step)
    rows = torch.tensor([report.rows for report in reports]).to(losses)
    weights = rows / rows.sum()
    return {"step": reports[-1].step, "loss": (weights @ losses).item(),
            "batch_fvu": (weights @ errors / variance).item(), "batch_l0": (weights @ l0s).item()}


def demand_no_worse(fvu: float, worst: float, when: str) -> None:
    """Refuse reconstructions far worse than none: descent that comes back from there ends worse than it could have.

    Args:
        fvu: squared error over the variance of the training rows.
        worst: the highest that is let pass.
        when: the steps that it is of.

    Raises:
        TrainingError: it is above that, or no number.
    """
    if not fvu <= worst:
        raise TrainingError(None, "training diverged: the train FVU is {fvu:.3g} {when}, expected {worst:,.0f} at most",
                            ADVICE, fvu=fvu, when=when, worst=worst)


def demand_shapes(kept: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint that is not of this training, as after an edit of either; RunError where one of these tensors
    is not in it, or of another shape."""
    for name, shape in shapes.items():
        got = tuple(kept[name].shape) if name in kept else None
        if got != shape:
            raise RunError(f"cannot go on from a checkpoint of another training: expected {name} of shape {shape}, got "
                           f"{'none' if got is None else got}; remove the run's checkpoint.safetensors to train it "
                           f"from the start")


def on_raw_rows(sae: SAE, normalisation: Normalisation) -> SAE:
    """The SAE with the normalisation folded in, computed in float64."""
    folded = sae.copy_to(torch.float64).on_raw_rows(normalisation.mean.double(), normalisation.scale.double())
    return folded.copy_to(sae.W_enc.dtype)
