"""One SAE in training: its solver, its measures, and the state kept of each epoch."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..base.console import Step
from ..base.devices import device_named, free_memory
from ..base.distributed import ALONE, Communicator
from ..base.errors import ConfigError, RunError, TrainingError
from ..base.precision import demand_precision
from ..base.torchrun import local_world
from ..sae.batch import Batch
from ..sae.dictionary import SAE
from ..sae.metrics import reconstruction
from ..store.rows import RowSource
from .array_rows import HeldRows, held_bytes
from .checkpoints import Progress
from .normalisation import Normalisation, fit_normalisation, on_raw_rows
from .plan import Plan, doubts_at_end, doubts_at_start
from .rows import SUMMED_ROWS, TrainingRows, fitted_learning_rate, initial_sae
from .solver import Solver
from .task import StepReport, Task

Measures = dict[str, Any]  # of `metrics.reconstruction`

LOG_EVERY = 20  # steps between lines of measures, and between checks for divergence
# Mean squared error, over the error of reconstructing every row as 0, above which training has diverged. Steps against
# a decoder solved without a ridge reached 2e4 on the paper's settings, from which the next decoder step recovers.
DIVERGED = 1e6
MOST_TAKEN = 0.8  # of a device's free memory, by the solver and rows that are kept there
ADVICE = "lower --lr, or look at the data"


class Record:
    """Keeps nothing of a training; subclasses write files."""

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        """The state and the progress to resume from; None to start."""
        return None

    def begin(self, step: int, epochs: int) -> None:
        """Training starts, or resumes after a step, and what was kept of later steps is void; it has `epochs` in
        all."""

    def line(self, line: dict[str, Any]) -> None:
        """A line of measures, with its `step`."""

    def epoch(self, sae: SAE, state: dict[str, Tensor], progress: Progress, test: Measures | None) -> None:
        """An epoch is over.

        Args:
            sae: the current SAE, acting on raw activations.
            state: all tensors needed to resume.
            progress: of training.
            test: the SAE's measures on the test rows; None without test rows.
        """

    def end(self) -> None:
        """Training is over, or stopped."""


class Trainer:
    """Trains one SAE, from the start or from its last checkpoint; `Loop.train` pushes the rows.

    Args:
        plan: what to train.
        record: keeps checkpoints and measures.
        show: called with the steps done and a few words on the measures.
        trainings: number of trainings that divide the memory.
        communicator: of the processes that train on other parts of each batch.

    Raises:
        ConfigError: the solver needs more memory than is free, the device is unknown, or several processes cannot
            carry out the plan.
    """

    def __init__(self, plan: Plan, record: Record, show: Step = lambda done, words="": None, trainings: int = 1,
                 communicator: Communicator = ALONE) -> None:
        self.plan, self.record, self.show, self.communicator = plan, record, show, communicator
        training = plan.training
        self.train_rows, self.test_rows = plan.train_rows, plan.test_rows
        self.device = device_named(training.device)
        demand_precision(training.precision, self.device)
        self._demand_processes(trainings)
        self.memory, self.holds = self._demand_memory(trainings)
        self.batches, self.steps, self.epochs = plan.batches, plan.steps, plan.epochs
        self.kept = Progress()  # as of the last checkpoint
        self.rows: TrainingRows | None = None  # once it has begun

    def begin(self, shared: TrainingRows | None = None) -> None:
        """Make the solver, or restore it from its checkpoint.

        Args:
            shared: the rows of another training on the same rows, so that they are not measured and sampled again;
                not used with a checkpoint, which has its own normalisation.
        """
        training = self.plan.training
        checkpoint = self.communicator.broadcast_object(self.record.checkpoint)
        self.rows = shared if checkpoint is None and shared else self._normalised_rows(checkpoint and checkpoint[0])
        sample, self.normalisation = self.rows.sample, self.rows.normalisation
        self.worst = DIVERGED * max(1.0, (sample.y.square().sum(1).mean() / self.normalisation.variance).item())
        expected = self.plan.activation.expected_l0(self.train_rows.d_in) / training.d_sae  # firing rate
        lr = fitted_learning_rate(sample.x, training.batch_size * expected) if training.lr == "auto" else training.lr
        B = self.rows.regression
        task = Task(training, self.train_rows.rows, self.steps, lr, sample, B, self.plan.held, self.memory)
        activation, start = self.plan.activation, self.plan.start
        places = self.train_rows.places
        initial = (initial_sae(activation, training.d_sae, sample, training.seed, training.nested, B, training.skip,
                               places)
                   if start is None or checkpoint is not None  # which has all that a start gives
                   else start.initial(activation, sample.x, self.normalisation, training.nested, training.skip,
                                      places))
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
        """The training rows, normalised as in a checkpoint, or by their spread."""
        training, rows = self.plan.training, self.train_rows
        if checkpoint is None:
            spread = self.communicator.broadcast_object(rows.spread)
            normalisation = fit_normalisation(training.normalize, spread, getattr(torch, training.dtype), rows.widths,
                                              rows.d_target)
        else:
            width = rows.d_in + rows.d_target
            shapes = {"mean": (width,), "scale": (width,), "variance": ()}
            demand_shapes(checkpoint, {f"normalisation.{name}": shape for name, shape in shapes.items()})
            normalisation = Normalisation(**{name: checkpoint[f"normalisation.{name}"] for name in shapes},
                                          d_in=rows.d_in)
        return TrainingRows(self._rows_for_device(), normalisation.to(self.device), training.batch_size,
                            training.shuffle_seed, self.communicator)

    def _rows_for_device(self) -> RowSource | HeldRows:
        """The training rows, as they reach a GPU at the least cost: kept there, or as stored and converted there."""
        if self.device.type == "cpu" or not self.train_rows.inputs:
            return self.train_rows
        return HeldRows(self.train_rows, self.device) if self.holds else self.train_rows.as_stored()

    @property
    def sae(self) -> SAE:
        """The current SAE, acting on raw activations."""
        return on_raw_rows(self.solver.sae(), self.normalisation)

    def begin_epoch(self) -> None:
        """Begin a pass over the rows."""
        self._began = time.monotonic()
        self.solver.begin_epoch()

    def step(self, batch: Batch) -> None:
        """Train on a batch of the epoch."""
        self._look(self.solver.step(batch))

    def end_pass(self) -> bool:
        """End a decoder step's pass; False if it has to be made again."""
        try:
            return self.solver.end_pass()
        except TrainingError:
            if self.communicator.world_size == 1:  # else the others, which have not failed, would not all-reduce
                self._look([], now=True)  # a NaN loss explains the failure better
            raise

    def end_epoch(self) -> None:
        """End the pass over the rows; every loss has been checked when this returns."""
        self._look(self.solver.end_epoch(), now=True)

    def keep(self, sae: SAE, test: Measures | None) -> None:
        """Keep the epoch, after its decoder step: the SAE, and its measures on the test rows, if there are any."""
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
        """Refuse to keep the epoch if training has diverged.

        The last steps may have diverged without a loss that shows it, and the decoder step may have recovered, so the
        current SAE is measured: on the sample of training rows, since the error on test rows may also be large for lack
        of training rows.

        Args:
            sae: the current SAE, acting on raw rows.

        Raises:
            TrainingError: a weight is NaN or infinite, or the error too large.
        """
        solver = self.solver
        if any(not tensor.isfinite().all() for tensor in sae.tensors().values()):
            raise TrainingError(f"the weights became NaN or infinite at step {solver.steps}; {ADVICE}")
        sample = solver.task.sample.x if solver.task.B is None else torch.cat([solver.task.sample.x,
                                                                               solver.task.sample.y], 1)
        error = reconstruction(solver.dictionary, [sample])["mse"] * sae.d_out
        demand_no_worse(error / self.normalisation.variance.item(), self.worst, f"at step {solver.steps}")

    def result(self, train: Measures, test: Measures) -> dict[str, Any]:
        """The results of the training.

        Args:
            train: the SAE's measures on the training rows.
            test: the same on the test rows.

        Returns:
            `rows_train, rows_counted, rows_test, epochs, steps, seconds, rows_per_second, warnings, notes,
            decoder_steps, final`; rows counted are those that `train` is of, of a model's rows the last.
        """
        solver, progress = self.solver, self.progress
        warnings = [*doubts_at_start(self.plan), *doubts_at_end(self.plan, train, test)]
        return {
            "rows_train": self.train_rows.rows, "rows_counted": train["rows"], "rows_test": self.test_rows.rows,
            "epochs": progress.epoch, "steps": progress.step, "seconds": progress.seconds,
            "rows_per_second": progress.rows / max(progress.seconds, 1e-9), "warnings": warnings,
            "notes": solver.notes(), "decoder_steps": [asdict(one) for one in solver.passes.values()],
            "final": {"test_fvu": test["fvu"], "test_mse": test["mse"], "test_l0": test["l0"],
                      "train_fvu": train["fvu"], "dead_fraction": train["silent_fraction"], "lr": solver.task.lr,
                      **solver.record()}}

    def _demand_processes(self, trainings: int) -> None:
        """Refuse what several processes cannot do together."""
        world_size, training = self.communicator.world_size, self.plan.training
        if world_size == 1:
            return
        if trainings > 1:
            raise ConfigError(f"options given several times train {trainings} SAEs in one process: expected one, got "
                              f"{world_size}; run it without torchrun, or give each value to a command of its own")
        if training.batch_size < world_size:
            raise ConfigError(f"--batch-size must be at least the number of processes, {world_size}, which share "
                              f"every batch, got {training.batch_size}", option="batch_size")
        if training.sparsity == "kl":
            raise ConfigError("--sparsity kl takes each batch as a whole, since its firing rates are those of one: "
                              f"expected one process, got {world_size}; run it without torchrun, or use another "
                              "penalty", option="sparsity")

    def _demand_memory(self, trainings: int) -> tuple[int, bool]:
        """The bytes that are free for the solver, one of `trainings`, and whether the device keeps the rows beside it;
        ConfigError if the solver needs more."""
        solver, training = self.plan.solver, self.plan.training
        d_sae = training.d_sae
        width = max(self.train_rows.d_in, self.train_rows.d_target)

        def with_batches(rows: int) -> tuple[int, int]:
            batch = 3 * 4 * max(rows, SUMMED_ROWS) * d_sae  # codes, their gradients, a copy
            return batch, batch + solver.memory(self.train_rows.rows, rows, width, d_sae, training.nested)

        batch, needed = with_batches(training.batch_size)
        free = free_memory(self.device, local_world() if self.communicator.world_size > 1 else 1)
        free = int(self.communicator.all_reduce(torch.tensor([free], dtype=torch.float64), "min").item()) // trainings
        if needed > free:
            beside = "" if trainings == 1 else f" for each of {trainings} trainings"
            sizes = (f"with --d-sae {d_sae} needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are "
                     f"free{beside}")
            if training.batch_size > SUMMED_ROWS and with_batches(SUMMED_ROWS)[1] <= free:
                raise ConfigError(f"--batch-size {training.batch_size:,} {sizes}; lower it", option="batch_size")
            raise ConfigError(f"--solver {solver.name} {sizes}; {solver.memory_advice}", option="solver")
        if self.device.type == "cpu" or self.communicator.world_size > 1 or not self.train_rows.inputs:
            return free - batch, False
        held = held_bytes(self.train_rows) // trainings
        holds = needed + held <= MOST_TAKEN * free
        return free - batch - holds * held, holds

    def _look(self, reports: Sequence[StepReport], now: bool = False) -> None:
        """Log reports, `LOG_EVERY` at a time, or all of them now."""
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
        if len(pending) == LOG_EVERY:  # fewer may hold one batch of outliers, and the epoch's end checks again
            demand_no_worse(line["batch_fvu"], self.worst, f"over steps {pending[0].step} to {line['step']}")
        seconds = self.progress.seconds + time.monotonic() - self._began
        rate = (self.progress.rows + self._seen) / max(seconds, 1e-9)
        self.show(self.solver.steps, f"loss {line['loss']:.4g} fvu {line['batch_fvu']:.4f} l0 {line['batch_l0']:.1f} "
                                     f"{rate:,.0f} rows/s")


def averages(reports: list[StepReport], variance: Tensor, communicator: Communicator = ALONE) -> dict[str, Any]:
    """The means over the rows of some consecutive batches, as a line of `metrics.jsonl`.

    Args:
        reports: for this process' parts of the batches.
        variance: of the normalised rows, smoothed like the batches; squared errors are divided by it.
        communicator: of the processes with the other parts.

    Raises:
        TrainingError: one of the losses is NaN or infinite; names the step.
    """
    parts = torch.stack([torch.stack([report.loss, report.squared_error, report.l0.to(report.loss)])
                         for report in reports])
    losses, errors, l0s = communicator.all_reduce(parts.double()).cpu().unbind(1)  # all in one copy
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = reports[int(bad[0])]
        raise TrainingError(f"the loss became {first.loss.item()} at step {first.step}; {ADVICE}")
    rows = torch.tensor([report.rows for report in reports]).to(losses)
    weights = rows / rows.sum()
    return {"step": reports[-1].step, "loss": (weights @ losses).item(),
            "batch_fvu": (weights @ errors / variance.item()).item(), "batch_l0": (weights @ l0s).item()}


def demand_no_worse(fvu: float, worst: float, when: str) -> None:
    """Refuse reconstructions far worse than none: descent that recovers from there ends worse than it could.

    Args:
        fvu: squared error over the variance of the training rows.
        worst: the highest allowed.
        when: its steps, in words.

    Raises:
        TrainingError: it is above `worst`, or NaN.
    """
    if not fvu <= worst:
        raise TrainingError(f"training diverged: the train FVU is {fvu:.3g} {when}, expected {worst:,.0f} at most; "
                            + ADVICE)


def demand_shapes(kept: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of another training, as after an edit of either; RunError if one of these tensors is missing
    or has another shape."""
    for name, shape in shapes.items():
        got = tuple(kept[name].shape) if name in kept else None
        if got != shape:
            raise RunError(f"cannot go on from a checkpoint of another training: expected {name} of shape {shape}, got "
                           f"{'none' if got is None else got}; remove the run's checkpoint.safetensors to train it "
                           f"from the start")
