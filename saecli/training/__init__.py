"""Training one SAE: rows in, and out an SAE, or checkpoints and a finished run folder.

A batch of activations enters in `rows.py`, which normalises it; the solver's `epoch` takes it from there, and
its decoder step, where it has one, hands codes and rows to `saecli/ridge`.
"""

from .checkpoints import CHECKPOINT, read_metrics
from .claim import claimed
from .config import TrainingConfig
from .doubts import doubts_at_start
from .loop import Record, Trainer
from .plan import Plan
from .run import Run, RunRecord, origin_of
from .shared_passes import Outcome, Share, alone, in_step

__all__ = ["CHECKPOINT", "Outcome", "Plan", "Record", "Run", "RunRecord", "Share", "Trainer", "TrainingConfig", "alone",
           "claimed", "doubts_at_start", "in_step", "origin_of", "read_metrics"]
