"""Rows of high norm: what `--max-norm-multiple` leaves out of a store, and what is said of it."""

import numpy as np
import pytest
from homes import CommandLine
from storing import collect

from saecli.store.reader import ActivationStore


def rows_with_outliers() -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3000, 16)).astype(np.float32)
    rows[rng.choice(3000, 40, replace=False)] *= 50
    return rows


def norms_of(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows.astype(np.float64), axis=1)


def test_import_drops_outliers_and_says_so_everywhere(sae: CommandLine, tmp_path):
    rows = rows_with_outliers()
    norms = norms_of(rows)
    high = norms > 10 * np.median(norms)
    np.save(tmp_path / "a.npy", rows)
    words = ("import", tmp_path / "a.npy", "--max-norm-multiple", "10")
    document = sae(*words, "--json").json
    assert (document["rows"], document["dropped"]) == (2960, {"high_norm": 40})
    assert document["dropped_norms"]["high_norm"] == {
        "rows": 40, "mean": pytest.approx(norms[high].mean()), "max": pytest.approx(norms[high].max())}
    assert document["norms"]["max"] == pytest.approx(norms[~high].max())
    (listed,) = sae("list", "--json").json["stores"]
    assert (listed["norms"], listed["dropped_norms"]) == (document["norms"], document["dropped_norms"])
    median = f"{document['norms']['quantiles']['0.5']:.4g}"
    shown = sae("list").out
    assert f"1.3% at {norms[high].mean():.4g}" in shown and median in shown
    done = sae(*words)
    assert f"median {median}, mean {document['norms']['mean']:.4g}, max {document['norms']['max']:.4g}" in done.out
    assert "stored already" in done.out
    assert "dropped: high_norm" in done.out and f"40 (1.3%), norm mean {norms[high].mean():.4g}" in done.out
    np.testing.assert_array_equal(
        collect(ActivationStore.open(sae.home / "activations" / "a").split("all").sequential(64)), rows[~high])
    for other in ((), ("--max-norm-multiple", "11")):
        assert "there is a store named 'a' already, made from something else" in sae(*words[:2], *other).err


@pytest.mark.slow
def test_extract_drops_rows_above_the_limit_and_stores_as_many_as_were_asked_for(sae: CommandLine):
    words = ("extract", "--model", "tiny-gemma2", "--rows", "1200", "--context", "32", "--dtype", "float32", "--json")
    every = sae(*words, "--name", "every").json
    less = sae(*words, "--name", "less", "--max-norm-multiple", "1.1").json
    stored = [collect(ActivationStore.open(sae.home / "activations" / name).split("all").sequential(64))
              for name in ("every", "less")]
    median = ActivationStore.open(sae.home / "activations" / "less").meta.median_norm
    assert median == pytest.approx(np.median(norms_of(stored[0])), rel=0.01)  # of one block, whole windows
    kept = stored[0][norms_of(stored[0]) <= 1.1 * median]
    assert every["rows"] == less["rows"] == 1200 and 300 < len(kept) < 1200
    np.testing.assert_allclose(stored[1][: len(kept)], kept, rtol=1e-3, atol=1e-4)
    assert norms_of(stored[1]).max() <= 1.1 * median
    assert less["dropped"]["high_norm"] >= 1200 - len(kept)
