"""Scores on known features against SAELens' own, in an environment of its own; see `launching`."""

import json
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine
from launching import captured, python_with
from safetensors.numpy import load_file

from saecli.store.reader import ActivationStore
from saecli.store.worlds import World

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "libraries" / "saelens.py"
RUNS = {"relu": [], "batchtopk": ["--k", "6"], "jumprelu": ["--sparsity", "l0"]}
G = 200


def saelens(*words: str | Path) -> str:
    done = captured([python_with("saelens"), SCRIPT, *words], check=True)
    return done.stdout


def codes_of(store: ActivationStore, which: str) -> np.ndarray:
    return np.concatenate([codes.toarray() for codes in store.split(which).codes(1000)])


def test_every_score_agrees_with_saelens_scorer(sae: CommandLine, tmp_path: Path):
    python_with("saelens")
    words = ["--features", str(G), "--d-in", "40", "--l0", "6", "--rows", "12000"]
    assert sae("import", "synthetic", *words, "--name", "world").status == 0
    for act, more in RUNS.items():
        words = f"train --data world --act {act} --d-sae 220 --steps 200 --name {act}".split()
        sae(*words, *more).succeeds()
        assert sae("export", act, "--to", "saelens", "--out", tmp_path / act).status == 0
    store = ActivationStore.open(sae.home / "activations" / "world")
    world = World(**load_file(store.path / "world.safetensors"))
    truth, codes = tmp_path / "truth.npz", codes_of(store, "test").astype(np.float32)
    np.savez(truth, directions=world.directions, bias=world.bias, codes=codes)
    ours = sae("eval", *RUNS, "--json").json["runs"]
    lines = saelens("score", truth, *(tmp_path / act for act in RUNS)).splitlines()[-len(RUNS) :]
    for scores, line in zip(ours, lines, strict=True):
        theirs = json.loads(line)
        scored = theirs["classification"]
        names = ("mcc", "uniqueness", "true_l0", "explained_variance")
        expected = {name: theirs[name] for name in names} | {"l0": theirs["sae_l0"]}
        expected |= {name: scored[name] for name in ("precision", "recall")}
        expected["f1"] = scored["f1_score"]
        assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert 0.2 < scores["mcc"] < 1
