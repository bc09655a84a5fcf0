"""Worlds of known features."""

import numpy as np
import pytest

from saecli.base.errors import ConfigError
from saecli.store.options import SyntheticConfig
from saecli.store.worlds import World, forest, tight_frame, world_of, zipfian

G, D = 96, 16


def sampled(world: World, blocks: int, seed: int = 0) -> np.ndarray:
    """The true codes of some blocks as a matrix, float64."""
    codes = [world.codes(seed, block).toarray() for block in range(blocks)]
    return np.concatenate(codes).astype(float)


def few(features: int = G, **changes: np.ndarray) -> World:
    """A world of independent features that fire on half of the rows, with magnitude 1, but for the changes."""
    half = np.full(features, 0.5)
    fields = {
        "directions": np.eye(features),
        "bias": np.zeros(features),
        "firing_probabilities": half,
        "own_probabilities": half,
        "mean": np.ones(features),
        "std": np.zeros(features),
        "factor": np.empty((features, 0)),
    }
    fields = {name: value.astype(np.float32) for name, value in (fields | changes).items()}
    return World(**fields, parents=np.full(features, -1, np.int32))


@pytest.mark.parametrize(
    ("features", "exponent", "l0"), [(1024, 0.5, 10), (1536, 0.5, 23), (20, 3, 4), (5, 1, 1.5)]
)
def test_zipfian_probabilities_sum_to_l0_and_fall_by_the_power(features, exponent, l0):
    firing = zipfian(features, exponent, l0)
    assert firing.sum() == pytest.approx(l0)
    assert firing.max() <= 0.4 + 1e-12
    below = np.flatnonzero(firing < 0.4 - 1e-9)
    ranks = below + 1.0
    scales = firing[below] * ranks**exponent
    np.testing.assert_allclose(scales, scales[-1])


@pytest.mark.parametrize(("features", "d_in"), [(100, 16), (16, 16), (9, 16)])
def test_directions_reach_the_least_sum_of_squared_products(features, d_in):
    frame = tight_frame(np.random.default_rng(0).standard_normal((features, d_in)))
    np.testing.assert_allclose(np.linalg.norm(frame, axis=1), 1)
    least = max(features**2 / d_in, features) - features  # Benedetto and Fickus 2003
    assert np.square(frame @ frame.T).sum() - features == pytest.approx(least, abs=1e-4)


def test_two_thirds_of_features_are_in_trees_of_two_levels():
    parents = forest(1024)
    assert [(parents == -1).sum(), (parents >= 0).sum()] == [32 + 352, 640]
    children = np.bincount(parents[parents >= 0])
    assert (children == 4).all() and len(children) == 32 + 128
    assert (parents[parents >= 0] < np.flatnonzero(parents >= 0)).all()


@pytest.mark.parametrize("hierarchy", [True, False])
@pytest.mark.parametrize("correlation", [0, 0.5])
def test_features_fire_as_often_as_they_say(hierarchy, correlation):
    options = {"correlation": correlation, "hierarchy": hierarchy}
    world = world_of(SyntheticConfig(features=G, d_in=D, l0=5, **options))
    fires = sampled(world, 8) > 0
    p = world.firing_probabilities
    # A magnitude of mean 1 and of a standard deviation that is rarely above 0.4 is rarely cut at 0.
    assert (np.abs(fires.mean(0) - p) < 0.01 * p + 5 * np.sqrt(p * (1 - p) / len(fires))).all()
    assert fires.sum(1).mean() == pytest.approx(5, rel=0.03)


def test_a_child_fires_only_with_its_parent():
    world = world_of(SyntheticConfig(features=G, d_in=D, l0=5))
    fires = sampled(world, 1) > 0
    children = np.flatnonzero(world.parents >= 0)
    assert fires[:, children].any(0).sum() > len(children) / 2
    assert not (fires[:, children] & ~fires[:, world.parents[children]]).any()


def test_correlations_of_firing_are_those_of_a_gaussian_copula():
    factor = np.zeros((3, 2))
    factor[:2, 0] = np.sqrt(0.8)
    fires = sampled(few(3, factor=factor), 8) > 0
    both = (fires[:, 0] & fires[:, 1]).mean()
    assert both == pytest.approx(0.25 + np.arcsin(0.8) / (2 * np.pi), abs=0.01)  # Sheppard 1899
    assert (fires[:, 0] & fires[:, 2]).mean() == pytest.approx(0.25, abs=0.01)


def test_rows_are_the_bias_and_the_sum_of_magnitudes_times_directions():
    world = world_of(SyntheticConfig(features=G, d_in=D, l0=5, seed=3))
    codes = world.codes(3, 2)
    expected = codes @ world.directions.astype(np.float64) + world.bias
    np.testing.assert_allclose(world.rows(codes), expected, atol=1e-6)
    assert np.linalg.norm(world.bias) == pytest.approx(1)


def test_a_block_depends_on_options_seed_and_its_number_alone():
    config = SyntheticConfig(features=G, d_in=D, l0=5, seed=1)
    first, second = world_of(config), world_of(config)
    second.codes(1, 0)
    for block in (5, 6):
        ours, theirs = first.codes(1, block), second.codes(1, block)
        np.testing.assert_array_equal(ours.indices, theirs.indices)
        np.testing.assert_array_equal(ours.data, theirs.data)
    assert first.to_bytes() == second.to_bytes()
    assert first.codes(2, 5).nnz != first.codes(1, 5).nnz


def test_more_active_features_than_can_be_are_refused_by_the_option():
    with pytest.raises(ConfigError, match=r"--l0 must be at most 0\.4 times --features, 4, got 5"):
        world_of(SyntheticConfig(features=10, l0=5))
