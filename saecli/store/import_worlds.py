"""Putting rows of a world, whose features are known, into a store."""

import hashlib
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.errors import ConfigError, StoreError, did_you_mean, flag_of
from ..base.files import file_sha256
from ..base.home import Home, checked_name
from ..base.options import options_of
from .checks import damaged_world
from .import_arrays import check_room
from .opening import DERIVED, filling, finished_store, told_when_stopped
from .options import ImportConfig, SyntheticConfig
from .reader import ActivationStore
from .schema import StoreMeta, WorldRecord, hash_request, rows_per_shard
from .sparse_rows import CODES, INDEX, OFFSET, VALUE, SparseRows
from .synthetic import world_of
from .worlds import World
from .worlds_saelens import is_saved_world, read_saelens, world_files
from .writer import StoreWriter

SYNTHETIC = "synthetic"  # what stands for a world made of options
OF_ROWS = {"rows", "seed", "dtype", "shard_rows"}  # options that a saved world leaves open
OF_ARRAYS = options_of(ImportConfig).keys() - OF_ROWS
SHARD_ROWS = 32_768  # true codes of a shard are held in memory until it is whole


def import_synthetic(source: str | Path = SYNTHETIC, name: str | None = None, *, home: str | Path | None = None,
                     progress: bool = False, **options: Any) -> ActivationStore:
    """Put rows of a world, whose features are known, into a store, as `sae import synthetic` does.

    Args:
        source: `synthetic`, or a folder in which SAELens saved a world (`SyntheticModel.save`).
        name: the store's name; by default `synthetic`, or the folder's.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress on stderr.
        **options: those of `sae import synthetic`: `features` (G), `d_in` (D), `rows`, `seed`, `l0`, `zipf`,
            `hierarchy`, `correlation`; `dtype` and `shard_rows`. A saved world takes `rows`, `seed`, `dtype` and
            `shard_rows`.

    Returns:
        The store; an existing one if it holds the same rows. `evaluate` on it measures which of the features an SAE has
        found.

    Raises:
        ConfigError: an unknown or invalid option.
        FormatError: the saved world cannot be read.
        StoreError: the name is another store's, or the disk has no room.
    """
    known = [*options_of(SyntheticConfig), *OF_ROWS]
    for word in options:
        if word not in known:
            advice = did_you_mean(word, known) or "expected one of `sae import synthetic`'s"
            raise ConfigError(f"import_synthetic has no option {word}; {advice}")
    config = SyntheticConfig(**{key: options[key] for key in options_of(SyntheticConfig) if key in options})
    shape = ImportConfig(dtype=options.get("dtype"), shard_rows=options.get("shard_rows"))
    if not is_world(str(source)):
        raise ConfigError("--source must be synthetic or a folder in which SAELens saved a world, got "
                          f"{str(source)!r}", option="source")
    return imported_world(str(source), config, shape, options.keys(), name, Home.at(home), listening(progress))[0]


def is_world(source: str) -> bool:
    """Whether what is to be imported is a world: `synthetic`, where there is no file of that name, or one that SAELens
    saved."""
    return (source == SYNTHETIC and not Path(source).is_file()) or is_saved_world(source)


def imported_world(source: str, config: SyntheticConfig, shape: ImportConfig, given: Set[str], name: str | None,
                   home: Home, listener: Listener) -> tuple[ActivationStore, bool]:
    """The store of a world's rows, and whether it existed already.

    Args:
        source: of which `is_world`.
        config: the options of the world.
        shape: of these, dtype and rows of a shard.
        given: the options that the user set, as opposed to left at their defaults.
        name: the store's name; None for the source's.
        home: where it goes.
        listener: shows notes and progress.

    Raises:
        ConfigError: an invalid option, or one without effect here.
        FormatError: the saved world cannot be read.
        StoreError: the name is another store's, or the disk has no room.
    """
    _refuse_idle(source, given)
    with told_when_stopped(listener) as folders:
        named = checked_name(_folder(source).name, DERIVED) if name is None else checked_name(name)
        folder = home.stores.path / named
        wanted = _source(source, config)
        dtype = shape.dtype or "float32"
        request = hash_request({**wanted, "dtype": dtype, "shard_rows": shape.shard_rows})
        folders.append(folder)
        if (there := finished_store(folder, request)) is not None:
            if problems := damaged_world(there.path, there.meta):
                raise StoreError(problems[0])
            return there, True
        world = read_saelens(source, config.seed) if is_saved_world(source) else world_of(config)
        content = world.to_bytes()
        record = WorldRecord(world.features, hashlib.sha256(content).hexdigest())
        shard_rows = shape.shard_rows or rows_per_shard(world.d_in, dtype, SHARD_ROWS)
        meta = StoreMeta(wanted, request, dtype, world.d_in, shard_rows, world=record)
        entries = world.firing_probabilities.sum()  # of a row, in the mean, or in a saved world more
        check_room(folder, config.rows, meta, OFFSET.itemsize + int(entries * (INDEX.itemsize + VALUE.itemsize)))
        with (StoreWriter.open(folder, meta) as writer,
              filling([writer], "sampling", config.rows, listener) as show):
            if writer.meta.world != record:
                raise StoreError(f"cannot go on with {folder}: expected a world of SHA-256 {writer.meta.world}, got "
                                 f"{record}, as another machine may round differently; remove that store")
            world.save(folder, content)
            for cursor, rows, codes in () if writer.complete else _blocks(world, config, writer.cursor):
                writer.append(rows, {CODES: codes}, {"row": cursor})
                show(writer.rows)
            writer.finish()
    return ActivationStore.open(folder), False


def _refuse_idle(source: str, given: Set[str]) -> None:
    """Refuse options that do nothing with a world, or with a saved one. Raises ConfigError."""
    idle = OF_ARRAYS if not is_saved_world(source) else OF_ARRAYS | options_of(SyntheticConfig).keys() - OF_ROWS
    if found := sorted(idle & given):
        raise ConfigError(f"{flag_of(found[0])} does nothing with {source}; leave it out", option=found[0])


def refuse_options_of_worlds(source: str, given: Set[str]) -> None:
    """Refuse options of worlds where an array is imported. Raises ConfigError."""
    if found := sorted((options_of(SyntheticConfig).keys() - options_of(ImportConfig).keys()) & given):
        raise ConfigError(f"{flag_of(found[0])} does nothing with {source}; leave it out, or import synthetic",
                          option=found[0])


def _folder(source: str) -> Path:
    path = Path(source)
    return path.resolve().parent if path.is_file() else path if source == SYNTHETIC else path.resolve()


def _source(source: str, config: SyntheticConfig) -> dict[str, Any]:
    """What decides the rows, as `store.json` says it."""
    if not is_saved_world(source):
        return {"kind": "world", "file": SYNTHETIC, **config.to_json()}
    hashes = {path.name: file_sha256(path) for path in world_files(source)}
    return {"kind": "world", "file": _folder(source).name, "sha256": hashes, "rows": config.rows, "seed": config.seed}


def _blocks(world: World, config: SyntheticConfig,
            since: dict[str, Any] | None) -> Iterator[tuple[int, np.ndarray, SparseRows]]:
    """The number of each block's first row, its rows and their true codes, from a cursor on."""
    for begin in range(since["row"] if since else 0, config.rows, world.block_rows):
        codes = world.codes(config.seed, begin // world.block_rows)[: config.rows - begin]
        yield begin, world.rows(codes), codes
