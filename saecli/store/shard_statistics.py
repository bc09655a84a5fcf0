"""Each shard's statistics of its own rows, from which those of a store or a split follow without a pass."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..base.errors import StoreError
from .checks import make_anew
from .schema import SHARDS, ShardRecord, StoreMeta
from .shard import HDF5_ERRORS, hdf5_file, read_layout
from .statistics import BINS, QUANTILES, Norms, Spread, Statistics

STATISTICS = "statistics"


def put_statistics(file: h5py.File, statistics: Statistics) -> None:
    """Write a shard's statistics into it, in the format of `schema.py`."""
    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)  # equal rows make equal bytes
    group = h5py.Group(h5py.h5g.create(file.id, STATISTICS.encode(), gcpl=creation))
    bins = np.flatnonzero(statistics.norm_counts)
    columns = {"mean": (statistics.spread.mean, "<f8"), "scatter": (statistics.spread.scatter, "<f8"),
               "norm_bin": (bins, "<i4"), "norm_count": (statistics.norm_counts[bins], "<i8")}
    for name, (values, kind) in columns.items():
        group.create_dataset(name, data=values.astype(kind), track_times=False)
    for name, value in (("norm_mean", statistics.norms.mean), ("norm_max", statistics.norms.max)):
        group.attrs.create(name, value, dtype="<f8")


def _read(path: Path, meta: StoreMeta, record: ShardRecord) -> Statistics | None:
    """A shard's statistics; None if an earlier version wrote it without. StoreError if the shard is missing or damaged,
    or the statistics do not fit its rows."""
    read_layout(path, meta, record)  # verifies the checksum before any byte is used
    try:
        with hdf5_file(path) as file:
            if STATISTICS not in file:
                return None
            group = file[STATISTICS]
            mean, scatter, bins, number = (group[name][:] for name in ("mean", "scatter", "norm_bin", "norm_count"))
            norms = Norms(record.rows, *(float(group.attrs[name]) for name in ("norm_mean", "norm_max")))
            counts = np.zeros(BINS, np.int64)
            counts[bins] = number
    except (*HDF5_ERRORS, IndexError) as error:
        raise StoreError(f"cannot read the statistics of shard {path}: {' '.join(str(error).split())}; "
                         f"{make_anew(path.parents[1])}") from error
    if not (mean.shape == scatter.shape == (meta.d_in,) and (scatter >= 0).all() and counts.sum() == record.rows
            and np.isfinite([*mean, *scatter, norms.mean, norms.max]).all()):
        raise StoreError(f"cannot use the statistics of shard {path}: expected those of {record.rows} rows of "
                         f"{meta.d_in} dimensions, got others; {make_anew(path.parents[1])}")
    return Statistics(Spread(record.rows, mean, scatter), norms, counts)


def stored_statistics(path: Path, meta: StoreMeta) -> Statistics | None:
    """The statistics of all rows of a store, merged from its shards' in their order.

    Args:
        path: the store's folder.
        meta: its `store.json`.

    Returns:
        None if there is no shard, or an earlier version wrote one without statistics.

    Raises:
        StoreError: a shard is missing or damaged.

    Cost: opens every shard, and reads no rows.
    """
    total = None
    for record in meta.shards:
        found = _read(path / SHARDS / record.file, meta, record)
        if found is None:
            return None
        total = found if total is None else total + found
    return total


def norm_fields(statistics: Statistics | None) -> dict[str, Any]:
    """The fields of `store.json` on the norms of the rows stored; none without statistics."""
    if statistics is None:
        return {}
    return {"norms": statistics.norms,
            "norm_quantiles": {f"{fraction:g}": statistics.norm_quantile(fraction) for fraction in QUANTILES}}
