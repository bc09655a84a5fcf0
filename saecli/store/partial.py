"""Rows of a shard that is not whole yet, stored now and then: what kills the writer loses those of a minute at most.

They are a shard of their own for as long, which only the next writer reads.
"""

import dataclasses
from pathlib import Path

from ..errors import StoreError
from .dropped import Dropped
from .schema import SHARDS, Partial, Resume, ShardRecord, StoreMeta, partial_name, shard_name
from .shard import MappedShards
from .shard_writer import ShardWriter

SAVE_SECONDS = 60.0  # copying a shard takes half a second at most


def store_partial(path: Path, meta: StoreMeta, shard: ShardWriter, last: Resume, onward: Resume,
                  ended: Dropped) -> Partial:
    """Store what there is of a shard; more can be appended to it.

    Args:
        path: the store's folder.
        meta: its `store.json`.
        shard: what is being written, of one row or more.
        last: where its last row came from.
        onward: where the producer goes on.
        ended: rows dropped in the blocks that ended since the shard before, and before that.

    Returns:
        What is to be said of it in `store.json`.

    Raises:
        OSError: the disk refuses it.
    """
    copy = ShardWriter(path / SHARDS / partial_name(len(meta.shards), shard.rows), meta)
    try:
        for rows, columns in shard.parts():
            copy.append(rows, columns)
        digest, frame = copy.commit()
    except BaseException:
        copy.abandon()
        raise
    record = ShardRecord(copy.path.name, shard.rows, digest, dict(ended.counts), last, dict(ended.norms), frame)
    return Partial(record, onward)


def taken_up(path: Path, meta: StoreMeta) -> ShardWriter | None:
    """A shard to append to that holds what was stored of it before; None where that is damaged.

    Args:
        path: the store's folder.
        meta: its `store.json`, which names a partial shard.
    """
    assert meta.partial is not None
    record = meta.partial.shard
    stored = MappedShards(path, dataclasses.replace(meta, shards=(record,)))
    shard = ShardWriter(path / SHARDS / shard_name(len(meta.shards)), meta)
    try:
        columns = {name: stored.column(0, name) for name in meta.columns}
        for chunk, begin in enumerate(range(0, record.rows, meta.chunk_rows)):
            rows = stored.chunk(0, chunk)
            shard.append(rows, {name: column[begin : begin + len(rows)] for name, column in columns.items()})
    except StoreError:  # then its rows come from the producer once more
        shard.abandon()
        return None
    return shard


def remove_partials(path: Path, kept: Partial | None = None) -> None:
    """Remove the partial shards of a store, but for the one that is kept; a kill can leave others."""
    for file in (path / SHARDS).glob("*-*.h5"):
        if kept is None or file.name != kept.shard.file:
            file.unlink()
