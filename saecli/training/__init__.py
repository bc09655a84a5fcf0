"""Training one SAE from a store: rows in, checkpoints and a finished run folder out.

A batch of activations enters in `rows.py`, which normalises it; the solver's `epoch` takes it from there, and
its decoder step, where it has one, hands codes and rows to `saecli/ridge`.
"""

from .checkpoints import CHECKPOINT, read_metrics
from .config import TrainingConfig
from .loop import Plan, Trainer

__all__ = ["CHECKPOINT", "Plan", "Trainer", "TrainingConfig", "read_metrics"]
