"""`sae train` in several processes: real ones, started by torchrun, talking by gloo. In float64 every figure of a run
is that of one process to rounding, whatever takes part in it."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine, Done, assert_same_weights, make_run, make_store, random_sae
from launching import captured, launched, own_words, together, torchrun

from saecli.sae.activations import TopK
from saecli.train.runs import CHECKPOINT, read_metrics

NETWORK = "10.77.7"  # of two namespaces, for two hosts
COMMON = ("--dtype", "float64", "--d-sae", "32", "--data", "rows", "--json")
VARIANTS = {
    "topk": "--act topk --k 3 --epochs 2 --batch-size 255".split(),
    "sgd": "--solver sgd --act relu --batch-size 250".split(),
    "l1": ("--act", "relu", "--sparsity-weight", "3", "--batch-size", "500"),
    "dead-latents": "--act topk --k 1 --lr 0.1 --batch-size 1000 --epochs 3".split(),
    "jumprelu": ("--act", "jumprelu", "--sparsity", "l0"),
    "within-epochs": "--act topk --k 3 --decoder-every 7 --epochs 1".split(),
    "nested": ("--act", "topk", "--k", "3", "--prefixes", "4,16"),
    "one-block": "--fraction 0.1 --act relu".split(),  # of sums: one process has none
    "iterative": ("--solve", "iterative", "--act", "topk", "--k", "3"),
    "few-rows": "--fraction 0.003 --act abs-topk --k 4 --batch-size 10 --epochs 5".split(),
    "paper": ("--solver", "pam", "--act", "relu"),
}
IN_CI = ("topk", "paper", "l1")
OTHERS = [name for name in VARIANTS if name not in IN_CI]
PAPER = "alpha = 0.1\nmu_enc = 2\nnu_dec = 1\nclip_norm = 0.5\n"

WITHOUT_MEMORY = """
from dataclasses import replace
from saecli.train import ridge

method_for = ridge.method_for
ridge.method_for = lambda *sizes, **more: replace(method_for(*sizes, **more), budget=0.0)
"""


def some_rows() -> np.ndarray:
    """Rows of a few directions at a time, far from zero: more than a block of sums for each of two processes."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(20, 8))
    codes = rng.exponential(size=(9500, 20)) * (rng.random((9500, 20)) < 0.15)
    return (codes @ directions + 0.1 * rng.normal(size=(9500, 8)) + 3).astype(np.float32)


def assert_same_run(home: Path, run: str, expected: str, rel: float = 1e-7) -> None:
    """Measures and weights."""
    lines, others = (read_metrics(home / "runs" / name) for name in (run, expected))
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, rel=rel, abs=1e-9)
    assert_same_weights(home, expected, run, rtol=1e-5, atol=1e-6)


def assert_several_as_one(home: Path, found: dict, wanted: dict, rel: float = 1e-7) -> None:
    for name in ("rows_train", "rows_test", "epochs", "steps"):
        assert found[name] == wanted[name]
    assert found["final"] == pytest.approx(wanted["final"], rel=rel)
    assert_same_run(home, "several", "one", rel=rel)


def in_one_and_several(sae: CommandLine, *words: str, processes: int = 2) -> tuple[dict, Done]:
    """Train `one` in one process, whose document it returns, and `several` in several."""
    make_store(sae.home, "rows", some_rows())
    words = ("train", *words)
    one = sae(*words, "--name", "one").json
    done = together(processes, "--home", sae.home, *words, "--name", "several").succeeds()
    return one, done


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [*IN_CI, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_every_part_of_training_is_that_of_one_process(sae: CommandLine, variant: str):
    more = VARIANTS[variant]
    if variant == "paper":
        config = sae.home.parent / "paper.toml"
        config.write_text(PAPER)
        more += ("--config", str(config))
    if "--epochs" not in more:
        more = (*more, "--epochs", "2")
    count = 3 if variant == "few-rows" else 2
    one, done = in_one_and_several(sae, *COMMON, *more, processes=count)
    assert_several_as_one(sae.home, done.json, one)
    if variant == "topk":
        assert [line.partition(":")[0] for line in own_words(done.err)] == ["several"]


@pytest.mark.slow
def test_codes_that_are_computed_again_are_smoothed_as_they_were(sae: CommandLine, tmp_path: Path):
    """In processes without memory for the codes of all rows, each of which belongs to one of them."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MEMORY)
    make_store(sae.home, "rows", some_rows())
    words = ("train", *COMMON, "--act", "topk", "--k", "3", "--epochs", "2")
    words += ("--solve", "iterative", "--solver", "pam", "--alpha", "0.1", "--smoothing", "0.3")
    path, documents = f"{tmp_path}:{Path(__file__).parents[2]}", {}
    for processes, name in ((1, "one"), (2, "several")):
        command = [*map(str, ("--home", sae.home, *words)), "--name", name]
        with launched(torchrun(processes), *command, PYTHONPATH=path) as started:
            done = started.done()
        assert done.status == 0, done.err
        documents[name] = done.json
    assert_several_as_one(sae.home, documents["several"], documents["one"], rel=1e-4)


@pytest.mark.long
def test_training_on_is_that_of_one_process(sae: CommandLine):
    make_run(sae.home, "old", random_sae(TopK(k=3)))
    words = "--init old --dtype float64 --data rows --epochs 1 --json".split()
    one, done = in_one_and_several(sae, *words)
    assert_several_as_one(sae.home, done.json, one)
    assert done.json["kept"] == one["kept"] == "after"
    for measured in ("before", "after"):
        for name in ("fvu", "l0", "loss"):
            assert done.json[measured][name] == pytest.approx(one[measured][name], rel=1e-7)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", "2", "--act", "batchtopk", "--k", "3"),
        ("--steps", "200", "--act", "jumprelu", "--target-l0", "3"),
    ],
    ids=" ".join,
)
def test_the_l0_asked_for_is_that_of_each_ranks_rows(sae: CommandLine, words: tuple):
    one, done = in_one_and_several(sae, *COMMON, *words)
    assert done.json["final"]["test_l0"] == pytest.approx(3, rel=0.05)
    assert done.json["final"]["test_fvu"] == pytest.approx(one["final"]["test_fvu"], rel=0.1)
    most = 3 + 1e-9 if "--k" in words else math.inf
    lines = read_metrics(sae.home / "runs" / "several")
    assert all(line["batch_l0"] <= most for line in lines if "batch_l0" in line)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "epochs"),
    [(("--epochs", "6"), 6), (("--epochs", "1", "--checkpoint-every", "7", "--solver", "sgd"), 1)],
    ids=["after epochs", "within an epoch"],
)
def test_a_killed_training_goes_on_at_another_number_of_processes(sae, more, epochs):
    make_store(sae.home, "rows", some_rows())
    words = ("train", *COMMON, "--act", "topk", "--k", "3", *more)
    assert sae(*words, "--name", "whole").status == 0
    folder = sae.home / "runs" / "killed"
    with launched(torchrun(2), "--home", sae.home, *words, "--name", "killed") as started:
        started.until((folder / CHECKPOINT).exists)
        os.kill(started.ranks()[1], signal.SIGKILL)
        killed = time.monotonic()
        done = started.done()
        assert time.monotonic() - killed < 60
    assert own_words(done.err)[-1].startswith("sae: process 0 of 2: ")
    assert not json.loads((folder / "run.json").read_text())["complete"]
    resumed = together(3, "--home", sae.home, "train", "--resume", "--name", "killed", "--json")
    assert resumed.json["epochs"] == epochs
    assert_same_run(sae.home, "killed", "whole")


@pytest.mark.slow
def test_control_c_stops_all_and_says_how_to_go_on(sae: CommandLine):
    make_store(sae.home, "rows", some_rows())
    folder = sae.home / "runs" / "stopped"
    words = ("train", *COMMON, "--epochs", "300", "--name", "stopped")
    with launched(torchrun(2), "--home", sae.home, *words) as started:
        started.until((folder / CHECKPOINT).exists)
        started.process.send_signal(signal.SIGINT)
        done = started.done()
    assert done.status != 0
    said = "stopped; `sae train --resume --name stopped` goes on from its last checkpoint"
    assert own_words(done.err)[1:] == [said]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--device", "cuda:1"), "--device cuda:1 has no GPU for each of the 2 processes of this"),
        (("--batch-size", "1"), "--batch-size must be at least 2, the processes"),
        (("--solver", "sgd", "--lr", "1e20"), "lower --lr"),
    ],
)
def test_what_fails_says_so_and_leaves_no_run(sae: CommandLine, words: tuple, sentence: str):
    make_store(sae.home, "rows", some_rows())
    done = together(2, "--home", sae.home, "train", *COMMON, *words)  # torchrun adds a traceback
    assert (done.status, "sae: process" in done.err, sentence in done.err) == (1, True, True)
    assert list((sae.home / "runs").iterdir()) == []


def ip(line: str) -> subprocess.CompletedProcess:
    return captured(["ip", *line.split()], timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other, and nothing else."""
    names = f"sae-{os.getpid()}-a", f"sae-{os.getpid()}-b"
    try:
        for name in names:
            if (made := ip(f"netns add {name}")).returncode:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        ends = "link add sae0 netns {} type veth peer name sae0 netns {}".format(*names)
        if (made := ip(ends)).returncode:
            pytest.skip(f"they cannot be joined here: {made.stderr.strip()}")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} address add {NETWORK}.{number}/24 dev sae0")
            for device in ("lo", "sae0"):
                assert ip(f"-n {name} link set {device} up").returncode == 0
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}")


def launcher(hosts: tuple[str, str], number: int, port: int) -> list[str]:
    first = f"--master-addr {NETWORK}.1 --master-port {port}"
    where = f"--nnodes 2 --node-rank {number} {first}".split()
    return ["ip", "netns", "exec", hosts[number], *torchrun(1, *where)]


@pytest.mark.slow
def test_a_process_killed_on_one_host_ends_that_of_the_other(sae, hosts):
    make_store(sae.home, "rows", some_rows())
    both = ("--home", sae.home, "train", *COMMON, "--epochs", "300", "--name", "killed")
    with (
        launched(launcher(hosts, 0, 29573), *both, GLOO_SOCKET_IFNAME="sae0") as first,
        launched(launcher(hosts, 1, 29573), *both, GLOO_SOCKET_IFNAME="sae0") as second,
    ):
        first.until((sae.home / "runs" / "killed" / CHECKPOINT).exists)
        os.kill(second.ranks()[1], signal.SIGKILL)
        killed = time.monotonic()
        done = first.done(), second.done()
        assert time.monotonic() - killed < 60
    assert [each.status for each in done] == [1, 1]
    lost = "sae: process 0 of 2: lost the others of 2 processes"
    assert own_words(done[0].err)[-1].startswith(lost)
    assert "goes on from its last checkpoint" in done[0].err
