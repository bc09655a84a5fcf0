"""`sae import` and `sae list` as a shell runs them: what they store, print, refuse, and go on with."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, make_run, random_sae
from sklearn.datasets import load_digits
from storing import collect

from saecli.store.reader import ActivationStore

KEYS = ["name", "path", "rows", "d_in", "dtype", "shards", "cached"]


def stored(sae: CommandLine, name: str) -> tuple[np.ndarray, ActivationStore]:
    store = ActivationStore.open(sae.home / "activations" / name)
    return collect(store.split("all").sequential(100)), store


def test_import_of_the_digits(sae):
    document = sae("import", "digits", "--json").json
    assert list(document) == [*KEYS, "dropped", "norms", "dropped_norms", "source"]
    assert [document[key] for key in KEYS if key != "path"] == ["digits", 1797, 64, "float32", 1, False]
    images, labels = load_digits(return_X_y=True)
    lengths = np.linalg.norm(images, axis=1)
    quantiles = {share: pytest.approx(np.quantile(lengths, float(share), method="inverted_cdf"), rel=0.009)
                 for share in ("0.01", "0.1", "0.5", "0.9", "0.99")}
    assert document["norms"] == {"rows": 1797, "mean": pytest.approx(lengths.mean()),
                                 "max": pytest.approx(lengths.max()), "quantiles": quantiles}
    rows, store = stored(sae, "digits")
    np.testing.assert_array_equal(rows, images)
    np.testing.assert_array_equal(np.concatenate(list(store.split("all").column("label", 100))), labels)


def test_an_import_again_is_a_cache_hit_another_of_its_name_refused(sae, tmp_path):
    rows = np.random.default_rng(0).standard_normal((300, 5), np.float32)
    np.save(tmp_path / "a.npy", rows)
    assert sae("import", tmp_path / "a.npy", "--json").json["cached"] is False
    made = (sae.home / "activations" / "a" / "store.json").stat().st_mtime_ns
    assert sae("import", tmp_path / "a.npy", "--json").json["cached"] is True
    assert (sae.home / "activations" / "a" / "store.json").stat().st_mtime_ns == made
    np.save(tmp_path / "a.npy", -rows)
    for words in ([], ["--dtype", "bfloat16"]):
        refused = sae("import", tmp_path / "a.npy", *words)
        assert refused.status == 1
        assert "there is a store named 'a' already" in refused.err
        assert "--name" in refused.err
    assert sae("import", tmp_path / "a.npy", "--name", "b", "--dtype", "bfloat16", "--json").json["dtype"] == "bfloat16"
    np.testing.assert_array_equal(stored(sae, "a")[0], rows)


def test_mnist_files_are_flattened_and_labelled(sae, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (70, 6, 5), np.uint8)
    labels = (np.arange(70) % 10).astype(np.uint8)
    for name, values in (("train-images-idx3-ubyte.gz", images), ("train-labels-idx1-ubyte.gz", labels)):
        head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        (tmp_path / name).write_bytes(gzip.compress(head + values.tobytes()))
    done = sae("import", tmp_path / "train-images-idx3-ubyte.gz", "--labels", tmp_path / "train-labels-idx1-ubyte.gz",
               "--name", "mnist", "--shard-rows", "32", "--json")
    assert (done.json["rows"], done.json["d_in"], done.json["shards"]) == (70, 30, 3)
    rows, store = stored(sae, "mnist")
    np.testing.assert_array_equal(rows, images.reshape(70, 30))
    np.testing.assert_array_equal(np.concatenate(list(store.split("all").column("label", 9))), labels)


def test_rows_that_are_not_finite_are_dropped_and_said(sae, tmp_path):
    rows = np.ones((40, 3))
    rows[7] = np.nan
    rows[9, 1] = 1e300
    np.save(tmp_path / "a.npy", rows)
    done = sae("import", tmp_path / "a.npy", "--json")
    assert (done.json["rows"], done.json["dropped"]) == (38, {"nonfinite": 2})
    np.save(tmp_path / "b.npy", np.full((4, 3), np.inf))
    refused = sae("import", tmp_path / "b.npy")
    assert refused.status == 1
    assert "no rows to store" in refused.err
    assert "4 nonfinite" in refused.err
    assert not (sae.home / "activations" / "b").exists()


def test_a_file_whose_name_no_store_can_have_is_imported(sae, tmp_path):
    np.save(tmp_path / "a\udcff.npy", np.random.default_rng(0).normal(size=(30, 4)))
    refused = sae("import", tmp_path / "a\udcff.npy")
    assert refused.status == 2
    assert "the store's name, which --name sets, must be a plain folder name, " in refused.err
    assert sae("import", tmp_path / "a\udcff.npy", "--name", "a").status == 0
    assert sae("import", tmp_path / "a\udcff.npy", "--name", "a", "--json").json["cached"]
    assert sae("list", "--json").json["stores"][0]["source"]["file"] == "a\\udcff.npy"


def test_list_shows_stores_and_runs_newest_first(sae):
    sae("import", "digits")
    sae("import", "digits", "--name", "half", "--dtype", "float16", "--shard-rows", "1000")
    make_run(sae.home, "first", random_sae(), data="digits", created="2026-01-01")
    make_run(sae.home, "second", random_sae(), data="digits", created="2026-01-02", complete=False)
    document = sae("list", "--json").json
    assert [(store["name"], store["rows"], store["dtype"], store["shards"]) for store in document["stores"]] == [
        ("half", 1797, "float16", 2), ("digits", 1797, "float32", 1)]
    assert [(run["name"], run["state"], run["data"]) for run in document["runs"]] == [
        ("second", "unfinished", "digits"), ("first", "complete", "digits")]
    for entry in (*document["stores"], *document["runs"]):
        assert entry["bytes"] == sum(path.stat().st_size for path in Path(entry["path"]).rglob("*") if path.is_file())
    shown = sae("list").out
    assert all(word in shown for word in ("half", "digits", "first", "second", "unfinished", "1,797", "float16"))


def test_folders_without_a_marker_are_listed_with_what_to_do(sae):
    sae("import", "digits")
    make_run(sae.home, "run", random_sae(), data="digits")
    lost = [sae.home / "activations" / "digits" / "store.json", sae.home / "runs" / "run" / "run.json"]
    assert sae("list", "--check").status == 0
    for marker in lost:
        marker.unlink()
        (marker.parents[1] / "empty").mkdir()
        (marker.parents[1] / "starting").mkdir()
        (marker.parents[1] / "starting" / ".lock").touch()
        (marker.parents[1] / "notes.txt").touch()
        (marker.parents[1] / "newer").mkdir()
        (marker.parents[1] / "newer" / marker.name).write_text('{"format_version": 99}')
    document = sae("list", "--json").json
    found = (*document["stores"], *document["runs"])
    assert {(entry["name"], entry["state"]) for entry in found} == {
        (name, "unreadable") for name in ("digits", "run", "newer")}
    shown = sae("list").out
    assert "expected format version 1 or older, got 99" in shown
    for marker, noun in zip(lost, ("activation store", "run"), strict=True):
        assert (f"{marker.parent} is no {noun}: expected {marker.name} in it, got none; restore it, or remove the "
                "folder to go on without it") in shown
    checked = sae("list", "--check")
    assert checked.status == 1
    assert "found 2 problems" in checked.err


def test_a_store_json_that_does_not_fit_its_shards_is_named(sae):
    sae("import", "digits", "--shard-rows", "600")
    marker = sae.home / "activations" / "digits" / "store.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"columns": []}))
    for refused in (sae("list", "--check"), sae("train", "--epochs", "1", "--d-sae", "8")):
        assert refused.status == 1
        said = " ".join((refused.out + refused.err).split())
        assert said.count(f"{marker} does not fit shard") == 1
        assert "expected columns ['label'], got []; restore it, or remove" in said
    assert not list((sae.home / "runs").iterdir())


def test_check_names_every_damaged_shard_and_unreadable_store_once(sae):
    sae("import", "digits", "--shard-rows", "600")
    assert "checked 1 store, 3 shards: all whole" in sae("list", "--check").err
    shards = sorted((sae.home / "activations" / "digits" / "shards").iterdir())
    for path in shards:
        path.write_bytes(b"damaged")
    (sae.home / "activations" / "other").mkdir()
    (sae.home / "activations" / "other" / "store.json").write_text("{")
    done, document = sae("list", "--check"), sae("list", "--check", "--json")
    assert (done.status, document.status, sae("list").status) == (1, 1, 0)
    assert [(done.out + done.err).count(part) for part in (*map(str, shards), "store.json")] == [1, 1, 1, 1]
    assert len(document.json["problems"]) == 4
    assert "found 4 problems" in done.err and done.err.count("\n") == 1


def test_three_rows_can_be_trained_on(sae, tmp_path):
    np.save(tmp_path / "three.npy", np.random.default_rng(0).standard_normal((3, 4)))
    sae("import", tmp_path / "three.npy")
    done = sae("train", "--epochs", "1", "--d-sae", "8")
    assert done.status == 0, done.err
