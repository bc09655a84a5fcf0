"""An SAE with the rows that it is measured on.

Shapes: N rows, B rows of a batch, D = d_in.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.devices import carried, device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import words_of
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject, open_sae
from ..store.joined import Joined, JoinedRows, in_words
from ..store.opening import open_joined
from ..store.reader import ActivationStore
from ..store.rows import Rows, RowSource
from ..store.worlds import World
from ..train.array_rows import ArrayLike, ArrayRows
from .worlds import Alignment

# A store, stores joined, or rows of these, rows in memory (N, D), or a store's name in the home, or several side by
# side; None for the stores that the run was trained on, else the newest.
RowsLike = ActivationStore | Joined | Rows | JoinedRows | ArrayLike | str | Sequence[str] | None

BATCH_CODES, BATCH_ROWS = 1 << 24, 1024  # at a time: at most 64 MB of codes; smaller batches are faster


@dataclass(frozen=True)
class Measured:
    """An SAE, and the rows that it is measured on.

    Args:
        subject: where the SAE comes from.
        saved: the SAE, on the device it is measured on, in float32 or better.
        split: of the store; None for rows in memory.
        rows: of the split, or in memory.
    """

    subject: Subject
    saved: SavedSAE
    split: str | None
    rows: RowSource

    @property
    def sae(self) -> SAE:
        """The autoencoder."""
        return self.saved.sae

    @property
    def of_store(self) -> Rows:
        """The rows, of several stores the first one's, for measures that need their store; ConfigError if they are in
        memory."""
        if isinstance(self.rows, ArrayRows):
            raise ConfigError("--data must be a store or rows of one here, got rows in memory; put them into a store "
                              "with `sae import`", option="data")
        return self.rows.inputs[0] if isinstance(self.rows, JoinedRows) else self.rows

    @property
    def stores(self) -> Joined:
        """The rows' stores; ConfigError as of `of_store`."""
        return self.rows.stores if isinstance(self.rows, JoinedRows) else Joined((self.store,))

    def demand_reconstruction(self, what: str) -> None:
        """Refuse a transcoder, or a crosscoder, where `what` is defined for the reconstruction of one store's rows; by
        a ConfigError."""
        if isinstance(self.rows, JoinedRows):
            raise ConfigError(f"{what} of {self.subject.name} is not defined: expected an SAE that reconstructs the "
                              f"rows of one store, got one trained on {self.rows.name}; name another run")

    @property
    def store(self) -> ActivationStore:
        """The rows' store; for rows in memory, ConfigError as of `of_store`."""
        return self.of_store.store

    def alignment(self) -> Alignment | None:
        """The alignment of the SAE's decoder with the features that the rows are made of; None if these are unknown.
        Raises StoreError if the store's file of them is damaged."""
        if isinstance(self.rows, ArrayRows) or self.store.meta.world is None:
            return None
        return Alignment.of(self.sae.W_dec, torch.from_numpy(World.of_store(self.store).directions))

    @property
    def heading(self) -> dict[str, str | None]:
        """The first entries of every document: the names of run, store and split; None for rows in memory."""
        data = None if isinstance(self.rows, ArrayRows) else name_of(self.rows)
        return {"run": self.subject.name, "data": data, "split": self.split}

    @property
    def chosen_rows(self) -> tuple[str, int, float] | None:
        """The stores, and seed and fraction of the split, which determine the rows but for the split's name; None in
        memory."""
        if isinstance(self.rows, ArrayRows):
            return None
        split = self.of_store.split
        return name_of(self.rows), split.seed, split.fraction

    @property
    def batch_rows(self) -> int:
        """Rows per batch; the last may have fewer."""
        return max(16, min(BATCH_ROWS, BATCH_CODES // self.sae.d_sae))

    def batches(self, listener: Listener) -> Iterator[Tensor]:
        """The rows in stored order, with targets beside them, in batches, (B, D + E), in the SAE's dtype and on its
        device; the listener shows progress."""
        done = 0
        with listener.progress(f"measuring {self.subject.name}", self.rows.rows, "rows") as show:
            W_enc = self.sae.W_enc
            for batch in carried(self.rows.sequential(self.batch_rows), W_enc.device):
                yield batch.to(W_enc.dtype)
                done += len(batch)
                show(done)

    def inputs(self, listener: Listener) -> Iterator[Tensor]:
        """As `batches`, without targets, (B, D)."""
        return (batch[:, :self.sae.d_in] for batch in self.batches(listener))


def name_of(rows: Rows | JoinedRows) -> str:
    """The name of the rows' store, or the names of all."""
    return rows.name if isinstance(rows, JoinedRows) else rows.store.name


def measured(home: Home, sae: SAELike, data: RowsLike, split: str, device: str, listener: Listener,
             target: ArrayLike | str | None = None) -> Measured:
    """Open an SAE and the rows to measure it on.

    Args:
        home: the folder of stores and runs.
        sae: see `SAELike`.
        data: see `RowsLike`; rows of a store and rows in memory are all taken.
        split: "test", "train" or "all", with the run's split seed.
        device: as of `--device`.
        listener: notes the choices that the user did not make.
        target: name of the store of a transcoder's targets, with rows in memory these targets, (N, E); None for the
            store that it was trained on, if data are too.

    Raises:
        RunError, FormatError, HubError, StoreError: one of them is missing or cannot be read.
        ConfigError: the rows do not have the SAE's width, or lack its targets, or there is no such device or split.
    """
    subject, saved = open_sae(home, sae, listener)
    rows = _rows(home, subject, data, target, split, listener)
    name = "these rows" if isinstance(rows, ArrayRows) else name_of(rows)
    if not isinstance(rows, ArrayRows):
        _compare_places(subject.name, saved.origin, Joined((rows.store,)) if isinstance(rows, Rows) else rows.stores,
                        listener)
    if saved.is_transcoder and not rows.d_target:
        raise ConfigError(f"{subject.name} is a transcoder: expected the store of what it predicts, got {name} "
                          "alone; name both, by --data and --target")
    if rows.d_target and saved.sae.d_out != rows.d_target:
        raise ConfigError(f"{subject.name} cannot be measured on {name}: expected targets of {saved.sae.d_out} "
                          f"dimensions, got {rows.d_target}; name another store with --target")
    if saved.sae.d_in != rows.d_in:
        raise ConfigError(f"{subject.name} cannot be measured on {name}: expected rows of {saved.sae.d_in} "
                          f"dimensions, got {rows.d_in}; name another store with --data")
    found = Measured(subject, replace(saved, sae=saved.sae.copy_to(device_named(device))), None, rows)
    return found if isinstance(rows, ArrayRows) else replace(found, split=found.of_store.split.which)


def _compare_places(name: str, origin: Mapping[str, Any], stores: Joined, listener: Listener) -> None:
    """Warn if an SAE was trained on other places of a model than these stores hold; refuse a crosscoder's stores in
    another order, by a ConfigError."""
    (wanted, wanted_target), (got, got_target) = _places(origin), _places(stores.origin)
    models = [Path(one["model"]).name for one in (origin, stores.origin) if one.get("model")]
    if len(wanted) > 1 and wanted != got and sorted(wanted) == sorted(got):
        raise ConfigError(f"--data names the inputs of {name} in another order than it was trained on; name them in "
                          f"this order: {', '.join(wanted)}", option="data")
    if wanted and got and (wanted, wanted_target) != (got, got_target):
        listener.warn(f"{name} was trained on {in_words(wanted, wanted_target)}; {stores.name} holds "
                      f"{in_words(got, got_target)}")
    elif len({*models}) > 1:
        listener.warn(f"{name} was trained on {models[0]}; {stores.name} holds activations of {models[1]}")


def _places(origin: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The places of the inputs and of the target, as far as they are known."""
    found = [f"layer {one['layer']} {one['site']}" for one in origin.get("inputs") or [origin]
             if {"layer", "site"} <= one.keys()]
    known = {"target_layer", "target_site"} <= origin.keys()
    return found, f"layer {origin['target_layer']} {origin['target_site']}" if known else None


def _rows(home: Home, subject: Subject, data: RowsLike, target: ArrayLike | str | None, split: str,
          listener: Listener) -> RowSource:
    names = [data] if isinstance(data, str) else list(data) if _are_names(data) else []
    if not names and not isinstance(data, Rows | JoinedRows | ActivationStore | Joined | None):
        return ArrayRows(data, target)
    if target is not None and not names:
        raise ConfigError("--target does nothing without the name of a store as --data, or rows in memory; leave it "
                          "out, or give stores as one, by `saecli.join`", option="target")
    if isinstance(data, Rows | JoinedRows):
        return data
    if isinstance(data, ActivationStore):
        stores = Joined((data,))
    elif isinstance(data, Joined):
        stores = data
    else:
        if not names and subject.streamed and subject.data not in home.stores.names():
            raise ConfigError(f"--data is needed: {subject.name} was trained on rows that were not stored; name a "
                              "store, or make one of its text by `sae extract "
                              f"{shlex.join(words_of(subject.streamed))}`", option="data")
        found = names or [name for name in (subject.data, *subject.beside) if name]
        if not found:
            listener.warn(f"{subject.name} does not name its store: taking the newest")
        stores = open_joined(home, found, target if target or names else subject.target, listener)
    own = (subject.data, *subject.beside, subject.target) == (
        *(store.reference for store in stores.inputs), stores.target and stores.target.reference)
    if subject.data_hash is not None and own and subject.data_hash != stores.hash:
        listener.note(f"{stores.name} is not the store that {subject.name} was trained on, though it has its name")
    return stores.split(split, fraction=subject.fraction if split == "train" else 1.0, seed=subject.split_seed)


def _are_names(data: RowsLike) -> bool:
    """Whether rows are given as the names of several stores."""
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(name, str) for name in data)


def held_out(one: Measured) -> Measured:
    """The same SAE with the held-out rows of its store, at least one."""
    return replace(one, split="test", rows=one.stores.split("test", seed=one.subject.split_seed))


def all_measured(home: Home, saes: Sequence[SAELike], data: RowsLike, split: str, device: str,
                 listener: Listener, target: ArrayLike | str | None = None) -> list[Measured]:
    """`measured` of each of several SAEs, or of the newest run if there are none; notes it if their rows differ."""
    found = [measured(home, sae, data, split, device, listener, target) for sae in saes or [None]]
    if len({one.chosen_rows for one in found}) > 1:
        listener.note("these runs are measured on different rows, each on its own store and split")
    return found


def by_rows(everything: Sequence[Measured]) -> list[list[int]]:
    """The indices of SAEs on the same rows, one list per choice of rows."""
    groups: dict[tuple[str, int, float] | None, list[int]] = {}
    for index, one in enumerate(everything):
        groups.setdefault(one.chosen_rows, []).append(index)
    return list(groups.values())
