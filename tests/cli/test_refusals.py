"""What commands refuse: exit status, and the beginning of one sentence. Options and statuses are a contract."""

from pathlib import Path

import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows

# The command line, its exit status, and words of the sentence.
CASES = [
    ("no-such", 2, "No such command 'no-such'"),
    ("--home a list", 2, "--home is given twice"),
    ("train --no-such", 2, "--no-such"),
    ("train --alpha many", 2, "neither a number nor auto"),
    ("train --act tanh", 2, "Invalid value for '--act'"),
    ("train --act reul", 2, "did you mean relu?"),
    ("train --d-sae x", 2, "Invalid value for '--d-sae': expected a valid integer."),
    ("train --model tiny-gemma2 --layer 1 --layer=2", 2, "--layer is given twice"),
    ("extract --site resid-pre", 2, "did you mean resid_pre?"),
    ("extract --model a --model b", 2, "--model is given twice"),
    ("eval nosuch", 1, "there are: run"),
    ("eval run --data nosuch", 1, "there are: rows"),
    ("eval run --device toaster", 2, "--device must be cpu, cuda, cuda:N or auto, got 'toaster'"),
    ("eval --split half", 2, "--split"),
    ("eval run --csv nowhere/a.csv", 2, "cannot write nowhere/a.csv"),
    ("eval run --match-threshold 0.5", 2, "--match-threshold does nothing without --stability"),
    ("sparsity run --plot picture.docx", 2, "cannot draw"),
    ("geometry run --slice 0,1,2", 2, "--slice does nothing without --plot"),
    ("geometry run --slice 0,1 --plot x.png", 2, "--slice must be pca or three row numbers"),
    ("geometry run --slice 0,1,9999 --plot x.png", 2, "--slice names row 9999"),
    ("geometry run --plot x.gif", 2, "cannot draw x.gif"),
    ("geometry run --lambda -1", 2, "--lambda must be auto or a number that is at least 0"),
    ("geometry run --lambda nan", 2, "--lambda must be auto or a number that is at least 0"),
    ("geometry run --radius 0", 2, "--radius must be a number above 0"),
    ("geometry no-such-run", 1, "there is no run and no folder named 'no-such-run'"),
    ("export run --to onnx --out out", 2, "--to must be one of"),
    ("export run --to saelens --out out --data rows", 2, "--data does nothing here"),
    ("import nowhere.npy", 1, "there is no file nowhere.npy"),
    ("import digits --key x", 1, "leave out --key, --labels and --flatten"),
    ("import digits --name a/b", 2, "--name must be a plain folder name"),
    ("import digits --shard-rows 0", 2, "--shard-rows must be at least 1, got 0"),
    ("import digits --shard-rows 4294967296", 2, "--shard-rows must be at most"),
    ("import digits --l0 3", 2, "--l0 does nothing with digits"),
    ("import synthetic --key x", 2, "--key does nothing with synthetic"),
    ("import synthetic --features 10 --l0 5", 2, "--l0 must be at most 0.4 times --features"),
    ("import synthetic --correlation 1", 2, "--correlation must be below 1, got 1"),
    ("report run --out out --latents 3,20", 2, "names latent 20"),
    ("report run --out out --latents 9-99999999999", 2, "names latent 99999999999"),
    ("report run --out out --latents 5-3", 2, "must be all, or numbers and ranges"),
    ("report run --out out --latents 1,,2", 2, "must be all, or numbers and ranges"),
    ("report run --out out --latents 0 --top 3", 2, "cannot use both --latents and --top"),
    ("report run --out out --neuronpedia javascript:x", 2, "neuronpedia must be MODEL/SOURCE"),
    ("report run --out out --neuronpedia a/b/../c", 2, "got 'a/b/../c'"),
    ("report run --out out --data none", 1, "no activation store named 'none'"),
    ("rm rows --kind run --yes", 2, "there is no run named 'rows'"),
]


@pytest.mark.parametrize(("line", "status", "said"), CASES)
def test_exit_status_and_one_sentence(sae: CommandLine, tmp_path: Path, monkeypatch, line: str, status: int, said: str):
    monkeypatch.chdir(tmp_path)
    make_store(sae.home, "rows", some_rows(300))
    make_run(sae.home, "run", random_sae())
    before = sorted(path for path in tmp_path.rglob("*") if path.name != ".lock")
    done = sae(*line.split())
    assert (done.status, done.out) == (status, "")
    assert said in " ".join(done.err.replace("\u2502", " ").split())
    assert "Traceback" not in done.err
    assert sorted(path for path in tmp_path.rglob("*") if path.name != ".lock") == before


@pytest.mark.parametrize(("line", "said"), [
    ("train", "there is no activation store"), ("eval", "there is no run"), ("geometry", "there is no run")])
def test_an_empty_home_is_answered_with_the_command_to_run(sae: CommandLine, line: str, said: str):
    done = sae(line)
    assert (done.status, done.out) == (1, "") and said in done.err
