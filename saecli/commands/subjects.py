"""What `eval`, `sparsity` and `export` share: which SAEs to look at, and on which rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor

from .. import formats
from ..devices import device_named
from ..errors import ConfigError
from ..formats import SavedSAE
from ..inventory.opening import open_store
from ..sae import SAE
from ..store import Rows
from ..subjects import Subject, find_subject
from .options import Session, store_names

Data = Annotated[str | None, typer.Option(
    "--data", help="Activation store.", show_default="the one that the run was trained on, else the newest",
    autocompletion=store_names)]
SplitName = Annotated[Literal["test", "train", "all"], typer.Option(
    "--split", help="Rows to measure on: test, those held out; train, those trained on; all.")]

BATCH_CODES, BATCH_ROWS = 1 << 24, 1024  # at a time: 64 MB of codes at most, and less memory to go through is faster


@dataclass(frozen=True)
class Measured:
    """An SAE, and the rows that it is measured on.

    Args:
        subject: where the SAE comes from.
        saved: the SAE, on the device it is measured on, in float32 or better.
        split: which of the store's rows.
        rows: those rows.
    """

    subject: Subject
    saved: SavedSAE
    split: str
    rows: Rows

    @property
    def sae(self) -> SAE:
        """The autoencoder."""
        return self.saved.sae

    @property
    def heading(self) -> dict[str, str]:
        """What every measurement starts with: the names of run, store and split."""
        return {"run": self.subject.name, "data": self.rows.store.name, "split": self.split}

    @property
    def chosen_rows(self) -> tuple[str, int, float]:
        """What decides the rows, the split's name apart: store, seed and share of the split."""
        return self.rows.store.name, self.subject.split_seed, self.rows.split.fraction

    @property
    def batch_rows(self) -> int:
        """Rows of every batch but the last."""
        return max(16, min(BATCH_ROWS, BATCH_CODES // self.sae.d_sae))

    def batches(self, session: Session) -> Iterator[Tensor]:
        """The rows in stored order, in batches (B, D) of the SAE's device and dtype, progress shown."""
        done = 0
        with session.console.progress(f"measuring {self.subject.name}", self.rows.rows, "rows") as show:
            for batch in self.rows.sequential(self.batch_rows):
                yield torch.from_numpy(batch).to(self.sae.W_enc)
                done += len(batch)
                show(done)


def measured(session: Session, run: str | None, data: str | None, split: str, device: str) -> Measured:
    """Open an SAE and the rows that it is to be measured on, saying on stderr whatever was not asked for.

    Args:
        session: the command's session.
        run: a run's name or a folder that holds an SAE; None for the newest run.
        data: the store's name; None for the run's own, else the newest.
        split: "test", "train" or "all", split as the run was.
        device: what `--device` says.

    Raises:
        RunError, FormatError, StoreError: one of them is missing or cannot be read.
        ConfigError: the store's rows are not of the width that the SAE takes, or there is no such device.
    """
    subject = find_subject(session.home, run, session.console.note)
    if run is None:
        session.console.note(f"using the newest run, {subject.name}")
    if not subject.complete:
        session.console.note(f"{subject.name} is not finished; this is its last checkpoint")
    store = open_store(session.home, data or subject.data, session.console)
    if subject.data_hash is not None and subject.data == store.name and subject.data_hash != store.meta.request_hash:
        session.console.note(f"{store.name} is not the store that {subject.name} was trained on, though it has its "
                             f"name")
    saved = formats.load(subject.folder)
    if saved.sae.d_in != store.d_in:
        raise ConfigError(f"{subject.name} cannot be measured on {store.name}: expected rows of {saved.sae.d_in} "
                          f"dimensions, got {store.d_in}; name another store with --data")
    rows = store.split(split, fraction=subject.fraction if split == "train" else 1.0, seed=subject.split_seed)
    return Measured(subject, SavedSAE(saved.sae.to(device_named(device)), saved.origin), split, rows)


def held_out(one: Measured) -> Measured:
    """The same SAE, to be measured on the rows of its store that are held out, of which there is one at least."""
    return replace(one, split="test", rows=one.rows.store.split("test", seed=one.subject.split_seed))


def all_measured(session: Session, runs: Sequence[str] | None, data: str | None, split: str,
                 device: str) -> list[Measured]:
    """As `measured`, for each of several runs; says so where their rows are not the same."""
    found = [measured(session, run, data, split, device) for run in runs or [None]]
    if len({one.chosen_rows for one in found}) > 1:
        session.console.note("these runs are measured on different rows, each on its own store and split")
    return found
