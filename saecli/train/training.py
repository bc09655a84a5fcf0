"""One SAE in training: its state, what it logs, keeps and reports; its start, or resumption from a checkpoint; and with
`--init` the SAE that it begins with against the one that it ends with."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from ..base.console import Step
from ..base.devices import device_named, moved
from ..base.errors import RunError, TrainingError
from ..base.processes import ALONE, Communicator
from ..base.words import number
from ..sae.dictionary import SAE, Batch, Dictionary
from ..sae.metrics import reconstruction, reconstructions
from .options import CALIBRATION_ROWS, TRAIN_ON
from .plan import Plan, demand_machine, doubts_at_end, doubts_at_start
from .rows import Normalisation, TrainingRows, fit_normalisation, on_raw_rows, raw_batches
from .solver import Solver, StepReport, Task
from .start import Start, default_learning_rate, initial_sae, rescaled, shaped

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
        """The state and the progress to resume from; None to start."""
        return None

    def begin(self, step: int) -> None:
        """Training starts, or resumes after `step`; lines of later steps are void."""

    def line(self, line: dict[str, Any]) -> None:
        """A line of measures, with its `step`."""

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        """The SAE on raw activations, and all tensors to resume."""

    def keep(self, sae: SAE) -> None:
        """The SAE to keep instead of the last epoch's."""

    def end(self) -> None:
        """Training is over, or stopped."""


@dataclass(eq=False)
class Comparison:
    """Keeps the SAE of less loss, which training minimises, of the two."""

    before: SAE  # on normalised rows, its codes times `factor`
    factor: float
    normalisation: Normalisation
    scale: Tensor | None  # of the metric of the SAE before
    measures: dict[str, Any] = field(default_factory=dict)  # before, after, and which is kept

    @classmethod
    def of(
        cls, start: Start, initial: SAE, normalisation: Normalisation, state: Mapping[str, Tensor]
    ) -> Self:
        """A comparison with `initial`, or, on resuming, with the checkpoint's SAE from before training."""
        factor, scale = 1.0, None if start.sae is None else start.sae.scale
        if state:
            scale = state.get("begun.scale")
            factor = float(state.get("begun.factor", 1.0))
            tensors = initial.tensors().items()
            kept = {name: state[f"begun.{name}"].to(own) for name, own in tensors}
            initial = initial.changed(None, **kept)
        elif start.sae is not None:
            norm = start.sae.W_enc.to(initial.W_enc).norm()
            factor = (on_raw_rows(initial, normalisation).W_enc.norm() / norm).item()
        return cls(initial, factor, normalisation, scale)

    @property
    def keeps_before(self) -> bool:
        return self.measures.get("kept") == "before"

    def sae(self, dictionary: Dictionary) -> SAE:
        """The SAE on raw rows: of the trained dictionary, or the one before if that is kept."""
        if not self.keeps_before:
            return self._on_raw_rows(dictionary)
        before = self._on_raw_rows(self.before)
        before.scale = self.scale
        return before

    def _on_raw_rows(self, dictionary: Dictionary) -> SAE:
        sae = rescaled(dictionary.sae().without_training_parameters(), 1 / self.factor)
        return on_raw_rows(sae, self.normalisation)

    def saes(self, after: Dictionary) -> list[SAE]:
        """Both on raw rows, with the metric of this training."""
        return [self._on_raw_rows(self.before), self._on_raw_rows(after)]

    def measured(
        self, plan: Plan, after: Dictionary, communicator: Communicator
    ) -> list[dict[str, Any]]:
        """Both SAEs' measures, and their mean `loss` as dictionaries of normalised rows, by one pass over rows kept out
        of training, else over training rows."""
        sparsity, weight = plan.training.sparsity or "none", plan.training.sparsity_weight or 0.0
        # Of the penalty, such as the price of excess L0 that training found.
        penalty = self.before.activation.penalty(sparsity)
        learned = {name: getattr(after, name) for name in penalty.initial(1)}
        on_normalised_rows = [self.before.changed(None, **learned), after]
        saes, mean = self.saes(after), self.normalisation.mean
        total = torch.zeros(1 + len(saes), dtype=torch.float64, device=mean.device)

        def batches() -> Iterator[Tensor]:
            for raw in raw_batches(plan.kept_out or plan.train_rows, communicator):
                rows = self.normalisation(moved(raw, mean.device).to(mean.dtype))
                batch = Batch.of(rows, saes[0].d_in)
                total[0] += batch.size
                for index, dictionary in enumerate(on_normalised_rows, 1):
                    loss = dictionary.loss(batch, sparsity, weight).value
                    total[index] += batch.size * loss.double()
                yield raw

        measures = reconstructions(saes, batches(), communicator)
        count, *losses = communicator.all_reduce(total).tolist()
        for measured, loss in zip(measures, losses, strict=True):
            measured["loss"] = loss / count
        return measures

    def state(self) -> dict[str, Tensor]:
        tensors = self.before.tensors()
        tensors["factor"] = torch.tensor(self.factor, dtype=torch.float64)
        if self.scale is not None:
            tensors["scale"] = self.scale
        return {f"begun.{name}": tensor for name, tensor in tensors.items()}


@dataclass(eq=False)
class Training:
    plan: Plan
    record: Record
    show: Step
    rows: TrainingRows
    solver: Solver
    progress: Progress  # up to the last checkpoint, its rows up to now
    comparison: Comparison | None  # of an SAE that training begins with
    test: Measures | None = None  # the last, of test rows
    pending: list[StepReport] = field(default_factory=list)  # since the last line of measures
    # The seconds since are not in `progress`.
    resumed_at: float = field(default_factory=time.monotonic)

    @property
    def sae(self) -> SAE:
        """The current SAE, acting on raw activations; at the end the better one."""
        if self.comparison is not None:
            return self.comparison.sae(self.solver.dictionary)
        return on_raw_rows(self.solver.sae(), self.rows.normalisation)

    def take(self, report: StepReport) -> None:
        """Count a step; every `LOG_EVERY` steps a line of measures."""
        self.progress.rows += report.rows
        self.pending.append(report)
        if len(self.pending) == LOG_EVERY:
            self.log()

    def log(self) -> None:
        """A line on the steps since the last; TrainingError if training has diverged."""
        reports, self.pending = self.pending, []
        if not reports:
            return
        variance = self.rows.normalisation.variance * self.solver.smoothing.inflation
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
            f"loss {line['loss']:.4g} fvu {line['batch_fvu']:.4f} l0 {line['batch_l0']:.1f} "
            f"{rate:,.0f} rows/s",
        )

    @cached_property  # it waits for the device
    def _worst_fvu(self) -> float:
        """The FVU above which training has diverged: a million times that of reconstructing every row as 0. Steps
        against a decoder solved without a ridge reached 2e4 on the paper's settings, from which the next one recovers.
        """
        targets = self.rows.sample.y.square().sum(1).mean() / self.rows.normalisation.variance
        return 1e6 * max(1.0, targets.item())

    def demand_convergence(self, sae: SAE) -> None:
        """TrainingError if a weight of the current SAE is NaN or infinite, or it is far worse than none."""
        step, sample = self.solver.steps, self.rows.sample
        if any(not tensor.isfinite().all() for tensor in sae.tensors().values()):
            raise TrainingError(f"the weights became NaN or infinite at step {step}; {ADVICE}")
        rows = sample.x if sample.y is sample.x else torch.cat([sample.x, sample.y], 1)
        error = reconstruction(self.solver.dictionary, [rows])["mse"] * sae.d_out
        fvu = error / self.rows.normalisation.variance.item()
        demand_no_worse(fvu, self._worst_fvu, f"at step {step}")

    def is_due(self) -> bool:
        """Whether to keep a checkpoint within an epoch."""
        if self.plan.train_rows.passes == 1:  # which cannot be read again
            return False
        return self.solver.steps - self.progress.step >= self.plan.training.checkpoint_every

    def keep(self, sae: SAE, after_epoch: bool) -> None:
        """Save a checkpoint, after an epoch with a line of measures on test rows."""
        progress, solver = self.progress, self.solver
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

    @property
    def epochs(self) -> int:
        """Begun so far."""
        return math.ceil(self.progress.step / self.plan.batches)

    def choose(self, measures: list[dict[str, Any]]) -> None:
        """Keep the SAE of less `loss`, given the measures before and after."""
        assert self.comparison is not None
        before, after = measures
        kept = "after" if after["loss"] <= before["loss"] else "before"
        self.comparison.measures = {"before": before, "after": after, "kept": kept}
        if self.comparison.keeps_before:
            self.test = None  # of the SAE that is not kept
            self.record.keep(self.sae)

    def notes(self) -> list[str]:
        notes = self.solver.notes()
        if self.comparison is not None and self.comparison.keeps_before:
            measures = self.comparison.measures
            before, after = (number(measures[name]["loss"]) for name in ("before", "after"))
            notes.append(
                f"training did not lower the loss, {before} to {after}: the SAE's weights are kept as they were; train "
                "on more rows, or with a lower --lr"
            )
        return notes

    def result(self, train: Measures, test: Measures) -> dict[str, Any]:
        """The results, given the measures on training and test rows; of a model's rows the last `rows_counted`."""
        solver, progress, plan = self.solver, self.progress, self.plan
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
            "decoder_steps": [asdict(due) for due in solver.schedule.values()],
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
    comparison = None
    if plan.start is not None:
        begun, x = initial, rows.sample.x
        l0 = initial.codes(x).count().item() / len(x)
        if not state and not plan.start.has_codes_of(plan.activation, l0):
            begun = initial.changed(None, **solver.calibrated(initial))
        comparison = Comparison.of(plan.start, begun, rows.normalisation, state)
    if state:
        tensors = solver.state() | ({} if comparison is None else comparison.state())
        demand_shapes(state, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        solver.restore(state)
    elif plan.start is not None:
        fired = torch.zeros(plan.d_sae, dtype=torch.bool, device=rows.sample.x.device)
        for batch in rows.some(rows.rows, 0):
            fired |= solver.dictionary.codes(batch.x).fired()
        solver.revive(communicator.all_reduce(fired.to(torch.int32)) > 0, rows.rows)
    try:
        record.begin(progress.step)
    except BaseException:
        record.end()
        raise
    return Training(plan, record, show, rows, solver, progress, comparison)


def _initial(plan: Plan, rows: TrainingRows, state: Mapping[str, Tensor]) -> SAE:
    """What training begins with, on normalised rows; of a checkpoint, which has all weights, any of its shape."""
    start, activation = plan.start, plan.activation
    sparsity = plan.training.sparsity or "none"
    if start is None or state:
        seed = plan.training.seed
        initial = initial_sae(activation, plan.d_sae, rows.sample, seed, rows.regression, sparsity)
    else:
        initial = start.initial(activation, rows.sample.x, rows.normalisation, sparsity)
    return shaped(initial, plan.training, plan.train_rows.places)


def _task(plan: Plan, rows: TrainingRows, memory: int) -> Task:
    training = plan.training
    lr = training.lr
    if lr == "auto":
        firings = training.batch_size * plan.activation.expected_l0(rows.d_in) / plan.d_sae
        if plan.start:
            lr = TRAIN_ON * default_learning_rate(rows.d_in, firings)
        else:
            lr = default_learning_rate(
                rows.d_in, firings, plan.steps, plan.solver.most_for_few, plan.solver.firings_power
            )
    unseen = None
    if plan.kept_out is not None:
        unseen = rows.sample_of(plan.kept_out, CALIBRATION_ROWS)
    return Task(
        training,
        rows=rows.rows,
        steps=plan.steps,
        lr=float(lr),
        sample=rows.sample,
        unseen=unseen,
        B=rows.regression,
        held=plan.held,
        begun=plan.start is not None,
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
        own = plan.start if plan.start and training.normalize == "init" else rows
        normalisation = fit_normalisation(
            training.normalize,
            spread,
            getattr(torch, training.dtype),
            rows.widths,
            rows.d_target,
            own.reads,
        )
    if device.type != "cpu":  # which gets the rows as stored, and converts them
        rows = rows.as_stored()
    kept = replace(normalisation.to(device), kept=plan.kept_scale)
    return TrainingRows(rows, kept, training.batch_size, training.shuffle_seed, communicator)


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
    """A warning if a penalty of fixed weight has not brought L0 to rest; a tenth of fewer steps has no line."""
    before, now = progress.l0_before, progress.l0
    told = plan.training.penalised and plan.steps >= 10 * LOG_EVERY
    if not told or abs(now - before) <= 0.05 * before:
        return []
    return [
        f"L0 was still moving at the end, from {number(before)} to {number(now)} over the last tenth of "
        "the steps; train for more --steps, or ask for an L0: --act jumprelu --target-l0 L0"
    ]


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
