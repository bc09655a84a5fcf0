"""An SAE with the rows that it is measured on.

Shapes: N rows, B rows of a batch, D = d_in, E the width of targets, 0 without, F = d_sae.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener, Silent
from ..base.devices import batches_on, device_named
from ..base.errors import ConfigError, StoreError
from ..base.home import Home
from ..base.options import words_of
from ..model.saes import fold_in, open_sae, why_not_folded
from ..sae.codes import Codes
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject, note_if_remade
from ..store.opening import Joined, open_joined
from ..store.origin import Origin
from ..store.reader import ActivationStore, JoinedRows, Rows, RowSource, in_words
from ..store.split import Split, Which
from ..store.values import OUTLYING
from ..store.worlds import directions_of
from ..train.rows import ArrayLike, ArrayRows
from .cosines import Alignment

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# A store, stores joined, or rows of these, rows in memory (N, D), or a store's name in the home, or several side by
# side; None for the stores that the run was trained on, else the newest.
RowsLike = ActivationStore | Joined | Rows | JoinedRows | ArrayLike | str | Sequence[str] | None

# Per batch: at most 64 MB of codes; smaller batches are faster.
BATCH_CODES, BATCH_ROWS = 1 << 24, 1024


@dataclass(frozen=True)
class Measured:
    subject: Subject
    saved: SavedSAE  # on the device that it is measured on
    rows: RowSource
    source: int | None = None  # of a mixture, number of the only source whose rows `batches` gives

    @property
    def sae(self) -> SAE:
        return self.saved.sae

    @property
    def split(self) -> str | None:
        """None for rows in memory."""
        return self.rows.inputs[0].split.which if self.rows.inputs else None

    @property
    def family(self) -> str:
        """Solver, if known, and activation, for legends."""
        return f"{self.sae.metadata.get('solver') or ''} {self.sae.activation.name}".strip()

    @property
    def _stored(self) -> RowSource:
        if not self.rows.inputs:
            raise ConfigError(
                "--data must be a store or rows of one here, got rows in memory; store them by `sae import`"
            )
        return self.rows

    @property
    def of_store(self) -> Rows:
        """The rows of the store, or the first; ConfigError for rows in memory."""
        return self._stored.inputs[0]

    @property
    def store(self) -> ActivationStore:
        return self.stores.inputs[0]

    @property
    def stores(self) -> Joined:
        """ConfigError for rows in memory."""
        return Joined.of(self._stored)

    def demand_reconstruction(self, what: str) -> None:
        """ConfigError for a transcoder or crosscoder, for which `what` is not defined."""
        if len(self.rows.inputs) > 1 or self.rows.target is not None:
            raise ConfigError(
                f"{what} of {self.subject.name} is not defined: expected an SAE that reconstructs the "
                f"rows of one store, got one trained on {self.rows.name}; name another run"
            )

    def alignment(self) -> Alignment | None:
        """The decoder's alignment with the features that the rows are made of; None if unknown."""
        if len(self.rows.inputs) != 1 or self.rows.target or self.store.meta.world is None:
            return None
        return Alignment.of(self.sae.W_dec, torch.from_numpy(directions_of(self.store)))

    @cached_property  # it reads the column `source`
    def by_source(self) -> "dict[str, Measured]":
        """The SAE on each source's rows, by name; empty unless rows are of several."""
        if not self.rows.inputs or self.source is not None or not self.store.meta.sources:
            return {}
        columns = self.of_store.column("source", self.batch_rows)
        present = sorted({int(number) for part in columns for number in np.unique(part)})
        if len(present) < 2:
            return {}
        names = list(self.store.meta.sources)
        return {names[number]: replace(self, source=number) for number in present}

    @cached_property
    def _massive_norms(self) -> list[float]:
        """`OUTLYING` times the median norm of rows, at each hook point predicted."""
        predicted = [self.rows.target] if self.rows.target else self.rows.inputs
        medians = []
        for rows in predicted:
            assert rows.store.meta.norms is not None
            medians.append(rows.store.meta.norms.median)
        return [OUTLYING * median for median in medians]

    def massive(self, y: Tensor) -> Tensor:
        """Rows, or targets, (B, E), above `OUTLYING` times the median norm at some hook point, (B,) bool."""
        massive = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        for place, limit in zip(self.sae.hook_columns, self._massive_norms, strict=True):
            if limit > 0:
                massive |= y[:, place].norm(dim=1) > limit
        return massive

    @property
    def heading(self) -> dict[str, str | None]:
        """The first entries of every document; None for rows in memory."""
        return {
            "run": self.subject.name,
            "data": self.rows.name if self.rows.inputs else None,
            "split": self.split,
        }

    @property
    def batch_rows(self) -> int:
        return max(16, min(BATCH_ROWS, BATCH_CODES // self.sae.d_sae))

    def batches(self, listener: Listener) -> Iterator[Tensor]:
        """Rows in stored order, targets next to them, (B, D + E), in the SAE's dtype and on its device."""
        W_enc = self.sae.W_enc
        sources = None
        if self.source is not None:
            sources = self.of_store.column("source", self.batch_rows)
        batches = batches_on(self.rows.sequential(self.batch_rows), W_enc.device)
        done = 0
        with listener.progress(f"measuring {self.subject.name}", self.rows.rows, "rows") as show:
            for batch in batches:
                done += len(batch)
                if sources is not None:
                    of_source = torch.from_numpy(next(sources) == self.source)
                    batch = batch[of_source.to(batch.device)]
                if len(batch):
                    yield batch.to(W_enc.dtype)
                show(done)

    def inputs(self, listener: Listener) -> Iterator[Tensor]:
        """Rows in stored order, without targets, (B, D); see `batches`."""
        return (batch[:, : self.sae.d_in] for batch in self.batches(listener))


@dataclass(frozen=True)
class ChosenRows:
    """The rows to measure SAEs on.

    data: rows chosen from a store, and rows in memory, are all taken.
    split: with the run's split seed.
    target: store of a transcoder's targets, or for rows in memory targets, (N, E); None for the store that it was
        trained on, if data are too.
    """

    home: Home
    data: RowsLike
    split: Which
    device: str
    listener: Listener
    target: ArrayLike | str | None = None

    def with_sae(self, sae: SAELike) -> Measured:
        return self.with_opened(*open_sae(self.home, sae, self.listener))

    def with_opened(self, subject: Subject, saved: SavedSAE) -> Measured:
        rows = self._rows(subject)
        if rows.inputs:
            stores = Joined.of(rows)
            saved = fold_in(saved, stores.origin.model)
            _compare_hook_points(subject.name, saved.origin, stores, self.listener)
        if saved.is_transcoder and not rows.d_target:
            raise ConfigError(
                f"{subject.name} is a transcoder: expected the store of what it predicts, got {rows.name} "
                "alone; name both, by --data and --target"
            )
        widths = [("rows", saved.sae.d_in, rows.d_in, "--data")]
        if rows.d_target:
            widths.append(("targets", saved.sae.d_out, rows.d_target, "--target"))
        for what, expected, got, option in widths:
            if got != expected:
                raise ConfigError(
                    f"{subject.name} cannot be measured on {rows.name}: expected {what} of {expected} "
                    f"dimensions, got {got}; name another store with {option}"
                )
        sae = saved.sae.copy_to(device_named(self.device))
        if rows.places and not sae.widths:  # of a crosscoder, which no other format records
            sae = sae.with_widths(rows.places)
        return Measured(subject, replace(saved, sae=sae), rows)

    def with_all(self, saes: Sequence[SAELike], of_set: bool = False) -> list[Measured]:
        """Each SAE, or the newest run without any; in a set each has rows of its own."""
        opened = [self.with_sae(sae) for sae in saes or [None]]
        if not of_set and len(by_rows(opened)) > 1:
            self.listener.warn(
                "these runs are measured on different rows, each on its own store and split"
            )
        return opened

    def _rows(self, subject: Subject) -> RowSource:
        data, target, split = self.data, self.target, self.split
        names = [data] if isinstance(data, str) else []
        if isinstance(data, list | tuple) and all(isinstance(name, str) for name in data):
            names = list(data)
        if not names and not isinstance(data, Rows | JoinedRows | ActivationStore | Joined | None):
            return ArrayRows(data, target)
        if target is not None and not (names and isinstance(target, str)):
            raise ConfigError(
                "--target does nothing without the name of a store as --data, or rows in memory; leave it "
                "out, or give stores as one, by `saecli.join`"
            )
        if isinstance(data, Rows | JoinedRows):
            return data
        if isinstance(data, Joined):
            stores = data
        elif isinstance(data, ActivationStore):
            stores = Joined((data,))
        elif names:
            stores = open_joined(self.home, names, target, self.listener)
        else:
            stores = self._own_stores(subject)
        note_if_remade(subject, stores, self.listener)
        fraction = subject.fraction if split == "train" else 1.0
        return stores.split(split, fraction=fraction, seed=subject.split_seed)

    def _own_stores(self, subject: Subject) -> Joined:
        """The stores that an SAE was trained on, else the newest."""
        if subject.streamed and subject.data not in self.home.stores:
            raise ConfigError(
                f"--data is needed: {subject.name} was trained on rows that were not stored; name a store, or make one "
                f"of its text by `sae extract {shlex.join(words_of(subject.streamed))}`"
            )
        if not subject.inputs:
            self.listener.warn(f"{subject.name} does not name its store: taking the newest")
        return open_joined(self.home, subject.inputs, subject.target, self.listener)


@torch.no_grad()
def own_codes(
    home: Home,
    opened: tuple[Subject, SavedSAE],
    device: str,
    rows: int,
    products: int,
    window_bytes: int | None = None,
) -> Iterator[Codes]:
    """An SAE's codes on random batches from the stores of its training, none where one is missing or unfit: of `rows`
    rows, or fewer above `products` multiplications, one batch at least. `window_bytes` as in `Rows.batches`."""
    subject, _ = opened
    names = [name for name in (*subject.inputs, subject.target) if name]
    if not names or not all(name in home.stores or Path(name).exists() for name in names):
        return
    try:
        measured = ChosenRows(home, None, "all", device, Silent(warns=False)).with_opened(*opened)
    except (ConfigError, StoreError):  # a store made anew under the name may lack rows or targets
        return
    sae, stored = measured.sae, measured.rows
    assert isinstance(stored, Rows | JoinedRows)
    left = min(rows, products // (sae.d_in * sae.d_sae))
    for batch in stored.batches(measured.batch_rows, seed=0, epoch=0, window_bytes=window_bytes):
        yield sae.codes(torch.from_numpy(batch[:, : sae.d_in]).to(sae.W_enc))
        left -= len(batch)
        if left <= 0:
            return


def codes_of(sae: SAE, x: Tensor) -> "csr_array":
    """Codes, (N, F), of rows, (N, D)."""
    from scipy.sparse import csr_array, vstack  # which not all measures need

    batches = x.split(max(1, BATCH_CODES // sae.d_sae))
    codes = [csr_array(sae.encode(part.to(sae.W_enc)).float().cpu().numpy()) for part in batches]
    return vstack(codes, format="csr")


def at_tokens(codes: "csr_array", is_row: np.ndarray) -> "csr_array":
    """Codes of rows, (n, F), as codes of tokens, (T, F), given which are rows, (T,) bool; the others have none."""
    from scipy.sparse import csr_array  # which not all measures need

    counts = np.zeros(len(is_row), np.int64)
    counts[is_row] = np.diff(codes.indptr)
    offsets = np.append(0, counts.cumsum())
    return csr_array((codes.data, codes.indices, offsets), shape=(len(is_row), codes.shape[1]))


def spread_out(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(int)]


def held_out(measured: Measured) -> Measured:
    rows = measured.stores.split("test", seed=measured.subject.split_seed)
    return replace(measured, rows=rows)


def by_rows(saes: Sequence[Measured]) -> list[list[int]]:
    """Indices of SAEs on the same rows, a list per choice of rows."""
    groups: dict[tuple[str | Split, ...], list[int]] = {}
    for index, measured in enumerate(saes):
        splits = [rows.split for rows in measured.rows.inputs]
        groups.setdefault((measured.rows.name, *splits), []).append(index)
    return list(groups.values())


def _compare_hook_points(name: str, origin: Origin, stores: Joined, listener: Listener) -> None:
    """Warn of other hook points than the SAE was trained on; refuse a crosscoder's in another order."""
    reason = why_not_folded(origin, stores.origin)
    if reason:
        raise ConfigError(f"{name} cannot be measured on {stores.name}: {reason}")
    trained_on, stored = origin.hook_points(), stores.origin.hook_points()
    if len(trained_on[0]) > 1 and trained_on != stored and set(trained_on[0]) == set(stored[0]):
        raise ConfigError(
            f"--data names the inputs of {name} in another order than it was trained on; name them in "
            f"this order: {', '.join(trained_on[0])}"
        )
    models = [Path(each.model or "").name for each in (origin, stores.origin)]
    if trained_on[0] and stored[0] and trained_on != stored:
        listener.warn(
            f"{name} was trained on {in_words(*trained_on)}; {stores.name} holds {in_words(*stored)}"
        )
    elif all(models) and models[0] != models[1]:
        listener.warn(
            f"{name} was trained on {models[0]}; {stores.name} holds activations of {models[1]}"
        )
