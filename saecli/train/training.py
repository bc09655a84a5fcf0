"""One SAE in training: its start or resumption, its loop, what it logs, keeps and reports."""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..base.console import Step
from ..base.devices import device_named
from ..base.errors import RunError, TrainingError
from ..base.processes import ALONE, Communicator
from ..base.words import number
from ..sae.dictionary import SAE
from ..sae.metrics import reconstruction, reconstructions
from ..store.reader import RowSource
from .descent import Descent, StepReport, Task
from .options import TRAIN_ON
from .plan import Plan, demand_machine, doubts_at_end, doubts_at_start
from .rows import (
    BLOCK_ROWS,
    Normalisation,
    TrainingRows,
    fit_normalisation,
    on_raw_rows,
    raw_batches,
)
from .start import Comparison, default_learning_rate, initial_sae, shaped
from .upkeep import revive_by

Measures = dict[str, Any]  # of `metrics.reconstruction`

LOG_EVERY = 20  # steps between lines of measures, and between checks for divergence
ADVICE = "lower --lr, or look at the data"


@dataclass
class Progress:
    step: int = 0
    rows: int = 0  # seen
    seconds: float = 0.0
    l0: float = 0.0  # of the last line of measures
    l0_before: float = 0.0  # of the last one before the last tenth of the steps


class Record:
    """Callbacks of a training; subclasses write files."""

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        """State and progress to resume from; None to start."""
        return None

    def begin(self, step: int) -> None:
        """Training starts, or resumes after `step`: lines of later steps are void."""

    def line(self, line: dict[str, Any]) -> None:
        """Measures, with their `step`."""

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        """The SAE on raw activations, and all tensors to resume."""

    def keep(self, sae: SAE) -> None:
        """The SAE to keep instead of the last epoch's."""

    def end(self) -> None:
        """Training is over, or stopped."""


@dataclass(eq=False)
class Training:
    plan: Plan
    record: Record
    show: Step
    rows: TrainingRows
    solver: Descent
    progress: Progress  # up to the last checkpoint, its rows up to now
    comparison: Comparison | None  # of an SAE that training begins with
    test: Measures | None = None  # the last, of test rows
    pending: list[StepReport] = field(default_factory=list)  # since the last line of measures
    # The seconds since are not in `progress`.
    resumed_at: float = field(default_factory=time.monotonic)

    def train(self) -> SAE:
        """Train on the rows; the SAE acts on raw activations."""
        plan, rows = self.plan, self.rows
        return self.train_on(
            rows.from_step(self.progress.step, plan.batches, plan.epochs),
            lambda comparison: comparison.measured(
                self.solver.dictionary,
                plan.kept_out or plan.train_rows,
                plan.training,
                rows.communicator,
            ),
        )

    def train_on(
        self,
        batches: Generator[Any, None, None],
        measured: Callable[[Comparison], list[dict[str, Any]]],
    ) -> SAE:
        """Train on batches from the last checkpoint on; `measured` gives measures before and after, with `loss`."""
        try:
            if self.progress.step < self.plan.steps:
                self._train(batches)
            if self.comparison is not None:
                self.comparison.choose(*measured(self.comparison))
                if self.comparison.keeps_before:
                    self.test = None  # of the SAE that is not kept
                    self.record.keep(self.sae)
        finally:
            self.record.end()
        return self.sae

    def _train(self, batches: Generator[Any, None, None]) -> None:
        with closing(self._between_checkpoints(batches)) as steps:
            try:
                for report in self.solver.train(steps, self.rows):
                    self._take(report)
            except TrainingError:
                # Other processes, which have not failed, would not all-reduce.
                if self.rows.communicator.world_size == 1:
                    self._log()  # a NaN loss explains the failure better
                raise
        self._keep(after_epoch=True)

    def _between_checkpoints(
        self, batches: Generator[Any, None, None]
    ) -> Generator[Any, None, None]:
        """The batches; between them checkpoints, where due."""
        plan, solver = self.plan, self.solver
        with closing(batches):
            for batch in batches:
                yield batch
                if solver.finished:
                    return
                if solver.steps % plan.batches == 0:
                    self._keep(after_epoch=True)
                elif self._is_due():
                    self._keep(after_epoch=False)
        # A model's text has ended early. Weights next to a sum over all rows are for those that came.
        solver.task = replace(solver.task, rows=plan.train_rows.rows)

    @property
    def sae(self) -> SAE:
        """The current SAE, on raw activations; at the end the better one."""
        if self.comparison is not None:
            return self.comparison.sae(self.solver.dictionary)
        return on_raw_rows(self.solver.sae(), self.rows.normalisation)

    def _take(self, report: StepReport) -> None:
        self.progress.rows += report.rows
        self.pending.append(report)
        if len(self.pending) == LOG_EVERY:
            self._log()

    def _log(self) -> None:
        """A line on the steps since the last; TrainingError on divergence."""
        reports, self.pending = self.pending, []
        if not reports:
            return
        variance = self.rows.normalisation.variance * self.solver.inflation
        line = averages(reports, variance, self.rows.communicator)
        self.record.line(line)
        progress = self.progress
        progress.l0 = line["batch_l0"]
        if line["step"] <= 0.9 * self.plan.steps:
            progress.l0_before = progress.l0
        # Fewer reports may hold one batch of outliers, and the epoch's end checks again.
        if len(reports) == LOG_EVERY:
            steps = f"over steps {reports[0].step} to {line['step']}"
            demand_no_worse(line["batch_fvu"], self._worst_fvu, steps)
        seconds = progress.seconds + time.monotonic() - self.resumed_at
        rate = progress.rows / max(seconds, 1e-9)
        self.show(
            self.solver.steps,
            f"loss {line['loss']:.4g} fvu {line['batch_fvu']:.4f} l0 {line['batch_l0']:.1f} {rate:,.0f} rows/s",
        )

    @cached_property  # it waits for the device
    def _worst_fvu(self) -> float:
        """A million times the FVU of reconstructing every row as 0. Steps against a decoder solved without a ridge
        reached 2e4 on the paper's settings, from which the next solve recovers."""
        targets = self.rows.sample.y.square().sum(1).mean() / self.rows.normalisation.variance
        return 1e6 * max(1.0, targets.item())

    def _demand_convergence(self, sae: SAE) -> None:
        step, sample = self.solver.steps, self.rows.sample
        if any(not tensor.isfinite().all() for tensor in sae.tensors().values()):
            raise TrainingError(f"the weights became NaN or infinite at step {step}; {ADVICE}")
        rows = sample.x if sample.y is sample.x else torch.cat([sample.x, sample.y], 1)
        error = reconstruction(self.solver.dictionary, [rows])["mse"] * sae.d_out
        fvu = error / self.rows.normalisation.variance.item()
        demand_no_worse(fvu, self._worst_fvu, f"at step {step}")

    def _is_due(self) -> bool:
        if self.plan.train_rows.passes == 1:  # which cannot be read again
            return False
        return self.solver.steps - self.progress.step >= self.plan.training.checkpoint_every

    def _keep(self, after_epoch: bool) -> None:
        """Save SAE and checkpoint; after an epoch also measure test rows."""
        self._log()
        sae, plan, progress, solver = self.sae, self.plan, self.progress, self.solver
        self._demand_convergence(sae)
        if after_epoch and plan.test_rows is not None:
            self.test = self._measured(sae, plan.test_rows)
        progress.step = solver.steps
        progress.seconds += time.monotonic() - self.resumed_at
        self.resumed_at = time.monotonic()
        if after_epoch:
            line = {"step": progress.step, "epoch": self.epochs}
            if self.test is not None:
                line |= {"test_fvu": self.test["fvu"], "test_l0": self.test["l0"]}
            self.record.line({**line, **solver.record()})
        state = solver.state()
        for name, tensor in self.rows.normalisation.tensors().items():
            state[f"normalisation.{name}"] = tensor
        if self.comparison is not None:
            state |= self.comparison.state()
        self.record.save(sae, state, progress)

    def _measured(self, sae: SAE, rows: RowSource) -> Measures:
        communicator = self.rows.communicator
        (measures,) = reconstructions([sae], raw_batches(rows, communicator), communicator)
        return measures

    @property
    def epochs(self) -> int:
        """Begun so far."""
        return math.ceil(self.progress.step / self.plan.batches)

    def notes(self) -> list[str]:
        return [*self.solver.notes(), *(self.comparison.notes() if self.comparison else [])]

    def result(self, sae: SAE) -> dict[str, Any]:
        """Results of the SAE that training returned; of a model's rows only the last `rows_counted` are measured.

        Cost: a pass over the training rows.
        """
        solver, progress, plan = self.solver, self.progress, self.plan
        train, test = self._measured(sae, plan.train_rows), self.test
        if test is None:  # no step was left to train, or the start is kept
            test = self._measured(sae, plan.test_rows) if plan.test_rows else {}
        compared = {} if self.comparison is None else self.comparison.measures
        return {
            "rows_train": plan.train_rows.rows,
            "rows_counted": train["rows"],
            "rows_test": test["rows"],
            "epochs": self.epochs,
            "steps": progress.step,
            "seconds": progress.seconds,
            "rows_per_second": progress.rows / max(progress.seconds, 1e-9),
            "warnings": [
                *doubts_at_start(plan),
                *doubts_at_end(plan, train, test),
                *doubt_of_l0(plan, progress),
            ],
            "notes": self.notes(),
            **compared,
            "final": {
                "test_fvu": test["fvu"],
                "test_mse": test["mse"],
                "test_l0": test["l0"],
                "train_fvu": train["fvu"],
                "dead_fraction": train["silent_fraction"],
                "lr": solver.task.lr,
                **solver.record(),
            },
        }


def start_training(
    plan: Plan,
    record: Record,
    show: Step = lambda done, words="": None,
    communicator: Communicator = ALONE,
) -> Training:
    """Start a training, or resume it from its record's checkpoint.

    Args:
        show: called with the steps done and a few words on the measures.
        communicator: of the processes that train on other parts of each batch.
    """
    memory = demand_machine(plan, communicator)
    checkpoint = communicator.broadcast_object(record.checkpoint)
    state: Mapping[str, Tensor] = {}
    progress = Progress()
    if checkpoint is not None:
        state, progress = checkpoint[0], replace(checkpoint[1])
    rows = _normalised(plan, state, communicator)
    initial = _initial(plan, rows, state)
    solver = plan.solver.build(initial, _task(plan, rows, memory), communicator)
    comparison = _comparison(plan, rows, initial, solver, state)
    if state:
        tensors = solver.state() | ({} if comparison is None else comparison.state())
        demand_shapes(state, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        solver.restore(state)
    elif plan.start is not None:
        revive_by(solver, rows)
    try:
        record.begin(progress.step)
    except BaseException:
        record.end()
        raise
    return Training(plan, record, show, rows, solver, progress, comparison)


def _initial(plan: Plan, rows: TrainingRows, state: Mapping[str, Tensor]) -> SAE:
    """On normalised rows; before a checkpoint is restored, any SAE of its shape."""
    start, activation = plan.start, plan.activation
    sparsity = plan.training.sparsity or "none"
    if start is None or state:
        seed = plan.training.seed
        initial = initial_sae(activation, plan.d_sae, rows.sample, seed, rows.regression, sparsity)
    else:
        initial = start.initial(activation, rows.sample.x, rows.normalisation, sparsity)
    return shaped(initial, plan.training, plan.train_rows.places)


def _comparison(
    plan: Plan, rows: TrainingRows, initial: SAE, solver: Descent, state: Mapping[str, Tensor]
) -> Comparison | None:
    """With the SAE before training, with thresholds for the L0 asked for if its own differs."""
    if plan.start is None:
        return None
    l0 = initial.codes(rows.sample.x).count().item() / len(rows.sample.x)
    if not state and not plan.start.has_codes_of(plan.activation, l0):
        initial = initial.changed(None, **solver.calibrated(initial))
    return Comparison.of(plan.start, initial, rows.normalisation, state)


def _task(plan: Plan, rows: TrainingRows, memory: int) -> Task:
    training = plan.training
    lr = training.lr
    if lr == "auto":
        l0 = plan.activation.l0_wanted or rows.d_in / 16  # else a guess
        firings = training.batch_size * l0 / plan.d_sae
        if plan.start:
            lr = TRAIN_ON * default_learning_rate(rows.d_in, firings)
        else:
            lr = default_learning_rate(rows.d_in, firings, plan.steps, plan.solver.descending)
    kept_out = plan.kept_out
    return Task(
        training,
        rows=rows.rows,
        steps=plan.steps,
        lr=float(lr),
        sample=rows.sample,
        unseen=None if kept_out is None else rows.sample_of(kept_out, BLOCK_ROWS),
        B=rows.regression,
        fixed=plan.fixed,
        from_sae=plan.start is not None,
        memory=memory,
    )


def _normalised(
    plan: Plan, state: Mapping[str, Tensor], communicator: Communicator
) -> TrainingRows:
    training, rows, device = plan.training, plan.train_rows, device_named(plan.training.device)
    if state:
        width = rows.d_in + rows.d_target
        shapes: dict[str, tuple[int, ...]] = {"mean": (width,), "scale": (width,), "variance": ()}
        demand_shapes(state, {f"normalisation.{name}": shape for name, shape in shapes.items()})
        normalisation = Normalisation(
            **{name: state[f"normalisation.{name}"] for name in shapes}, d_in=rows.d_in
        )
    else:
        spread = communicator.broadcast_object(rows.spread)
        metric = plan.start if plan.start and training.normalize == "init" else rows
        normalisation = fit_normalisation(
            training.normalize,
            spread,
            getattr(torch, training.dtype),
            rows.widths,
            rows.d_target,
            metric.reads,
        )
    if device.type != "cpu":  # which gets the rows as stored, and converts them
        rows = rows.as_stored()
    normalisation = replace(normalisation.to(device), kept=plan.kept_scale)
    return TrainingRows(
        rows, normalisation, training.batch_size, training.shuffle_seed, communicator
    )


def averages(
    reports: Sequence[StepReport], variance: Tensor, communicator: Communicator
) -> dict[str, Any]:
    """Means over the rows of consecutive batches; `variance` is of smoothed rows. TrainingError, with the step, if a
    loss is NaN or infinite."""
    of_steps = [
        torch.stack([report.loss, report.squared_error, report.l0.to(report.loss)])
        for report in reports
    ]
    sums = communicator.all_reduce(torch.stack(of_steps).double())
    losses, errors, l0s = sums.cpu().unbind(1)  # all in one copy
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = int(bad[0])
        raise TrainingError(
            f"the loss became {losses[first].item()} at step {reports[first].step}; {ADVICE}"
        )
    rows = torch.tensor([report.rows for report in reports]).to(losses)
    weights = rows / rows.sum()
    return {
        "step": reports[-1].step,
        "loss": (weights @ losses).item(),
        "batch_fvu": (weights @ errors / variance.item()).item(),
        "batch_l0": (weights @ l0s).item(),
    }


def doubt_of_l0(plan: Plan, progress: Progress) -> list[str]:
    """A warning if a penalty of fixed weight has not brought L0 to rest."""
    before, now = progress.l0_before, progress.l0
    # A tenth of fewer steps has no line.
    enough = plan.training.penalised and plan.steps >= 10 * LOG_EVERY
    if not enough or abs(now - before) <= 0.05 * before:
        return []
    return [
        f"L0 was still moving at the end, from {number(before)} to {number(now)} over the last tenth of the steps; "
        "train for more --steps, or ask for an L0: --act jumprelu --target-l0 L0"
    ]


def demand_no_worse(fvu: float, worst: float, when: str) -> None:
    """TrainingError if the FVU is above `worst`, or NaN."""
    if not fvu <= worst:
        raise TrainingError(
            f"training diverged: the train FVU is {fvu:.3g} {when}, expected {worst:,.0f} at most; {ADVICE}"
        )


def demand_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        got = tuple(state[name].shape) if name in state else "none"
        if got != shape:
            raise RunError(
                f"cannot go on from a checkpoint of another training: expected {name} of shape {shape}, got {got}; "
                "remove the run's checkpoint.safetensors to train it from the start"
            )
