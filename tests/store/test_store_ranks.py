"""A store that several ranks write: what is joined is what each of them stored, however often any of them was killed,
joining too; and shards of uneven sizes are read as others are."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import collect, make_meta, memory_folder

from saecli.base.errors import StoreError
from saecli.store.ranks import RankedStore, joining_began, rank_folder, rank_meta, saved_rows
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.stream import Part
from saecli.store.writer import StoreWriter

META = make_meta(3, shard_rows=7, chunk_rows=4, columns=("document",))
ROWS = [45, 23, 0, 31]  # of each rank
Block = tuple[dict, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]


def blocks(rank: int, since: dict | None) -> Iterator[Block]:
    """A rank's blocks of five documents of a row each; a row holds its document's number."""
    for number in range(since["block"] if since else 0, 12):
        documents = rank + len(ROWS) * (5 * number + np.arange(5))
        yield ({"block": number}, documents[:, None] * np.array([1, 0, 0], np.float32), {"document": documents},
               {"special": np.ones(2)})


def write_rank(path: Path, meta: StoreMeta, rank: int, stop: int | None = None) -> None:
    """Write a rank's rows, from where they stand; interrupted after so many blocks."""
    limit = meta.ranks[rank].rows
    if not limit:
        return
    with StoreWriter.open(rank_folder(path, rank), rank_meta(meta), limit=limit) as writer:
        if not writer.complete:
            for number, (cursor, rows, columns, dropped) in enumerate(blocks(rank, writer.cursor)):
                if number == stop:
                    raise KeyboardInterrupt
                writer.append(rows, columns, cursor, dropped)
                if writer.full:
                    break
            writer.finish()


def write(path: Path, meta: StoreMeta = META, stops: tuple[int, ...] = ()) -> None:
    """Write the store, as the ranks would from where it stands; rank r of those in `stops` is interrupted."""
    with RankedStore.open(path, meta, world_size=len(ROWS)) as store:
        if not store.meta.ranks:
            store.begin(ROWS)
        if not joining_began(path):
            for rank in range(len(ROWS)):
                with suppress(KeyboardInterrupt):
                    write_rank(path, store.meta, rank, stops[rank] if rank < len(stops) else None)
            if stops:
                return
        if not store.meta.complete:
            store.join()


def contents(path: Path) -> dict:
    """All that a store says and holds, but for when it was begun."""
    store = ActivationStore.open(path)
    assert store.verify() == [] == store.misfits()
    assert sorted(file.name for file in path.iterdir()) == [".lock", "shards", "store.json"]
    return {**store.meta.to_json(), "created": "", "values": collect(store.split("all").sequential(16)).tolist()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("ranks") / "s"
    write(path)
    return contents(path)


def test_a_joined_store_says_and_holds_what_the_ranks_stored(whole: dict):
    expected = [float(rank + len(ROWS) * number) for rank, rows in enumerate(ROWS) for number in range(rows)]
    assert [row[0] for row in whole["values"]] == expected
    assert whole["complete"]
    assert [(rank["rows"], rank["shards"]) for rank in whole["ranks"]] == [(45, 7), (23, 4), (0, 0), (31, 5)]
    assert [shard["rows"] for shard in whole["shards"]] == [7] * 6 + [3] + [7] * 3 + [2] + [7] * 4 + [3]
    assert whole["dropped"] == {"special": 2 * (9 + 5 + 7)}
    assert whole["norms"]["rows"] == sum(ROWS)
    assert whole["norms"]["max"] == max(expected)


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 11), min_size=len(ROWS), max_size=len(ROWS)), max_size=4))
def test_ranks_interrupted_anywhere_and_run_again_equal_those_never_interrupted(whole: dict, stops: list[list[int]]):
    with memory_folder() as folder:
        for some in stops:
            write(folder / "s", stops=tuple(some))
            if (folder / "s").exists():
                assert saved_rows(folder / "s") == sum(
                    shard["rows"] for file in folder.glob("s/ranks/*/store.json")
                    for shard in json.loads(file.read_text())["shards"])
        write(folder / "s")
        assert contents(folder / "s") == whole


JOIN = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
import test_store_ranks
left = int(sys.argv[2])
def note(event, arguments):
    global left
    if event in ("os.rename", "os.mkdir", "os.remove", "shutil.rmtree", "os.chmod", "os.rmdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(note)
test_store_ranks.write(Path(sys.argv[1]))
"""


@pytest.mark.long
def test_joining_killed_at_any_step_is_gone_on_with(whole: dict, tmp_path: Path):
    with memory_folder() as folder:
        write(folder / "stored", stops=(99,) * len(ROWS))
        here = Path(__file__).parent
        script = JOIN.format(tests=str(here), root=str(here.parent))
        kills = 0
        for step in range(0, 60, 2):
            shutil.rmtree(folder / "s", ignore_errors=True)
            shutil.copytree(folder / "stored", folder / "s")
            done = subprocess.run([sys.executable, "-c", script, folder / "s", str(step)], check=False)
            kills += done.returncode != 0
            write(folder / "s")
            found = ActivationStore.open(folder / "s")
            assert {**found.meta.to_json(), "created": ""} == {name: value for name, value in whole.items()
                                                               if name != "values"}
            assert collect(found.split("all").sequential(16)).tolist() == whole["values"]
            if done.returncode == 0:
                break
        assert kills > 8


def test_another_number_of_processes_is_refused_in_one_sentence(tmp_path: Path):
    write(tmp_path / "several", stops=(3, 3, 3, 3))
    with pytest.raises(StoreError, match="expected the number of processes that began it, 4, got 2; run the command "
                                         "with `torchrun --nproc-per-node 4`, or remove that store"):
        RankedStore.open(tmp_path / "several", META, world_size=2)
    with pytest.raises(StoreError, match="that began it, 4, got 1; run the command with `torchrun"):
        StoreWriter.open(tmp_path / "several", META)
    with suppress(KeyboardInterrupt), StoreWriter.open(tmp_path / "one", META) as writer:
        writer.append(np.ones((8, 3), np.float32), {"document": np.arange(8)}, {"block": 0})
        raise KeyboardInterrupt
    with pytest.raises(StoreError, match="that began it, 1, got 4; run the command with one process, without torchrun"):
        RankedStore.open(tmp_path / "one", META, world_size=4)
    write(tmp_path / "several")  # as it was, each of them lets go of the lock


def test_a_second_command_is_refused_and_a_store_without_rows_is_removed(tmp_path: Path):
    with RankedStore.open(tmp_path / "s", META, world_size=4) as store:
        for again in (lambda: RankedStore.open(tmp_path / "s", META, world_size=4),
                      lambda: StoreWriter.open(tmp_path / "s", META)):
            with pytest.raises(StoreError, match="another process is writing it"):
                again()
        store.begin(ROWS)
        assert saved_rows(tmp_path / "s") == 0
    assert not (tmp_path / "s").exists()
    with (RankedStore.open(tmp_path / "s", META, world_size=4) as store,
          pytest.raises(StoreError, match="there are no rows to store")):
        store.begin([0, 0, 0, 0])
    assert not (tmp_path / "s").exists()


def test_a_store_json_whose_ranks_do_not_fit_its_shards_is_refused(tmp_path: Path):
    write(tmp_path / "s")
    document = json.loads((tmp_path / "s" / "store.json").read_text())
    for ranks, said in (([{"rows": 45, "shards": 7}], "expected 7 shards, as `ranks` says, got 16"),
                        ([{"rows": 45, "shards": 16}], "expected 7 rows in shard 00006.h5, got 3")):
        (tmp_path / "s" / "store.json").write_text(json.dumps({**document, "ranks": ranks}))
        with pytest.raises(StoreError, match=said):
            ActivationStore.open(tmp_path / "s")


@pytest.mark.slow
@given(st.data())
def test_shards_of_uneven_sizes_are_read_as_the_rows_that_they_hold(data):
    counts = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    columns = data.draw(st.sampled_from([(), ("document",)]))
    meta = make_meta(2, shard_rows=data.draw(st.integers(1, 20)), chunk_rows=data.draw(st.integers(1, 25)),
                     columns=columns)
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        with RankedStore.open(folder / "s", meta, world_size=len(counts)) as joined:
            joined.begin(counts)
            for rank, count in enumerate(counts):
                begin = sum(counts[:rank])
                if count:
                    with StoreWriter.open(rank_folder(folder / "s", rank), rank_meta(joined.meta)) as writer:
                        numbers = np.arange(begin, begin + count)
                        writer.append(numbers[:, None] * np.ones(2, np.float32), dict.fromkeys(columns, numbers),
                                      {"row": 0})
                        writer.finish()
            joined.join()
        store = ActivationStore.open(folder / "s")
        in_memory = data.draw(st.booleans())
        patch.setattr(ActivationStore, "in_memory", lambda store: in_memory)
        patch.setattr("saecli.store.stream.RUN_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        rows, size = store.split("all"), data.draw(st.integers(1, 60))
        total = sum(counts)
        assert store.rows == total
        assert collect(rows.sequential(size))[:, 0].tolist() == list(range(total))
        assert np.concatenate(list(rows.numbers(size))).tolist() == list(range(total))
        asked = {"seed": 1, "epoch": 0, "window_bytes": data.draw(st.integers(1, 2000))}
        assert sorted(collect(rows.batches(size, **asked))[:, 0].tolist()) == list(range(total))
        if 1 < size <= total:
            parts = [collect(rows.batches(size, **asked, part=Part(part, 2)))[:, 0] for part in range(2)]
            assert sorted(np.concatenate(parts).tolist()) == list(range(total))
        if total > 1:
            train, test = store.split("train"), store.split("test")
            assert sorted([*collect(train.batches(size, **asked))[:, 0],
                           *collect(test.sequential(size))[:, 0]]) == list(range(total))
            np.testing.assert_allclose(train.spread().mean, collect(train.sequential(64)).astype(np.float64).mean(0))
