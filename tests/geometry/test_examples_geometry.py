"""The scripts of examples/geometry run, say what the theory says, and draw."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "examples" / "geometry"
QUICK = {"bridge.py": ["--steps", "40"]}
SAYS = {"orders.py": "residual", "lift.py": "10,000 of 10,000 points", "kth_order_or_not.py": "around: refused"}


def run(name: str, out: Path, *words: str) -> None:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [name, "--out", str(out), *words])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    torch.set_num_threads(threads)  # one script computes in one


def fvus(said: str, k: int) -> tuple[float, float, float]:
    """k-means, SAE and local PCA of a Top-K SAE."""
    found = re.search(rf"Top-{k}: k-means ([\d.]+), SAE ([\d.]+), local PCA ([\d.]+)", said)
    return tuple(float(number) for number in found.groups())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_script_runs_and_draws(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, tmp_path / "x.svg", *QUICK.get(name, []))
    said = capsys.readouterr().out
    assert f"drew {tmp_path / 'x.svg'}" in said
    assert SAYS.get(name, "") in said
    assert (tmp_path / "x.svg").stat().st_size > 10_000
    if name == "bridge.py":
        assert all(fvus(said, k)[1] >= fvus(said, k)[2] for k in (1, 3))  # however badly it is trained


def test_orders_finds_the_sites_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("orders.py", tmp_path / "x.svg")
    said = capsys.readouterr().out
    assert float(re.search(r"off by ([\d.e-]+)", said).group(1)) < 1e-12
    held, same = re.search(r"; (\d+) of 9999 points hold them, and (\d+)", said).groups()
    assert int(held) == int(same) > 100


@pytest.mark.long
def test_kmeans_is_worse_than_the_sae_and_the_sae_worse_than_local_pca(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("bridge.py", tmp_path / "x.png")
    said = capsys.readouterr().out
    for k in (1, 3):
        kmeans, sae, local_pca = fvus(said, k)
        assert kmeans > 2 * sae > 2 * local_pca
