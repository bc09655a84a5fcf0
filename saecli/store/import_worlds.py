"""Importing rows of a world: one made of options, or one that SAELens saved.

SAELens' `SyntheticModel.save` (`sae_lens.synthetic`, version 6) writes a folder with `synthetic_model_config.json`,
`synthetic_model.safetensors` (`feature_vectors` (G, D), `bias` (D,), `firing_probabilities` (G,), and with correlations
`correlation_factor` (G, R) and `correlation_diag` (G,)) and, with a hierarchy, `hierarchy.json`. Magnitudes are made
from the configuration and its seed.

Shapes: G features, D = d_in, R rank of the correlations.
"""

import hashlib
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.documents import read_json
from ..base.errors import ConfigError, FormatError, StoreError, did_you_mean, flag_of
from ..base.files import file_sha256
from ..base.home import Home, checked_name
from ..base.options import options_of
from .checks import damaged_world
from .codec import CODES, INDEX, OFFSET, VALUE, SparseRows
from .import_arrays import check_room
from .opening import DERIVED, filling, finished_store, told_when_stopped
from .options import ImportConfig, SyntheticConfig
from .reader import ActivationStore
from .schema import StoreMeta, WorldRecord, hash_request, rows_per_shard
from .worlds import World, world_of
from .writer import StoreWriter

SYNTHETIC = "synthetic"  # what stands for a world made of options
OF_ROWS = {"rows", "seed", "dtype", "shard_rows"}  # options that a saved world leaves open
OF_ARRAYS = options_of(ImportConfig).keys() - OF_ROWS
SHARD_ROWS = 32_768  # true codes of a shard are held in memory until it is whole
CONFIG, WEIGHTS, HIERARCHY = "synthetic_model_config.json", "synthetic_model.safetensors", "hierarchy.json"
STD_STREAM, MEAN_STREAM = 1, 2  # what SAELens adds to the seed


def import_synthetic(source: str | Path = SYNTHETIC, name: str | None = None, *, home: str | Path | None = None,
                     progress: bool | Listener = False, **options: Any) -> ActivationStore:
    """Put rows of a world, whose features are known, into a store; an existing one of the same rows is opened.

    `evaluate` on it measures the features that an SAE has found. CLI equivalent: `sae import synthetic`.

    Args:
        source: `synthetic`, or a folder in which SAELens saved a world (`SyntheticModel.save`).
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        **options: `features` (G), `d_in` (D), `rows`, `seed`, `l0`, `zipf`, `hierarchy`, `correlation`; `dtype` and
            `shard_rows`. A saved world takes `rows`, `seed`, `dtype` and `shard_rows`.

    Raises:
        ConfigError: an option that is unknown, invalid, or has no effect here.
        FormatError: the saved world cannot be read.
        StoreError: the name is another store's, or the disk has no room.
    """
    source, listener = str(source), listening(progress)
    if not is_world(source):
        raise ConfigError(f"--source must be synthetic or a folder in which SAELens saved a world, got {source!r}",
                          option="source")
    idle = OF_ARRAYS if not is_saved_world(source) else OF_ARRAYS | options_of(SyntheticConfig).keys() - OF_ROWS
    if found := sorted(idle & options.keys()):
        raise ConfigError(f"{flag_of(found[0])} does nothing with {source}; leave it out", option=found[0])
    known = [*options_of(SyntheticConfig), *OF_ROWS]
    if unknown := [word for word in options if word not in known]:
        advice = did_you_mean(unknown[0], known) or "expected one of `sae import synthetic`'s"
        raise ConfigError(f"import_synthetic has no option {unknown[0]}; {advice}")
    config = SyntheticConfig(**{key: value for key, value in options.items() if key in options_of(SyntheticConfig)})
    shape = ImportConfig(dtype=options.get("dtype"), shard_rows=options.get("shard_rows"))
    with told_when_stopped(listener) as folders:
        folder = Home.at(home).stores.path / (checked_name(_folder(source).name, DERIVED) if name is None else
                                              checked_name(name))
        wanted, dtype = _source(source, config), shape.dtype or "float32"
        request = hash_request({**wanted, "dtype": dtype, "shard_rows": shape.shard_rows})
        folders.append(folder)
        if (there := finished_store(folder, request)) is not None:
            if problems := damaged_world(there.path, there.meta):
                raise StoreError(problems[0])
            return there
        world = read_saelens(source, config.seed) if is_saved_world(source) else world_of(config)
        content = world.to_bytes()
        record = WorldRecord(world.features, hashlib.sha256(content).hexdigest())
        shard_rows = shape.shard_rows or rows_per_shard(world.d_in, dtype, SHARD_ROWS)
        meta = StoreMeta(wanted, request, dtype, world.d_in, shard_rows, world=record)
        entries = world.firing_probabilities.sum()  # mean per row; in a saved world at most that
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
    return ActivationStore.open(folder)


def is_world(source: str) -> bool:
    """Whether a source is a world: `synthetic`, if there is no file of that name, or one that SAELens saved."""
    return (source == SYNTHETIC and not Path(source).is_file()) or is_saved_world(source)


def refuse_options_of_worlds(source: str, given: Set[str]) -> None:
    if found := sorted((options_of(SyntheticConfig).keys() - options_of(ImportConfig).keys()) & given):
        raise ConfigError(f"{flag_of(found[0])} does nothing with {source}; leave it out, or import synthetic",
                          option=found[0])


def _folder(source: str) -> Path:
    path = Path(source)
    return path.resolve().parent if path.is_file() else path if source == SYNTHETIC else path.resolve()


def _source(source: str, config: SyntheticConfig) -> dict[str, Any]:
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



@dataclass(frozen=True)
class _Config:
    num_features: int
    hidden_dim: int
    mean_firing_magnitudes: float | dict[str, Any] = 1.0
    std_firing_magnitudes: float | dict[str, Any] = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class _Node:
    feature_index: int | None = None
    mutually_exclusive_children: bool = False
    scale_children_by_parent: bool = False
    children: list["_Node"] = field(default_factory=list)


@dataclass(frozen=True)
class _Hierarchy:
    roots: list[_Node]


def is_saved_world(source: str | Path) -> bool:
    """Whether a path is a folder in which SAELens saved a world, or one of its two required files."""
    path = Path(source)
    return (path / CONFIG).is_file() or (path.name in (CONFIG, WEIGHTS) and path.is_file())


def world_files(source: str | Path) -> list[Path]:
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    return [folder / name for name in (CONFIG, WEIGHTS, HIERARCHY) if name != HIERARCHY or (folder / name).exists()]


def read_saelens(source: str | Path, seed: int) -> World:
    """A world that SAELens saved; FormatError if a file is missing, damaged or of an unknown kind.

    `seed` draws magnitudes that differ by feature at random, if the world was saved without a seed; SAELens then draws
    others each time that it loads the world.
    """
    folder = world_files(source)[0].parent
    try:
        config = read_json(folder / CONFIG, _Config)
        hierarchy = read_json(folder / HIERARCHY, _Hierarchy) if (folder / HIERARCHY).exists() else _Hierarchy([])
        arrays = _weights(folder / WEIGHTS, config)
        parents, groups, scaled = _structure(hierarchy, config.num_features)
        base = seed if config.seed is None else config.seed
        magnitudes = {name: _magnitudes(given, config.num_features, base + stream) for name, given, stream in (
            ("mean", config.mean_firing_magnitudes, MEAN_STREAM), ("std", config.std_firing_magnitudes, STD_STREAM))}
    except FormatError:
        raise
    except (OSError, ValueError) as error:
        raise FormatError(f"cannot read the world in {folder}: {getattr(error, 'strerror', None) or error}; save it "
                          "again with SAELens") from error
    probabilities = arrays["firing_probabilities"]
    return World(arrays["feature_vectors"], arrays["bias"], probabilities, probabilities, **magnitudes,
                 factor=arrays["correlation_factor"], parents=parents, groups=groups, scaled=scaled)


def _weights(path: Path, config: _Config) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # NumPy has no bfloat16

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    features, d_in = config.num_features, config.hidden_dim
    shapes = {"feature_vectors": (features, d_in), "bias": (d_in,), "firing_probabilities": (features,)}
    if "correlation_factor" in tensors:
        shapes["correlation_factor"] = (features, tensors["correlation_factor"].shape[-1])
    found = {"correlation_factor": np.empty((features, 0), np.float32)}
    for name, shape in shapes.items():
        got = tuple(tensors[name].shape) if name in tensors else "none"
        if got != shape:
            raise ValueError(f"expected {name} of shape {shape} in {path.name}, got {got}")
        found[name] = tensors[name].float().numpy()
        if not np.isfinite(found[name]).all():
            raise ValueError(f"expected finite numbers in {name} of {path.name}, got others")
    if not ((found["firing_probabilities"] >= 0) & (found["firing_probabilities"] <= 1)).all():
        raise ValueError(f"expected firing_probabilities from 0 to 1 in {path.name}, got others")
    if (np.square(found["correlation_factor"]).sum(1) > 1).any():
        raise ValueError(f"expected rows of correlation_factor of norm 1 at most in {path.name}, got longer ones")
    return found


def _structure(hierarchy: _Hierarchy, features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, groups and scaled of `World`, (G,) each. A node without a feature passes its parent on, and its own
    children may exclude each other."""
    parents, groups = np.full(features, -1, np.int32), np.full(features, -1, np.int32)
    scaled, seen = np.zeros(features, bool), np.zeros(features, bool)
    waiting = [(root, -1, -1, False) for root in hierarchy.roots]
    count = 0
    while waiting:
        node, parent, group, scale = waiting.pop()
        own = node.feature_index
        if own is not None:
            if not 0 <= own < features or seen[own]:
                raise ValueError(f"expected each feature of {HIERARCHY} once, from 0 to {features - 1}, got {own}")
            seen[own] = True
            parents[own], groups[own], scaled[own] = parent, group, scale
            parent = own
        exclusive = node.mutually_exclusive_children and sum(c.feature_index is not None for c in node.children) > 1
        waiting += [(child, parent, count if exclusive else -1, node.scale_children_by_parent)
                    for child in node.children]
        count += exclusive
    return parents, groups, scaled


def _magnitudes(given: float | dict[str, Any], features: int, seed: int) -> np.ndarray:
    """Means or standard deviations, (G,) float32, by SAELens' rules."""
    if not isinstance(given, dict):
        return np.full(features, given, np.float32)
    rule = dict(given)
    kind = rule.pop("generator_name", None)
    if kind == "constant":
        return np.full(features, rule.get("value", 1.0), np.float32)
    steps = np.linspace(0, 1, features) if features > 1 else np.zeros(1)
    if kind in ("linear", "exponential") and not {"start", "end"} - rule.keys():
        start, end = float(rule["start"]), float(rule["end"])
        found = start + (end - start) * steps if kind == "linear" else start * (end / start) ** steps
        return found.astype(np.float32)
    if kind == "folded_normal":
        import torch  # whose random numbers they are

        drawn = torch.randn(features, generator=torch.Generator().manual_seed(seed)).numpy()
        found = np.abs(rule.get("mean", 0.0) + drawn * rule.get("std", 0.1)).astype(np.float32)
        return found.clip(rule.get("min_value"), rule.get("max_value"))
    raise ValueError(f"expected magnitudes that are constant, linear, exponential or folded_normal, got {kind!r:.40}")
