"""Worlds made of options.

Shapes: G features, D = d_in, R rank of the correlations.
"""

import numpy as np

from ..base.errors import ConfigError
from .options import SyntheticConfig
from .worlds import World

MOST_OFTEN = 0.4  # no feature fires on more of the rows
RANK = 25
FEATURES_PER_ROOT, BRANCHES, DEPTH = 32, 4, 2  # so that 21 of 32 features are in a tree
MEAN, STD_MEAN, STD_STD = 1.0, 0.2, 0.1
BIAS_NORM = 1.0
TIGHT, STEPS = 1e-6, 500  # to a tight frame: largest change of an entry in the last step, and steps at most
DIRECTIONS, CORRELATIONS, MAGNITUDES = 1, 2, 3  # streams of random numbers


def world_of(config: SyntheticConfig) -> World:
    """The world of some options, a function of all but rows; ConfigError if so many features cannot be active."""
    firing = zipfian(config.features, config.zipf, config.l0)
    parents = forest(config.features) if config.hierarchy else np.full(config.features, -1)
    own = np.where(parents >= 0, firing / firing[parents], firing)
    directions, bias = _directions(config)
    random = np.random.default_rng((config.seed, MAGNITUDES))
    std = np.abs(random.normal(STD_MEAN, STD_STD, config.features))
    columns = {"firing_probabilities": firing, "own_probabilities": own, "mean": np.full(config.features, MEAN),
               "std": std, "directions": directions, "bias": bias, "factor": _factor(config)}
    return World(**{name: column.astype(np.float32) for name, column in columns.items()},
                 parents=parents.astype(np.int32), groups=np.full(config.features, -1, np.int32),
                 scaled=np.zeros(config.features, bool))


def _directions(config: SyntheticConfig) -> tuple[np.ndarray, np.ndarray]:
    """Directions and bias, (G, D) and (D,), float64."""
    random = np.random.default_rng((config.seed, DIRECTIONS))
    directions = tight_frame(random.standard_normal((config.features, config.d_in)))
    bias = random.standard_normal(config.d_in)
    return directions, bias * (BIAS_NORM / np.linalg.norm(bias))


def _factor(config: SyntheticConfig) -> np.ndarray:
    """Loadings of the shared Gaussians, (G, R), each row of squared norm `correlation`; R is 0 without any."""
    if not config.correlation:
        return np.empty((config.features, 0))
    factor = np.random.default_rng((config.seed, CORRELATIONS)).standard_normal((config.features, RANK))
    if config.hierarchy:
        _part_from_ancestors(factor, forest(config.features))
    return factor * (np.sqrt(config.correlation) / np.linalg.norm(factor, axis=1, keepdims=True))


def zipfian(features: int, exponent: float, l0: float) -> np.ndarray:
    """Firing probabilities `min(0.4, c / i^s)`, i = 1 to G, with c such that they sum to l0.

    Args:
        features: G.
        exponent: s, at least 0.
        l0: their sum, above 0.

    Returns:
        (G,) float64, descending.

    Raises:
        ConfigError: the sum cannot be had.
    """
    most = MOST_OFTEN * features
    if l0 > most:
        raise ConfigError(f"--l0 must be at most {MOST_OFTEN:g} times --features, {most:g}, got {l0:g}; lower --l0 "
                          "or raise --features", option="l0")
    shape = np.arange(1, features + 1, dtype=np.float64) ** -exponent
    # With the first m at their most, c is what is left over the others' sum; m is right where it cuts none of them.
    rest = shape[::-1].cumsum()[::-1]
    scales = np.maximum(l0 - MOST_OFTEN * np.arange(features), 0) / rest
    fits = scales * shape <= MOST_OFTEN * (1 + 1e-12)
    return np.minimum(MOST_OFTEN, scales[fits.argmax()] * shape)


def forest(features: int) -> np.ndarray:
    """Each feature's parent, (G,), -1 for none: the most frequent features are roots, the next their children, and so
    on, level by level."""
    parents = np.full(features, -1)
    begin, end = 0, max(1, features // FEATURES_PER_ROOT)
    for _ in range(DEPTH):
        children = np.arange(end, min(features, end + BRANCHES * (end - begin)))
        parents[children] = begin + (children - end) // BRANCHES
        begin, end = end, end + len(children)
    return parents


def _part_from_ancestors(factor: np.ndarray, parents: np.ndarray) -> None:
    """Make the loadings of each feature, (G, R), orthogonal to those of its ancestors, in place: where Gaussians are
    independent, the probabilities of firing multiply."""
    depth = (parents >= 0).astype(int) + (parents[parents] >= 0) * (parents >= 0)
    for level in range(1, DEPTH + 1):
        at = np.flatnonzero(depth == level)
        above = parents[at]
        for _ in range(level):  # the ancestors of one feature are orthogonal to each other by now
            unit = factor[above] / np.linalg.norm(factor[above], axis=1, keepdims=True)
            factor[at] -= (factor[at] * unit).sum(1, keepdims=True) * unit
            above = parents[above]


def tight_frame(vectors: np.ndarray) -> np.ndarray:
    """Unit vectors near those given that are as orthogonal as so many can be in the mean square.

        minimise sum over i != j of <d_i, d_j>^2

    over unit vectors: orthonormal ones where G <= D, else a tight frame, `d' d = G/D I`, of which the sum is
    `G^2/D - G`. Tight and normalised vectors are taken in turns. SAELens descends on the same sum by Adam.

    Args:
        vectors: (G, D), of full rank.

    Returns:
        (G, D) float64.

    Cost: `4 G D min(G, D)` operations a step, a few dozen steps.

    Source: J. J. Benedetto and M. Fickus, "Finite normalized tight frames", 2003; J. A. Tropp et al., "Designing
    structured tight frames via an alternating projection method", 2005.
    """
    features, d_in = vectors.shape
    found = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for _ in range(STEPS):
        before = found
        gram = found.T @ found if features > d_in else found @ found.T
        values, axes = np.linalg.eigh(gram)
        root = axes * values.clip(np.finfo(float).tiny) ** -0.5 @ axes.T
        found = found @ root if features > d_in else root @ found
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        if np.abs(found - before).max() < TIGHT:
            break
    return found
