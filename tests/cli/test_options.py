"""An option is declared once, for Python, TOML and the command line; a run's own config.toml trains it again."""

import inspect
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from annotated_types import Ge, Gt, Le, Lt
from homes import CommandLine, assert_same_weights, make_store, some_rows
from typer.testing import CliRunner

import saecli
from saecli.base.errors import ConfigError
from saecli.base.options import (
    REQUIRED,
    Config,
    Count,
    NonNegative,
    Shown,
    arguments_of,
    options_of,
    toml_lines,
    words_of,
)
from saecli.cli.main import load_command
from saecli.cli.options import configured
from saecli.derive.functions import refit_run
from saecli.sae.activations import ACTIVATIONS
from saecli.train import SOLVERS


@dataclass(frozen=True)
class Sample(Config):
    size: Annotated[int, Ge(1), Le(9), Shown("Size.")] = 3
    rate: Annotated[Annotated[float, Gt(0), Lt(1)] | Literal["auto"], Shown("Rate.")] = "auto"
    kind: Annotated[Literal["a", "b"], Shown("Kind.")] = "a"
    name: Annotated[str | None, Shown("Name.")] = None
    parts: Annotated[tuple[Count, ...] | None, Shown("Parts.")] = None
    loud: Annotated[bool, Shown("Loudly.", advanced=True)] = False
    deep: Annotated[NonNegative, Shown("Depth.", advanced=True)] = 0.0


TAKEN = {
    "size": [1, 9],
    "rate": [0.5, "auto"],
    "kind": ["a", "b"],
    "name": ["a", "", None],
    "parts": [(1, 2), None],
    "loud": [True, False],
    "deep": [0.0, 0.5],
}
OTHERS = [0, -1, 10, 1.5, True, "3", "c", None, float("nan"), [1, "x"], [[1]], (0,)]


@pytest.mark.parametrize("name", TAKEN)
def test_python_takes_what_the_annotation_says_and_names_the_option_otherwise(name: str):
    for value in TAKEN[name]:
        assert getattr(Sample(**{name: value}), name) == value
    refused = 0
    for value in OTHERS:
        try:
            taken = getattr(Sample(**{name: value}), name)
        except ConfigError as error:
            assert str(error).startswith(f"--{name} must be ")
            refused += 1
        else:
            assert taken in (value, (value,))
    assert refused >= 6


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": 0}, "--size must be at least 1, got 0"),
        ({"size": 3.0}, "--size must be a valid integer, got 3.0"),
        ({"rate": 1.0}, "--rate must be less than 1 or 'auto', got 1.0"),
        ({"rate": "fast"}, "--rate must be a valid number or 'auto', got 'fast'"),
        ({"kind": "A"}, "--kind must be 'a' or 'b', got 'A'; did you mean a?"),
        ({"parts": [3, 0]}, "--parts must be at least 1, got 0"),
    ],
)
def test_a_refusal_is_one_sentence(values: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as refusal:
        Sample(**values)
    assert str(refusal.value) == said


def test_whole_numbers_are_taken_for_others_and_one_value_for_several():
    sample = Sample(deep=1, parts=[1, 2])
    assert (sample.deep, type(sample.deep), sample.parts) == (1.0, float, (1, 2))
    assert Sample(parts=3).parts == (3,)
    assert Sample.from_json(sample.to_json()) == sample


def test_values_as_words_of_a_command_have_zeros_and_no_flag_that_is_off():
    values = {"layer": 0, "lr": 0.0, "packed": False, "chat": True, "name": None, "data": ["a", 0]}
    assert shlex.join(words_of(values)) == "--layer 0 --lr 0.0 --chat --data a --data 0"
    values = {"name": "-x", "layer": -1, "data": ["--y"]}
    assert words_of(values) == ["--name=-x", "--layer=-1", "--data=--y"]


def test_every_text_is_read_back_from_toml():
    texts = {f"text{number}": f"a{chr(number)}b" for number in [*range(0x2100), 0x1F600]}
    assert tomllib.loads("\n".join(toml_lines(texts))) == texts


@pytest.fixture
def sample_command() -> Callable[..., str]:
    """Runs a command with the options of `Sample`, which prints them."""

    @configured(Sample)
    def command(ctx: typer.Context, options: dict):
        print(Sample.among(options))

    app = typer.Typer()
    app.command()(command)

    def run(*words: str | Path) -> str:
        done = CliRunner().invoke(app, list(map(str, words)))
        return str(done.exception) if isinstance(done.exception, ConfigError) else done.output

    return run


def test_the_command_line_and_a_file_take_what_python_takes(sample_command, tmp_path: Path):
    assert sample_command() == f"{Sample()}\n"
    wanted = Sample(size=5, rate=0.5, kind="b", name="x", parts=(1, 2), loud=True)
    words = "--size 5 --rate 0.5 --kind b --name x --parts 1 --parts 2 --loud".split()
    assert sample_command(*words) == f"{wanted}\n"
    config = tmp_path / "config.toml"
    config.write_text("\n".join(toml_lines(replace(wanted, deep=0.25).to_json())))
    assert sample_command("--config", config) == f"{replace(wanted, deep=0.25)}\n"
    assert sample_command("--config", config, "--size", "2", "--no-loud") == (
        f"{replace(wanted, deep=0.25, size=2, loud=False)}\n"
    )


def test_the_command_line_refuses_in_the_same_words(sample_command, tmp_path: Path):
    assert "size must be at least 1, got '0'" in sample_command("--size", "0")
    assert "rate must be a valid number or 'auto', got 'fast'" in sample_command("--rate", "fast")
    config = tmp_path / "config.toml"
    for text, name in (("deep = -1", "deep"), ("size = [1, 2]", "size"), ("parts = []", "parts")):
        config.write_text(text)
        said = sample_command("--config", config)
        assert str(config) in said and name in said


def test_help_shows_constraints_in_brief_and_advanced_options_on_demand(sample_command):
    brief, whole = sample_command("--help"), sample_command("--help-all")
    for words in ("<int>", "<auto|float>", "<a|b>", "<int>..."):
        assert words in brief
    assert "--loud" in whole and "--loud" not in brief
    assert "--deep" in whole and "--deep" not in brief


def test_an_option_of_several_configurations_is_declared_alike():
    for table in (SOLVERS, ACTIVATIONS):
        declared: dict[str, object] = {}
        for config in table.values():
            for name, option in options_of(config).items():
                assert declared.setdefault(name, option) == option


BY_COMMAND = {
    "eval": saecli.evaluate,
    "refit": refit_run,
    **{
        name: getattr(saecli, name)
        for name in (
            "sparsity geometry probe contrast controls read explain steer effects report export push".split()
        )
    },
}


@pytest.mark.parametrize("name", BY_COMMAND)
def test_a_public_function_names_types_and_describes_what_its_command_takes(name: str):
    function, params = BY_COMMAND[name], {param.name: param for param in load_command(name).params}
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    options = arguments_of(function)
    for argument, option in options.items():
        param = params[option.name]
        assert param.required == (option.default is REQUIRED)
        assert option.help in param.help and f"{argument}: {option.help}" in function.__doc__


QUICK = ["--d-sae", "24", "--epochs", "2"]
CHOICES = {
    "pam-sgd": "--solver pam-sgd --act jumprelu --no-revive --seed 3",
    "sgd": "--solver sgd --act topk --k 4 --lr 0.0123456789 --tied --batch-size 64",
    "pam": "--solver pam --act relu --batch-size 1000",
    "nested": "--act topk --k 3 --prefixes auto",
}


@pytest.mark.slow
@pytest.mark.parametrize("solver", CHOICES)
def test_a_runs_own_config_trains_the_same_bits(sae: CommandLine, tmp_path, solver: str):
    make_store(sae.home, "rows", some_rows(300))
    runs = sae.home / "runs"
    words = ("--data", "rows", "--name", "first", *QUICK, *CHOICES[solver].split())
    assert sae("train", *words).status == 0
    make_store(sae.home, "newer", some_rows(300, seed=1))
    config = runs / "first" / "config.toml"
    repeated = sae("train", "--config", config, "--json").json
    assert (repeated["run"], repeated["data"]) != ("first", "newer")
    assert_same_weights(sae.home, "first", repeated["run"])
    assert (Path(repeated["path"]) / "config.toml").read_text() == config.read_text()
    spelt = tmp_path / "spelt.toml"
    _, chosen, defaults = config.read_text().split("\n\n")
    spelt.write_text(
        "\n".join([chosen, *(line.removeprefix("# ") for line in defaults.splitlines()[1:])])
    )
    assert {"smoothing", "sparsity", "batch_size"} < tomllib.loads(spelt.read_text()).keys()
    assert sae("train", "--config", spelt, "--name", "spelt").status == 0
    assert_same_weights(sae.home, "first", "spelt")


def test_the_command_line_wins(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows(300))
    config = tmp_path / "run.toml"
    config.write_text(
        'act = "topk"\nk = 4\nd_sae = 24\nbatch_size = 64\nepochs = 1\nlr = 1\nrevive = false\n'
        'smoothing = "auto"\njson = true\nsolver = "sgd"\ntied = true\n'
    )
    words = ["--lr", "0.001", "--k", "6", "--revive", "--no-tied", "--name", "run"]
    document = sae("train", "--config", config, *words).json
    assert (document["act"], document["d_sae"], document["epochs"]) == ("topk", 24, 1)
    assert document["final"]["lr"] == 0.001
    assert document["final"]["test_l0"] == 6
    kept = tomllib.loads((sae.home / "runs" / "run" / "config.toml").read_text())
    wanted = {"lr": 0.001, "revive": True, "tied": False, "smoothing": "auto"}
    assert {name: kept[name] for name in wanted} == wanted
    assert not {"name", "json", "config"} & kept.keys()


@pytest.mark.slow
def test_options_that_are_given_several_times_are_lists(sae: CommandLine, tmp_path: Path):
    config = tmp_path / "extract.toml"
    config.write_text(
        'model = "tiny-gemma2"\nlayer = [0, 1]\nsite = "resid_pre"\nrows = 40\npacked = true\n'
    )
    stores = sae("extract", "--config", config, "--json").json["stores"]
    names = [store["name"].rpartition("-")[0] for store in stores]
    assert names == ["tiny-gemma2-l0-resid_pre", "tiny-gemma2-l1-resid_pre"]
    only = sae("extract", "--config", config, "--layer", "1", "--json").json  # the line's alone
    assert only["name"] != stores[1]["name"] and only["name"].startswith(names[1])
