"""`--config run.toml`: a run's own file trains it again, the command line wins, and what is wrong in it is named."""

import tomllib
from pathlib import Path

import pytest
from homes import CommandLine, assert_same_weights, make_store, some_rows

QUICK = ("--d-sae", "24", "--epochs", "2")
CHOICES = {
    "pam-sgd": ("--solver", "pam-sgd", "--act", "jumprelu", "--mu-dec", "1", "--no-revive", "--seed", "3"),
    "sgd": ("--solver", "sgd", "--act", "topk", "--k", "4", "--lr", "0.0123456789", "--tied",
            "--batch-size", "64"),
    "proximal": ("--act", "swish", "--clip-norm", "2", "--batch-size", "1000"),
    "nested": ("--act", "topk", "--k", "3", "--prefixes", "auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("solver", CHOICES)
def test_a_runs_own_config_trains_the_same_bits(sae: CommandLine, tmp_path, solver: str):
    make_store(sae.home, "rows", some_rows(300))
    runs = sae.home / "runs"
    assert sae("train", "--data", "rows", "--name", "first", *QUICK, *CHOICES[solver]).status == 0
    make_store(sae.home, "newer", some_rows(300, seed=1))
    config = runs / "first" / "config.toml"
    again = sae("train", "--config", config, "--json").json
    assert (again["run"], again["data"]) != ("first", "newer")
    assert_same_weights(sae.home, "first", again["run"])
    assert (Path(again["path"]) / "config.toml").read_text() == config.read_text()
    spelt = tmp_path / "spelt.toml"
    _, given, defaults = config.read_text().split("\n\n")
    spelt.write_text("\n".join([given, *(line.removeprefix("# ") for line in defaults.splitlines()[1:])]))
    assert {"smoothing", "sparsity", "inner_steps"} < tomllib.loads(spelt.read_text()).keys()
    assert sae("train", "--config", spelt, "--name", "spelt").status == 0
    assert_same_weights(sae.home, "first", "spelt")


def test_the_command_line_wins_and_keys_may_have_hyphens(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(300))
    config = tmp_path / "run.toml"
    config.write_text('act = "topk"\nk = 4\nd-sae = 24\nbatch_size = 64\nepochs = 1\nlr = 1\nrevive = false\n'
                      'smoothing = "auto"\njson = true\nsolver = "sgd"\ntied = true\n')
    document = sae("train", "--config", config, "--lr", "0.001", "--k", "6", "--revive", "--no-tied", "--name",
                   "run").json
    assert (document["act"], document["d_sae"], document["epochs"]) == ("topk", 24, 1)
    assert document["final"]["lr"] == 0.001
    assert document["final"]["test_l0"] == 6
    kept = tomllib.loads((sae.home / "runs" / "run" / "config.toml").read_text())
    assert (kept["lr"], kept["revive"], kept["tied"], kept["smoothing"]) == (0.001, True, False, "auto")
    assert not {"name", "json", "config"} & kept.keys()


@pytest.mark.slow
def test_options_that_are_given_several_times_are_lists(sae: CommandLine, tmp_path: Path):
    config = tmp_path / "extract.toml"
    config.write_text('model = "tiny-gemma2"\nlayer = [0, 1]\nsite = "resid_pre"\nrows = 40\npacked = true\n')
    stores = sae("extract", "--config", config, "--json").json["stores"]
    assert [store["name"].split("-l")[1].rpartition("-")[0] for store in stores] == ["0-resid_pre", "1-resid_pre"]
    only = sae("extract", "--config", config, "--layer", "1", "--json").json  # the line's alone: another request
    assert only["name"] != stores[1]["name"] and only["name"].startswith("tiny-gemma2-l1-resid_pre-")
