"""What users of other tools type: each name is answered by the option that takes its place here."""

from pathlib import Path

import pytest
from homes import CommandLine, make_store, some_rows

import saecli
from saecli.base.other_names import OTHERS, in_place_of
from saecli.cli.main import COMMANDS, Command, loaded


@pytest.fixture(scope="module")
def commands() -> dict[str, Command]:
    return {name: loaded(name) for name in COMMANDS}


def options(command: Command) -> set[str]:
    return {parameter.name for parameter in command.params}


def test_every_name_stands_for_an_option_that_there_is_and_is_none_itself(commands: dict[str, Command]):
    for name, ours in OTHERS.items():
        assert ours.option in (options(commands[ours.command]) if ours.command else {"home"})
        assert name not in options(commands["train"]) | options(commands["extract"])


@pytest.mark.parametrize(("words", "said"), [
    (["train", "--l1-coefficient", "5"], "sae train has no option --l1-coefficient; here --sparsity-weight: the same"),
    (["train", "--l1_coefficient=5"], "sae train has no option --l1_coefficient; here --sparsity-weight: "),
    (["train", "--expansion-factor", "8"], "here --d-sae: the number of latents, which is the factor times d_in"),
    (["train", "--num-latents", "8"], "here --d-sae"),
    (["train", "--architecture", "topk"], "here --act: "),
    (["train", "--wandb-project", "x"], "here --log-to: wandb"),
    (["train", "--model-name", "gpt2"], "here --model"),
    (["train", "--hook-name", "x"], "here --layer: blocks.12.hook_resid_post is --layer 12 --site"),
    (["train", "--output-path", "x"], "here `sae --home`: "),
    (["eval", "--model-name", "gpt2"], "sae eval has no option --model-name; here --model"),
])
def test_an_option_of_another_tool_is_answered_by_ours(sae: CommandLine, words: list[str], said: str):
    done = sae(*words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err and "{" not in done.err


def test_all_answers_are_whole_sentences_for_every_command(commands: dict[str, Command]):
    for command in commands.values():
        for name in (*OTHERS, "wandb_entity"):
            remedy = in_place_of(name, options(command))
            assert remedy.startswith("here ")
    assert in_place_of("xyzzy", options(commands["train"])) == ""


def test_a_file_of_options_and_python_are_answered_alike(sae: CommandLine, tmp_path: Path):
    (tmp_path / "run.toml").write_text("expansion_factor = 8\n")
    done = sae("train", "--config", tmp_path / "run.toml")
    assert done.status == 2 and "got expansion_factor; here --d-sae: the number of latents" in done.err
    with pytest.raises(saecli.SaeError, match="fit has no option l1_coefficient; here sparsity_weight: the same"):
        saecli.fit(some_rows(40), l1_coefficient=3)


def test_underscores_and_capitals_in_an_option_are_as_hyphens(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    done = sae("train", "--d_sae", "24", "--batch_size=100", "--EPOCHS", "1", "--no_revive", "--name", "a_b", "--json")
    assert done.status == 0, done.err
    assert (done.json["run"], done.json["d_sae"], done.json["steps"]) == ("a_b", 24, 30)
    assert "No such option: --d_saex" in sae("train", "--d_saex", "24").err
    assert "--x_y" in sae("eval", "--", "--x_y").err  # after -- are names
