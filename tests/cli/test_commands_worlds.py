"""Worlds of known features; `sae import synthetic` as a shell runs it, and `sae eval` on what it stores."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, random_sae
from safetensors.numpy import load_file, save_file
from storing import collect

import saecli
from saecli.base.console import Silent
from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE
from saecli.store.options import SyntheticConfig
from saecli.store.reader import ActivationStore
from saecli.store.worlds import World, forest, tight_frame, world_of, zipfian

FEATURES, WIDTH, ROWS = 64, 8, 3000
SMALL = ["--features", str(FEATURES), "--d-in", str(WIDTH), "--l0", "4", "--rows", str(ROWS)]
CONFIG = SyntheticConfig(features=FEATURES, d_in=WIDTH, l0=4, rows=ROWS)


def opened(sae: CommandLine, name: str = "synthetic") -> ActivationStore:
    return ActivationStore.open(sae.home / "activations" / name)


def truth_of(store: ActivationStore, which: str = "all") -> np.ndarray:
    return np.concatenate([codes.toarray() > 0 for codes in store.split(which).codes(500)])


def test_rows_and_true_codes_are_the_worlds_and_stay_together(sae):
    words = ("import", "synthetic", *SMALL, "--zipf", "0.8", "--shard-rows", "700", "--json")
    document = sae(*words).json
    values = [document[name] for name in ("name", "rows", "d_in", "shards")]
    assert values == ["synthetic", ROWS, WIDTH, 5]
    assert document["source"]["features"] == FEATURES and not document["cached"]
    store, world = opened(sae), world_of(replace(CONFIG, zipf=0.8))
    codes = world.codes(0, 0)[:ROWS]
    np.testing.assert_array_equal(collect(store.split("all").sequential(100)), world.rows(codes))
    np.testing.assert_array_equal(truth_of(store), codes.toarray() > 0)
    assert (store.path / "world.safetensors").read_bytes() == world.to_bytes()
    for which in ("train", "test"):
        rows = store.split(which)
        numbers = np.concatenate(list(rows.numbers(100)))
        assert 0 < len(numbers) < ROWS
        np.testing.assert_array_equal(truth_of(store, which), codes.toarray()[numbers] > 0)
        lengths = [len(batch) for batch in rows.sequential(64)]
        assert [part.shape[0] for part in rows.codes(64)] == lengths


def test_a_second_import_is_a_cache_hit_fewer_rows_the_first_of_more(sae):
    sae("import", "synthetic", *SMALL)
    assert sae("import", "synthetic", *SMALL, "--json").json["cached"] is True
    sae("import synthetic --seed 1", *SMALL).fails(1, "there is a store named 'synthetic' already")
    sae("import", "synthetic", *SMALL[:-1], "1000", "--name", "fewer")
    np.testing.assert_array_equal(
        collect(opened(sae, "fewer").split("all").sequential(100)),
        collect(opened(sae).split("all").sequential(100))[:1000],
    )


def test_damage_to_the_truth_is_found_by_check_and_by_eval(sae):
    words = ["import", "synthetic", *SMALL, "--shard-rows", "900"]
    sae(*words)
    damaged = "shards/00001.h5"
    make_run(sae.home, "run", random_sae(d_in=WIDTH), data="synthetic")
    path = opened(sae).path / damaged
    content = bytearray(path.read_bytes())
    codes = opened(sae).row_values("codes", opened(sae).rows_of(1))
    content[content.index(codes.data.tobytes())] ^= 64
    path.write_bytes(content)
    for done in (sae("list", "--check"), sae("eval", "run", "--data", "synthetic")):
        assert done.status == 1 and (done.out + done.err).count(f"{damaged} is damaged") == 1
    assert "remove it with `sae rm synthetic` and run the command that made it again" in done.err
    assert sae("rm", "synthetic", "--yes").status == sae(*words).status == 0
    assert sae("list", "--check").status == 0


def test_a_missing_world_is_refused_and_an_empty_store_unfinished(sae, monkeypatch):
    sae("import", "synthetic", *SMALL)
    make_run(sae.home, "run", random_sae(d_in=WIDTH), data="synthetic")
    (opened(sae).path / "world.safetensors").unlink()
    sae("eval", "run").fails(1, "cannot read")
    monkeypatch.setattr(World, "rows", lambda *_: np.full((3000, WIDTH), np.nan))
    sae("import", "synthetic", *SMALL, "--name", "other").fails(1, "no rows to store")
    assert opened(sae, "other").rows == 0


def perfect(world: World) -> SAE:
    """An SAE that is the world: its decoder holds the directions."""
    directions = torch.from_numpy(world.directions)
    bias = torch.from_numpy(world.bias)
    return SAE(directions.T.clone(), -directions @ bias, directions, bias, Relu(), {})


class Stopping(Silent):
    """Is told of progress, and stops at 1,000 rows, as Ctrl-C does."""

    @contextmanager
    def progress(self, label, total, unit):
        def step(done, words=""):
            if done >= 1000:
                raise KeyboardInterrupt

        yield step


def test_a_world_is_resumed_from_its_file(tmp_path):
    """Another machine's matrix products may give it other last bits."""
    options = CONFIG.to_json() | {"features": 1024, "home": tmp_path, "shard_rows": 500}
    with pytest.raises(KeyboardInterrupt):
        saecli.import_synthetic("w", progress=Stopping(), **options)
    path = tmp_path / "activations" / "w" / "world.safetensors"
    tensors = load_file(path)
    tensors["bias"] += 1
    save_file(tensors, path)
    store = saecli.import_synthetic("w", **options)
    others = world_of(replace(CONFIG, features=1024))
    expected = np.concatenate([others.rows(codes) for codes in store.split("all").codes(500)])
    kept = ActivationStore.open(store.path).meta.shards[0].rows * 2
    got = collect(store.split("all").sequential(500))
    np.testing.assert_array_equal(got[:kept], expected[:kept])
    np.testing.assert_allclose(got[2048:], expected[2048:] + 1, atol=1e-5)


def test_eval_tells_what_of_the_truth_an_sae_has_found(sae):
    sae("import", "synthetic", *SMALL)
    make_run(sae.home, "run", perfect(world_of(CONFIG)), data="synthetic")
    make_run(sae.home, "random", random_sae(d_in=WIDTH), data="synthetic")
    done = sae("eval", "run", "random", "--json").json["runs"]
    assert done[0]["mcc"] == pytest.approx(1) and done[0]["uniqueness"] == 1
    assert done[1]["mcc"] < 0.99 and done[1]["f1"] < done[0]["f1"]
    truth = truth_of(opened(sae), "test")
    assert done[0]["true_l0"] == pytest.approx(truth.sum(1).mean())
    assert saecli.evaluate("run", home=sae.home)["f1"] == done[0]["f1"]
    shown = sae("eval", "run", "random").out
    assert "known features" in shown and "uniqueness" in shown
    rows = np.ones((5, WIDTH)) * np.arange(5)[:, None]
    assert "mcc" not in saecli.evaluate("run", rows, home=sae.home)
    sae("import", "synthetic", *SMALL, "--name", "other")
    stores = [opened(sae), opened(sae, "other")]
    transcoder, crosscoder = saecli.join(stores[0], target=stores[1]), saecli.join(*stores)
    assert "mcc" not in saecli.evaluate(random_sae(d_in=WIDTH), transcoder)
    assert "mcc" not in saecli.evaluate(random_sae(d_in=2 * WIDTH), crosscoder)


def test_import_synthetic_is_a_function_too_which_knows_its_options(sae):
    options = {"features": FEATURES, "d_in": WIDTH, "l0": 4, "rows": 100, "dtype": "bfloat16"}
    store = saecli.import_synthetic(**options, home=sae.home)
    assert (store.name, store.rows, store.dtype) == ("synthetic", 100, "bfloat16")
    assert store.meta.world.features == FEATURES
    with pytest.raises(saecli.SaeError, match=r"no option feature; did you mean features\?"):
        saecli.import_synthetic(feature=3, home=sae.home)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "l0"),
    [([], 10), (["--features", "1536", "--d-in", "192", "--no-hierarchy", "--l0", "23"], 23)],
)
def test_worlds_of_the_paper_and_the_flat_one_are_reached_by_options(sae, words: list, l0: float):
    sae("import", "synthetic", *words, "--rows", "20000")
    active = [np.diff(codes.indptr) for codes in opened(sae).split("all").codes(1000)]
    assert np.concatenate(active).mean() == pytest.approx(l0, rel=0.05)


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
