"""What commands refuse: exit status, and the beginning of one sentence. Options and statuses are a contract."""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from homes import CommandLine, Done, make_run, make_store, random_sae, some_rows

# The command line, its exit status, and words of the sentence.
CASES = [
    ("no-such", 2, "No such command 'no-such'"),
    ("train --no-such", 2, "--no-such"),
    ("train --alpha many", 2, "neither a number nor auto"),
    ("train --d-sae x", 2, "Invalid value for '--d-sae': expected a valid integer."),
    ("train --model tiny-gemma2 --layer 1 --layer=2", 2, "--layer is given twice"),
    ("train --each", 2, "expected --data 'mlp-*' or the like and no --target, got no --data"),
    ("train --each --data rows --target rows", 2, "--each trains on one store at a time"),
    ("train --each --resume", 2, "--each does nothing with --resume"),
    ("train --each --data r*z", 1, "no activation store matches 'r*z'; there are: rows"),
    ("eval n*", 1, "no run matches 'n*'; there are: run"),
    ("extract --layer al", 2, "'al' is neither a number nor all"),
    ("extract --site resid-pre", 2, "did you mean resid_pre?"),
    ("eval nosuch", 1, "there are: run"),
    ("eval run --data nosuch", 1, "there are: rows"),
    ("eval run --device toaster", 2, "--device must be cpu, cuda, cuda:N or auto, got 'toaster'"),
    ("eval --split half", 2, "--split"),
    ("eval run --csv nowhere/a.csv", 2, "cannot write nowhere/a.csv"),
    ("sparsity run --plot picture.docx", 2, "cannot draw --plot"),
    ("geometry run --slice 0,1,2", 2, "--slice does nothing without --plot"),
    ("geometry run --slice 0,1 --plot x.png", 2, "--slice must be pca or three row numbers"),
    ("geometry run --slice 0,1,9999 --plot x.png", 2, "--slice names row 9999"),
    ("geometry run --plot x.gif", 2, "cannot draw --plot x.gif"),
    ("geometry run --lambda -1", 2, "--lambda must be auto or a number that is at least 0"),
    ("geometry run --radius 0", 2, "--radius must be a number above 0"),
    ("geometry no-such-run", 1, "there is no run and no folder named 'no-such-run'"),
    ("export run --to onnx --out out", 2, "--to must be one of"),
    ("import nowhere.npy", 1, "there is no file nowhere.npy"),
    ("import digits --key x", 1, "leave out --key, --flatten and --bits"),
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
    ("rm both --yes", 2, "both is a store and a run; say which by --kind store or --kind run"),
    ("rm ../runs/run --yes", 2, "there is no store and no run named '../runs/run'"),
    ("rm rows rnu --yes", 2, "did you mean run?"),
    ("rm rows", 2, "--yes is needed where nobody can be asked"),
    (
        "eval run --data wide",
        2,
        "expected rows of 8 dimensions, got 9; name another store with --data",
    ),
    (
        "eval x --plot file.png/a.png",
        2,
        "cannot write file.png/a.png: Not a directory; name another path",
    ),
    ("sparsity x --plot folder.png", 2, "cannot write folder.png: expected a file, got a folder"),
    ("geometry x --plot new/a.png", 2, "cannot write new/a.png: there is no folder new"),
    (
        "export run --to saelens --out folder.png",
        2,
        "expected an empty or a new folder, got one in use",
    ),
    ("report x --out folder.png", 2, "expected an empty or a new folder, got one in use"),
    ("extract --model tiny-gemma2 --dataset pipe", 1, "expected a file, got a pipe"),
    ("train --config pipe", 2, "expected a file, got a pipe"),
    ("train --config nowhere.toml", 2, "nowhere.toml: No such file or directory"),
    ("train --config folder.png", 2, "expected a file, got a folder"),
]
# The text of --config, further words, and words of the sentence.
CONFIGS = [
    ('d_sae = "many"', "", 'd_sae must be a whole number, or a list of such, got "many"'),
    ("d_sae = true", "", "d_sae must be a whole number, or a list of such, got true"),
    ("d_sae = [[0]]", "", "d_sae must be a whole number, or a list of such, got [[0]]"),
    ("d_sae = []", "", "d_sae must be a whole number, or a list of such, got []"),
    ('alpha = "many"', "", 'alpha must be a number or one of auto, or a list of such, got "many"'),
    ('act = "reul"', "", 'got "reul"; did you mean relu?'),
    ("data = 3", "", "data must be text in quotes, or a list of such, got 3"),
    ("epochs = [1, 2]", "", "epochs must be a whole number, got [1, 2]"),
    ("epochs = 1979-05-27", "", 'epochs must be a whole number, got "1979-05-27"'),
    ('revive = "no"', "", 'revive must be true or false, got "no"'),
    ("dsae = 3", "", "long name of an option of `sae train`, got dsae; did you mean d_sae?"),
    ("xyzzy = 3", "", "`sae train --help` lists them"),
    ("[train]\nk = 3", "", "the table [train]"),
    ("d_sae = 3\nd-sae = 4", "", "expected d_sae once, got it spelt d-sae as well"),
    ("act: topk", "", "expected TOML, lines such as d_sae = 512"),
    ("act = " + "[" * 5000, "", "cannot read"),
    ("d_sae = " + "9" * 5000, "", "cannot "),
    ('name = "a\\u0000b"', "", "cannot use"),
    ("\0", "", "cannot read"),
    ("lr = 0", "", "says lr = 0.0: --lr must be above 0, got 0"),
    ("lr = nan", "", "--lr must be a number of ordinary size, got nan"),
    ("tied = true", "", "says tied = true: --tied does nothing with --solver pam-sgd"),
    ('act = "topk"\nk = 9', "--act relu", "says k = 9: --k does nothing with --act relu"),
    ('act = "topk"\nk = 9', "--d-sae 8", "says k = 9: --k must be at most --d-sae, 8, got 9"),
    ("steps = 3", "--epochs 3", "says steps = 3: cannot use both --epochs and --steps"),
    ("k = 3", "--resume", "--config does nothing with --resume"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home and other things in it, none of which a refused command changes."""
    folder = tmp_path_factory.mktemp("refusals")
    for name, d_in in (("wide", 9), ("both", 8), ("rows", 8)):
        make_store(folder / "home", name, some_rows(300, d_in))
    for name in ("both", "run"):
        make_run(folder / "home", name, random_sae())
    (folder / "file.png").touch()
    (folder / "folder.png" / "mine").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    return folder


def refused(sae: CommandLine, folder: Path, *words: str | Path) -> Done:
    """What is left of a command that may change nothing."""
    sae.monkeypatch.chdir(folder)
    sae.monkeypatch.setattr("sys.stdin", io.StringIO())
    before = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    done = replace(sae, home=folder / "home")(*words)
    assert sorted(path for path in folder.rglob("*") if path.name != ".lock") == before
    return done


@pytest.mark.parametrize(("line", "status", "said"), CASES)
def test_exit_status_and_one_sentence(
    sae: CommandLine, folder: Path, line: str, status: int, said: str
):
    done = refused(sae, folder, *line.split())
    assert (done.status, done.out) == (status, "")
    assert said in " ".join(done.err.replace("\u2502", " ").split())
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("text", "words", "said"), CONFIGS, ids=lambda value: str(value)[:30])
def test_what_is_wrong_in_a_config_is_told_with_its_line(
    sae: CommandLine, folder: Path, tmp_path: Path, text: str, words: str, said: str
):
    config = tmp_path / "run.toml"
    config.write_text(text)
    done = refused(sae, folder, "train", "--config", config, *words.split())
    assert done.status == 2 and said in done.err
    assert str(config) in done.err or words == "--resume"
    assert done.err.strip().splitlines()[-1].startswith("sae: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train", "there is no activation store"),
        ("eval", "there is no run"),
        ("geometry", "there is no run"),
    ],
)
def test_an_empty_home_is_answered_with_the_command_to_run(sae: CommandLine, line: str, said: str):
    done = sae(line)
    assert (done.status, done.out) == (1, "") and said in done.err
