"""An SAE with the rows that it is measured on.

Shapes: N rows, B rows of a batch, D = d_in, E the width of targets; 0 without.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener
from ..base.devices import carried, device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import words_of
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.formats.hooks import settled, why_unsettled
from ..sae.library import SAELike, Subject, hook_points, note_if_remade, open_sae
from ..store.joined import Joined, JoinedRows, in_words
from ..store.opening import open_joined
from ..store.reader import ActivationStore, Rows, RowSource
from ..store.split import Which
from ..store.values import OUTLYING
from ..store.worlds import World
from ..train.rows import ArrayLike, ArrayRows
from .worlds import Alignment

# A store, stores joined, or rows of these, rows in memory (N, D), or a store's name in the home, or several side by
# side; None for the stores that the run was trained on, else the newest.
RowsLike = ActivationStore | Joined | Rows | JoinedRows | ArrayLike | str | Sequence[str] | None

BATCH_CODES, BATCH_ROWS = (
    1 << 24,
    1024,
)  # per batch: at most 64 MB of codes; smaller batches are faster


@dataclass(frozen=True)
class Measured:
    subject: Subject
    saved: SavedSAE  # on the device that it is measured on
    split: str | None  # of the store; None for rows in memory
    rows: RowSource
    source: int | None = None  # of a mixture, number of the only source whose rows `batches` gives

    @property
    def sae(self) -> SAE:
        return self.saved.sae

    @property
    def family(self) -> str:
        """Its solver, if known, and activation, for legends."""
        return " ".join(filter(None, (self.sae.metadata.get("solver"), self.sae.activation.name)))

    @property
    def _stored(self) -> RowSource:
        if not self.rows.inputs:
            raise ConfigError(
                "--data must be a store or rows of one here, got rows in memory; put them into a store "
                "with `sae import`"
            )
        return self.rows

    @property
    def of_store(self) -> Rows:
        """The rows, of several stores the first one's; ConfigError for rows in memory."""
        return self._stored.inputs[0]

    @property
    def store(self) -> ActivationStore:
        return self.stores.inputs[0]

    @property
    def stores(self) -> Joined:
        """All stores of the rows; ConfigError for rows in memory."""
        return Joined.of(self._stored)

    def demand_reconstruction(self, what: str) -> None:
        """Refuse a transcoder or crosscoder where `what` is defined for reconstructions of one store's rows."""
        if len(self.rows.inputs) > 1 or self.rows.target is not None:
            raise ConfigError(
                f"{what} of {self.subject.name} is not defined: expected an SAE that reconstructs the "
                f"rows of one store, got one trained on {self.rows.name}; name another run"
            )

    def alignment(self) -> Alignment | None:
        """The alignment of the decoder with the features that the rows are made of; None if these are unknown."""
        if not self.rows.inputs or self.store.meta.world is None:
            return None
        return Alignment.of(self.sae.W_dec, torch.from_numpy(World.of_store(self.store).directions))

    @cached_property  # it reads the column `source`
    def _sources_present(self) -> set[int]:
        columns = self.of_store.column("source", self.batch_rows)
        return {int(number) for part in columns for number in np.unique(part)}

    @property
    def by_source(self) -> "dict[str, Measured]":
        """Of a mixture with rows of several sources, the same on the rows of each, by name."""
        names = self._source_names()
        if not names or len(self._sources_present) < 2:
            return {}
        return {
            name: replace(self, source=number)
            for number, name in enumerate(names)
            if number in self._sources_present
        }

    def note_absent_sources(self, listener: Listener) -> None:
        """Say which sources of a mixture have no row here."""
        absent = [
            name
            for number, name in enumerate(self._source_names())
            if number not in self._sources_present
        ]
        if absent:
            listener.note(
                f"{self.rows.name}: the {self.split} rows hold none of {' and '.join(absent)}, where "
                "measures by source are left out; --split all measures every row"
            )

    def _source_names(self) -> list[str]:
        if not self.rows.inputs or self.source is not None:
            return []
        return list(self.store.meta.sources)

    @cached_property
    def _massive_norms(self) -> list[float]:
        """`OUTLYING` times the median norm of all rows, at each hook point that is predicted."""
        if not self.rows.inputs:
            y = [
                torch.from_numpy(rows[:, -self.sae.d_out :])
                for rows in self.rows.sequential(self.batch_rows)
            ]
            return [
                OUTLYING * float(torch.cat([part[:, place].norm(dim=1) for part in y]).median())
                for place in self.sae.places
            ]
        found = []
        for rows in [self.rows.target] if self.rows.target else self.rows.inputs:
            norms = rows.store.meta.norms
            assert norms is not None
            found.append(OUTLYING * norms.median)
        return found

    def massive(self, y: Tensor) -> Tensor:
        """Which of some rows, or targets, (B, E), have over `OUTLYING` times the median norm at a hook point that is
        predicted, (B,) bool."""
        found = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        for place, limit in zip(self.sae.places, self._massive_norms, strict=True):
            if limit > 0:
                found |= y[:, place].norm(dim=1) > limit
        return found

    @property
    def heading(self) -> dict[str, str | None]:
        """The first entries of every document: run, store and split; None for rows in memory."""
        return {
            "run": self.subject.name,
            "data": self.rows.name if self.rows.inputs else None,
            "split": self.split,
        }

    @property
    def chosen_rows(self) -> tuple[str, int, float] | None:
        """Stores, seed and fraction of the split, which with its name determine the rows; None in memory."""
        if not self.rows.inputs:
            return None
        split = self.of_store.split
        return self.rows.name, split.seed, split.fraction

    @property
    def batch_rows(self) -> int:
        """Rows per batch; the last may have fewer."""
        return max(16, min(BATCH_ROWS, BATCH_CODES // self.sae.d_sae))

    def batches(self, listener: Listener) -> Iterator[Tensor]:
        """Rows in stored order, targets next to them, (B, D + E), in the SAE's dtype and on its device."""
        done = 0
        with listener.progress(f"measuring {self.subject.name}", self.rows.rows, "rows") as show:
            W_enc = self.sae.W_enc
            sources = (
                repeat(None)
                if self.source is None
                else self.of_store.column("source", self.batch_rows)
            )
            for batch, own in zip(
                carried(self.rows.sequential(self.batch_rows), W_enc.device), sources, strict=False
            ):
                taken = (
                    batch
                    if own is None
                    else batch[torch.from_numpy(own == self.source).to(batch.device)]
                )
                if len(taken):
                    yield taken.to(W_enc.dtype)
                done += len(batch)
                show(done)

    def inputs(self, listener: Listener) -> Iterator[Tensor]:
        """As `batches`, without targets, (B, D)."""
        return (batch[:, : self.sae.d_in] for batch in self.batches(listener))


def open_measured(
    home: Home,
    sae: SAELike,
    data: RowsLike,
    split: Which,
    device: str,
    listener: Listener,
    target: ArrayLike | str | None = None,
) -> Measured:
    """Open an SAE and the rows to measure it on.

    Args:
        data: rows chosen from a store, and rows in memory, are all taken.
        split: with the run's split seed.
        listener: notes the choices that the user did not make.
        target: store of a transcoder's targets, or for rows in memory these targets, (N, E); None for the store that it
            was trained on, if data are too.
    """
    return with_rows(home, open_sae(home, sae, listener), data, split, device, listener, target)


def with_rows(
    home: Home,
    opened: tuple[Subject, SavedSAE],
    data: RowsLike,
    split: Which,
    device: str,
    listener: Listener,
    target: ArrayLike | str | None = None,
) -> Measured:
    """As `open_measured`, for an SAE from `open_sae`."""
    subject, saved = opened
    rows = _rows(home, subject, data, target, split, listener)
    if rows.inputs:
        stores = Joined.of(rows)
        saved = settled(saved, stores.origin.get("model"))
        _compare_hook_points(subject.name, saved.origin, stores, listener)
    if saved.is_transcoder and not rows.d_target:
        raise ConfigError(
            f"{subject.name} is a transcoder: expected the store of what it predicts, got {rows.name} "
            "alone; name both, by --data and --target"
        )
    if rows.d_target and saved.sae.d_out != rows.d_target:
        raise ConfigError(
            f"{subject.name} cannot be measured on {rows.name}: expected targets of {saved.sae.d_out} "
            f"dimensions, got {rows.d_target}; name another store with --target"
        )
    if saved.sae.d_in != rows.d_in:
        raise ConfigError(
            f"{subject.name} cannot be measured on {rows.name}: expected rows of {saved.sae.d_in} "
            f"dimensions, got {rows.d_in}; name another store with --data"
        )
    saved = replace(saved, sae=saved.sae.copy_to(device_named(device)))
    if rows.places and not saved.sae.widths:  # a crosscoder's, which no other format records
        saved.sae.widths = rows.places
    return Measured(subject, saved, rows.inputs[0].split.which if rows.inputs else None, rows)


def open_all_measured(
    home: Home,
    saes: Sequence[SAELike | Measured],
    data: RowsLike,
    split: Which,
    device: str,
    listener: Listener,
    target: ArrayLike | str | None = None,
) -> list[Measured]:
    """`open_measured` of each SAE, or of the newest run if there are none; those that are opened stay as they are."""
    found = [
        one
        if isinstance(one, Measured)
        else open_measured(home, one, data, split, device, listener, target)
        for one in saes or [None]
    ]
    if (
        not all(isinstance(one, Measured) for one in saes)
        and len({one.chosen_rows for one in found}) > 1
    ):
        listener.note("these runs are measured on different rows, each on its own store and split")
    return found


def held_out(one: Measured) -> Measured:
    """The same SAE with the held-out rows of its store, at least one."""
    rows = one.stores.split("test", seed=one.subject.split_seed).reusing()
    return replace(one, split="test", rows=rows)


def by_rows(everything: Sequence[Measured]) -> list[list[int]]:
    """The indices of SAEs on the same rows, one list per choice of rows."""
    groups: dict[tuple[str, int, float] | None, list[int]] = {}
    for index, one in enumerate(everything):
        groups.setdefault(one.chosen_rows, []).append(index)
    return list(groups.values())


def _compare_hook_points(
    name: str, origin: Mapping[str, Any], stores: Joined, listener: Listener
) -> None:
    """Warn if an SAE was trained on other hook points than the stores hold; refuse a crosscoder's in another order."""
    (wanted, wanted_target), (got, got_target) = hook_points(origin), hook_points(stores.origin)
    models = [Path(one["model"]).name for one in (origin, stores.origin) if one.get("model")]
    if reason := why_unsettled(origin, stores.origin):
        raise ConfigError(f"{name} cannot be measured on {stores.name}: {reason}")
    if len(wanted) > 1 and wanted != got and sorted(wanted) == sorted(got):
        raise ConfigError(
            f"--data names the inputs of {name} in another order than it was trained on; name them in "
            f"this order: {', '.join(wanted)}"
        )
    if wanted and got and (wanted, wanted_target) != (got, got_target):
        listener.warn(
            f"{name} was trained on {in_words(wanted, wanted_target)}; {stores.name} holds "
            f"{in_words(got, got_target)}"
        )
    elif len({*models}) > 1:
        listener.warn(
            f"{name} was trained on {models[0]}; {stores.name} holds activations of {models[1]}"
        )


def _rows(
    home: Home,
    subject: Subject,
    data: RowsLike,
    target: ArrayLike | str | None,
    split: Which,
    listener: Listener,
) -> RowSource:
    names = [data] if isinstance(data, str) else []
    if isinstance(data, list | tuple) and data and all(isinstance(name, str) for name in data):
        names = list(data)
    if not names and not isinstance(data, Rows | JoinedRows | ActivationStore | Joined | None):
        return ArrayRows(data, target)
    if target is not None and not (names and isinstance(target, str)):
        raise ConfigError(
            "--target does nothing without the name of a store as --data, or rows in memory; leave it "
            "out, or give stores as one, by `saecli.join`"
        )
    if isinstance(data, Rows | JoinedRows):
        return data.reusing()
    if isinstance(data, ActivationStore | Joined):
        stores = data if isinstance(data, Joined) else Joined((data,))
    else:
        if not names and subject.streamed and subject.data not in home.stores.names():
            raise ConfigError(
                f"--data is needed: {subject.name} was trained on rows that were not stored; name a "
                "store, or make one of its text by `sae extract "
                f"{shlex.join(words_of(subject.streamed))}`"
            )
        found = names or [name for name in (subject.data, *subject.beside) if name]
        named = (target if isinstance(target, str) else None) if names else subject.target
        if not found:
            listener.warn(f"{subject.name} does not name its store: taking the newest")
        stores = open_joined(home, found, named, listener)
    note_if_remade(subject, stores, listener)
    fraction = subject.fraction if split == "train" else 1.0
    return stores.split(split, fraction=fraction, seed=subject.split_seed).reusing()
