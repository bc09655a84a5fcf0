"""`sae train` where something goes wrong: nothing is lost, nothing half-made stays, one sentence says why; and what it
refuses: one sentence, an exit status, and no run folder."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from homes import change_json, make_run, make_store, random_sae, same_tensors, some_rows
from launching import captured
from safetensors.torch import load_file
from store_producer import Producer
from storing import memory_folder

from saecli.base.files import lock_folder
from saecli.sae.activations import JumpRelu, TopK
from saecli.store.reader import Rows
from saecli.train.runs import read_metrics

QUICK = ("--d-sae", "24", "--epochs", "2", "--batch-size", "64", "--json")


def unfinished(sae, name: str = "run") -> Path:
    """A run that was trained for two epochs, and made to look as if a third were to come."""
    make_store(sae.home, "rows", some_rows(1000))
    assert sae("train", "--name", name, *QUICK).status == 0
    folder = sae.home / "runs" / name
    train_on(folder, epochs=3)
    return folder


def train_on(folder: Path, **settings: object) -> None:
    """Make a finished run unfinished, with other settings."""
    marker = json.loads((folder / "run.json").read_text())
    training = marker["training"] | settings
    change_json(folder / "run.json", complete=False, result=None, training=training)


def test_test_rows_that_do_not_vary_give_null_and_not_an_error(sae):
    make_store(sae.home, "rows", some_rows(24))
    document = sae("train", *QUICK).json
    assert document["rows_test"] == 1
    assert document["final"]["test_fvu"] is None
    assert document["final"]["train_fvu"] > 0


@pytest.mark.parametrize("lr", ["1e18", "1e25", "1e30"])
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_weights_that_diverge_in_an_epochs_last_step_are_never_saved(sae, solver, lr):
    make_store(sae.home, "rows", some_rows(1000))
    words = f"train --solver {solver} --batch-size 2000 --lr {lr} --epochs 9 --d-sae 24"
    assert "unexpected" not in sae(words).fails(1, "lower --lr").err
    for saved in sae.home.glob("runs/*/sae.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(saved).values())


@pytest.mark.slow
@pytest.mark.parametrize("act", ["relu", "jumprelu", "topk --k 4", "batchtopk --k 4"])
@pytest.mark.parametrize("solver", ["sgd --lr 1e3", "pam-sgd --lr 1e4 --batch-size 8"])
def test_a_run_that_diverges_without_overflow_leaves_no_folder(sae, solver, act):
    make_store(sae.home, "rows", some_rows(1000))
    said = "; lower --lr, or look at the data; the run stops at step "
    done = sae(f"train --d-sae 24 --epochs 3 --solver {solver} --act {act}")
    done.fails(1, "training diverged: the train FVU is ", said)
    assert not list((sae.home / "runs").iterdir())


@pytest.mark.slow
# Seen over some steps, at the epoch's end, and at once.
@pytest.mark.parametrize(("batch_size", "lr"), [(8, 1e3), (900, 1e3), (64, 1e30)])
def test_a_run_that_diverges_keeps_the_checkpoint_from_before(sae, batch_size, lr):
    said = "training diverged: the train FVU is " if lr < 1e30 else "the loss became"
    make_store(sae.home, "rows", some_rows(1000))
    words = f"--solver sgd --epochs 2 --batch-size {batch_size} --d-sae 24 --lr 0.001".split()
    before = sae("train", "--name", "run", *words, "--json").json
    folder = sae.home / "runs" / "run"
    train_on(folder, epochs=6, lr=lr)
    kept = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    for _ in range(2):
        done = sae("train --resume --name run")
        done.fails(1, said, "lower --lr", "; its checkpoint of step ")
        assert [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))] == kept
    steps = [line["step"] for line in read_metrics(folder) if "loss" in line]
    assert (steps[-1] > before["steps"]) == (lr < 1e30) and len(set(steps)) == len(steps)
    measured = sae("eval", "run", "--json")
    assert "run is not finished; this is its last checkpoint" in measured.err
    assert measured.json["runs"][0]["fvu"] == pytest.approx(before["final"]["test_fvu"], rel=1e-4)


@pytest.mark.slow
def test_uncentred_rows_start_above_an_fvu_of_1_without_diverging(sae):
    make_store(sae.home, "rows", some_rows(1000) + 100 * np.arange(8, dtype=np.float32))
    words = "--normalize none --lr 0.01 --batch-size 8 --d-sae 24 --epochs 1"
    sae(f"train --solver sgd --name run {words}").succeeds()
    first = read_metrics(sae.home / "runs" / "run")[0]
    assert first["batch_fvu"] > 1e4


OF_OTHERS = [
    ({"data_hash": "another"}, "not the store that it was begun on"),
    ({"format_version": 9}, "expected format version 1 or older, got 9; upgrade saecli"),
    ({"solver": {"name": "foo"}}, "not what this version of `sae train` writes"),
    ({"activation": {"name": "foo"}}, "act must be one of relu, jumprelu"),
    ({"training": {"split_seed": 0, "fraction": 1.0}}, "not all of its settings are filled in"),
]


def test_a_run_of_another_version_or_on_other_rows_is_left_alone(sae):
    folder = unfinished(sae)
    document = (folder / "run.json").read_text()
    for fields, sentence in OF_OTHERS:
        (folder / "run.json").write_text(document)
        change_json(folder / "run.json", **fields)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        sae("train --resume --name run").fails(1, sentence)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        if "data_hash" in fields:
            assert "not the store that run was trained on" in sae("eval run").err


@pytest.mark.slow
def test_a_line_of_metrics_cut_off_by_a_kill_is_left_out(sae):
    folder = unfinished(sae)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n{"st')
    assert [line["step"] for line in read_metrics(folder)] == [1, 3]
    assert sae("train", "--resume", "--name", "run").status == 0


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_trained_twice(sae):
    folder = unfinished(sae)
    lock = lock_folder(folder)
    sae("train", "--resume", "--name", "run").fails(1, "another process is training run")
    os.close(lock)
    assert sae("train", "--resume", "--name", "run").status == 0


@pytest.mark.slow
@pytest.mark.parametrize("kib", [4, 24])
def test_after_a_full_disk_a_run_begins_anew_or_is_resumed(sae, kib: int):
    """A limit on file sizes stands for a full disk: the first checkpoint does not fit; or later, the metrics."""
    make_store(sae.home, "rows", some_rows(1000))
    words = "train --name full --solver sgd --d-sae 24 --epochs 160 --batch-size 500"
    command = f"{sys.executable} -m saecli --home {sae.home} {words}"
    done = captured(["bash", "-c", f"ulimit -f {kib}; exec {command}"])
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    folder = sae.home / "runs" / "full"
    assert folder.exists() == (kib > 4) and not list(folder.glob(".*.partial"))
    assert sae(words if kib == 4 else "train --resume --name full").status == 0
    assert json.loads((folder / "run.json").read_text())["complete"]


def test_a_sweep_that_failed_whole_says_nothing_is_saved(sae):
    make_store(sae.home, "rows", some_rows(1000))
    words = ("train", "--solver", "sgd", *QUICK[:-1], "--lr", "1e25", "--lr", "1e24")
    done = sae(*words)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("the loss became") == 2 and "saved in" not in done.err
    done = sae(*words, "--json")
    assert (done.status, json.loads(done.out)) == (1, {"runs": []})


@pytest.mark.parametrize(("name", "resumes"), [(["--name", "sweep"], True), ([], False)])
def test_a_stopped_sweep_says_how_it_goes_on(sae, monkeypatch, name, resumes):
    make_store(sae.home, "rows", some_rows(1000))

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rows, "batches", stopped)
    done = sae("train", *QUICK, "--seed", "0", "--seed", "1", *name)
    assert done.status == 130
    assert ("the same command again resumes this sweep" in done.err) == resumes


def test_resume_without_a_name_passes_over_a_damaged_run(sae):
    make_store(sae.home, "rows", some_rows(1000))
    for name in ("good", "damaged"):
        assert sae("train", "--name", name, *QUICK).status == 0
        change_json(sae.home / "runs" / name / "run.json", complete=False, result=None)
    change_json(sae.home / "runs" / "damaged" / "run.json", format_version=10**6)
    assert sae("train", "--resume", "--json").json["run"] == "good"


def test_a_run_cut_short_before_its_last_file_is_completed_by_resume(sae):
    make_store(sae.home, "rows", some_rows(1000))
    whole = sae("train", "--name", "run", *QUICK).json
    folder = sae.home / "runs" / "run"
    (folder / "loss.png").unlink()
    change_json(folder / "run.json", complete=False, result=None)
    again = sae("train", "--resume", "--name", "run", "--json").json
    assert again["final"] == whole["final"]
    assert (folder / "loss.png").exists()
    assert json.loads((folder / "run.json").read_text())["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.long), 23])
def test_a_run_killed_at_any_moment_begins_anew_or_is_resumed(produce: Producer, step: int):
    """Killed before every opening, renaming, removing and flushing of a file: the same command begins a run that has no
    checkpoint anew, and `--resume` goes on with one that is known; both end as one that was never killed."""
    words = "train --data rows --d-sae 12 --epochs 2 --batch-size 64 --name".split()
    imports = ["saecli.show.pictures", "matplotlib.backends.backend_agg"]
    with memory_folder() as home:
        make_store(home, "rows", some_rows(300))
        runs = home / "runs"

        def train(*words: str, **order: int) -> tuple[int, str]:
            return produce(home / "activations" / "rows", words=words, imports=imports, **order)

        assert train(*words, "whole") == (0, "")
        whole, kills, ways = load_file(runs / "whole" / "sae.safetensors"), 0, set()
        names = {path.name for path in (runs / "whole").glob("[!.l]*")}  # loss.png is drawn last
        for kill_at in range(1, 1000, step):
            folder = runs / f"run{kill_at}"
            status, _ = train(*words, folder.name, kill_at=kill_at)
            if not status:
                break
            kills += 1
            known = (folder / "run.json").exists()
            kept = (folder / "checkpoint.safetensors").exists()
            begun_anew = not kept and (kills % 2 == 1 or not known)
            ways.add((known, begun_anew))
            complete = known and json.loads((folder / "run.json").read_text())["complete"]
            again = [*words] if begun_anew else ["train", "--resume", "--name"]
            assert complete or train(*again, folder.name) == (0, ""), (kill_at, again)
            assert json.loads((folder / "run.json").read_text())["complete"]
            assert same_tensors(load_file(folder / "sae.safetensors"), whole)
            assert {path.name for path in folder.glob("[!.l]*")} == names
        assert kills > 3 and ways >= {(False, True), (True, False)}


@pytest.mark.slow
def test_a_finished_run_without_its_checkpoint_is_not_overwritten(sae):
    make_store(sae.home, "rows", some_rows(300))
    assert sae("train", "--name", "run", *QUICK).status == 0
    folder, thesis = sae.home / "runs" / "run", sae.home / "runs" / "thesis"
    (folder / "checkpoint.safetensors").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    sae("train", "--name", "run", *QUICK).fails(1, "there is a run named 'run' already")
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("x")
    assert "there is a run named 'thesis' already" in sae("train", "--name", "thesis", *QUICK).err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in thesis.iterdir()] == ["thesis.tex"]


# Words of the command, and the beginning of the sentence.
WRONG = [
    ("--tied", "--tied does nothing with --solver pam-sgd"),
    ("--act relu --k 4", "--k does nothing with --act relu"),
    ("--act relu --k-start 4", "--k-start does nothing with --act relu"),
    ("--act topk --k 4 --k-start 3", "--k-start must be from --k, 4, to --d-sae"),
    ("--solver sgd --alpha 1", "--alpha does nothing with --solver sgd"),
    ("--act topk --k 25 --d-sae 24", "--k must be at most --d-sae, 24"),
    ("--act topk --k 2 --k 100000", "--k must be at most --d-sae"),
    ("--act topk --sparsity l0", "--sparsity l0 cannot be used with --act topk"),
    ("--act gated --sparsity l0", "--sparsity l0 cannot be used with --act gated"),
    ("--act jumprelu --target-l0 5 --sparsity l1", "--target-l0 does nothing"),
    ("--act jumprelu --target-l0 33 --d-sae 32", "--target-l0 must be at most --d-sae, 32, got 33"),
    ("--act topk --sparsity=", "--sparsity"),
    (
        "--sparsity-weight 1",
        "--sparsity-weight does nothing with --act batchtopk and --sparsity none; leave it out, or use --act relu",
    ),
    ("--act topk --sparsity-warm-up 0", "--sparsity-warm-up does nothing with --act topk and"),
    (
        "--target-l0 5",
        "--target-l0 does nothing with --act batchtopk; leave it out, or use jumprelu",
    ),
    ("--sparsity-weight 1e30", "--sparsity-weight must be at most 1"),
    ("--solver pam --release 1", "--release does nothing with --solver pam"),
    ("--epochs 2 --steps 9", "cannot use both --epochs and --steps"),
    ("--lr 0", "--lr must be greater than 0"),
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
    ("--data rows --skip", "--skip does nothing without --target"),
    ("--data rows --target many", "rows and many are not row for row the same tokens"),
    ("--data rows --data rows", "--data names rows twice"),
    ("--data rows --normalize model", "--normalize model needs weights of the model's later norms"),
    ("--data rows --rows 500", "--rows does nothing without --model"),
    ("--model tiny-gemma2 --data rows", "--data does nothing with --model tiny-gemma2"),
    ("--model tiny-gemma2 --fraction 0.5", "--fraction does nothing with --model tiny-gemma2"),
    ("--model tiny-gemma2 --checkpoint-every 9", "--checkpoint-every does nothing with --model"),
    ("--model tiny-gemma2 --seed 0 --seed 1", "--model gives its rows once, to one run: expected"),
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
    pytest.param(words, status, sentence, id=words, marks=marks)
    for cases, status, marks in ((WRONG, 2, ()), (FAILED, 1, ()), (LOADED, 2, pytest.mark.slow))
    for words, sentence in cases
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
def test_refused(sae, home: Path, words: str, status: int, sentence: str):
    done = replace(sae, home=home)("train", *words.split())
    assert (done.status, done.out) == (status, "")
    last = done.err.strip().splitlines()[-1]
    assert last.startswith(f"sae: {sentence}"), last
    assert {path.name for path in (home / "runs").iterdir()} == {"old", "jumping"}
