"""Training one SAE or several: rows in, and out SAEs, or checkpoints and finished run folders.

A batch of activations enters in `rows.py`, which normalises it; `loop.py` pushes it to each solver's `step`, and to
`observe` for a decoder step, where codes and targets go to `saecli/ridge`.
"""

from .checkpoints import CHECKPOINT, claimed, read_metrics
from .config import Plan, TrainingConfig
from .doubts import doubts_at_start
from .jobs import Job, claimed_folders, resumed_job, run_names
from .loop import Loop
from .run import Run, RunRecord, origin_of
from .runs import train_runs
from .trainer import Record, Trainer

__all__ = ["CHECKPOINT", "Job", "Loop", "Plan", "Record", "Run", "RunRecord", "Trainer", "TrainingConfig", "claimed",
           "claimed_folders", "doubts_at_start", "origin_of", "read_metrics", "resumed_job", "run_names", "train_runs"]
