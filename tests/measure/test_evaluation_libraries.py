"""`sae eval` against the evaluations of other libraries, each in an environment of its own; see `launching`."""

import json
from itertools import islice
from pathlib import Path

import pytest
from homes import CommandLine
from launching import captured, python_with

from saecli.extract.readers import stdlib_docstrings
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.model.windows import stored_windows
from saecli.store.reader import ActivationStore

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parents[1] / "libraries"
LAYER, D = 1, 128
RUNS = {"relu": [], "jumprelu": ["--sparsity", "l0"], "batchtopk": ["--k", "8"]}

SAME = {
    "explained_variance": "explained_variance",
    "cosine": "cossim",
    "l0": "l0",
    "l1": "l1",  # and SAELens' names
    "ce_clean": "ce_loss_without_sae",
    "ce_spliced": "ce_loss_with_sae",
    "ce_zero": "ce_loss_with_ablation",
    "ce_recovered": "ce_loss_score",
    "kl": "kl_div_with_sae",
}


@pytest.fixture
def trained(sae: CommandLine, tmp_path: Path) -> CommandLine:
    """A home with all rows of a text of tiny-gemma2, so that no window is cut, and a short run of each activation."""
    text = tmp_path / "docs.jsonl"
    documents = islice(stdlib_docstrings(), 60)
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    extract = f"extract --model {TINY_GEMMA2} --layer {LAYER} --dtype float32 --name rows --dataset"
    sae(*extract.split(), text).succeeds()
    for act, words in RUNS.items():
        train = f"train --data rows --act {act} --d-sae 256 --epochs 2 --name {act}"
        sae(*train.split(), *words).succeeds()
    return sae


def test_every_measure_agrees_with_saelens_on_the_same_tokens(trained: CommandLine, tmp_path: Path):
    python = python_with("saelens")
    for act in RUNS:
        assert trained("export", act, "--to", "saelens", "--out", tmp_path / act).status == 0
    rows = ActivationStore.open(trained.home / "activations" / "rows").split("all")
    windows = list(stored_windows(rows, 10**9))
    # All tokens but each window's BOS.
    assert sum(len(window.token_ids) - 1 for window in windows) == rows.rows > 2000
    whole = [window.token_ids.tolist() for window in windows]
    (tmp_path / "windows.json").write_text(json.dumps(whole))
    words = (BUNDLED[TINY_GEMMA2], f"model.layers.{LAYER}", tmp_path / "windows.json")
    command = [python, SCRIPTS / "saelens.py", "evaluate", *words, *(tmp_path / a for a in RUNS)]
    done = captured(command, check=True)
    options = f"--split all --model {TINY_GEMMA2} --tokens 1000000 --json"
    ours = trained("eval", *RUNS, *options.split()).json
    for measures, line in zip(ours["runs"], done.stdout.splitlines()[-len(RUNS) :], strict=True):
        theirs = json.loads(line)
        assert measures["tokens"] == measures["rows"] == rows.rows
        assert measures["mse"] * D == pytest.approx(theirs["mse"], rel=1e-4)
        for name, their in SAME.items():
            assert measures[name] == pytest.approx(theirs[their], rel=1e-4), name
        assert theirs["kl_div_with_sae"] > 1e-3
