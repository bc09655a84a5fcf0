"""`sae import synthetic` as a shell runs it, and `sae eval` on what it stores."""

import re

import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, random_sae
from storing import collect

import saecli
from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE
from saecli.store.options import SyntheticConfig
from saecli.store.reader import ActivationStore
from saecli.store.worlds import World, world_of

G, D, ROWS = 64, 8, 3000
SMALL = ["--features", str(G), "--d-in", str(D), "--l0", "4", "--rows", str(ROWS)]
CONFIG = SyntheticConfig(features=G, d_in=D, l0=4, rows=ROWS)


def opened(sae: CommandLine, name: str = "synthetic") -> ActivationStore:
    return ActivationStore.open(sae.home / "activations" / name)


def contents(store: ActivationStore) -> dict[str, bytes]:
    """The bytes of what the store's folder holds; of `store.json` all but times."""
    files = {
        str(path.relative_to(store.path)): path.read_bytes()
        for path in store.path.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    files["store.json"] = re.sub(rb'"created": "[^"]*"', b"", files["store.json"])
    return files


def truth_of(store: ActivationStore, which: str = "all") -> np.ndarray:
    return np.concatenate([codes.toarray() > 0 for codes in store.split(which).codes(500)])


def test_rows_and_true_codes_are_the_worlds_and_stay_together(sae):
    document = sae("import", "synthetic", *SMALL, "--shard-rows", "700", "--json").json
    values = [document[name] for name in ("name", "rows", "d_in", "shards")]
    assert values == ["synthetic", ROWS, D, 5]
    assert document["source"]["features"] == G and not document["cached"]
    store, world = opened(sae), world_of(CONFIG)
    codes = world.codes(0, 0)[:ROWS]
    np.testing.assert_array_equal(collect(store.split("all").sequential(100)), world.rows(codes))
    np.testing.assert_array_equal(truth_of(store), codes.toarray() > 0)
    assert World.of_store(store).to_bytes() == world.to_bytes()
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
    sae("import", "synthetic", *SMALL, "--seed", "1").fails(
        1, "there is a store named 'synthetic' already"
    )
    sae("import", "synthetic", *SMALL[:-1], "1000", "--name", "fewer")
    np.testing.assert_array_equal(
        collect(opened(sae, "fewer").split("all").sequential(100)),
        collect(opened(sae).split("all").sequential(100))[:1000],
    )


@pytest.mark.parametrize("damaged", ["world.safetensors", "shards/00001.h5"])
def test_damage_to_the_truth_is_found_by_check_and_by_eval(sae, damaged):
    words = ["import", "synthetic", *SMALL, "--shard-rows", "900"]
    sae(*words)
    expected = contents(opened(sae))
    make_run(sae.home, "run", random_sae(d_in=D), data="synthetic")
    path = opened(sae).path / damaged
    content, at = bytearray(expected[damaged]), -5
    if damaged.endswith("h5"):
        at = content.index(opened(sae).row_values("codes", opened(sae).rows_of(1)).data.tobytes())
    content[at] ^= 64
    path.write_bytes(content)
    for done in (sae("list", "--check"), sae("eval", "run", "--data", "synthetic")):
        assert done.status == 1 and (done.out + done.err).count(f"{damaged} is damaged") == 1
    assert "remove it with `sae rm synthetic` and run the command that made it again" in done.err
    assert sae("rm", "synthetic", "--yes").status == sae(*words).status == 0
    assert sae("list", "--check").status == 0


def test_a_missing_world_is_refused_an_empty_store_removed(sae, monkeypatch):
    sae("import", "synthetic", *SMALL)
    (opened(sae).path / "world.safetensors").unlink()
    assert "cannot read" in sae("list", "--check").out
    assert sae("import", "synthetic", *SMALL).status == 1
    monkeypatch.setattr(World, "rows", lambda *_: np.full((3000, D), np.nan))
    sae("import", "synthetic", *SMALL, "--name", "other").fails(1, "no rows to store")
    assert not (sae.home / "activations" / "other").exists()


def perfect(world: World) -> SAE:
    """An SAE that is the world: its decoder holds the directions."""
    directions = torch.from_numpy(world.directions)
    bias = torch.from_numpy(world.bias)
    return SAE(directions.T.clone(), -directions @ bias, directions, bias, Relu(), {})


def test_eval_tells_what_of_the_truth_an_sae_has_found(sae):
    sae("import", "synthetic", *SMALL)
    make_run(sae.home, "run", perfect(world_of(CONFIG)), data="synthetic")
    make_run(sae.home, "random", random_sae(d_in=D), data="synthetic")
    done = sae("eval", "run", "random", "--json").json["runs"]
    assert done[0]["mcc"] == pytest.approx(1) and done[0]["uniqueness"] == 1
    assert done[1]["mcc"] < 0.99 and done[1]["f1"] < done[0]["f1"]
    truth = truth_of(opened(sae), "test")
    assert done[0]["true_l0"] == pytest.approx(truth.sum(1).mean())
    assert saecli.evaluate("run", home=sae.home)["f1"] == done[0]["f1"]
    shown = sae("eval", "run", "random").out
    assert "known features" in shown and "uniqueness" in shown
    rows = np.ones((5, D)) * np.arange(5)[:, None]
    assert "mcc" not in saecli.evaluate("run", rows, home=sae.home)


def test_import_synthetic_is_a_function_too_which_knows_its_options(sae):
    options = {"features": G, "d_in": D, "l0": 4, "rows": 100, "dtype": "bfloat16"}
    store = saecli.import_synthetic(**options, home=sae.home)
    assert (store.name, store.rows, store.dtype) == ("synthetic", 100, "bfloat16")
    assert store.meta.world.features == G
    with pytest.raises(saecli.SaeError, match=r"no option feature; did you mean features\?"):
        saecli.import_synthetic(feature=3, home=sae.home)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "l0"),
    [([], 10), (["--features", "1536", "--d-in", "192", "--no-hierarchy", "--l0", "23"], 23)],
)
def test_the_worlds_of_the_paper_and_the_flat_one_are_reached_by_options(
    sae, words: list, l0: float
):
    sae("import", "synthetic", *words, "--rows", "20000")
    active = [np.diff(codes.indptr) for codes in opened(sae).split("all").codes(1000)]
    assert np.concatenate(active).mean() == pytest.approx(l0, rel=0.05)
