"""The training loop: epochs, checkpoints, measures, and the run folder that they leave."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..activations import Activation, activation_to_json
from ..devices import device_named
from ..errors import ConfigError, TrainingError
from ..files import write_json
from ..formats import SavedSAE, save_native
from ..home import RUN_MARKER
from ..machine import available_memory
from ..metrics import reconstruction
from ..report import Step
from ..runs import FORMAT_VERSION
from ..sae import SAE
from ..solvers import Solver, SolverConfig, StepReport, Task
from ..store import ActivationStore, spread_of
from ..store import Rows as StoredRows
from .checkpoints import MetricsLog, load_checkpoint, save_checkpoint
from .config import DTYPES, TrainingConfig
from .normalise import Normalisation, fit_normalisation
from .rows import SUMMED_ROWS, TrainingRows, fitted_learning_rate, initial_sae, raw_batches

ORIGIN = ("model", "layer", "site", "dataset", "context", "prepend_bos")  # what an SAE's file keeps of its rows' source
Measures = dict[str, Any]  # as of `metrics.reconstruction`

KEPT = "kept"  # folder of a run, of the run folders of its earlier epochs
LOG_EVERY = 20  # steps between lines in metrics.jsonl, and between looks at whether the loss is a number


@dataclass(frozen=True)
class Plan:
    """One training run, fully decided.

    Args:
        store: the activations.
        train_rows: those of its rows to train on, as `training` splits them.
        training: the settings, resolved.
        solver: the solver and its settings.
        activation: the activation and its settings.
        created: when the run was begun.
    """

    store: ActivationStore
    train_rows: StoredRows
    training: TrainingConfig
    solver: SolverConfig
    activation: Activation
    created: str

    def write(self, folder: Path, result: dict[str, Any] | None) -> None:
        """Write the run's `run.json`: finished where there is a result."""
        write_json(folder / RUN_MARKER, {
            "format_version": FORMAT_VERSION, "created": self.created, "complete": result is not None,
            "data": self.store.name, "data_hash": self.store.meta.request_hash, "training": self.training.to_json(),
            "solver": {"name": self.solver.name, **self.solver.to_json()},
            "activation": activation_to_json(self.activation), "result": result})


@dataclass
class Progress:
    """How far training has come: epochs and steps done, rows seen, seconds spent."""

    epoch: int = 0
    step: int = 0
    rows: int = 0
    seconds: float = 0.0


class Trainer:
    """Trains one run, from its start or from its last checkpoint.

    Args:
        plan: what to train.
        folder: the run folder, which exists.

    Raises:
        ConfigError: the solver needs more memory than is free, or the device is unknown.
        StoreError: the store cannot be split.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        training = plan.training
        self.train_rows = plan.train_rows
        self.test_rows = plan.store.split("test", seed=training.split_seed)
        self.device = device_named(training.device)
        self.memory = self._demand_memory()
        self.batches = training.epoch_batches(self.train_rows.rows)
        per_epoch = self.batches * plan.solver.steps_per_batch
        self.steps = training.steps or training.epochs * per_epoch
        self.epochs = math.ceil(self.steps / per_epoch)

    def run(self, show: Step) -> dict[str, Any]:
        """Train to the end.

        Args:
            show: told the steps done, and a few words on how it goes.

        Returns:
            The result for `Plan.write`, which finishes the run: `rows_train, rows_test, epochs, steps, seconds,
            rows_per_second, notes, final`.

        Raises:
            TrainingError: the loss became NaN or infinite; the last checkpoint stands.
        """
        checkpoint = load_checkpoint(self.folder)
        solver, normalisation, progress = self._begin(checkpoint)
        rows = self._rows(normalisation)
        log = MetricsLog(self.folder, progress.step)
        test = None
        try:
            while progress.epoch < self.epochs:
                began = time.monotonic()
                progress.rows += self._epoch(solver, rows, progress, log, show)
                progress.epoch, progress.step = progress.epoch + 1, solver.step
                progress.seconds += time.monotonic() - began
                sae = on_raw_rows(solver.sae(), normalisation)
                demand_finite(sae, solver.step)
                test = self._measured(self.test_rows, sae)
                log.write({"step": solver.step, "epoch": progress.epoch, "test_fvu": test["fvu"],
                           "test_l0": test["l0"], **solver.record()})
                self._save(solver, sae, normalisation, progress)
                self._keep(sae, progress, test)
        finally:
            log.close()
        sae = on_raw_rows(solver.sae(), normalisation)
        return self._result(solver, progress, self._measured(self.train_rows, sae),
                            test or self._measured(self.test_rows, sae))

    def _rows(self, normalisation: Normalisation) -> TrainingRows:
        training = self.plan.training
        return TrainingRows(self.train_rows, normalisation, training.batch_size, training.seed,
                            training.shuffle == "exact")

    def _demand_memory(self) -> int:
        """The bytes that are free for the solver."""
        solver, d_sae = self.plan.solver, self.plan.training.d_sae
        batch = 3 * 4 * max(self.plan.training.batch_size, SUMMED_ROWS) * d_sae  # codes, their gradients, a copy
        needed = solver.memory(self.train_rows.rows, self.plan.training.batch_size, self.plan.store.d_in, d_sae) + batch
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()
        if needed > free:
            raise ConfigError(f"--solver {solver.name} with --d-sae {d_sae} needs {needed / 2**30:.1f} GiB of memory, "
                              f"{free / 2**30:.1f} GiB are free; {solver.memory_advice}")
        return free - batch

    def _begin(self, checkpoint: tuple[dict, dict] | None) -> tuple[Solver, Normalisation, Progress]:
        training = self.plan.training
        if checkpoint is None:
            normalisation = fit_normalisation(training.normalize, spread_of(self.train_rows), DTYPES[training.dtype])
        else:
            kept = {name: checkpoint[0][f"normalisation.{name}"] for name in ("mean", "scale", "variance")}
            normalisation = Normalisation(**kept)
        normalisation = normalisation.to(self.device)
        sample = self._rows(normalisation).sample()
        lr = fitted_learning_rate(sample) if training.lr == "auto" else training.lr
        task = Task(self.train_rows.rows, self.steps, lr, training.sparsity, training.sparsity_weight,
                    sample, training.smoothing, training.seed, self.batches,
                    training.sparsity_warm_up, training.lr_warm_up, training.lr_decay, self.memory)
        solver = self.plan.solver.build(initial_sae(self.plan.activation, training.d_sae, sample, training.seed), task)
        if checkpoint is None:
            return solver, normalisation, Progress()
        solver.restore(checkpoint[0])
        return solver, normalisation, Progress(**checkpoint[1])

    def _epoch(self, solver: Solver, rows: TrainingRows, progress: Progress, log: MetricsLog, show: Step) -> int:
        """One pass; returns how many rows it saw. Every loss has been looked at when it returns."""
        seen, pending, began = 0, [], time.monotonic() - progress.seconds

        def look() -> None:
            if not pending:
                return
            line = averages(pending, rows.normalisation.variance * solver.smoothing.inflation)
            log.write(line)
            rate = (progress.rows + seen) / max(time.monotonic() - began, 1e-9)
            show(solver.step, f"loss {line['loss']:.4g} fvu {line['train_fvu']:.4f} l0 {line['l0']:.1f} "
                              f"{rate:,.0f} rows/s")
            pending.clear()

        try:
            for report in solver.epoch(rows, progress.epoch):
                seen += report.rows
                pending.append(report)
                if len(pending) == LOG_EVERY:
                    look()
        except TrainingError:
            look()  # a loss that is no number explains the failure better
            raise
        look()
        return seen

    def _measured(self, stored: StoredRows, sae: SAE) -> Measures:
        return reconstruction(sae, (batch.to(sae.W_enc) for batch in raw_batches(stored)))

    def _save(self, solver: Solver, sae: SAE, normalisation: Normalisation, progress: Progress) -> None:
        self._save_sae(sae, self.folder)
        kept = {f"normalisation.{name}": tensor for name, tensor in normalisation.tensors().items()}
        save_checkpoint(self.folder, solver.state() | kept, vars(progress))

    def _save_sae(self, sae: SAE, folder: Path) -> None:
        source = self.plan.store.meta.source
        origin = {key: source[key] for key in ORIGIN if key in source}
        save_native(SavedSAE(sae.to(torch.float32), origin), folder)

    def _keep(self, sae: SAE, progress: Progress, test: Measures) -> None:
        """Write a run folder of the SAE as it stands, where `--keep-every` asks for this epoch's."""
        every = self.plan.training.keep_every
        if every is None or progress.epoch % every:
            return
        folder = self.folder / KEPT / f"epoch-{progress.epoch:0{len(str(self.epochs))}}"
        folder.mkdir(parents=True, exist_ok=True)
        self._save_sae(sae, folder)
        self.plan.write(folder, {"epochs": progress.epoch, "steps": progress.step,
                                 "final": {"test_fvu": test["fvu"], "l0": test["l0"]}})

    def _result(self, solver: Solver, progress: Progress, train: Measures, test: Measures) -> dict[str, Any]:
        rate = {} if solver.optimizer.to_tolerance else {"lr": solver.task.lr}
        return {
            "rows_train": self.train_rows.rows, "rows_test": self.test_rows.rows, "epochs": progress.epoch,
            "steps": progress.step, "seconds": progress.seconds,
            "rows_per_second": progress.rows / max(progress.seconds, 1e-9), "notes": solver.notes(),
            "final": {"train_fvu": train["fvu"], "test_fvu": test["fvu"], "test_mse": test["mse"], "l0": test["l0"],
                      "dead_fraction": train["dead_fraction"], **rate, **solver.record()}}


def averages(reports: list[StepReport], variance: torch.Tensor) -> dict[str, Any]:
    """The means over the rows of some consecutive batches, as a line of `metrics.jsonl`.

    Args:
        reports: the reports.
        variance: of the normalised rows, smoothed as the batches were, which squared errors are divided by.

    Raises:
        TrainingError: one of the losses is NaN or infinite; names the step.
    """
    losses = torch.stack([report.loss for report in reports])
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        first = reports[int(bad[0])]
        raise TrainingError(f"the loss became {first.loss.item()} at step {first.step}; the run stops there, and its "
                            f"last checkpoint, if it came to one, stands; lower --lr, or look at the data")
    rows = torch.tensor([report.rows for report in reports]).to(losses)
    share = rows / rows.sum()
    error = share @ torch.stack([report.squared_error for report in reports])
    l0 = share @ torch.stack([report.l0 for report in reports]).to(share)
    return {"step": reports[-1].step, "loss": (share @ losses).item(), "train_fvu": (error / variance).item(),
            "l0": l0.item()}


def demand_finite(sae: SAE, step: int) -> None:
    """Refuse weights that are NaN or infinite, as a last step can leave them after a loss that was still a number.

    Raises:
        TrainingError: one is.
    """
    if not all(tensor.isfinite().all() for tensor in sae.tensors().values()):
        raise TrainingError(f"the weights became NaN or infinite at step {step}; the run stops there, and its last "
                            f"checkpoint, if it came to one, stands; lower --lr, or look at the data")


def on_raw_rows(sae: SAE, normalisation: Normalisation) -> SAE:
    """The SAE with the normalisation folded in, computed in float64."""
    folded = sae.to(torch.float64).on_raw_rows(normalisation.mean.double(), normalisation.scale.double())
    return folded.to(sae.W_enc.dtype)
