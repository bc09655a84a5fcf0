"""What is to be trained."""

from dataclasses import dataclass
from typing import Self

from ..activations import Activation
from ..solvers import SolverConfig
from ..store import Rows as StoredRows
from .array_rows import ArrayRows
from .config import TrainingConfig


@dataclass(frozen=True)
class Plan:
    """What is to be trained, fully decided.

    Args:
        train_rows: the rows to train on.
        test_rows: the rows to measure on after each epoch; None for none.
        training: the settings, resolved.
        solver: the solver and its settings, resolved.
        activation: the activation and its settings.
    """

    train_rows: StoredRows | ArrayRows
    test_rows: StoredRows | None
    training: TrainingConfig
    solver: SolverConfig
    activation: Activation

    @classmethod
    def resolved(cls, train_rows: StoredRows | ArrayRows, test_rows: StoredRows | None, training: TrainingConfig,
                 solver: SolverConfig, activation: Activation) -> Self:
        """The plan with every default filled in.

        Raises:
            ConfigError: settings contradict each other, or do nothing together.
        """
        training = training.resolved(activation, solver, train_rows.rows, train_rows.d_in)
        return cls(train_rows, test_rows, training, solver.resolved(training.batches(train_rows.rows)), activation)
