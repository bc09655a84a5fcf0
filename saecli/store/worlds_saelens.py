"""Worlds that SAELens saved: `SyntheticModel.save` of `sae_lens.synthetic`, version 6.

A folder with `synthetic_model_config.json`, `synthetic_model.safetensors` (`feature_vectors` (G, D), `bias` (D,),
`firing_probabilities` (G,), and with correlations `correlation_factor` (G, R) and `correlation_diag` (G,)) and, with a
hierarchy, `hierarchy.json`. Magnitudes are not in it: SAELens makes them of the configuration and its seed, and so does
this. Nothing of SAELens is imported.

Shapes: G features, D = d_in, R rank of the correlations.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..base.documents import read_json
from ..base.errors import FormatError
from .worlds import World

CONFIG, WEIGHTS, HIERARCHY = "synthetic_model_config.json", "synthetic_model.safetensors", "hierarchy.json"
STD_STREAM, MEAN_STREAM = 1, 2  # what SAELens adds to the seed


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


def is_saved_world(place: str | Path) -> bool:
    """Whether a path is a folder in which SAELens saved a world, or one of the two files that such a folder always has.
    """
    path = Path(place)
    return (path / CONFIG).is_file() or (path.name in (CONFIG, WEIGHTS) and path.is_file())


def world_files(place: str | Path) -> list[Path]:
    """The files of a world that SAELens saved, by a path as of `is_saved_world`."""
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    return [folder / name for name in (CONFIG, WEIGHTS, HIERARCHY) if name != HIERARCHY or (folder / name).exists()]


def read_saelens(place: str | Path, seed: int) -> World:
    """A world that SAELens saved.

    Args:
        place: as of `is_saved_world`.
        seed: of magnitudes that differ by feature at random, in a world that was saved without a seed; SAELens then
            draws others each time that it loads the world.

    Raises:
        FormatError: a file is missing, damaged or of a kind that this cannot read.
    """
    folder = world_files(place)[0].parent
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
    """The arrays of `synthetic_model.safetensors`, float32; ValueError where one is missing or of another shape."""
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
    """Parents, groups and what is scaled, (G,) each, as of `World`. A node without a feature passes its parent on, and
    its own children may exclude each other."""
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
    """Means or standard deviations, (G,), float32, by one of SAELens' own rules; ValueError for another."""
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
