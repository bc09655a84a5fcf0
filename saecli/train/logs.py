"""Where a run's figures are written, line by line: `metrics.jsonl`, and the trackers that `--log-to` names.

To add a tracker, write a class with the methods of `MetricsLog`, and a line in `TRACKERS`.
"""

import contextvars
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..base.console import Listener
from ..base.errors import ConfigError, RunError, one_line
from ..base.files import appearing_whole, regular, to_json

METRICS = "metrics.jsonl"
PROJECT = "saecli"  # of runs in Weights & Biases and trackio, unless the environment names another


@dataclass(frozen=True)
class Logged:
    """A run, for what logs it.

    Args:
        folder: its folder.
        created: when it was begun, by which a later run of its name is told apart.
        settings: its options, by name.
        step: the last that counts; lines of later steps, left by a stopped run, are void.
        listener: receives notes.
    """

    folder: Path
    created: str
    settings: dict[str, Any]
    step: int
    listener: Listener

    @property
    def identity(self) -> str:
        """Its name and the second it was begun in."""
        return f"{self.folder.name}-{self.created[:19].translate(str.maketrans('T:', '--'))}"


class Log(Protocol):
    """What figures are written to."""

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, which has a `step`."""

    def close(self) -> None:
        """Nothing more is written."""


class MetricsLog:
    """Appends to a run's `metrics.jsonl`."""

    def __init__(self, run: Logged) -> None:
        path = run.folder / METRICS
        kept = [line for line in read_metrics(run.folder) if line["step"] <= run.step]
        with appearing_whole(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, which has a `step`."""
        self._file.write(to_json(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, without a last line cut off by a kill. Raises RunError if another line is
    no JSON object with a step."""
    from ..base.documents import parse_json  # pydantic

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
            parse_json(line, _Step)
            lines.append(parse_json(line, dict[str, int | float | None]))
        except ValueError as error:
            raise RunError(f"cannot read line {number} of {path}: expected a JSON object of numbers with a step, got "
                           f"{line[:60].decode(errors='replace')!r}; remove the line to go on without it") from error
    return lines


@dataclass(frozen=True)
class _Step:
    step: int


class EventFiles:
    """Appends to TensorBoard's event files, in the run's folder `tensorboard`."""

    def __init__(self, run: Logged) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import, and an extra

        # It purges events of later steps, left by a stopped run: TensorBoard ignores them.
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Append each number in a line under its name, at the line's step."""
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()  # now: events before a checkpoint must not be lost with the process

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbRun:
    """A run in Weights & Biases, which keeps its own files in the run's folder `wandb`. Its process sends them, and
    training does not wait for it. Where it cannot be reached at the start, the run is kept there alone.

    Raises:
        ConfigError: it refuses the run, e.g. as nobody has logged in.
    """

    def __init__(self, run: Logged) -> None:
        import wandb

        def begun(identity: str, mode: str | None) -> Any:
            return wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.folder.name, id=identity,
                              resume="allow", dir=str(run.folder), config=run.settings, reinit="create_new", mode=mode,
                              settings=wandb.Settings(silent=True, console="off"))

        try:
            with _told_apart():
                self._run = begun(run.identity, None)
        except wandb.errors.CommError as error:
            run.listener.note(f"warning: Weights & Biases cannot be reached ({one_line(error)}); the run is kept in "
                              f"{run.folder / 'wandb'}, from which `wandb sync` sends it")
            self._run = begun(f"{run.identity}-offline", "offline")  # its process still holds the other
        except wandb.errors.UsageError as error:
            raise ConfigError(f"--log-to cannot begin a run in wandb: {one_line(error)}; log in by `wandb login`, or "
                              "set WANDB_MODE=offline", option="log_to") from error

    def write(self, line: dict[str, Any]) -> None:
        """Append the numbers in a line, at its step; steps that were logged before a resumption are not again."""
        if line["step"] >= self._run.step:
            self._run.log(_numbers(line), step=line["step"])

    def close(self) -> None:
        """Send what has not been sent."""
        self._run.finish()


class TrackioRun:
    """A run in trackio, on this machine, where `trackio show` shows it."""

    def __init__(self, run: Logged) -> None:
        import trackio

        # A context of its own, since there trackio finishes the run that was begun before.
        with _told_apart():
            self._run = contextvars.Context().run(
                trackio.init, project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=run.identity,
                config=run.settings, resume="allow", embed=False)

    def write(self, line: dict[str, Any]) -> None:
        """Append the numbers in a line, at its step."""
        self._run.log(_numbers(line), step=line["step"])

    def close(self) -> None:
        """Write what has not been written."""
        with _told_apart():
            self._run.finish()


TRACKERS: dict[str, Callable[[Logged], Log]] = {
    "trackio": TrackioRun, "wandb": WandbRun, "tensorboard": EventFiles}


def check_trackers(text: str) -> None:
    """Refuse a text that does not name trackers, by a ValueError whose message completes "the option must be"."""
    words = text.split(",")
    if not set(words) <= TRACKERS.keys() or len(set(words)) < len(words):
        raise ValueError(f"one of {', '.join(TRACKERS)}, or several with commas between")


def demand_trackers(names: str | None) -> None:
    """Refuse trackers that are not installed, by a ConfigError."""
    for name in names.split(",") if names else ():
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--log-to needs the package {name}, which is not installed; install it with `pip "
                              f"install 'saecli[{name}]'`, or leave --log-to out: metrics.jsonl holds the same "
                              "figures", option="log_to")


def logs_of(run: Logged, names: str | None) -> Iterator[Log]:
    """What a run's figures are written to, begun one after the other: its `metrics.jsonl`, and the trackers named."""
    yield MetricsLog(run)
    yield from (TRACKERS[name](run) for name in (names.split(",") if names else ()))


def _numbers(line: dict[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}


@contextmanager
def _told_apart() -> Iterator[None]:
    """What a tracker prints goes to stderr: stdout holds the command's result alone."""
    with redirect_stdout(sys.stderr):
        yield
