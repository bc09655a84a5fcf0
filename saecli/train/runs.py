"""A training run and its folder; trackers that `--log-to` names.

    run.json                  configuration, data, state, result; written first, and again at the end
    config.toml               the options of `sae train` that repeat the training
    metrics.jsonl             one JSON object per line: `loss, batch_fvu, batch_l0`, means over some training batches,
                              and after each epoch `test_fvu, test_l0` of all held-out rows
    checkpoint.safetensors    all state to resume, of the end of an epoch, or within one of every 1,000 steps
    sae.safetensors           the SAE at that time, acting on raw activations
    wandb/                    with --log-to wandb, its own files

Each file but `metrics.jsonl` appears whole or not at all; its lines newer than the checkpoint are dropped on resuming.
"""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from .. import __version__
from ..base.console import Listener
from ..base.errors import ConfigError, RunError, one_line
from ..base.files import (
    Marker,
    appearing_whole,
    lock_folder,
    parse_json,
    read_json,
    to_json,
    write_json,
)
from ..base.home import RUN_MARKER, Home
from ..base.options import toml_lines
from ..extract.extraction import Streamed
from ..sae.activations import activation_from_json, activation_to_json
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE, save_native
from ..sae.formats.common import read_safetensors, write_tensors
from ..sae.run_documents import RUN_VERSION
from ..store.opening import Joined, open_joined
from ..store.origin import Origin
from . import SOLVERS
from .options import TrainingConfig
from .plan import Plan, split_rows
from .start import Start
from .training import Progress, Record, Training

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"
BEFORE_CHECKPOINT = {CONFIG, RUN_MARKER, METRICS, "wandb", "sae.safetensors"}  # files


@dataclass(frozen=True)
class Run:
    """A training on rows of stores, or of a model."""

    stores: Joined | Streamed
    plan: Plan
    created: str

    @property
    def command(self) -> str:
        return self.plan.solver.command

    def train(self, training: Training) -> SAE:
        return training.train()

    def result(self, training: Training, sae: SAE) -> dict[str, Any]:
        return training.result(sae)

    @property
    def origin(self) -> Origin:
        training = self.plan.training
        return self.stores.origin.trained(training.split_seed, training.fraction)

    @property
    def summary(self) -> str:
        plan = self.plan
        parts = {"training": plan.train_rows, "kept out": plan.kept_out, "test": plan.test_rows}
        rows = [f"{part.rows:,} {name}" for name, part in parts.items() if part is not None]
        l0 = plan.activation.l0_wanted
        words = [
            f"{plan.solver.name}, {plan.activation.name}" + (f" {l0:g}" if l0 else ""),
            f"{plan.training.d_sae} latents on {self.stores.d_in} dimensions",
            f"rows: {', '.join(rows)}",
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
        """Write `run.json`; complete if there is a result."""
        plan, start = self.plan, {}
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
        """Write a file for `--config` that repeats the run: options given, and as comments those filled in."""
        chosen, resolved = self.options()
        shown = chosen | {name: value for name, value in given.items() if name != "precision"}
        filled = {name: value for name, value in resolved.items() if name not in shown}
        lines = [
            f"# sae {self.command} --config {CONFIG} makes this run again, to the same weights, on the same rows.",
            f"# Options on the command line win. Written by saecli {__version__}.",
            "",
            *toml_lines(shown),
            "",
            "# Not given, and so by default:",
            *(f"# {line}" for line in toml_lines(filled)),
        ]
        with appearing_whole(folder / CONFIG) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


class RunRecord(Record):
    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self._metrics: TextIO | None = None
        self._wandb: WandbRun | None = None
        self._tracks = run.plan.training.log_to is not None
        if self._tracks and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "--log-to wandb needs the package wandb; install it with `pip install 'saecli[wandb]'`, or leave "
                "--log-to out: metrics.jsonl holds the same figures"
            )

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        return load_checkpoint(self.folder)

    def begin(self, step: int) -> None:
        path = self.folder / METRICS
        kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
        with appearing_whole(path) as temporary:
            temporary.write_text(
                "".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8"
            )
        self._metrics = path.open("a", encoding="utf-8")
        if self._tracks:
            self._wandb = WandbRun(self.run, self.folder)

    def line(self, line: dict[str, Any]) -> None:
        assert self._metrics is not None, "begun"
        self._metrics.write(to_json(line) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.write(line)

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        self.keep(sae)
        save_checkpoint(self.folder, state, progress)

    def keep(self, sae: SAE) -> None:
        save_native(SavedSAE(sae.copy_to(torch.float32), self.run.origin), self.folder)

    def end(self) -> None:
        for log in (self._metrics, self._wandb):
            if log is not None:
                log.close()


class WandbRun:
    def __init__(self, run: Run, folder: Path) -> None:
        import wandb

        # Its start tells a run from others of the same name.
        identity = f"{folder.name}-{run.created[:19].translate(str.maketrans('T:', '--'))}"
        try:
            with redirect_stdout(sys.stderr):  # stdout holds the command's result alone
                self._run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "saecli"),
                    name=folder.name,
                    id=identity,
                    resume="allow",
                    dir=str(folder),
                    config=run.stores.names() | run.plan.settings(),
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"--log-to cannot begin in wandb: {one_line(error)}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def write(self, line: dict[str, Any]) -> None:
        numbers = {
            name: value
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float)
        }
        if line["step"] >= self._run.step:  # those logged before a resumption are not again
            self._run.log(numbers, step=line["step"])

    def close(self) -> None:
        self._run.finish()


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    write_tensors(folder / CHECKPOINT, tensors, {"progress": to_json(asdict(progress))})


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """The last checkpoint, None before the first."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        tensors, metadata = read_safetensors(path)
        return tensors, parse_json(metadata.get("progress", ""), Progress)
    except ValueError as error:
        raise RunError(
            f"cannot read {path}: {error}; remove it to train this run from the start"
        ) from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, without a last one cut off by a kill."""
    path = folder / METRICS
    if not path.exists():
        return []
    text = path.read_bytes()
    try:
        return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise RunError(f"cannot read {path}: {error}; remove it to go on without it") from error


@contextmanager
def claimed(folder: Path, new: bool = True) -> Iterator[None]:
    """Lock a run's folder, and remove it at the end unless it has a checkpoint. FileExistsError if a new run's name is
    taken; leftovers of a run killed before its first checkpoint are removed."""
    if new and not _is_free(folder):
        raise FileExistsError(folder)
    try:
        lock = lock_folder(folder, {*BEFORE_CHECKPOINT, CHECKPOINT})
    except BlockingIOError as error:
        raise RunError(
            f"another process is training {folder.name}; wait for it, or stop it"
        ) from error
    try:
        if new:
            if not _is_free(folder):  # by now
                raise FileExistsError(folder)
            for path in folder.glob("[!.]*"):  # not its lock
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        try:
            yield
        finally:
            if not (folder / CHECKPOINT).exists():
                shutil.rmtree(folder)
    finally:
        os.close(lock)


def _is_free(folder: Path) -> bool:
    """Empty, or with only leftovers of a run that cannot be resumed."""
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.glob("[!.]*")}
    if names <= {CONFIG}:  # which is written before run.json
        return True
    with suppress(OSError, ValueError):
        return names <= BEFORE_CHECKPOINT and not read_json(folder / RUN_MARKER, Marker).complete
    return False


def reopen_run(
    home: Home, folder: Path, document: Mapping[str, Any], listener: Listener, purpose: str
) -> Run:
    """The run of a `run.json`, without the SAE it started from; RunError, "cannot PURPOSE NAME", if its settings are
    not of this version, or its store has changed."""
    name, path = folder.name, folder / home.runs.marker
    if "streamed" in document:
        raise RunError(
            f"cannot {purpose} {name}: its rows came from a model, and are not stored; train it again by `sae train "
            f"--config {folder / CONFIG}`, or on a store, made by `sae extract`"
        )
    stores = open_joined(
        home, [document["data"], *document.get("beside", [])], document.get("target"), listener
    )
    try:
        run = Run(stores, _plan_of(document, stores), document["created"])
        trained_on = document["data_hash"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot {purpose} {name}: {path} is not what this version of `sae train` writes ({error}); train it anew"
        ) from error
    if trained_on != stores.hash:
        what = "is not the store" if stores.is_single else "are not the stores"
        raise RunError(
            f"cannot {purpose} {name}: {stores.name} {what} that it was begun on; make the same again, or train anew"
        )
    return run


def _plan_of(document: Mapping[str, Any], stores: Joined) -> Plan:
    settings = dict(document["solver"])
    training = TrainingConfig.from_json(document["training"])
    activation = activation_from_json(document["activation"])
    parts = split_rows(training, stores, "init" in document, activation)
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
    if "init" not in document:
        return plan
    return replace(plan, start=Start(document["init"]["name"], document["init"]["hash"], None))
