"""What `sae train` refuses: one sentence, an exit status, and no run folder."""

from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows

from saecli.sae.activations import JumpRelu, TopK

# Words of the command, and the beginning of the sentence.
WRONG = [
    ("--tied", "--tied does nothing with --solver pam-sgd"),
    ("--act relu --k 4", "--k does nothing with --act relu"),
    ("--solver sgd --alpha 1", "--alpha does nothing with --solver sgd"),
    ("--act topk --k 25 --d-sae 24", "--k must be at most --d-sae, 24"),
    ("--act topk --k 2 --k 100000", "--k must be at most --d-sae"),
    ("--act topk --sparsity l0", "--sparsity l0 cannot be used with --act topk"),
    ("--act topk --sparsity=", "--sparsity"),
    ("--act topk --sparsity-weight 1", "--sparsity-weight does nothing with --sparsity none"),
    ("--act topk --sparsity-warm-up 0", "--sparsity-warm-up does nothing with --sparsity none"),
    ("--sparsity-weight 1e30", "--sparsity-weight must be at most 1e+12"),
    ("--solver pam --release 1", "--release does nothing with --solver pam"),
    ("--epochs 2 --steps 9", "cannot use both --epochs and --steps"),
    ("--lr 0", "--lr must be above 0"),
    ("--lr inf", "--lr must be a finite number"),
    ("--steps 999999999999999999999999999999", "--steps must be at most"),
    ("--fraction 2", "--fraction must be at most 1"),
    ("--seed 0 --seed 0", "--seed 0 is given twice"),
    ("--prefixes 4,99 --d-sae 24", "--prefixes must be at most --d-sae, 24"),
    ("--prefixes 8,3", "--prefixes must be auto, or numbers of latents with commas between"),
    ("--data constant", "there is nothing to learn"),
    ("--name ../x", "--name must be a plain folder name"),
    ("--device cuda:77", "--device cuda:77 cannot be used"),
    ("--data many --d-sae 500000", "--solver pam-sgd with --d-sae 500000 needs"),
    ("--precision bf16 --dtype float64", "--precision bf16 cannot be used with --dtype float64"),
    ("--resume --lr 1", "--lr does nothing with --resume"),
    ("--resume --init old", "--init does nothing with --resume"),
    ("--data rows --init old --d-sae 24", "--d-sae must be 20, as in --init old"),
    ("--data narrow --init old", "--init old cannot be trained on these rows: expected rows of 8"),
    ("--data rows --init old --k 30", "--k must be at most --d-sae, 20"),
    ("--data rows --init old --act relu --k 3", "--k does nothing with --act relu"),
    ("--data rows --init old --act jumprelu --target-l0 19", "--target-l0 must be at most"),
    ("--data rows --skip", "--skip does nothing without --target"),
    ("--data rows --target many", "rows and many are not row for row the same tokens"),
    ("--data rows --data rows", "--data names rows twice"),
    ("--data rows --normalize model", "--normalize model needs weights of the model's later norms"),
    (
        "--act matching-pursuit --normalize standardize",
        "--act matching-pursuit compares directions",
    ),
    ("--data rows --data beside --act matching-pursuit", "--act matching-pursuit compares"),
    ("--data rows --data beside --sparsity kl", "--sparsity kl is defined for one hook point"),
    ("--data rows --rows 500", "--rows does nothing without --model"),
    ("--model tiny-gemma2 --data rows", "--data does nothing with --model tiny-gemma2"),
    ("--model tiny-gemma2 --fraction 0.5", "--fraction does nothing with --model tiny-gemma2"),
]
FAILED = [
    ("--data nowhere", "there is no activation store named 'nowhere'"),
    ("--resume", "there is no unfinished run"),
    ("--resume --name nowhere", "there is no run named 'nowhere'"),
    ("--data rows --init nowhere", "there is no run and no folder named 'nowhere'"),
    ("--model tiny-gemma2 --dataset none.txt", "the text file none.txt does not exist"),
]
LOADED = [  # a model, before what is wrong shows
    ("--model tiny-gemma2 --epochs 2", "--epochs must be 1 with --model"),
    ("--model tiny-gemma2 --rows 600 --steps 9", "--steps must be at most 3 with --model"),
    ("--model tiny-gemma2 --layer 9", "tiny-gemma2 has layers 0 to 3"),
]
CASES = [
    *(pytest.param(words, 2, sentence, id=words) for words, sentence in WRONG),
    *(pytest.param(words, 1, sentence, id=words) for words, sentence in FAILED),
    *(
        pytest.param(words, 2, sentence, id=words, marks=pytest.mark.slow)
        for words, sentence in LOADED
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


@pytest.mark.parametrize(("words", "status", "sentence"), CASES)
def test_refused(sae: CommandLine, home: Path, words: str, status: int, sentence: str):
    done = CommandLine(home, sae.monkeypatch, sae.capsys)("train", *words.split())
    assert (done.status, done.out) == (status, "")
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"sae: {sentence}"), last
    assert {path.name for path in (home / "runs").iterdir()} == {"old", "jumping"}
