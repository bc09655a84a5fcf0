"""`--config run.toml`: a run's own file trains it again, the command line wins, and what is wrong in it is named."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, make_store, some_rows
from safetensors.torch import load_file

from saecli.cli.main import COMMANDS, loaded

QUICK = ("--d-sae", "24", "--epochs", "2")
CHOICES = {
    "pam-sgd": ("--solver", "pam-sgd", "--act", "jumprelu", "--mu-dec", "1", "--no-revive", "--seed", "3"),
    "sgd": ("--solver", "sgd", "--act", "topk", "--k", "4", "--lr", "0.0123456789", "--tied",
            "--batch-size", "64"),
    "proximal": ("--act", "swish", "--clip-norm", "2", "--batch-size", "1000"),
}


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "sae.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("solver", ["pam-sgd", "sgd", pytest.param("proximal", marks=pytest.mark.slow)])
def test_a_runs_own_config_trains_the_same_bits_and_so_does_one_with_its_defaults_spelt_out(sae: CommandLine, tmp_path,
                                                                                         solver: str):
    make_store(sae.home, "rows", some_rows(300))
    runs = sae.home / "runs"
    assert sae("train", "--data", "rows", "--name", "first", *QUICK, *CHOICES[solver]).status == 0
    make_store(sae.home, "newer", some_rows(300, seed=1))
    config = runs / "first" / "config.toml"
    again = sae("train", "--config", config, "--json").json
    assert (again["run"], again["data"]) != ("first", "newer")
    assert same_weights(runs / "first", Path(again["path"]))
    assert (Path(again["path"]) / "config.toml").read_text() == config.read_text()
    spelt = tmp_path / "spelt.toml"
    _, given, defaults = config.read_text().split("\n\n")
    spelt.write_text("\n".join([given, *(line.removeprefix("# ") for line in defaults.splitlines()[1:])]))
    assert {"smoothing", "sparsity", "inner_steps"} < tomllib.loads(spelt.read_text()).keys()
    assert sae("train", "--config", spelt, "--name", "spelt").status == 0
    assert same_weights(runs / "first", runs / "spelt")


def test_the_command_line_wins_and_either_spelling_of_a_key_will_do(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(300))
    config = tmp_path / "run.toml"
    config.write_text('act = "topk"\nk = 4\nd-sae = 24\nbatch_size = 64\nepochs = 1\nlr = 1\nrevive = false\n'
                      'smoothing = "auto"\njson = true\n')
    document = sae("train", "--config", config, "--lr", "0.001", "--k", "6", "--revive", "--name", "run").json
    assert (document["act"], document["d_sae"], document["epochs"]) == ("topk", 24, 1)
    assert document["final"]["lr"] == 0.001
    assert document["final"]["test_l0"] == 6
    kept = tomllib.loads((sae.home / "runs" / "run" / "config.toml").read_text())
    assert (kept["lr"], kept["revive"], kept["smoothing"]) == (0.001, True, "auto")
    assert not {"name", "json", "config"} & kept.keys()


def test_what_a_file_switches_on_the_command_line_switches_off(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(300))
    config = tmp_path / "run.toml"
    config.write_text('solver = "sgd"\ntied = true\nd_sae = 24\nsteps = 2\n')
    for words, tied in ((), True), (("--no-tied",), False):
        run = sae("train", "--config", config, *words, "--json").json["run"]
        assert json.loads((sae.home / "runs" / run / "run.json").read_text())["solver"]["tied"] is tied


@pytest.mark.slow
def test_options_that_are_given_several_times_are_lists(sae: CommandLine, tmp_path: Path):
    config = tmp_path / "extract.toml"
    config.write_text('model = "tiny-gemma2"\nlayer = [0, 1]\nsite = "resid_pre"\nrows = 40\npacked = true\n')
    stores = sae("extract", "--config", config, "--json").json["stores"]
    assert [store["name"].split("-l")[1].rpartition("-")[0] for store in stores] == ["0-resid_pre", "1-resid_pre"]
    only = sae("extract", "--config", config, "--layer", "1", "--json").json  # the line's alone: another request
    assert only["name"] != stores[1]["name"] and only["name"].startswith("tiny-gemma2-l1-resid_pre-")
    for wrong in ("[0, 1.5]", "[]", "[[0]]"):
        config.write_text(f"layer = {wrong}\n")
        assert f"layer must be a whole number, or a list of such, got {wrong}" in sae("extract", "--config", config).err


def test_every_key_is_the_name_of_an_option():
    for name in COMMANDS:
        options = {param.name: param.opts for param in loaded(name).params}
        if "config" in options:
            assert all(opts[0] == "--" + key.replace("_", "-") for key, opts in options.items()
                       if opts[0].startswith("-"))


@pytest.mark.parametrize(("text", "words", "sentence"), [
    ('d_sae = "many"', (), 'd_sae must be a whole number, or a list of such, got "many"'),
    ("d_sae = 3.0", (), "d_sae must be a whole number, or a list of such, got 3.0"),
    ("d_sae = true", (), "d_sae must be a whole number, or a list of such, got true"),
    ('alpha = "many"', (), 'alpha must be a number or one of auto, or a list of such, got "many"'),
    ('act = "tanh"', (), "act must be one of relu, jumprelu"),
    ('act = "reul"', (), 'got "reul"; did you mean relu?'),
    ("data = 3", (), "data must be text in quotes, or a list of such, got 3"),
    ("epochs = [1, 2]", (), "epochs must be a whole number, got [1, 2]"),
    ("epochs = 1979-05-27", (), 'epochs must be a whole number, got "1979-05-27"'),
    ('revive = "no"', (), 'revive must be true or false, got "no"'),
    ("dsae = 3", (), "long name of an option of `sae train`, got dsae; did you mean d_sae?"),
    ("config = 3", (), "got config"),
    ("xyzzy = 3", (), "`sae train --help` lists them"),
    ("[train]\nk = 3", (), "the table [train]"),
    ("d_sae = 3\nd-sae = 4", (), "expected d_sae once, got it spelt d-sae as well"),
    ("act: topk", (), "expected TOML, lines such as d_sae = 512"),
    ("lr = 0", (), "says lr = 0.0: --lr must be above 0, got 0"),
    ("lr = nan", (), "--lr must be a number of ordinary size, got nan"),
    ("tied = true", (), "says tied = true: --tied does nothing with --solver pam-sgd"),
    ('act = "topk"\nk = 9', ("--act", "relu"), "says k = 9: --k does nothing with --act relu"),
    ('act = "topk"\nk = 9', ("--d-sae", "8"), "says k = 9: --k must be at most --d-sae, 8, got 9"),
    ("steps = 3", ("--epochs", "3"), "says steps = 3: cannot use both --epochs and --steps"),
    ("k = 3", ("--resume",), "--config does nothing with --resume"),
])
def test_what_is_wrong_is_told_with_the_file_and_the_key(sae: CommandLine, tmp_path: Path, text: str, words: tuple,
                                                        sentence: str):
    make_store(sae.home, "rows", some_rows(300))
    config = tmp_path / "run.toml"
    config.write_text(text)
    done = sae("train", "--config", config, *words)
    assert done.status == 2
    assert sentence in done.err
    assert str(config) in done.err or "--resume" in words
    assert done.err.strip().splitlines()[-1].startswith("sae: ")
    assert not (sae.home / "runs").exists()


def test_a_file_that_cannot_be_read_is_told(sae: CommandLine, tmp_path: Path):
    assert "nowhere.toml: No such file or directory" in sae("train", "--config", tmp_path / "nowhere.toml").err
    assert "expected a file, got a folder" in sae("train", "--config", tmp_path).err
    np.save(tmp_path / "array.npy", np.ones(3))
    assert "expected TOML" in sae("import", "digits", "--config", tmp_path / "array.npy").err
