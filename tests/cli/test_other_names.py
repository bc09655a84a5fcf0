"""What users of other tools type: each name is answered by the option that takes its place here."""

import pytest
from homes import CommandLine, make_store, some_rows

import saecli
from saecli.base.options import OTHERS, in_place_of
from saecli.cli.main import COMMANDS, Command, loaded


@pytest.fixture(scope="module")
def commands() -> dict[str, Command]:
    return {name: loaded(name) for name in COMMANDS}


def options(command: Command) -> set[str]:
    return {parameter.name for parameter in command.params}


def test_every_name_stands_for_an_option_and_is_none_itself(commands: dict[str, Command]):
    for name, (ours, _) in OTHERS.items():
        assert ours in options(commands["train"]) | {"home"}
        assert name not in options(commands["train"]) | options(commands["extract"])


def test_all_answers_are_whole_sentences_for_every_command(commands: dict[str, Command]):
    for command in commands.values():
        for name in (*OTHERS, "wandb_entity"):
            assert in_place_of(name, options(command)).startswith("here ")
    assert in_place_of("xyzzy", options(commands["train"])) == ""


def test_python_is_answered_alike():
    with pytest.raises(
        saecli.SaeError, match="fit has no option l1_coefficient; here sparsity_weight: the same"
    ):
        saecli.fit(some_rows(40), l1_coefficient=3)


def test_underscores_and_capitals_in_an_option_are_as_hyphens(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    done = sae(
        "train",
        "--d_sae",
        "24",
        "--batch_size=100",
        "--EPOCHS",
        "1",
        "--no_revive",
        "--name",
        "a_b",
        "--json",
    )
    assert done.status == 0, done.err
    assert (done.json["run"], done.json["d_sae"], done.json["steps"]) == ("a_b", 24, 30)
    assert "No such option: --d_saex" in sae("train", "--d_saex", "24").err
    assert "--x_y" in sae("eval", "--", "--x_y").err  # after -- are names


def test_values_stay_as_they_are(commands: dict[str, Command]):
    words = [
        "--latent",
        "1",
        "--prompt",
        "--Latent",
        "--prompt=--k_sparse",
        "--prompt",
        "--l1_coefficient",
    ]
    context = commands["steer"].make_context("steer", ["first", *words], resilient_parsing=False)
    assert context.params["prompt"] == ["--Latent", "--k_sparse", "--l1_coefficient"]
    with pytest.raises(
        saecli.SaeError, match="has no option --L1_Coefficient; here sparsity_weight"
    ):
        commands["train"].make_context("train", ["--L1_Coefficient", "3"])
