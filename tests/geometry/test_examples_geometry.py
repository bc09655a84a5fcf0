"""The scripts of examples/geometry run, say what the theory says, and draw."""

import itertools
import math
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saecli.geometry.cells import PowerDiagram

SCRIPTS = Path(__file__).parents[2] / "examples" / "geometry"
QUICK = {"bridge.py": ["--steps", "40"]}
HELPERS = ("diagrams.py", "recovery.py")
SAYS = {
    "orders.py": "residual",
    "lift.py": "10,000 of 10,000 points",
    "kth_order_or_not.py": "around: refused",
}


def run(name: str, out: Path, *words: str) -> None:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(SCRIPTS)
        patched.setattr(sys, "argv", [name, "--out", str(out), *words])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    torch.set_num_threads(threads)  # one script computes in one


def fvus(said: str, k: int) -> tuple[float, float, float]:
    """k-means, SAE and local PCA of a Top-K SAE."""
    printed = re.search(rf"Top-{k}: k-means ([\d.]+), SAE ([\d.]+), local PCA ([\d.]+)", said)
    return tuple(float(number) for number in printed.groups())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.name for path in SCRIPTS.glob("*.py") if path.name not in HELPERS)
)
def test_script_runs_and_draws(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(name, tmp_path / "x.svg", *QUICK.get(name, []))
    said = capsys.readouterr().out
    assert f"drew {tmp_path / 'x.svg'}" in said
    assert SAYS.get(name, "") in said
    assert (tmp_path / "x.svg").stat().st_size > 10_000
    if name == "orders.py":
        assert float(re.search(r"off by ([\d.e-]+)", said).group(1)) < 1e-12
        held, same = re.search(r"; (\d+) of 9999 points hold them, and (\d+)", said).groups()
        assert int(held) == int(same) > 100
    if name == "bridge.py":  # however badly it is trained
        assert all(fvus(said, k)[1] >= fvus(said, k)[2] for k in (1, 3))
    if name == "ranks.py":
        fixed, variable = map(float, re.findall(r"FVU ([\d.]+) at", said))
        assert variable < 0.9 * fixed


@pytest.mark.long
def test_kmeans_is_worse_than_the_sae_and_the_sae_worse_than_local_pca(tmp_path, capsys):
    run("bridge.py", tmp_path / "x.png")
    said = capsys.readouterr().out
    for k in (1, 3):
        kmeans, sae, local_pca = fvus(said, k)
        assert kmeans > 2 * sae > 2 * local_pca


@pytest.mark.parametrize(("d", "k"), [(4, 2), (5, 3), (6, 1)])
def test_sites_are_recovered_from_their_kth_order_diagram(d, k, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from diagrams import sites_of
    from recovery import recover

    rng = np.random.default_rng(d)
    diagram = PowerDiagram(
        torch.from_numpy(rng.normal(size=(d, 2))), torch.from_numpy(rng.normal(size=d))
    )
    supports = rng.permutation(list(itertools.combinations(range(d), k)))
    nu = sites_of(diagram, torch.from_numpy(supports))
    recovered = recover(nu, k, supports.tolist())
    assert recovered.is_kth_order
    torch.testing.assert_close(recovered.diagram.centroids, diagram.centroids)
    torch.testing.assert_close(recovered.diagram.weights, diagram.weights, atol=1e-9, rtol=0)
    x = torch.from_numpy(3 * rng.normal(size=(500, 2)))
    kept = torch.from_numpy(supports)[nu.nearest(x, 1)[:, 0]]
    assert torch.equal(kept.sort(1).values, diagram.nearest(x, k).sort(1).values)
    random = PowerDiagram(
        torch.from_numpy(rng.normal(size=(math.comb(d, k), 2))), torch.zeros(math.comb(d, k))
    )
    assert k == 1 or not recover(random, k, supports.tolist()).is_kth_order


@given(st.integers(0, 2**32), st.floats(0, 3))
def test_no_choice_of_ranks_beats_the_theorems_ranks_for_lambda(seed: int, cost: float) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(SCRIPTS)
        from ranks import spectra, variable_ranks
    rng = np.random.default_rng(seed)
    x, labels = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 3)), rng.permutation(40) % 3

    def total(ranks: tuple[int, ...]) -> float:
        error = 0.0
        for cell, rank in enumerate(ranks):
            inside = x[labels == cell]
            values = np.linalg.svd(inside - inside.mean(0), compute_uv=False)
            error += (values[rank:] ** 2).sum() + cost * rank * len(inside)
        return error

    best = min(map(total, itertools.product(range(4), repeat=3)))
    ranks = variable_ranks(spectra(x, labels, 3), cost)
    assert total(tuple(ranks)) == pytest.approx(best, rel=1e-9, abs=1e-9)
