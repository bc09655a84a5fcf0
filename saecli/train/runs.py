"""A training run, what its folder says of it, and a run read from there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.documents import RUN_VERSION
from ..base.errors import ConfigError, RunError
from ..base.files import appearing_whole, write_json
from ..base.home import RUN_MARKER, Home
from ..base.options import toml_lines
from ..extract.extraction import Streamed
from ..sae.activations import activation_from_json, activation_to_json
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE, save_native
from ..sae.library import origin_of
from ..store.opening import Joined, open_joined
from . import SOLVERS
from .files import (
    CONFIG,
    Log,
    Logged,
    MetricsLog,
    Progress,
    WandbRun,
    demand_wandb,
    load_checkpoint,
    save_checkpoint,
)
from .loop import Loop
from .options import TrainingConfig
from .plan import Plan, parts_of
from .start import Start
from .training import Record, Training


@dataclass(frozen=True)
class Run:
    """A training on rows of stores, or of a model, and the time of its start."""

    command: ClassVar[str] = "train"

    stores: Joined | Streamed
    plan: Plan
    created: str

    def loop(self, trainings: Sequence[Training], alone: bool = True) -> Loop:
        return Loop(trainings, alone)

    @property
    def origin(self) -> dict[str, Any]:
        """The fields of `Origin` for the SAE's file."""
        return origin_of(self.stores, self.plan.training.split_seed, self.plan.training.fraction)

    @property
    def summary(self) -> str:
        """What is trained, for a line at the start."""
        plan = self.plan
        tests = 0 if plan.test_rows is None else plan.test_rows.rows
        words = [
            f"{plan.solver.name}, {plan.activation.name}",
            f"{plan.training.d_sae} latents on {self.stores.d_in} dimensions",
            f"{plan.train_rows.rows:,} training and {tests:,} test rows",
            f"{plan.steps:,} steps",
        ]
        if plan.training.precision != "float32":
            words.append(f"products in {plan.training.precision}")
        if plan.start is not None:
            words.append(f"from {plan.start.name}")
        return ", ".join(words)

    def options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options that repeat the run: those to set, and all with their values."""
        plan = self.plan
        chosen = {
            "solver": plan.solver.name,
            "act": plan.activation.name,
            **self.stores.options(),
            "precision": plan.training.precision,  # auto would choose anew on another device
        }
        if plan.start is not None:
            chosen["init"] = plan.start.name
        resolved = plan.training.to_json() | plan.solver.to_json() | plan.activation.to_json()
        if resolved["sparsity"] == "none":
            del resolved["sparsity_weight"]
        return chosen, resolved

    def write(self, folder: Path, result: dict[str, Any] | None) -> None:
        """Write the run's `run.json`: complete if there is a result."""
        plan = self.plan
        start = {}
        if plan.start is not None:
            start["init"] = {"name": plan.start.name, "hash": plan.start.hash}
        write_json(
            folder / RUN_MARKER,
            {
                "format_version": RUN_VERSION,
                "created": self.created,
                "complete": result is not None,
                **self.stores.names(),
                "training": plan.training.to_json(),
                "solver": {"name": plan.solver.name, **plan.solver.to_json()},
                "activation": activation_to_json(plan.activation),
                **start,
                "result": result,
            },
        )

    def write_config(self, folder: Path, given: Mapping[str, Any]) -> None:
        """Write a file for `--config` that repeats the run: the options given, and as comments those filled in."""
        chosen, resolved = self.options()
        shown = chosen | {name: value for name, value in given.items() if name != "precision"}
        filled = {name: value for name, value in resolved.items() if name not in shown}
        lines = [
            f"# sae {self.command} --config {CONFIG} makes this run again, to the same weights, on the same rows.",
            f"# Options on the command line win. Written by saecli {version('saecli')}.",
            "",
            *toml_lines(shown),
            "",
            "# Not given, and so by default:",
            *(f"# {line}" for line in toml_lines(filled)),
        ]
        with appearing_whole(folder / CONFIG) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


class RunRecord(Record):
    def __init__(self, run: Run, folder: Path, listener: Listener) -> None:
        if run.plan.training.log_to is not None:
            demand_wandb()
        self.run, self.folder, self.listener = run, folder, listener
        self.logs: list[Log] = []

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        return load_checkpoint(self.folder)

    def begin(self, step: int) -> None:
        settings = self.run.stores.names() | self.run.plan.settings()
        logged = Logged(self.folder, self.run.created, settings, step, self.listener)
        self.logs.append(MetricsLog(logged))
        if self.run.plan.training.log_to is not None:
            self.logs.append(WandbRun(logged))

    def line(self, line: dict[str, Any]) -> None:
        for log in self.logs:
            log.write(line)

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        self._save(sae)
        save_checkpoint(self.folder, state, progress)

    def keep(self, sae: SAE) -> None:
        self._save(sae)

    def end(self) -> None:
        for log in self.logs:
            log.close()

    def _save(self, sae: SAE) -> None:
        save_native(SavedSAE(sae.copy_to(torch.float32), self.run.origin), self.folder)


def reopen_run(
    home: Home, folder: Path, document: Mapping[str, Any], listener: Listener, purpose: str
) -> Run:
    """The run that a `run.json` describes, without the SAE it started from; RunError, "cannot PURPOSE NAME", if its
    settings are not of this version, or its store has changed."""
    name, path = folder.name, folder / home.runs.marker
    if "streamed" in document:
        raise RunError(
            f"cannot {purpose} {name}: its rows came from a model as it trained, and are not stored; train "
            f"it again by `sae train --config {folder / CONFIG}`, or on a store, made by `sae extract`"
        )
    stores = open_joined(
        home, [document["data"], *document.get("beside", [])], document.get("target"), listener
    )
    try:
        settings = dict(document["solver"])
        training = TrainingConfig.from_json(document["training"])
        activation = activation_from_json(document["activation"])
        parts = parts_of(training, stores, "init" in document, activation)
        plan = Plan.resolve(
            parts.train,
            parts.test,
            replace(training, fraction=parts.fraction),
            SOLVERS[settings.pop("name")].from_json(settings),
            activation,
            kept_out=parts.kept_out,
        )
        if plan.training != training:  # today's default would fill in a setting that was missing
            raise ConfigError("not all of its settings are filled in")
        if "init" in document:
            start = Start(document["init"]["name"], document["init"]["hash"], None)
            plan = replace(plan, start=start)
        run = Run(stores, plan, document["created"])
        trained_on = document["data_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot {purpose} {name}: {path} is not what this version of `sae train` writes "
            f"({error}); train it anew"
        ) from error
    if trained_on != stores.hash:
        what = "is not the store" if stores.is_single else "are not the stores"
        raise RunError(
            f"cannot {purpose} {name}: {stores.name} {what} that it was begun on; make the same again, or "
            "train anew"
        )
    return run
