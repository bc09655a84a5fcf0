"""Run folders as training writes them, and claiming one for a single process.

    run.json                  configuration, data, state, result; written first, and again at the end
    config.toml               the options of `sae train` that repeat the training
    metrics.jsonl             one JSON object per line: `loss, batch_fvu, batch_l0`, means over some training batches,
                              and at the end of each epoch `test_fvu, test_l0` of all held-out rows
    checkpoint.safetensors    all state needed to resume, from the end of the last complete epoch
    sae.safetensors           the SAE at that time, acting on raw activations
    tensorboard/, wandb/      if asked for by --log-to, metrics.jsonl in their files
    kept/epoch-N              if asked for, the SAE of an earlier epoch, with a run.json

Each file but `metrics.jsonl` appears whole or not at all; lines of `metrics.jsonl` newer than the checkpoint are
dropped on resuming.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from ..base.documents import Marker, parse_json, read_json
from ..base.errors import RunError
from ..base.files import lock_folder, to_json
from ..base.home import RUN_MARKER
from ..sae.formats.common import read_safetensors, write_safetensors
from .logs import METRICS, TRACKERS

CHECKPOINT = "checkpoint.safetensors"


@dataclass
class Progress:
    """Progress of training: epochs and steps done, rows seen, seconds spent."""

    epoch: int = 0
    step: int = 0
    rows: int = 0
    seconds: float = 0.0


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    """Write a run's checkpoint over the previous one: the tensors needed to resume, by name, and the progress."""
    write_safetensors(folder / CHECKPOINT, tensors, {"progress": to_json(asdict(progress))})


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """The tensors and progress that `save_checkpoint` wrote last, None if it never did; RunError if the file is
    damaged."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        tensors, metadata = read_safetensors(path)
        return tensors, parse_json(metadata.get("progress", ""), Progress)
    except ValueError as error:
        raise RunError(f"cannot read {path}: {error}; remove it to train this run from the start") from error


BEFORE_MARKER = {"config.toml"}  # files that a run writes before its run.json, and before its first checkpoint
BEFORE_CHECKPOINT = {*BEFORE_MARKER, RUN_MARKER, METRICS, *TRACKERS, "sae.safetensors"}


@contextmanager
def claimed(folder: Path, new: bool = True) -> Iterator[None]:
    """Lock a run's folder, and remove it at the end unless it has a checkpoint to resume from.

    Args:
        folder: the folder; made if need be.
        new: whether the run is new, not resumed; leftovers of a run killed before its first checkpoint are then
            removed.

    Raises:
        FileExistsError: the name of a new run is taken.
        RunError: another process is training it.
    """
    if new and not _is_free(folder):
        raise FileExistsError(folder)
    try:
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise RunError(f"another process is training {folder.name}; wait for it, or stop it") from error
    try:
        if new:
            if not _is_free(folder):  # by now
                raise FileExistsError(folder)
            _clear(folder)
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
    if names <= BEFORE_MARKER:
        return True
    with suppress(OSError, ValueError):
        return names <= BEFORE_CHECKPOINT and not read_json(folder / RUN_MARKER, Marker).complete
    return False


def _clear(folder: Path) -> None:
    """Remove a folder's content, except its lock and other hidden files."""
    for path in folder.glob("[!.]*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
