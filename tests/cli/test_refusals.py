"""What commands refuse: exit status, and what the one sentence names. Options and statuses are a contract."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from homes import CommandLine, Done, make_run, make_store, random_sae, some_rows

# Command lines and a word of the sentence, by exit status. LAST is the last word of the line.
WRONG = [
    ("no-such", "LAST"),
    ("train --no-such", "LAST"),
    ("train --alpha many", "--alpha"),
    ("train --d-sae x", "--d-sae"),
    ("train --model tiny-gemma2 --layer 1 --layer=2", "one value in sae train, got 1, 2"),
    ("train --model tiny-gemma2 --layer all", "--layer takes one value in sae train, got all"),
    ("train --act reul", "--act"),
    ("train --each", "--data"),
    ("train --each --data rows --target rows", "got layers [None] and [None]"),
    ("train --each --resume", "--each"),
    ("train --config nowhere.toml", "LAST"),
    ("train --config folder.png", "LAST"),
    ("extract --layer al", "--layer"),
    ("extract --site resid-pre", "did you mean resid_pre?"),
    ("eval run --device toaster", "LAST"),
    ("eval run --data wide", "--data"),
    ("eval x --plot file.png/a.png", "LAST"),
    ("sparsity run --plot picture.docx", "--plot"),
    ("sparsity x --plot folder.png", "LAST"),
    ("geometry run --slice 0,1,2", "--plot"),
    ("geometry run --slice 0,1 --plot x.png", "--slice"),
    ("geometry run --slice 0,1,9999 --plot x.png", "9999"),
    ("geometry run --plot x.gif", "--plot"),
    ("geometry run both --plot x.png", "--plot"),
    ("geometry x --plot new/a.png", "LAST"),
    ("export run --to onnx --out out", "--to"),
    ("export run --to saelens --out folder.png", "LAST"),
    ("export run --to saelens --out file.png/out", "there is no folder file.png"),
    ("import digits --shard-rows 0", "--shard-rows"),
    ("import digits --shard-rows 4294967296", "--shard-rows"),
    ("import digits --l0 3", "--l0"),
    ("import synthetic --key x", "--key"),
    (
        "import synthetic --features 10 --l0 5",
        "--l0 must be at most 0.4 times --features, 4, got 5",
    ),
    ("import synthetic --correlation 1", "--correlation"),
    ("report run --out out --latent 3 --latent 20", "20"),
    ("report run --out out --latent 0 --latents 3", "--latents"),
    ("report run --out out --neuronpedia javascript:x", "LAST"),
    ("report run --out out --neuronpedia a/b/../c", "LAST"),
    ("report x --out folder.png", "LAST"),
    ("rm both --yes", "--kind"),
    ("rm rows", "--yes"),
]
FAILED = [
    ("train --each --data r*z", "`sae list` shows every"),
    ("eval n*", "`sae list` shows every run"),
    ("eval nosuch", "`sae list` shows every run"),
    ("eval run --data nosuch", "`sae list` shows every"),
    ("geometry no-such-run", "LAST"),
    ("import nowhere.npy", "LAST"),
    ("import digits --key x", "--key"),
    ("report run --out out --data none", "LAST"),
    ("rm rows --kind run --yes", "rows"),
    ("rm ../runs/run --yes", "../runs/run"),
    ("rm rows rnu --yes", "did you mean run?"),
]
# The text of --config, further words, and words of the sentence.
CONFIGS = [
    ('d_sae = "many"', "", "--d-sae must be a valid integer, got 'many'"),
    ("d_sae = []", "", "d_sae"),
    ("epochs = [1, 2]", "", "epochs"),
    ("epochs = 1979-05-27", "", "--epochs"),
    ("dsae = 3", "", "did you mean d_sae?"),
    ("xyzzy = 3", "", "xyzzy"),
    ("[train]\nk = 3", "", "train"),
    ("act: topk", "", "expected TOML"),
    ("act = " + "[" * 5000, "", "cannot read"),
    ("d_sae = " + "9" * 5000, "", "cannot "),
    ('name = "a\\u0000b"', "", "--name"),
    ("\0", "", "cannot read"),
    ("tied = true", "", "--tied"),
    ('act = "topk"\nk = 9', "--act relu", "--k"),
    ('act = "topk"\nk = 9', "--d-sae 8", "--k"),
    ("steps = 3", "--epochs 3", "--steps"),
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
    return folder


def refused(sae: CommandLine, folder: Path, *words: str | Path) -> Done:
    """What is left of a command that may change nothing."""
    sae.monkeypatch.chdir(folder)
    sae.monkeypatch.setattr("sys.stdin", io.StringIO())
    before = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    done = replace(sae, home=folder / "home")(*words)
    assert sorted(path for path in folder.rglob("*") if path.name != ".lock") == before
    return done


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [(line, 2, said) for line, said in WRONG] + [(line, 1, said) for line, said in FAILED],
)
def test_status_and_one_sentence(sae: CommandLine, folder: Path, line: str, status: int, said: str):
    said = line.split()[-1] if said == "LAST" else said
    refused(sae, folder, *line.split()).fails_in_one_sentence(status, said)


@pytest.mark.parametrize(("text", "words", "said"), CONFIGS, ids=lambda value: str(value)[:30])
def test_what_is_wrong_in_a_config_is_told_with_its_name(sae, folder, tmp_path, text, words, said):
    config = tmp_path / "run.toml"
    config.write_text(text)
    done = refused(sae, folder, "train", "--config", config, *words.split())
    done.fails_in_one_sentence(2, said, str(config))
    assert done.err.splitlines()[-1].startswith("sae: ")
