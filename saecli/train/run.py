"""A training in a run folder: its `run.json`, and the files written at every epoch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.files import write_json
from ..base.home import KEPT, RUN_MARKER, RUN_VERSION
from ..extract.streaming import Streamed
from ..sae.activations import activation_to_json
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE, save_native
from ..sae.library import origin_of
from ..store.joined import Joined
from .checkpoints import Progress, load_checkpoint, save_checkpoint
from .logs import Log, Logged, demand_trackers, logs_of
from .plan import Plan
from .trainer import Measures, Record

CONFIG = "config.toml"  # of a run: the options that repeat it


@dataclass(frozen=True)
class Run:
    """A training on rows of stores, or of a model.

    Args:
        stores: the activations, or where they come from.
        plan: what is trained.
        created: time of its start.
    """

    stores: Joined | Streamed
    plan: Plan
    created: str

    def write(self, folder: Path, result: dict[str, Any] | None) -> None:
        """Write the run's `run.json`: complete if there is a result, as of `Trainer.result`."""
        plan = self.plan
        start = {} if plan.start is None else {"init": {"name": plan.start.name, "hash": plan.start.hash}}
        write_json(folder / RUN_MARKER, {
            "format_version": RUN_VERSION, "created": self.created, "complete": result is not None,
            **self.stores.names(), "training": plan.training.to_json(),
            "solver": {"name": plan.solver.name, **plan.solver.to_json()},
            "activation": activation_to_json(plan.activation), **start, "result": result})


class RunRecord(Record):
    """Keeps a run in its folder; see `checkpoints.py` for the files.

    Args:
        run: the run.
        folder: the run folder, which exists.
        listener: receives notes on trackers.

    Raises:
        ConfigError: a tracker is asked for that is not installed.
    """

    def __init__(self, run: Run, folder: Path, listener: Listener) -> None:
        demand_trackers(run.plan.training.log_to)
        self.run, self.folder, self.listener = run, folder, listener
        self.logs: list[Log] = []

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        """The last one in the folder."""
        return load_checkpoint(self.folder)

    def begin(self, step: int, epochs: int) -> None:
        """Open `metrics.jsonl`, with lines of later steps dropped, and begin runs of the trackers asked for."""
        self.epochs = epochs
        plan = self.run.plan
        settings = self.run.stores.names() | plan.settings()
        for log in logs_of(Logged(self.folder, self.run.created, settings, step, self.listener), plan.training.log_to):
            self.logs.append(log)

    def line(self, line: dict[str, Any]) -> None:
        """Append to `metrics.jsonl` and to trackers."""
        for log in self.logs:
            log.write(line)

    def epoch(self, sae: SAE, state: dict[str, Tensor], progress: Progress, test: Measures | None) -> None:
        """Write the SAE and the checkpoint, and if `--keep-every` asks for it, a run folder of this epoch."""
        self._save(sae, self.folder)
        save_checkpoint(self.folder, state, progress)
        every = self.run.plan.training.keep_every
        if every is None or progress.epoch % every:
            return
        folder = self.folder / KEPT / f"epoch-{progress.epoch:0{len(str(self.epochs))}}"
        folder.mkdir(parents=True, exist_ok=True)
        self._save(sae, folder)
        self.run.write(folder, {"epochs": progress.epoch, "steps": progress.step,
                                "final": {"test_fvu": test["fvu"], "test_l0": test["l0"]}})

    def end(self) -> None:
        """Close `metrics.jsonl`, and end the runs of trackers."""
        for log in self.logs:
            log.close()

    def _save(self, sae: SAE, folder: Path) -> None:
        training = self.run.plan.training
        origin = origin_of(self.run.stores, training.split_seed, training.fraction)
        save_native(SavedSAE(sae.copy_to(torch.float32), origin), folder)
