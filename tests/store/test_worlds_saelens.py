"""Worlds and scores against SAELens' own, in an environment of its own; see `launching`."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine
from launching import python_with
from storing import collect

from saecli.store.reader import ActivationStore
from saecli.store.worlds import World

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "libraries" / "saelens.py"
RUNS = {"relu": [], "batchtopk": ["--k", "6"], "jumprelu": ["--sparsity", "l0"]}
G, ROWS = 200, 40_000


def saelens(*words: str | Path) -> str:
    done = subprocess.run([python_with("saelens"), SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def codes_of(store: ActivationStore, which: str) -> np.ndarray:
    return np.concatenate(
        [codes.toarray().astype(float) for codes in store.split(which).codes(1000)]
    )


def test_every_score_agrees_with_saelens_scorer(sae: CommandLine, tmp_path: Path):
    python_with("saelens")
    words = ["--features", str(G), "--d-in", "40", "--l0", "6", "--rows", "12000"]
    assert sae("import", "synthetic", *words, "--name", "world").status == 0
    for act, more in RUNS.items():
        done = sae(
            "train",
            "--data",
            "world",
            "--act",
            act,
            *more,
            "--d-sae",
            "220",
            "--steps",
            "200",
            "--name",
            act,
        )
        assert done.status == 0, done.err
        assert sae("export", act, "--to", "saelens", "--out", tmp_path / act).status == 0
    store = ActivationStore.open(sae.home / "activations" / "world")
    world = World.of_store(store)
    np.savez(
        tmp_path / "truth.npz",
        directions=world.directions,
        bias=world.bias,
        codes=codes_of(store, "test").astype(np.float32),
    )
    ours = sae("eval", *RUNS, "--json").json["runs"]
    lines = saelens(
        "score", tmp_path / "truth.npz", *(tmp_path / act for act in RUNS)
    ).splitlines()[-len(RUNS) :]
    for found, line in zip(ours, lines, strict=True):
        theirs = json.loads(line)
        expected = {
            "mcc": theirs["mcc"],
            "uniqueness": theirs["uniqueness"],
            "true_l0": theirs["true_l0"],
            "f1": theirs["classification"]["f1_score"],
            "l0": theirs["sae_l0"],
            "precision": theirs["classification"]["precision"],
            "recall": theirs["classification"]["recall"],
            "explained_variance": theirs["explained_variance"],
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert 0.2 < found["mcc"] < 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["flat", "tree", "exclusive"])
def test_a_world_of_saelens_gives_rows_of_the_same_distribution(
    sae: CommandLine, tmp_path: Path, kind: str
):
    saelens("save", tmp_path / kind, kind, str(ROWS))
    done = sae("import", tmp_path / kind, "--rows", str(ROWS), "--json")
    assert done.status == 0, done.err
    store = ActivationStore.open(sae.home / "activations" / kind)
    with np.load(tmp_path / kind / "codes.npz") as file:
        theirs = dict(file)
    ours, expected = codes_of(store, "all"), theirs["codes"].astype(np.float64)

    def agree(found: np.ndarray, wanted: np.ndarray) -> None:
        """Means over rows of two samples differ by no more than chance makes them in one of a billion features."""
        error = np.sqrt((found.var(0) + wanted.var(0)) / ROWS)
        assert (np.abs(found.mean(0) - wanted.mean(0)) <= 6 * error + 1e-12).all()

    agree(ours, expected)
    agree(ours**2, expected**2)
    fires, there = (ours > 0).astype(float), (expected > 0).astype(float)
    agree(fires, there)
    for feature in range(60):  # every pair of features
        agree(fires * fires[:, [feature]], there * there[:, [feature]])
        agree(ours * ours[:, [feature]], expected * expected[:, [feature]])
    never = there.T @ there == 0
    assert (fires.T @ fires)[never].max(initial=0) <= 20
    assert kind != "exclusive" or never.sum() > 60
    agree(collect(store.split("all").sequential(1000)), theirs["x"])


@pytest.mark.long
def test_a_saved_world_is_recognised_by_folder_or_file(sae: CommandLine, tmp_path: Path):
    saelens("save", tmp_path / "tree", "tree", "10")
    files = ["synthetic_model.safetensors", "synthetic_model_config.json"]
    for number, name in enumerate(files):
        done = sae(
            "import",
            tmp_path / "tree" / name,
            "--rows",
            "100",
            "--name",
            f"by-file{number}",
            "--json",
        )
        assert (done.json["rows"], done.json["d_in"]) == (100, 12)
    refused = sae("import", tmp_path / "tree", "--features", "3")
    assert refused.status == 2 and "--features does nothing with" in refused.err
    for name in [*files, "hierarchy.json"]:
        path = tmp_path / "tree" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        refused = sae("import", tmp_path / "tree", "--name", "damaged")
        assert refused.status == 1 and "cannot read the world in" in refused.err
        path.write_bytes(whole)
