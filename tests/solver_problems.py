"""Small problems for solvers in memory, and the training loop around them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from homes import activation_of
from torch import Tensor

from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.sae.activations import ACTIVATIONS, Activation
from saecli.sae.dictionary import SAE, Batch
from saecli.train.descent import StepReport, Task
from saecli.train.fit import planned
from saecli.train.options import SolverConfig, TrainingConfig
from saecli.train.solver import Solver
from saecli.train.start import Start, initial_sae
from saecli.train.training import Record, start_training

D, F = 6, 16
EVERY_ACTIVATION = [activation_of(act, k=3) for act in ACTIVATIONS]


@dataclass(frozen=True)
class RowsInMemory:
    x: Tensor
    batch_size: int = 32

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def batches(self) -> int:
        return -(-self.rows // self.batch_size)

    def shuffled(self, epoch: int) -> Iterator[Batch]:
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        return map(Batch.of, self.x[order].split(self.batch_size))

    def some(self, count: int, number: int = 0) -> Iterator[Batch]:
        return map(Batch.of, self.x[:count].split(40) if count else ())


def sparse_mixture(rows: int = 300, seed: int = 0) -> RowsInMemory:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.rand(rows, F, generator=generator, dtype=torch.float64)
    codes *= torch.rand(rows, F, generator=generator) < 0.15
    dictionary = torch.randn(F, D, generator=generator, dtype=torch.float64)
    x = codes @ dictionary + 0.02 * torch.randn(rows, D, generator=generator, dtype=torch.float64)
    return RowsInMemory((x - x.mean(0)) / x.std())


def started(
    config: SolverConfig,
    rows: RowsInMemory,
    activation: Activation,
    epochs: int = 4,
    *given: Any,
    **more: Any,
) -> Solver:
    """A solver for a number of epochs, with a learning rate of 0.01; further arguments as of `task_of`."""
    steps = more.pop("steps", epochs * rows.batches)
    task = task_of(rows.rows, steps, 1e-2, *given, sample=rows.x, batches=rows.batches, **more)
    sample = Batch.of(rows.x[:64])
    return config.build(initial_sae(activation, F, sample, 1, None, task.training.sparsity), task)


def solve_decoder(solver: Solver, rows: RowsInMemory, last: bool = False) -> None:
    """The first or the last decoder step, over all rows."""
    due = [*solver.schedule.values()][-1 if last else 0]
    solver.decoder_step(replace(due, rows=rows.rows), rows)


def one_epoch(solver: Solver, rows: RowsInMemory, epoch: int = 0) -> list[StepReport]:
    """A pass over the rows, as the training loop makes it."""
    reports: list[StepReport] = []
    for batch in rows.shuffled(epoch):
        if solver.finished:
            break
        reports.append(solver.step(batch))
        if solver.steps in solver.schedule:
            solver.decoder_step(solver.schedule[solver.steps], rows)
    return reports


def trained(solver: Solver, rows: RowsInMemory, epochs: int) -> SAE:
    """The SAE after these epochs, or as many steps as the task has."""
    batches = (batch for epoch in range(epochs) for batch in rows.shuffled(epoch))
    for _ in solver.train(islice(batches, solver.task.steps - solver.steps), rows):
        pass
    return solver.sae()


def loss_of(solver: Solver, data: RowsInMemory) -> Tensor:
    """What descent lowers, on all rows."""
    sparsity, weight = solver.task.training.sparsity, solver.task.penalty_weight(solver.steps)
    return solver.dictionary.loss(Batch.of(data.x), sparsity, weight).value + solver.extra_loss()


def decoder_of(solver: Solver) -> tuple[Tensor, Tensor]:
    """The decoder's weights and bias as they stand."""
    return solver.dictionary.decoder().detach().clone(), solver.dictionary.b_dec.detach().clone()


def task_of(
    rows: int,
    steps: int,
    lr: float = 1e-2,
    sparsity: str = "none",
    weight: float = 0.0,
    *,
    sample: Tensor | None = None,
    batches: int = 1,
    memory: float = math.inf,
    **training: Any,
) -> Task:
    """A task with `batches` per epoch; smoothing is 0 unless given."""
    training = {"batch_size": math.ceil(rows / batches), "smoothing": 0.0} | training
    settings = TrainingConfig(sparsity=sparsity, sparsity_weight=weight, **training)
    sampled = Batch.of(torch.empty(0, 0) if sample is None else sample)
    return Task(settings, rows, steps, lr, sampled, memory=memory)


_random = np.random.default_rng(0)
ROWS = _random.standard_normal((300, 12)) @ _random.standard_normal((12, 20)) + 1
ROWS = ROWS.astype(np.float32)
ACTS = [
    ("relu", {}),
    ("relu", {"sparsity": "l1-codes"}),
    ("gated", {}),
    ("jumprelu", {}),
    ("topk", {"k": 3}),
    ("abs-topk", {"k": 3}),
    ("batchtopk", {"k": 3}),
    ("matching-pursuit", {"k": 3, "least_squares": True}),
]
SOLVERS = [
    ("sgd", {}),
    ("sgd", {"tied": True, "clip_norm": 1.0}),
    ("pam-sgd", {}),
    ("pam", {}),
    ("pam-sgd", {"solve": "iterative"}),
    ("pam-sgd", {"decoder_every": 1, "d_sae": 24}),
    ("pam-sgd", {"d_sae": 400}),
    ("pam", {"alpha": 1.0, "mu_enc": 0.1, "mu_dec": 0.1}),
]
# The last but one solves in the dimension of the rows, of which there are fewer than latents; the one before solves
# after every batch.


class Kept(Record):
    """Keeps the first epoch's state as a file would, on the CPU, and begins with what it is given."""

    def __init__(self, start: Any = None) -> None:
        self.start, self.kept = start, None

    def checkpoint(self) -> Any:
        return self.start

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Any) -> None:
        if self.kept is None:
            copied = {name: tensor.cpu().clone() for name, tensor in state.items()}
            self.kept = copied, replace(progress)


def numbers(document: Any) -> list[float]:
    """All numbers of a document, in order."""
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list | tuple):
        return [number for value in document for number in numbers(value)]
    return [] if isinstance(document, str | bool | Path) or document is None else [float(document)]


def trained_on(
    device: str,
    solver: str,
    act: str,
    options: dict,
    start: Any = None,
    rows: np.ndarray = ROWS,
    init: SAE | None = None,
) -> tuple[SAE, Any]:
    """The SAE, begun from `init` if given, and the state after the first epoch, from which `start` resumes."""
    record = Kept(start)
    options = {"d_sae": 32, "epochs": 2, "batch_size": 100, "device": device} | options
    begun = None if init is None else Start.open(Home.at(None), init, Silent())
    plan = planned(rows, solver, act, options, start=begun)
    sae = start_training(plan, record).train()
    return sae, record.kept
