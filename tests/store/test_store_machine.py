"""A state machine: a store that is appended to, interrupted, killed and resumed, against rows in a NumPy array."""

import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from storing import collect, make_meta, memory_folder, stored_contents

from saecli.base.errors import StoreError
from saecli.store.blocks import RowBlock
from saecli.store.reader import ActivationStore
from saecli.store.split import Part, is_test
from saecli.store.values import DTYPES
from saecli.store.writer import StoreWriter

BLOCKS, D_IN = 12, 3


def block(number: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Rows over many magnitudes, some not finite, with zeros of both signs and ties; documents; dropped norms."""
    rng = np.random.default_rng(number)
    count = int(rng.integers(0, 25))
    rows = rng.standard_normal((count, D_IN)) * 10.0 ** rng.integers(-8, 3, (count, 1))
    rows[rng.random((count, D_IN)) < 0.1] = -0.0
    rows[rng.random((count, D_IN)) < 0.1] = 1 + 2.0**-8
    rows[rng.random(count) < 0.1, 1] = rng.choice([np.nan, np.inf, 1e39])
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float32)
    dropped = {"special": rng.integers(0, count + 1, rng.integers(0, 3))}
    return rows, 20 * number + np.arange(count) // 3, dropped


class StoreMachine(RuleBasedStateMachine):
    """The store at `path`, and `kept` and `documents`: all rows that it is to hold in the end."""

    @initialize(
        dtype=st.sampled_from(list(DTYPES)),
        shard_rows=st.integers(1, 60),
        chunk_rows=st.integers(1, 30),
        limit=st.none() | st.integers(20, 120),
        documented=st.booleans(),
        multiple=st.sampled_from([None, 2.0]),
        seconds=st.sampled_from([0.0, 60.0]),
    )
    def begin(self, dtype, shard_rows, chunk_rows, limit, documented, multiple, seconds):
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("saecli.store.writer.SHARD_SECONDS", seconds)
        self.folder = self.stack.enter_context(memory_folder())
        self.columns = ("document",) if documented else ()
        sizes = {"shard_rows": shard_rows, "chunk_rows": chunk_rows}
        limits = {"columns": self.columns, "max_norm_multiple": multiple}
        self.meta = make_meta(D_IN, dtype, **sizes, **limits)
        self.limit, self.writer, self.path, self.copies = limit, None, self.folder / "s", 0
        median, kept, documents, self.until = None, [], [], []
        for number in range(BLOCKS):
            rows, of_rows, _ = block(number)
            with np.errstate(over="ignore"):
                stored = torch.from_numpy(rows).to(getattr(torch, dtype)).float().numpy()
            finite = np.isfinite(stored).all(axis=1)
            norms = np.linalg.norm(rows.astype(np.float64), axis=1)
            if median is None and finite.any():
                median = np.median(norms[finite])
            fits = finite & (norms <= multiple * median if multiple and finite.any() else True)
            kept.append(stored[fits])
            documents.append(of_rows[fits])
            self.until.append(sum(map(len, kept)))  # rows up to the end of each block
        self.kept, self.documents = np.concatenate(kept)[:limit], np.concatenate(documents)[:limit]

    def append_to(self, writer: StoreWriter, number: int) -> None:
        rows, documents, dropped = block(number)
        columns = dict.fromkeys(self.columns, documents)
        writer.append(RowBlock(rows, columns, dropped), {"block": number})

    def write_rest(self, writer: StoreWriter, number: int) -> None:
        while not writer.full and number < BLOCKS:
            self.append_to(writer, number)
            number += 1
        writer.finish()

    @precondition(lambda self: self.writer is None)
    @rule()
    def resume(self):
        self.writer = StoreWriter.open(self.path, self.meta, limit=self.limit)
        self.number = self.writer.cursor["block"] if self.writer.cursor else 0

    @precondition(lambda self: self.writer and self.number < BLOCKS and not self.writer.full)
    @rule()
    def append(self):
        self.append_to(self.writer, self.number)
        assert self.writer.rows == min(self.until[self.number], len(self.kept))
        self.number += 1

    @precondition(lambda self: self.writer)
    @rule()
    def interrupt(self):
        rows = self.writer.rows
        with self.writer:
            pass
        if self.writer.meta.shards or rows:
            assert ActivationStore.open(self.path).rows == rows
        self.writer = None

    @precondition(lambda self: self.writer)
    @rule()
    def kill(self):
        """What a kill leaves is what the disk holds now."""
        self.copies += 1
        killed = self.folder / f"s{self.copies}"
        shutil.copytree(self.path, killed)
        self.interrupt()
        self.path = killed

    @precondition(lambda self: self.writer and (self.number == BLOCKS or self.writer.full))
    @rule()
    def finish(self):
        assert self.writer.finish().complete
        assert self.writer.meta.complete and self.writer.rows == len(self.kept)

    def opened(self) -> ActivationStore | None:
        if not (self.path / "store.json").exists():
            return None
        store = ActivationStore.open(self.path)
        assert store.verify() == []
        return store if store.rows else None

    @rule(size=st.integers(1, 150), parts=st.integers(1, 4))
    def read(self, size, parts):
        if (store := self.opened()) is None:
            return
        rows, count = store.split("all"), store.rows
        np.testing.assert_array_equal(collect(rows.sequential(size)), self.kept[:count])
        several = [rows.sequential(size, Part(number, parts)) for number in range(parts)]
        together = np.concatenate([batch for part in several for batch in part])
        np.testing.assert_array_equal(together, self.kept[:count])
        for name in self.columns:
            values = np.concatenate([*rows.column(name, size)])
            np.testing.assert_array_equal(values, self.documents[:count])
        self.check_statistics(store)

    def check_statistics(self, store):
        spread, summary = store.spread(), store.meta.norms
        rows = self.kept[: store.rows].astype(np.float64)
        mean, scatter = rows.mean(0), ((rows - rows.mean(0)) ** 2).sum(0)
        large = np.abs(rows).max()
        np.testing.assert_allclose(spread.mean, mean, rtol=1e-12, atol=1e-12 * large)
        np.testing.assert_allclose(spread.scatter, scatter, rtol=1e-9, atol=1e-12 * large**2)
        norms = np.linalg.norm(rows, axis=1)
        assert summary.rows == store.rows
        assert summary.max == pytest.approx(norms.max())
        shards = np.split(norms, np.cumsum([shard.rows for shard in store.meta.shards])[:-1])
        medians = [np.median(shard) for shard in shards]
        massive = [shard[shard > 10 * np.median(shard)] for shard in shards]
        assert summary.median == pytest.approx(np.average(medians, weights=[*map(len, shards)]))
        assert summary.massive_rows == sum(map(len, massive))

    @rule(
        size=st.integers(1, 90),
        window=st.integers(1, 3000),
        seed=st.integers(0, 9),
        parts=st.integers(1, 4),
        run=st.sampled_from([8, 64, 1 << 20]),
    )
    def split(self, size, window, seed, parts, run):
        """Train and test rows are those of the hash, in any order; parts of a batch are the batch."""
        if (store := self.opened()) is None:
            return
        ids = self.documents[: store.rows] if self.columns else np.arange(store.rows)
        held_out = is_test(ids, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("saecli.store.split.RUN_BYTES", run)
            for which, chosen in (("train", ~held_out), ("test", held_out)):
                try:
                    rows = store.split(which, seed=seed)
                except StoreError:
                    assert len(np.unique(ids)) == 1  # the only document is not held out
                    continue
                expected = collect(rows.sequential(size))
                if held_out.any() and not held_out.all():
                    np.testing.assert_array_equal(expected, self.kept[: store.rows][chosen])
                asked = {"seed": seed, "epoch": 1, "window_bytes": window}
                whole = [*rows.batches(size, **asked)]
                assert [len(batch) for batch in whole[:-1]] == [size] * (len(whole) - 1)
                read, wanted = (
                    values[np.lexsort(values.T)] for values in (np.concatenate(whole), expected)
                )
                np.testing.assert_array_equal(read, wanted)
                if size >= parts:
                    own_parts = [Part(number, parts) for number in range(parts)]
                    of_parts = [[*rows.batches(size, **asked, part=part)] for part in own_parts]
                    for number, batch in enumerate(whole):
                        own = [batches[number] for batches in of_parts if number < len(batches)]
                        np.testing.assert_array_equal(np.concatenate(own), batch)

    def teardown(self):
        """However it was interrupted, the finished store is the one that never was."""
        if not hasattr(self, "folder"):
            return
        try:
            if self.writer:
                self.interrupt()
            with StoreWriter.open(self.folder / "whole", self.meta, limit=self.limit) as writer:
                self.write_rest(writer, 0)
            with StoreWriter.open(self.path, self.meta, limit=self.limit) as writer:
                self.write_rest(writer, writer.cursor["block"] if writer.cursor else 0)
            whole, resumed = stored_contents(self.folder / "whole"), stored_contents(self.path)
            for contents in (resumed, whole):  # an interruption ends a shard
                shards = contents["meta"].pop("shards")
                assert contents["meta"].pop("shard_count") == len(shards)
                assert all(1 <= shard["rows"] <= self.meta.shard_rows for shard in shards)
                del contents["meta"]["norms"]
            assert resumed["meta"] == whole["meta"]
            np.testing.assert_array_equal(resumed["rows"], self.kept)
            np.testing.assert_array_equal(whole["rows"], self.kept)
        finally:
            self.stack.close()


TestStore = StoreMachine.TestCase
TestStore.pytestmark = [pytest.mark.slow]  # 13 s
# Shrinking a failure takes minutes.
TestStore.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
