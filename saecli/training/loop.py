"""The training loop: epochs, their measures, and what is kept of them."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..console import Step
from ..devices import device_named
from ..distributed import agreed, everyone, latents_axis, own_part, processes, whole_on_main
from ..errors import ConfigError, RunError, TrainingError
from ..memory import available_memory
from ..metrics import reconstruction
from ..sae import SAE
from ..solvers import Solver, StepReport, Task
from ..torchrun import local_world
from .checkpoints import Progress
from .config import DTYPES
from .doubts import doubts_at_end, doubts_at_start
from .normalise import Normalisation, fit_normalisation
from .plan import Plan
from .rows import SUMMED_ROWS, TrainingRows, fitted_learning_rate, initial_sae, raw_batches
from .shared_passes import Share, alone
from .together import demand_shareable

Measures = dict[str, Any]  # as of `metrics.reconstruction`

LOG_EVERY = 20  # steps between lines of measures, and between looks at whether training diverges
# Mean squared error over that of 0 for every row, above which training diverges. Steps against a decoder solved without
# a ridge reached 2e4 on the paper's settings, from which the next decoder step comes back.
DIVERGED = 1e6
ADVICE = "lower --lr, or look at the data"


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
    """Trains one SAE, from its start or from its last checkpoint.

    Args:
        plan: what to train.
        record: what is kept of it meanwhile.
        trainings: how many share the memory.

    Raises:
        ConfigError: the solver needs more memory than is free, the device is unknown, or several processes cannot
            do together what is planned.
    """

    def __init__(self, plan: Plan, record: Record, trainings: int = 1) -> None:
        self.plan, self.record, self.share = plan, record, alone
        training = plan.training
        self.train_rows, self.test_rows = plan.train_rows, plan.test_rows
        self.device = device_named(training.device)
        demand_shareable(plan, trainings)
        self.memory = self._demand_memory(trainings)
        self.batches = training.epoch_batches(self.train_rows.rows)
        per_epoch = self.batches * plan.solver.steps_per_batch
        self.steps = training.steps or training.epochs * per_epoch
        self.epochs = math.ceil(self.steps / per_epoch)
        self.kept = Progress()  # as of the last checkpoint

    def train(self, show: Step, share: Share = alone) -> SAE:
        """Train to the end.

        Args:
            show: told the steps done, and a few words on how it goes.
            share: how passes over the rows are gone through, those of `result` too.

        Returns:
            The SAE, acting on raw activations; of its latents those that this process holds.

        Raises:
            TrainingError: it diverged: the loss or a weight became NaN or infinite, or the reconstructions are far
                worse than none; the last checkpoint, `kept`, is from before.
        """
        self.share = share
        solver, normalisation, progress = self._begin(agreed(self.record.checkpoint))
        self.solver, self.progress, self.test = solver, progress, None
        self.kept = replace(progress)
        rows = self._rows(normalisation)
        self.record.begin(progress.step, self.epochs)
        try:
            while progress.epoch < self.epochs:
                began = time.monotonic()
                progress.rows += self._epoch(solver, rows, progress, show)
                progress.epoch, progress.step = progress.epoch + 1, solver.step
                progress.seconds += time.monotonic() - began
                sae = on_raw_rows(solver.sae(), normalisation)
                self._demand_convergence(solver, sae, normalisation)
                self.test = None if self.test_rows is None else self._measured("test", sae)
                tested = {f"test_{name}": self.test[name] for name in ("fvu", "l0")} if self.test else {}
                self.record.line({"step": solver.step, "epoch": progress.epoch, **tested, **solver.record()})
                state = whole_on_main(solver.state())
                state |= {f"normalisation.{name}": tensor for name, tensor in normalisation.tensors().items()}
                self.record.epoch(sae.with_tensors(whole_on_main(sae.tensors())), state, progress, self.test)
                self.kept = replace(progress)
        finally:
            self.record.end()
        return on_raw_rows(solver.sae(), normalisation)

    def result(self, sae: SAE) -> dict[str, Any]:
        """What came of a training that had test rows.

        Args:
            sae: what `train` returned.

        Returns:
            `rows_train, rows_test, epochs, steps, seconds, rows_per_second, warnings, notes, final`.

        Cost: a pass over the training rows.
        """
        solver, progress = self.solver, self.progress
        train, test = self._measured("train", sae), self.test or self._measured("test", sae)
        warnings = [*doubts_at_start(self.plan), *doubts_at_end(self.plan, train, test)]
        rate = {} if solver.optimizer.to_tolerance else {"lr": solver.task.lr}
        return {
            "rows_train": self.train_rows.rows, "rows_test": self.test_rows.rows, "epochs": progress.epoch,
            "steps": progress.step, "seconds": progress.seconds,
            "rows_per_second": progress.rows / max(progress.seconds, 1e-9), "warnings": warnings,
            "notes": solver.notes(),
            "final": {"test_fvu": test["fvu"], "test_mse": test["mse"], "test_l0": test["l0"],
                      "train_fvu": train["fvu"], "dead_fraction": train["silent_fraction"], **rate, **solver.record()}}

    def _rows(self, normalisation: Normalisation) -> TrainingRows:
        training = self.plan.training
        return TrainingRows(self.train_rows, normalisation, training.batch_size, training.shuffle_seed,
                            training.shuffle == "exact", self.share)

    def _demand_memory(self, trainings: int) -> int:
        """The bytes that are free for the solver, which is one of several trainings'."""
        solver, d_sae = self.plan.solver, self.plan.training.d_sae
        batch = 3 * 4 * max(self.plan.training.batch_size, SUMMED_ROWS) * d_sae  # codes, their gradients, a copy
        batch //= latents_axis().size
        needed = solver.memory(self.train_rows.rows, self.plan.training.batch_size, self.train_rows.d_in, d_sae) + batch
        free = (torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else
                available_memory() // (local_world() if processes() > 1 else 1))
        free = int(everyone().least(torch.tensor([free], dtype=torch.float64)).item())  # that every process has
        free //= trainings
        if needed > free:
            beside = "" if trainings == 1 else f" for each of {trainings} trainings"
            raise ConfigError(f"--solver {solver.name} with --d-sae {d_sae} needs {needed / 2**30:.1f} GiB of memory, "
                              f"{free / 2**30:.1f} GiB are free{beside}; {solver.memory_advice}")
        return free - batch

    def _begin(self, checkpoint: tuple[dict[str, Tensor], Progress] | None) -> tuple[Solver, Normalisation, Progress]:
        training, d_in = self.plan.training, self.train_rows.d_in
        if checkpoint is None:
            (spread,) = self.share("spread", lambda: iter([agreed(self.train_rows.spread)]))
            normalisation = fit_normalisation(training.normalize, spread, DTYPES[training.dtype])
        else:
            shapes = {"mean": (d_in,), "scale": (d_in,), "variance": ()}
            demand_shapes(checkpoint[0], {f"normalisation.{name}": shape for name, shape in shapes.items()})
            normalisation = Normalisation(**{name: checkpoint[0][f"normalisation.{name}"] for name in shapes})
        normalisation = normalisation.to(self.device)
        sample = self._rows(normalisation).sample()
        self.worst = DIVERGED * max(1.0, (sample.square().sum(1).mean() / normalisation.variance).item())
        lr = fitted_learning_rate(sample) if training.lr == "auto" else training.lr
        task = Task(self.train_rows.rows, self.steps, lr, training.sparsity, training.sparsity_weight,
                    sample, training.smoothing, training.seed, self.batches,
                    training.sparsity_warm_up, training.lr_warm_up, training.lr_decay, self.memory)
        solver = self.plan.solver.build(initial_sae(self.plan.activation, training.d_sae, sample, training.seed), task)
        if checkpoint is None:
            return solver, normalisation, Progress()
        own = own_part(checkpoint[0])
        demand_shapes(own, {name: tuple(tensor.shape) for name, tensor in solver.state().items()})
        solver.restore(own)
        return solver, normalisation, replace(checkpoint[1])

    def _epoch(self, solver: Solver, rows: TrainingRows, progress: Progress, show: Step) -> int:
        """One pass; returns how many rows it saw. Every loss has been looked at when it returns."""
        seen, pending, began = 0, [], time.monotonic() - progress.seconds

        def look() -> None:
            if not pending:
                return
            line = averages(pending, rows.normalisation.variance * solver.smoothing.inflation)
            self.record.line(line)
            first, enough = pending[0].step, len(pending) == LOG_EVERY
            pending.clear()
            if enough:  # fewer may hold one batch of outliers, and the epoch's end looks again
                demand_no_worse(line["batch_fvu"], self.worst, f"over steps {first} to {line['step']}")
            rate = (progress.rows + seen) / max(time.monotonic() - began, 1e-9)
            show(solver.step, f"loss {line['loss']:.4g} fvu {line['batch_fvu']:.4f} l0 {line['batch_l0']:.1f} "
                              f"{rate:,.0f} rows/s")

        try:
            for report in solver.epoch(rows, progress.epoch):
                seen += report.rows
                pending.append(report)
                if len(pending) == LOG_EVERY:
                    look()
        except TrainingError:
            if processes() == 1:  # of several the others, which have not failed, do not look
                look()  # a loss that is no number explains the failure better
            raise
        look()
        return seen

    def _demand_convergence(self, solver: Solver, sae: SAE, normalisation: Normalisation) -> None:
        """Refuse what an epoch has come to, before it is kept, where training has diverged.

        Its last steps can do that, which no loss has shown yet. The decoder step can mend it, so that the SAE as it
        stands is measured, on the sample of training rows: test rows may be far off for want of training rows alone.

        Args:
            solver: as the epoch left it.
            sae: its SAE, acting on raw rows.
            normalisation: of the rows.

        Raises:
            TrainingError: a weight is NaN or infinite, or the error too large.
        """
        if everyone().any(torch.stack([(~tensor.isfinite()).any() for tensor in sae.tensors().values()])):
            raise TrainingError(f"the weights became NaN or infinite at step {solver.step}; {ADVICE}")
        error = reconstruction(solver.sae(), [solver.task.sample])["mse"] * sae.d_in
        demand_no_worse(error / normalisation.variance.item(), self.worst, f"at step {solver.step}")

    def _measured(self, split: str, sae: SAE) -> Measures:
        stored = self.train_rows if split == "train" else self.test_rows
        batches = self.share(split, lambda: raw_batches(stored))
        return reconstruction(sae, (batch.to(sae.W_enc) for batch in batches))


def averages(reports: list[StepReport], variance: Tensor) -> dict[str, Any]:
    """The means over the rows of some consecutive batches, as a line of `metrics.jsonl`; of all processes' portions.

    Args:
        reports: the reports.
        variance: of the normalised rows, smoothed as the batches were, which squared errors are divided by.

    Raises:
        TrainingError: one of the losses is NaN or infinite; names the step.
    """
    losses = everyone().add_up(torch.stack([report.loss for report in reports]))
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = reports[int(bad[0])]
        raise TrainingError(f"the loss became {first.loss.item()} at step {first.step}; {ADVICE}")
    rows = torch.tensor([report.rows for report in reports]).to(losses)
    share = rows / rows.sum()
    error = share @ everyone().add_up(torch.stack([report.squared_error for report in reports]))
    l0 = share @ everyone().add_up(torch.stack([report.l0 for report in reports]).to(share))
    return {"step": reports[-1].step, "loss": (share @ losses).item(), "batch_fvu": (error / variance).item(),
            "batch_l0": l0.item()}


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
        raise TrainingError(f"training diverged: the train FVU is {fvu:.3g} {when}, expected {worst:,.0f} at most; "
                            f"{ADVICE}")


def demand_shapes(kept: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint that is not of this training, as after an edit of either.

    Raises:
        RunError: one of these tensors is not in it, or of another shape.
    """
    for name, shape in shapes.items():
        got = tuple(kept[name].shape) if name in kept else None
        if got != shape:
            raise RunError(f"cannot go on from a checkpoint of another training: expected {name} of shape {shape}, got "
                           f"{'none' if got is None else got}; remove the run's checkpoint.safetensors to train it "
                           f"from the start")


def on_raw_rows(sae: SAE, normalisation: Normalisation) -> SAE:
    """The SAE with the normalisation folded in, computed in float64."""
    folded = sae.to(torch.float64).on_raw_rows(normalisation.mean.double(), normalisation.scale.double())
    return folded.to(sae.W_enc.dtype)
