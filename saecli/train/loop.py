"""The training loop: batches of rows are pushed to solvers, epoch by epoch.

Several SAEs are trained from one reading of the rows, with the same results as alone.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.console import Step
from ..base.devices import device_named, moved
from ..base.errors import RunError, TrainingError, number
from ..base.processes import ALONE, Communicator
from ..sae.dictionary import SAE, Batch, Dictionary
from ..sae.metrics import reconstruction, reconstructions
from ..store.reader import RowSource
from .files import Progress
from .options import TRAIN_ON
from .plan import Plan, demand_machine, doubts_at_end, doubts_at_start
from .rows import HeldRows, Normalisation, TrainingRows, fit_normalisation, on_raw_rows, raw_batches
from .solver import RECENT_ROWS, Solver, StepReport, Task
from .start import fitted_learning_rate, initial_sae, rescaled, shaped

Measures = dict[str, Any]  # of `metrics.reconstruction`

LOG_EVERY = 20  # steps between lines of measures, and between checks for divergence
# Mean squared error, over the error of reconstructing every row as 0, above which training has diverged. Steps against
# a decoder solved without a ridge reached 2e4 on the paper's settings, from which the next decoder step recovers.
DIVERGED = 1e6
ADVICE = "lower --lr, or look at the data"


class Record:
    """Callbacks of a training; subclasses write files."""

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        """The state and the progress to resume from; None to start."""
        return None

    def begin(self, step: int, epochs: int) -> None:
        """Training starts, or resumes after `step`; lines of later steps are void."""

    def line(self, line: dict[str, Any]) -> None:
        """A line of measures, with its `step`."""

    def save(
        self, sae: SAE, state: dict[str, Tensor], progress: Progress, test: Measures | None
    ) -> None:
        """The SAE on raw activations, all tensors to resume, and after an epoch measures on test rows if any."""

    def keep(self, sae: SAE) -> None:
        """The SAE to keep instead of the last epoch's."""

    def end(self) -> None:
        """Training is over, or stopped."""


@dataclass(frozen=True, eq=False)
class Training:
    """One SAE in training."""

    plan: Plan
    record: Record
    show: Step
    rows: TrainingRows
    solver: Solver
    progress: Progress  # up to the last checkpoint, its rows up to now
    worst: float  # the FVU above which training has diverged
    begun: SAE | None = (
        None  # what training starts from, on normalised rows, its codes times `factor`
    )
    factor: float = 1.0
    compared: dict[str, Any] = field(default_factory=dict)  # its measures and the last one's
    pending: list[StepReport] = field(default_factory=list)  # since the last line of measures

    @property
    def sae(self) -> SAE:
        """The current SAE, acting on raw activations; at the end the better one."""
        return self._raw(
            self.begun if self.compared.get("kept") == "before" else self.solver.dictionary
        )

    def _raw(self, dictionary: Dictionary | None) -> SAE:
        assert dictionary is not None
        sae = rescaled(dictionary.sae().without_training_parameters(), 1 / self.factor)
        return on_raw_rows(sae, self.rows.normalisation)

    def compare(self) -> None:
        """Measure the SAE that training began with and its last, on rows kept out of training, else on training
        rows; the one of less loss, which training minimises, is kept."""
        if self.begun is None or self.compared:
            return
        before, after = self.begun, self.solver.dictionary
        # Of the penalty, such as the price of excess L0 that training found.
        learned = {name: getattr(after, name) for name in self.solver.penalty.initial(1)}
        before = before.changed(None, **learned)
        saes = [self._raw(one) for one in (before, after)]
        both = self.rows.communicator.broadcast_object(lambda: self.plan.compared(saes))
        both = both or self._measured_with_loss(saes, (before, after))
        kept = "after" if both[1]["loss"] <= both[0]["loss"] else "before"
        self.compared.update(before=both[0], after=both[1], kept=kept)
        if kept == "before":
            self.record.keep(self.sae)

    def _measured_with_loss(
        self, saes: Sequence[SAE], normalised: Sequence[Dictionary]
    ) -> list[Measures]:
        """The SAEs' measures, and their mean `loss` as dictionaries of normalised rows, by one pass."""
        plan, communicator, normalisation = (
            self.plan,
            self.rows.communicator,
            self.rows.normalisation,
        )
        mean, penalty = (
            normalisation.mean,
            (plan.training.sparsity or "none", plan.training.sparsity_weight or 0.0),
        )
        total = torch.zeros(1 + len(saes), dtype=torch.float64, device=mean.device)

        def batches() -> Iterator[Tensor]:
            for raw in raw_batches(plan.kept_out or plan.train_rows, communicator):
                batch = Batch.of(
                    normalisation(moved(raw, mean.device).to(mean.dtype)), saes[0].d_in
                )
                losses = [one.loss(batch, *penalty).value.double() for one in normalised]
                total.add_(batch.size * torch.stack([torch.ones_like(losses[0]), *losses]))
                yield raw

        found = reconstructions(saes, batches(), communicator)
        count, *losses = communicator.all_reduce(total).tolist()
        return [one | {"loss": loss / count} for one, loss in zip(found, losses, strict=True)]

    def look(self, reports: Sequence[StepReport], began: float, now: bool = False) -> None:
        """Log reports of steps, `LOG_EVERY` at a time, or all of them now; TrainingError if training has diverged."""
        for report in reports:
            self.progress.rows += report.rows
            self.pending.append(report)
            if len(self.pending) == LOG_EVERY:
                self._log(began)
        if now and self.pending:
            self._log(began)

    def _log(self, began: float) -> None:
        pending, variance = self.pending.copy(), self.rows.normalisation.variance
        self.pending.clear()
        line = averages(pending, variance * self.solver.smoothing.inflation, self.rows.communicator)
        self.record.line(line)
        if (
            len(pending) == LOG_EVERY
        ):  # fewer may hold one batch of outliers, and the epoch's end checks again
            demand_no_worse(
                line["batch_fvu"], self.worst, f"over steps {pending[0].step} to {line['step']}"
            )
        rate = self.progress.rows / max(self.progress.seconds + time.monotonic() - began, 1e-9)
        self.show(
            self.solver.steps,
            f"loss {line['loss']:.4g} fvu {line['batch_fvu']:.4f} l0 {line['batch_l0']:.1f} "
            f"{rate:,.0f} rows/s",
        )

    def demand_convergence(self, sae: SAE) -> None:
        """TrainingError if a weight of the current SAE is NaN or infinite, or it is far worse than none."""
        step, sample = self.solver.steps, self.rows.sample
        if any(not tensor.isfinite().all() for tensor in sae.tensors().values()):
            raise TrainingError(f"the weights became NaN or infinite at step {step}; {ADVICE}")
        rows = sample.x if sample.y is sample.x else torch.cat([sample.x, sample.y], 1)
        error = reconstruction(self.solver.dictionary, [rows])["mse"] * sae.d_out
        demand_no_worse(
            error / self.rows.normalisation.variance.item(), self.worst, f"at step {step}"
        )

    def calibrate_if_cut_short(self) -> None:
        """What the solver does at its last step, where a model's text ended before it."""
        if self.plan.train_rows.passes == 1 and not self.solver.finished:
            self.solver.calibrate()

    def is_due(self, batches: int) -> bool:
        """Whether to keep a checkpoint after so many batches of an epoch, which does not end there."""
        since = self.solver.steps - self.progress.step
        reread = self.plan.train_rows.passes > 1
        due = reread and since >= self.plan.training.checkpoint_every and not self.solver.finished
        return due and self.solver.can_be_kept and batches < self.plan.batches

    def keep(self, sae: SAE, test: Measures | None, began: float, batches: int) -> None:
        """Save a checkpoint after so many batches of an epoch; 0 after a whole one."""
        progress, solver, normalisation = self.progress, self.solver, self.rows.normalisation
        progress.epoch, progress.batch = progress.epoch + (not batches), batches
        progress.step = solver.steps
        progress.seconds += time.monotonic() - began
        measures = {} if test is None else {"test_fvu": test["fvu"], "test_l0": test["l0"]}
        if not batches:
            self.record.line(
                {"step": progress.step, "epoch": progress.epoch, **measures, **solver.record()}
            )
        tensors = {
            f"normalisation.{name}": tensor for name, tensor in normalisation.tensors().items()
        }
        if self.begun is not None:
            factor = {"factor": torch.tensor(self.factor, dtype=torch.float64)}
            tensors |= {
                f"begun.{name}": tensor for name, tensor in (self.begun.tensors() | factor).items()
            }
        state = solver.state() | tensors
        self._demand_same(state.values())
        self.record.save(sae, state, progress, test)

    def _demand_same(self, tensors: Iterable[Tensor]) -> None:
        """TrainingError unless all processes, which repeat what changes the weights, have the same sums."""
        communicator = self.rows.communicator
        if communicator.world_size == 1:
            return
        sums = torch.stack([tensor.double().sum().cpu() for tensor in tensors]).nan_to_num()
        least, most = (communicator.all_reduce(sums.clone(), op) for op in ("min", "max"))
        if not torch.equal(least, most):
            raise TrainingError(
                f"the weights of {communicator.world_size} processes differ at step {self.solver.steps}: "
                "expected the same in each; go on from the last checkpoint by --resume, on machines of one kind"
            )

    def notes(self) -> list[str]:
        """Sentences for the user at the end of training."""
        found = self.solver.notes()
        if self.compared.get("kept") == "before":
            losses = (number(self.compared[name]["loss"]) for name in ("before", "after"))
            found.append(
                "training did not lower the loss, {} to {}: the SAE is kept as it was; train "
                "on more rows, or with a lower --lr".format(*losses)
            )
        return found

    def result(self, train: Measures, test: Measures) -> dict[str, Any]:
        """The results, given the measures on training and test rows; of a model's rows the last `rows_counted`."""
        solver, progress, plan = self.solver, self.progress, self.plan
        return {
            "rows_train": plan.rows_trained,
            "rows_counted": train["rows"],
            "rows_test": test["rows"],
            "epochs": progress.epoch,
            "steps": progress.step,
            "seconds": progress.seconds,
            "rows_per_second": progress.rows / max(progress.seconds, 1e-9),
            "warnings": [*doubts_at_start(plan), *doubts_at_end(plan, train, test)],
            "notes": self.notes(),
            **self.compared,
            "decoder_steps": [asdict(one) for one in solver.passes.values()],
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
    trainings: int = 1,
    communicator: Communicator = ALONE,
    shared: TrainingRows | None = None,
) -> Training:
    """Start a training, or resume it from its record's checkpoint.

    Args:
        show: called with the steps done and a few words on the measures.
        trainings: number of trainings that divide the memory.
        communicator: of the processes that train on other parts of each batch.
        shared: the rows of another training on the same rows, whose sample is reused; ignored with a checkpoint.
    """
    memory, holds = demand_machine(plan, trainings, communicator)
    training, activation, start = plan.training, plan.activation, plan.start
    checkpoint = communicator.broadcast_object(record.checkpoint)
    state, progress = ({}, Progress()) if checkpoint is None else checkpoint
    rows = shared if shared and not state else _normalised(plan, state, holds, communicator)
    sample, B, normalisation = rows.sample, rows.regression, rows.normalisation
    lr = training.lr
    if lr == "auto":
        firing_rate = activation.expected_l0(rows.d_in) / plan.d_sae
        lr = fitted_learning_rate(sample.x, training.batch_size * firing_rate) * (
            TRAIN_ON if start else 1
        )
    sparsity = training.sparsity or "none"
    if start is None or state:  # which has all that a start gives
        initial = initial_sae(activation, plan.d_sae, sample, training.seed, B, sparsity)
    else:
        initial = start.initial(activation, sample.x, normalisation, sparsity)
    task = Task(
        training, rows.rows, plan.steps, float(lr), sample, B, plan.held, start is not None, memory
    )
    initial = shaped(initial, training, plan.train_rows.places)
    solver = plan.solver.build(initial, task, communicator)
    begun, factor = None if start is None else initial, 1.0
    if start is not None and start.sae is not None and not state:
        factor = (
            on_raw_rows(initial, normalisation).W_enc.norm()
            / start.sae.W_enc.to(initial.W_enc).norm()
        ).item()
    if state:
        own = solver.state() | (
            {f"begun.{name}": tensor for name, tensor in begun.tensors().items()} if begun else {}
        )
        demand_shapes(state, {name: tuple(tensor.shape) for name, tensor in own.items()})
        solver.restore(state)
        factor = float(state.get("begun.factor", 1.0))
        begun = begun and begun.changed(
            None, **{name: state[f"begun.{name}"] for name in begun.tensors()}
        )
    elif begun is not None:
        fired = torch.zeros(plan.d_sae, dtype=torch.bool, device=sample.x.device)
        for batch in rows.some(rows.rows, 0):
            fired |= solver.dictionary.codes(batch.x).fired()
        solver.revive(communicator.all_reduce(fired.to(torch.int32)) > 0, rows.rows)
    try:
        record.begin(progress.step, plan.epochs)
    except BaseException:
        record.end()
        raise
    worst = DIVERGED * max(1.0, (sample.y.square().sum(1).mean() / normalisation.variance).item())
    return Training(plan, record, show, rows, solver, replace(progress), worst, begun, factor)


def _normalised(
    plan: Plan, state: Mapping[str, Tensor], holds: bool, communicator: Communicator
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
        normalisation = fit_normalisation(
            training.normalize, spread, getattr(torch, training.dtype), rows.widths, rows.d_target
        )
    # A GPU gets the rows as stored, and converts them.
    stored = rows if device.type == "cpu" else HeldRows(rows, device) if holds else rows.as_stored()
    return plan.in_batches(
        stored, normalisation.to(device), training.batch_size, training.shuffle_seed, communicator
    )


class Loop:
    """Trains SAEs, of plans with the same rows, normalisation, batch size and order. If `alone`, the error of a
    training is raised, rather than kept in `errors` while the others go on."""

    def __init__(self, trainings: Sequence[Training], alone: bool = True) -> None:
        self.trainings, self.alone = trainings, alone
        self.errors: dict[Training, Exception] = {}
        self._tests: dict[Training, Measures] = {}
        self._began: dict[Training, float] = {}  # the epoch, or after the last checkpoint in it

    def train(self) -> list[SAE]:
        """Train to the end. Returns the SAEs that did not fail, acting on raw activations."""
        try:
            for epoch in range(
                min((one.progress.epoch for one in self.trainings), default=0),
                max((one.plan.epochs for one in self.trainings), default=0),
            ):
                running = [
                    one for one in self.live() if one.progress.epoch == epoch < one.plan.epochs
                ]
                if not running:
                    break
                self._began, rows = dict.fromkeys(running, time.monotonic()), running[0].rows
                done = running[0].progress.batch  # before the training was resumed
                if not done:
                    self._each(lambda one: one.solver.begin_epoch(), running)
                    self._decoder_steps(epoch, 0, running)
                first = max(0, done - math.ceil(RECENT_ROWS / rows.batch_size))
                with closing(rows.shuffled(epoch, first)) as batches:
                    for number, batch in enumerate(batches, first + 1):
                        if number <= done:
                            self._each(
                                lambda one, batch: one.solver.remember(batch), running, batch
                            )
                            continue
                        self._each(
                            lambda one, batch: one.look(one.solver.step(batch), self._began[one]),
                            running,
                            batch,
                        )
                        if number < running[0].plan.batches:
                            self._decoder_steps(epoch, number, running)
                        if all(one.solver.finished for one in self.live(running)):
                            break
                        if due := [one for one in self.live(running) if one.is_due(number)]:
                            self._each(lambda one: one.look([], self._began[one], now=True), due)
                            self._keep(due, number)
                            self._began |= dict.fromkeys(due, time.monotonic())
                self._each(
                    lambda one: one.look(one.solver.end_epoch(), self._began[one], now=True),
                    running,
                )
                self._each(lambda one: one.calibrate_if_cut_short(), running)
                self._decoder_steps(epoch, running[0].plan.batches, running)
                self._keep(running)
            self._each(lambda one: one.compare(), self.live())
            for one in self.live():
                if one.compared.get("kept") == "before":
                    self._tests.pop(one, None)  # of the SAE that is not kept
        finally:
            for one in self.trainings:
                one.record.end()
        return [one.sae for one in self.live()]

    def results(self, saes: Sequence[SAE]) -> list[dict[str, Any]]:
        """`Training.result` of each SAE that `train` returned. Cost: a pass over the training rows."""
        live = self.live()
        train, tests = (
            self._measured(saes, live[0].plan.train_rows),
            [self._tests.get(one, {}) for one in live],
        )
        if {} in tests and (
            rows := live[0].plan.test_rows
        ):  # no epoch was left to train, or the start is kept
            tests = self._measured(saes, rows)
        return [one.result(*measures) for one, *measures in zip(live, train, tests, strict=True)]

    def live(self, trainings: Sequence[Training] | None = None) -> list[Training]:
        return [
            one
            for one in (self.trainings if trainings is None else trainings)
            if one not in self.errors
        ]

    def _decoder_steps(self, epoch: int, number: int, running: Sequence[Training]) -> None:
        """Make the decoder steps after a batch of an epoch; solvers that need equally many rows share a pass."""
        order = (
            epoch * (running[0].plan.batches + 1) + number
        )  # other rows for each pass, if not all are taken
        due = {
            one: now
            for one in self.live(running)
            if (now := one.solver.passes.get((epoch, number)))
        }

        def end(one: Training) -> None:
            try:
                if one.solver.end_pass():  # else it is made again
                    del due[one]
            except TrainingError:
                if (
                    one.rows.communicator.world_size == 1
                ):  # the others, which have not failed, would not all-reduce
                    one.look(
                        [], self._began[one], now=True
                    )  # a NaN loss explains the failure better
                raise

        while due := {one: now for one, now in due.items() if one not in self.errors}:
            count = next(iter(due.values())).rows
            members = [one for one, now in due.items() if now.rows == count]
            again: Callable[[], Iterable[Batch]] = partial(members[0].rows.some, count, order)
            self._each(lambda one, again: one.solver.begin_pass(due[one], again), members, again)
            for batch in again():
                self._each(lambda one, batch: one.solver.observe(batch), members, batch)
            self._each(end, members)

    def _keep(self, running: Sequence[Training], batches: int = 0) -> None:
        """Keep SAEs and checkpoints: within an epoch after some batches, else after it, with measures on test rows."""
        saes = {one: one.sae for one in self.live(running)}
        self._each(lambda one: one.demand_convergence(saes[one]), running)
        live, tests = self.live(running), {}
        if live and live[0].plan.test_rows is not None and not batches:
            measured = self._measured([saes[one] for one in live], live[0].plan.test_rows)
            tests = dict(zip(live, measured, strict=True))
        self._tests |= tests
        self._each(lambda one: one.keep(saes[one], tests.get(one), self._began[one], batches), live)

    def _each(
        self, action: Callable[..., None], trainings: Sequence[Training], *given: Any
    ) -> None:
        """Call `action(training, *given)` for each that has not failed; with several, an error ends only its own."""
        for one in self.live(trainings):
            try:
                action(one, *given)
            except Exception as error:  # reported at the end, when the others have finished
                if self.alone:
                    raise
                self.errors[one] = error

    def _measured(self, saes: Sequence[SAE], rows: RowSource) -> list[Measures]:
        communicator = self.trainings[0].rows.communicator
        return reconstructions(saes, raw_batches(rows, communicator), communicator)


def averages(
    reports: Sequence[StepReport], variance: Tensor, communicator: Communicator
) -> dict[str, Any]:
    """A line of `metrics.jsonl`: means over the rows of consecutive batches; `variance` is of smoothed rows.
    TrainingError, with the step, if a loss is NaN or infinite."""
    parts = torch.stack(
        [
            torch.stack([report.loss, report.squared_error, report.l0.to(report.loss)])
            for report in reports
        ]
    )
    losses, errors, l0s = communicator.all_reduce(parts.double()).cpu().unbind(1)  # all in one copy
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = reports[int(bad[0])]
        raise TrainingError(f"the loss became {first.loss.item()} at step {first.step}; {ADVICE}")
    rows = torch.tensor([report.rows for report in reports]).to(losses)
    weights = rows / rows.sum()
    return {
        "step": reports[-1].step,
        "loss": (weights @ losses).item(),
        "batch_fvu": (weights @ errors / variance.item()).item(),
        "batch_l0": (weights @ l0s).item(),
    }


def demand_no_worse(fvu: float, worst: float, when: str) -> None:
    """TrainingError if the FVU is above `worst`, or NaN: descent that recovers from there ends worse than it could."""
    if not fvu <= worst:
        raise TrainingError(
            f"training diverged: the train FVU is {fvu:.3g} {when}, expected {worst:,.0f} at most; "
            + ADVICE
        )


def demand_shapes(kept: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        got = tuple(kept[name].shape) if name in kept else "none"
        if got != shape:
            raise RunError(
                f"cannot go on from a checkpoint of another training: expected {name} of shape {shape}, got "
                f"{got}; remove the run's checkpoint.safetensors to train it from the start"
            )
