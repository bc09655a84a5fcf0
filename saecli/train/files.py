"""The files of a run folder, and the trackers that `--log-to` names.

    run.json                  configuration, data, state, result; written first, and again at the end
    config.toml               the options of `sae train` that repeat the training
    metrics.jsonl             one JSON object per line: `loss, batch_fvu, batch_l0`, means over some training batches,
                              and at the end of each epoch `test_fvu, test_l0` of all held-out rows
    checkpoint.safetensors    all state needed to resume, of the end of an epoch, or within one of every 1,000 steps
    sae.safetensors           the SAE at that time, acting on raw activations
    wandb/                    with --log-to wandb, its own files

Each file but `metrics.jsonl` appears whole or not at all; lines of `metrics.jsonl` newer than the checkpoint are
dropped on resuming.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..base.console import Listener
from ..base.documents import Marker, parse_json, read_json
from ..base.errors import ConfigError, RunError, one_line
from ..base.files import appearing_whole, lock_folder, regular, to_json
from ..base.home import RUN_MARKER

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"


@dataclass
class Progress:
    step: int = 0
    rows: int = 0  # seen
    seconds: float = 0.0


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    from ..sae.formats.common import write_tensors  # imports torch

    write_tensors(folder / CHECKPOINT, tensors, {"progress": to_json(asdict(progress))})


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """The last checkpoint, None before the first."""
    from ..sae.formats.common import read_safetensors  # imports torch

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


@dataclass(frozen=True)
class Logged:
    """A run to log; `created`, its start, tells it from others of the same name, lines after `step` are void."""

    folder: Path
    created: str
    settings: dict[str, Any]
    step: int
    listener: Listener

    @property
    def identity(self) -> str:
        return f"{self.folder.name}-{self.created[:19].translate(str.maketrans('T:', '--'))}"


class Log(Protocol):
    def write(self, line: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class MetricsLog:
    def __init__(self, run: Logged) -> None:
        path = run.folder / METRICS
        kept = [line for line in read_metrics(run.folder) if line["step"] <= run.step]
        with appearing_whole(path) as temporary:
            temporary.write_text(
                "".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8"
            )
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(to_json(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, without a last line cut off by a kill."""
    path = folder / METRICS
    if not path.exists():
        return []
    try:
        text = regular(path).read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error}; remove it to go on without it") from error
    lines = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            measures = parse_json(line, dict[str, int | float | None])
            if not isinstance(measures.get("step"), int):
                raise ValueError
            lines.append(measures)
        except ValueError as error:
            raise RunError(
                f"cannot read line {number} of {path}: expected a JSON object of numbers with a step, got "
                f"{line[:60].decode(errors='replace')!r}; remove the line to go on without it"
            ) from error
    return lines


class WandbRun:
    """A run in Weights & Biases; offline if the server cannot be reached at the start."""

    def __init__(self, run: Logged) -> None:
        import wandb

        def begin(identity: str, mode: str | None) -> Any:
            return wandb.init(
                project=os.environ.get("WANDB_PROJECT", "saecli"),
                name=run.folder.name,
                id=identity,
                resume="allow",
                dir=str(run.folder),
                config=run.settings,
                reinit="create_new",
                mode=mode,
                settings=wandb.Settings(silent=True, console="off"),
            )

        try:
            with redirect_stdout(sys.stderr):  # stdout holds the command's result alone
                self._run = begin(run.identity, None)
        except wandb.errors.CommError as error:
            run.listener.note(
                f"warning: Weights & Biases cannot be reached ({one_line(error)}); the run is kept in "
                f"{run.folder / 'wandb'}, from which `wandb sync` sends it"
            )
            # By another name, since its process still holds the first.
            self._run = begin(f"{run.identity}-offline", "offline")
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"--log-to cannot begin a run in wandb: {one_line(error)}; log in by `wandb login`, or "
                "set WANDB_MODE=offline"
            ) from error

    def write(self, line: dict[str, Any]) -> None:
        if line["step"] >= self._run.step:  # those logged before a resumption are not again
            self._run.log(_numbers(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


def demand_wandb() -> None:
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "--log-to wandb needs the package wandb, which is not installed; install it with `pip install "
            "'saecli[wandb]'`, or leave --log-to out: metrics.jsonl holds the same figures"
        )


def _numbers(line: dict[str, Any]) -> dict[str, int | float]:
    return {
        name: value
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }


# Files written before a checkpoint.
BEFORE_CHECKPOINT = {CONFIG, RUN_MARKER, METRICS, "wandb", "sae.safetensors"}


@contextmanager
def claimed(folder: Path, new: bool = True) -> Iterator[None]:
    """Lock a run's folder, and remove it at the end unless it has a checkpoint; FileExistsError if a new run's name is
    taken. Leftovers of a run killed before its first checkpoint are removed."""
    if new and not _is_free(folder):
        raise FileExistsError(folder)
    try:
        lock = lock_folder(folder)
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
    """Whether a folder is empty, or holds only leftovers of a run that cannot be resumed."""
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.glob("[!.]*")}
    if names <= {CONFIG}:  # which is written before run.json
        return True
    with suppress(OSError, ValueError):
        return names <= BEFORE_CHECKPOINT and not read_json(folder / RUN_MARKER, Marker).complete
    return False
