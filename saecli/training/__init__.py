"""Training one SAE or several: from rows to SAEs, or to checkpoints and finished run folders.

`rows.py` normalises a batch of activations; `loop.py` pushes it to each solver's `step`, or to `observe` in a decoder
step, which passes codes and targets to `saecli/ridge`.
"""

from .checkpoints import CHECKPOINT, claimed
from .config import Plan, TrainingConfig
from .doubts import doubts_at_start
from .jobs import Job, claimed_folders, resumed_job, run_again, run_names
from .live import LiveRows
from .logs import read_metrics
from .loop import Loop
from .run import Run, RunRecord, origin_of, settings_in
from .runs import train_runs
from .starting import Start
from .trainer import Record, Trainer

__all__ = ["CHECKPOINT", "Job", "LiveRows", "Loop", "Plan", "Record", "Run", "RunRecord", "Start", "Trainer",
           "TrainingConfig", "claimed", "claimed_folders", "doubts_at_start", "origin_of", "read_metrics",
           "resumed_job", "run_again", "run_names", "settings_in", "train_runs"]
