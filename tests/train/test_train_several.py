"""`sae train` with options given several values: every run is what it is alone, and the store is read once."""

from collections import Counter

import pytest
from homes import CommandLine, make_store, some_rows
from test_train import assert_same_weights

from saecli.store.rows import Rows
from saecli.train.files import read_metrics

QUICK = ("--d-sae", "24", "--epochs", "3", "--batch-size", "64")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each kind of pass over a store's rows was begun."""
    begun = Counter()

    def counting(name: str) -> None:
        original = getattr(Rows, name)

        def counted(self, *words, **named):
            begun[name, self.rows] += 1
            return original(self, *words, **named)

        monkeypatch.setattr(Rows, name, counted)

    counting("batches")
    counting("sequential")
    return begun


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    ("--solver", "pam-sgd", "--act", "topk", "--k", "2", "--k", "4"),
    pytest.param(("--solver", "pam-sgd", "--act", "relu", "--sparsity-weight", "0.1", "--sparsity-weight", "1"),
                 marks=pytest.mark.slow),
    pytest.param(("--solver", "sgd", "--act", "batchtopk", "--k", "2", "--k", "4"), marks=pytest.mark.slow),
    pytest.param(("--solver", "pam-sgd", "--act", "topk", "--k", "3", "--decoder-every", "4", "--inner-steps", "1",
                  "--inner-steps", "2"), marks=pytest.mark.slow),
], ids=lambda words: " ".join(words[1::2]))
def test_each_of_several_is_to_the_bit_what_it_is_alone_and_the_rows_are_read_once(sae: CommandLine, passes: Counter,
                                                                                   words: tuple):
    make_store(sae.home, "rows", some_rows(1000))
    varied = words[-2]
    common = tuple(word for place, word in enumerate(words) if word != varied and words[place - 1] != varied)
    values = words[words.index(varied) + 1 :: 2]
    read = []
    for seed in "0", "1":
        for value in values:
            passes.clear()
            assert sae("train", *QUICK, *common, varied, value, "--seed", seed, "--name",
                       f"alone-{seed}-{value}").status == 0
            read.append(passes.copy())
    passes.clear()
    done = sae("train", *QUICK, *words, "--seed", "0", "--seed", "1", "--name", "all", "--json")
    option = varied.removeprefix("--").replace("-", "_")
    assert sorted((run["varied"]["seed"], f"{run['varied'][option]:g}") for run in done.json["runs"]) == \
        [(seed, value) for seed in (0, 1) for value in values]
    for run in done.json["runs"]:
        alone = f"alone-{run['varied']['seed']}-{run['varied'][option]:g}"
        assert_same_weights(sae.home, alone, run["run"])
        assert [line["loss"] for line in read_metrics(sae.home / "runs" / alone) if "loss" in line] == \
            [line["loss"] for line in read_metrics(sae.home / "runs" / run["run"]) if "loss" in line]
    if varied != "--inner-steps":  # which are not in step with each other
        assert all(passes == one for one in read)


def test_one_that_diverges_leaves_the_others_to_their_ends(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    done = sae("train", *QUICK, "--solver", "sgd", "--lr", "0.01", "--lr", "1e30", "--name", "run")
    assert done.status == 1
    assert "run-lr1e+30: the loss became" in done.err
    assert "run-lr0.01" in done.out
    assert [path.name for path in (sae.home / "runs").iterdir()] == ["run-lr0.01"]
    assert sae("eval", "run-lr0.01").status == 0


def test_a_taken_name_among_several_leaves_nothing(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    assert sae("train", *QUICK, "--name", "run-seed1").status == 0
    done = sae("train", *QUICK, "--name", "run", "--seed", "0", "--seed", "1")
    assert done.status == 1
    assert "there is a run named 'run-seed1' already" in done.err
    assert [path.name for path in (sae.home / "runs").iterdir()] == ["run-seed1"]
