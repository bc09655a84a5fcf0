"""One declaration of an option: what Python, TOML and the command line take is the same; errors are data. `--config
run.toml`: a run's own file trains it again, and the command line wins."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from homes import CommandLine, assert_same_weights, make_store, some_rows
from typer.testing import CliRunner

from saecli.base.errors import ConfigError, TrainingError
from saecli.base.options import PAPER, Config, option, options_of
from saecli.cli.options import configured
from saecli.sae.activations import ACTIVATIONS
from saecli.train import SOLVERS


@dataclass(frozen=True)
class Sample(Config):
    panel: ClassVar[str] = "Sample"

    size: int = option(3, "Size.", minimum=1, maximum=9)
    rate: float | str = option("auto", "Rate.", choices=("auto",), above=0, below=1)
    kind: str = option("a", "Kind.", choices=("a", "b"))
    name: str | None = option(None, "Name.")
    loud: bool = option(False, "Loudly.", **PAPER)


VALUES = [
    0,
    1,
    9,
    10,
    0.0,
    0.5,
    1.0,
    True,
    "a",
    "b",
    "c",
    "auto",
    "many",
    "",
    float("nan"),
    2**54,
    [1],
    [1, 2],
]


@pytest.mark.parametrize("name", ["size", "rate", "kind", "name", "loud"])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_python_and_a_file_take_the_same_values(name: str, value: object):
    one = options_of(Sample)[name]
    try:
        taken = one.checked(value)
    except ConfigError as error:
        assert error.options == [name] and str(error).startswith(f"{name} must be ")
    else:
        assert one.admits(value) and taken == value


def test_a_file_admits_lists_for_options_given_several_times():
    one = options_of(Sample)["size"]
    assert replace(one, several=True).admits([1, 2]) and not one.admits([1, 2])
    assert not any(replace(one, several=True).admits(value) for value in ([], [1, "x"], [[1]]))


def test_the_command_line_takes_what_python_takes():
    @configured(Sample)
    def command(ctx: typer.Context, options: dict):
        print(Sample.among(options))

    app = typer.Typer()
    app.command()(command)

    def run(*words: str) -> str:
        return CliRunner().invoke(app, words).output.strip()

    assert run() == str(Sample())
    assert run("--size", "5", "--rate", "0.5", "--kind", "b", "--name", "x", "--loud") == str(
        Sample(size=5, rate=0.5, kind="b", name="x", loud=True)
    )
    assert command.advanced == {"loud"}
    assert "neither a number nor auto" in " ".join(run("--rate", "many").replace("│", " ").split())


def test_an_option_of_several_configurations_is_declared_alike():
    for table in (SOLVERS, ACTIVATIONS):
        declared: dict[str, object] = {}
        for config in table.values():
            for name, one in options_of(config).items():
                assert declared.setdefault(name, one) == one


def test_an_error_names_its_options_and_each_caller_spells_them():
    error = ConfigError(
        "--k must be at most --d-sae, 64, got a--k; raise --d-sae, see `sae train --help`"
    )
    assert error.options[:2] == ["k", "d_sae"]
    assert (
        str(error) == "k must be at most d_sae, 64, got a--k; raise d_sae, see `sae train --help`"
    )
    assert (
        error.sentence
        == "--k must be at most --d-sae, 64, got a--k; raise --d-sae, see `sae train --help`"
    )


@pytest.mark.parametrize("kind", [ConfigError, TrainingError])
def test_words_of_the_caller_leave_an_error_its_options(kind: type):
    error = (
        kind("--k must be 3; lower --k").within("run {0}").within("file", "stopped").within("again")
    )
    assert isinstance(error, kind) and error.options == ["k"]
    assert error.sentence == "again: file: run {0}: --k must be 3; lower --k; stopped"


def test_of_several_runs_the_one_that_cannot_be_trained_is_named(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    done = sae(
        "train", "--d-sae", "24", "--lr", "1e-3", "--lr", "1e29", "--solver", "sgd", "--epochs", "9"
    )
    assert done.status == 1
    assert (
        done.err.splitlines()[-1].startswith("sae: sgd-relu-2: ")
        and "lower --lr, or look" in done.err
    )


QUICK = ("--d-sae", "24", "--epochs", "2")
CHOICES = {
    "pam-sgd": (
        "--solver",
        "pam-sgd",
        "--act",
        "jumprelu",
        "--mu-dec",
        "1",
        "--no-revive",
        "--seed",
        "3",
    ),
    "sgd": (
        "--solver",
        "sgd",
        "--act",
        "topk",
        "--k",
        "4",
        "--lr",
        "0.0123456789",
        "--tied",
        "--batch-size",
        "64",
    ),
    "proximal": ("--act", "relu", "--clip-norm", "2", "--batch-size", "1000"),
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
    spelt.write_text(
        "\n".join([given, *(line.removeprefix("# ") for line in defaults.splitlines()[1:])])
    )
    assert {"smoothing", "sparsity", "decoder_every"} < tomllib.loads(spelt.read_text()).keys()
    assert sae("train", "--config", spelt, "--name", "spelt").status == 0
    assert_same_weights(sae.home, "first", "spelt")


def test_the_command_line_wins_and_keys_may_have_hyphens(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(300))
    config = tmp_path / "run.toml"
    config.write_text(
        'act = "topk"\nk = 4\nd-sae = 24\nbatch_size = 64\nepochs = 1\nlr = 1\nrevive = false\n'
        'smoothing = "auto"\njson = true\nsolver = "sgd"\ntied = true\n'
    )
    document = sae(
        "train",
        "--config",
        config,
        "--lr",
        "0.001",
        "--k",
        "6",
        "--revive",
        "--no-tied",
        "--name",
        "run",
    ).json
    assert (document["act"], document["d_sae"], document["epochs"]) == ("topk", 24, 1)
    assert document["final"]["lr"] == 0.001
    assert document["final"]["test_l0"] == 6
    kept = tomllib.loads((sae.home / "runs" / "run" / "config.toml").read_text())
    assert (kept["lr"], kept["revive"], kept["tied"], kept["smoothing"]) == (
        0.001,
        True,
        False,
        "auto",
    )
    assert not {"name", "json", "config"} & kept.keys()


@pytest.mark.slow
def test_options_that_are_given_several_times_are_lists(sae: CommandLine, tmp_path: Path):
    config = tmp_path / "extract.toml"
    config.write_text(
        'model = "tiny-gemma2"\nlayer = [0, 1]\nsite = "resid_pre"\nrows = 40\npacked = true\n'
    )
    stores = sae("extract", "--config", config, "--json").json["stores"]
    assert [store["name"].split("-l")[1].rpartition("-")[0] for store in stores] == [
        "0-resid_pre",
        "1-resid_pre",
    ]
    only = sae(
        "extract", "--config", config, "--layer", "1", "--json"
    ).json  # the line's alone: another request
    assert only["name"] != stores[1]["name"] and only["name"].startswith(
        "tiny-gemma2-l1-resid_pre-"
    )
