"""What `sae train` refuses: one sentence, an exit status, and no run folder."""

from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows

from saecli.sae.activations import JumpRelu, TopK

TINY = ("--model", "tiny-gemma2")
INIT = ("--data", "rows", "--init")
# Words of the command, status, and the beginning of the sentence.
CASES = [
    (("--tied",), 2, "--tied does nothing with --solver pam-sgd"),
    (("--act", "relu", "--k", "4"), 2, "--k does nothing with --act relu"),
    (("--solver", "sgd", "--alpha", "1"), 2, "--alpha does nothing with --solver sgd"),
    (("--act", "topk", "--k", "25", "--d-sae", "24"), 2, "--k must be at most --d-sae, 24"),
    (("--act", "topk", "--k", "2", "--k", "100000"), 2, "--k must be at most --d-sae"),
    (("--act", "topk", "--sparsity", "l0"), 2, "--sparsity l0 cannot be used with --act topk"),
    (
        ("--act", "topk", "--sparsity-weight", "1"),
        2,
        "--sparsity-weight does nothing with --sparsity none",
    ),
    (
        ("--act", "topk", "--sparsity-warm-up", "0"),
        2,
        "--sparsity-warm-up does nothing with --sparsity none",
    ),
    (("--sparsity-weight", "1e30"), 2, "--sparsity-weight must be at most 1e+12"),
    (("--solver", "pam", "--release", "1"), 2, "--release does nothing with --solver pam"),
    (("--epochs", "2", "--steps", "9"), 2, "cannot use both --epochs and --steps"),
    (("--lr", "0"), 2, "--lr must be above 0"),
    (("--lr", "inf"), 2, "--lr must be a finite number"),
    (("--steps", "9" * 30), 2, "--steps must be at most"),
    (("--fraction", "2"), 2, "--fraction must be at most 1"),
    (("--seed", "0", "--seed", "0"), 2, "--seed 0 is given twice"),
    (("--prefixes", "4,99", "--d-sae", "24"), 2, "--prefixes must be at most --d-sae, 24"),
    (
        ("--prefixes", "8,3"),
        2,
        "--prefixes must be auto, or numbers of latents with commas between, each larger than",
    ),
    (
        ("--prefixes", "0,3"),
        2,
        "--prefixes must be auto, or numbers of latents with commas between, each larger than",
    ),
    (("--prefixes", "3,x"), 2, "--prefixes must be auto, or numbers"),
    (("--data", "nowhere"), 1, "there is no activation store named 'nowhere'"),
    (("--data", "constant"), 2, "there is nothing to learn"),
    (("--name", "../x"), 2, "--name must be a plain folder name"),
    (("--device", "cuda:77"), 2, "--device cuda:77 cannot be used"),
    (("--data", "many", "--d-sae", "500000"), 2, "--solver pam-sgd with --d-sae 500000 needs"),
    (
        ("--precision", "bf16", "--dtype", "float64"),
        2,
        "--precision bf16 cannot be used with --dtype float64",
    ),
    (("--resume", "--lr", "1"), 2, "--lr does nothing with --resume"),
    (("--resume", "--init", "old"), 2, "--init does nothing with --resume"),
    (("--resume",), 1, "there is no unfinished run"),
    (("--resume", "--name", "nowhere"), 1, "there is no run named 'nowhere'"),
    ((*INIT, "old", "--d-sae", "24"), 2, "--d-sae must be 20, as in --init old"),
    (
        ("--data", "narrow", "--init", "old"),
        2,
        "--init old cannot be trained on these rows: expected rows of 8",
    ),
    ((*INIT, "nowhere"), 1, "there is no run and no folder named 'nowhere'"),
    ((*INIT, "old", "--k", "30"), 2, "--k must be at most --d-sae, 20"),
    ((*INIT, "old", "--act", "relu", "--k", "3"), 2, "--k does nothing with --act relu"),
    ((*INIT, "old", "--act", "jumprelu", "--target-l0", "19"), 2, "--target-l0 must be at most"),
    (("--data", "rows", "--skip"), 2, "--skip does nothing without --target"),
    (
        ("--data", "rows", "--target", "many"),
        2,
        "rows and many are not row for row the same tokens",
    ),
    (("--data", "rows", "--data", "rows"), 2, "--data names rows twice"),
    (
        ("--act", "matching-pursuit", "--normalize", "standardize"),
        2,
        "--act matching-pursuit compares directions",
    ),
    (
        ("--data", "rows", "--data", "beside", "--act", "matching-pursuit"),
        2,
        "--act matching-pursuit compares",
    ),
    (
        ("--data", "rows", "--data", "beside", "--sparsity", "kl"),
        2,
        "--sparsity kl is defined for one hook point",
    ),
    (("--data", "rows", "--rows", "500"), 2, "--rows does nothing without --model"),
    ((*TINY, "--data", "rows"), 2, "--data does nothing with --model tiny-gemma2"),
    ((*TINY, "--fraction", "0.5"), 2, "--fraction does nothing with --model tiny-gemma2"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ((*TINY, "--epochs", "2"), 2, "--epochs must be 1 with --model"),
            ((*TINY, "--rows", "600", "--steps", "9"), 2, "--steps must be at most 3 with --model"),
            ((*TINY, "--layer", "9"), 2, "tiny-gemma2 has layers 0 to 3"),
            ((*TINY, "--dataset", "none.txt"), 1, "the text file none.txt does not exist"),
        ]
    ),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for name, rows in {
        "many": some_rows(600_000),
        "constant": np.ones((300, 8), np.float32),
        "narrow": some_rows(50, 5),
        "beside": some_rows(300),
        "rows": some_rows(300),
    }.items():
        make_store(home, name, rows)
    make_run(home, "old", random_sae(TopK(k=3)))
    make_run(home, "jumping", random_sae(JumpRelu()))
    return home


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    CASES,
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_refused(sae: CommandLine, home: Path, words: tuple[str, ...], status: int, sentence: str):
    done = CommandLine(home, sae.monkeypatch, sae.capsys)("train", *words)
    assert (done.status, done.out) == (status, "")
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"sae: {sentence}"), last
    assert {path.name for path in (home / "runs").iterdir()} == {"old", "jumping"}
