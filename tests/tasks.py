"""A training problem of given size for tests of solvers."""

import math
from typing import Any

import torch
from torch import Tensor

from saecli.sae.batch import Batch
from saecli.train.options import TrainingConfig
from saecli.train.task import Task


def task_of(rows: int, steps: int, lr: float = 1e-2, sparsity: str = "none", weight: float = 0.0, *,
            sample: Tensor | None = None, batches: int = 1, memory: float = math.inf, **training: Any) -> Task:
    """A task with `batches` per epoch; smoothing is 0 unless given."""
    settings = TrainingConfig(**{"batch_size": math.ceil(rows / batches), "sparsity": sparsity,
                                 "sparsity_weight": weight, "smoothing": 0.0} | training)
    return Task(settings, rows, steps, lr, Batch.of(torch.empty(0, 0) if sample is None else sample), memory=memory)
