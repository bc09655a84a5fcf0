"""`sae train --latent-shards`: processes that hold the latents together, each some of them, real ones started by
torchrun. In float64 every figure of a run is that of one process to rounding, whatever takes part in it."""

import json
import os
import signal

import pytest
from homes import CommandLine, make_store
from launching import launched, own_words, together, torchrun
from test_torchrun_train import COMMON, VARIANTS, assert_same_result, assert_same_run, some_rows

from saecli.errors import ConfigError
from saecli.solvers import SolverConfig
from saecli.solvers.pam_sgd import PamSgd
from saecli.solvers.sgd import Sgd
from saecli.training import CHECKPOINT

PLAIN = ("--dtype", "float64", "--data", "rows", "--json")
WIDER = (*PLAIN, "--d-sae", "64")
TOPK = ("--act", "topk", "--k", "3")
SHARED = VARIANTS | {
    "sgd": ("--solver", "sgd", "--act", "relu-topk", "--k", "20", "--clip-norm", "0.3", "--weight-decay",
            "0.1"),  # more latents kept than a process has
    "kl": ("--act", "relu", "--sparsity", "kl", "--lr", "0.002", "--normalize", "standardize"),
    "panels": ("--d-sae", "1236", *TOPK, "--inner-steps", "1"),  # of the matrix: several each, the last ones narrow
}
CASES = [("jumprelu-clipped", 2, 2), ("few-rows", 2, 2),
         *(pytest.param(*case, marks=pytest.mark.long) for case in (
             ("panels", 3, 3), ("dead-latents", 4, 2), ("paper", 2, 2), ("sgd", 2, 2), ("kl", 2, 2),
             ("batchtopk", 4, 2), ("l1", 4, 2), ("from-running-sums", 4, 2)))]


def trained(sae: CommandLine, processes: int, shards: int, *words: str):
    done = together(processes, "--home", sae.home, *words, "--latent-shards", str(shards))
    assert done.status == 0, done.err
    return done


@pytest.mark.slow
def test_processes_that_share_the_latents_train_as_one_does(sae: CommandLine):
    make_store(sae.home, "rows", some_rows())
    words = ("train", *COMMON, *TOPK, "--epochs", "2", "--batch-size", "255", "--inner-steps", "2")
    one = sae(*words, "--name", "one").json
    done = trained(sae, 2, 2, *words, "--name", "shared")
    assert_same_result(done.json, one)
    assert_same_run(sae.home, "shared", "one")
    assert [line.partition(":")[0] for line in own_words(done.err)] == ["shared", "decoder"]
    assert (sae.home / "runs" / "shared" / "config.toml").read_text() == (
        sae.home / "runs" / "one" / "config.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "processes", "shards"), CASES)
def test_every_part_of_training_is_that_of_one_process(sae: CommandLine, variant: str, processes: int, shards: int):
    make_store(sae.home, "rows", some_rows())
    common = {"dead-latents": WIDER, "panels": PLAIN}.get(variant, COMMON)
    words = ("train", *common, "--epochs", "2", *SHARED[variant])
    one = sae(*words, "--name", "one")
    assert one.status == 0, one.err
    done = trained(sae, processes, shards, *words, "--name", "shared")
    but = "condition" if variant == "few-rows" else ""  # which one process solves for in the rows' dimensions
    assert_same_result(done.json, one.json, but=but)
    assert variant != "dead-latents" or one.json["final"]["revived"] > 0
    assert_same_run(sae.home, "shared", "one", but=but)


@pytest.mark.long
def test_a_killed_training_goes_on_with_the_latents_shared_otherwise(sae: CommandLine):
    make_store(sae.home, "rows", some_rows())
    words = ("train", *COMMON, *TOPK, "--epochs", "4", "--inner-steps", "4", "--batch-size", "250")
    assert sae(*words, "--name", "whole").status == 0
    folder = sae.home / "runs" / "killed"
    with launched(torchrun(2), "--home", sae.home, *words, "--latent-shards", "2", "--name", "killed") as started:
        started.until((folder / CHECKPOINT).exists)
        os.kill(started.ranks()[1], signal.SIGKILL)
        done = started.done()
    assert own_words(done.err)[-1].startswith("sae: process 0 of 2: ")
    assert not json.loads((folder / "run.json").read_text())["complete"]
    resumed = trained(sae, 4, 4, "train", "--resume", "--name", "killed", "--json")
    assert resumed.json["epochs"] == 4
    assert_same_run(sae.home, "killed", "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shards", "words", "sentence"), [
    (2, 2, ("--d-sae", "33"), "--d-sae must be a multiple of --latent-shards, 2, got 33; use 32"),
    (2, 2, ("--act", "soft-topk", "--k", "3"), "--act soft-topk looks at all latents of a row at once"),
    (2, 2, ("--solver", "sgd", "--optimizer", "sgd", "--lr", "1e5"), "the loss became"),
    (3, 3, ("--d-sae", "3000000"), "needs ")])
def test_what_cannot_be_shared_says_so_once_and_leaves_no_run(sae: CommandLine, processes: int, shards: int,
                                                              words: tuple, sentence: str):
    make_store(sae.home, "rows", some_rows())
    done = together(processes, "--home", sae.home, "train", *PLAIN, *words, "--latent-shards", str(shards))
    assert done.status == 1
    assert done.err.count("sae: process") == 1
    assert sentence in done.err
    runs = sae.home / "runs"
    assert not runs.exists() or list(runs.iterdir()) == []


@pytest.mark.parametrize(("solver", "sentence"), [
    (PamSgd(solve="iterative"), "--solve iterative cannot be used with --latent-shards"),
    (PamSgd(optimizer="lbfgs"), "--optimizer lbfgs looks at all weights at once"),
    (Sgd(optimizer="lbfgs"), "--optimizer lbfgs looks at all weights at once")])
def test_a_solver_that_needs_all_latents_says_so(solver: SolverConfig, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        solver.check_shared_latents()


def test_one_process_has_nobody_to_share_latents_with(sae: CommandLine):
    make_store(sae.home, "rows", some_rows()[:50])
    done = sae("train", *COMMON, "--latent-shards", "2")
    assert done.status == 1
    assert done.err.splitlines() == [
        "sae: --latent-shards must divide the number of processes, 1, got 2; start the command by `torchrun "
        "--nproc-per-node 2 -m saecli`, or leave the option out"]
