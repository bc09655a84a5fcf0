"""The README does what it says: its commands and code run, its tables and figures are the code's own."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from homes import CommandLine

import saecli
from saecli.cli.main import COMMANDS, load_command
from saecli.model import BUNDLED, TINY_GEMMA2

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = [ROOT / name for name in ("saecli", "tests", "examples")]
READMES = sorted(path for folder in FOLDERS for path in folder.rglob("README.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_shell_blocks_go_from_a_text_file_to_an_evaluated_sae(sae: CommandLine, tmp_path: Path):
    sae.monkeypatch.chdir(tmp_path)
    sae.monkeypatch.delenv("SAE_HOME", raising=False)
    write, *lines = [line for block in blocks("sh") for line in block.splitlines()]
    text, file = shlex.split(write, comments=True)[:-1], Path(shlex.split(write, comments=True)[-1])
    assert (text[:3], text[-1], file) == (["python", "-m", "pydoc"], ">", Path("notes.txt"))
    file.write_bytes(subprocess.check_output([sys.executable, *text[1:-1]]))
    chain = "extract train eval sparsity geometry report finetune train extract train eval"
    names = [*chain.split(), "export", "extract", "train"]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert [words[:2] for words in commands] == [["sae", name] for name in names]
    quick = {
        "extract": ["--rows", "3000"],
        "train": ["--epochs", "2", "--d-sae", "64"],
        "finetune": ["--tokens", "6000"],
    }
    here = CommandLine(Path("sae-data"), sae.monkeypatch, sae.capsys)
    for _, *words in commands:
        given = quick.get(words[0], []) if "--rows" not in words else []
        here(*words, *given).succeeds()
    assert Path("sparsity.png").exists()
    assert Path("geometry.png").exists()
    assert here("sparsity", "crosscoder", "--plot", "crosscoder.png").status == 0
    assert Path("crosscoder-places.png").exists()
    assert Path("pages/index.html").exists()
    assert sorted(path.name for path in Path("set").iterdir()) == [
        "config.yaml",
        *(f"layer_{layer}.safetensors" for layer in range(4)),
    ]
    for block in blocks("python"):
        namespace: dict = {}
        exec(block, namespace)
        assert namespace["x"].shape[1] == 128
        assert np.asarray(namespace["x"]).dtype == "float32"


@pytest.mark.slow
def test_the_three_lines_as_written_chain_by_their_defaults(sae: CommandLine, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    section = README.split("## Three lines")[1]
    lines = [
        shlex.split(line)[1:] for line in re.findall(r"^    (sae .*)$", section, re.MULTILINE)
    ][:3]
    sae(*lines[0]).fails(1, "--model tiny-gemma2")
    assert not (sae.home / "activations").exists()
    assert sae("extract", "--model", "tiny-gemma2", "--rows", "3000").status == 0
    assert sae(*lines[1], "--epochs", "1").status == 0
    assert sae(*lines[2]).status == 0


def test_two_set_up_commands_stand_where_ci_takes_them_from():
    assert re.findall(r"^    (pip install .*)$", README, re.MULTILINE) == [
        "pip install . && sae demo",
        "pip install -e '.[test]' && pytest",
    ]


def test_list_of_commands_has_them_all_in_the_order_of_help():
    section = README.split("## Commands")[1].split("## ")[0]
    entries = re.findall(r"^- (`sae [^:]*):", section, re.MULTILINE)
    assert re.findall(r"`sae (\w+)", " ".join(entries)) == list(COMMANDS)


def test_figures_of_the_bundled_model_are_those_measured():
    measured = json.loads((BUNDLED[TINY_GEMMA2] / "training.json").read_text())
    text = (ROOT / "saecli/store/README.md").read_text(encoding="utf-8")
    section = " ".join(text.split("## tiny-gemma2")[1].split("## ")[0].split())
    assert f"{measured['parameters']:,} parameters" in README
    assert f"{measured['parameters']:,} parameters" in section
    assert f"{measured['held_out_cross_entropy']:.2f} nats" in section
    assert f"training tokens give {measured['unigram_cross_entropy']:.2f}" in section
    assert measured["held_out_cross_entropy"] < 0.6 * measured["unigram_cross_entropy"]


def links_of(readme: Path) -> list[tuple[Path, str]]:
    """The files that it links to, each with the anchor of a heading in it, or none."""
    text = readme.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text)
    return [(readme.parent.joinpath(path).resolve() if path else readme, to) for path, to in links]


def anchors_of(readme: Path) -> set[str]:
    """The anchors that GitHub gives its headings."""
    headings = re.findall(r"^#+ (.*)$", readme.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


each_readme = pytest.mark.parametrize(
    "readme", [ROOT / "README.md", *READMES], ids=lambda path: str(path.relative_to(ROOT))
)


@each_readme
def test_every_file_named_or_linked_exists_with_its_heading(readme: Path):
    text = readme.read_text(encoding="utf-8")
    named = [ROOT / path for path in re.findall(r"`((?:saecli|tests|examples)/[\w/.]+)`", text)]
    links = links_of(readme)
    linked = [path for path, _ in links]
    assert [path for path in named + linked if not path.exists()] == []
    assert [(path, to) for path, to in links if to and to not in anchors_of(path)] == []


@each_readme
def test_every_command_and_function_is_one_that_users_have(readme: Path):
    text = readme.read_text(encoding="utf-8").replace("\\\n", "")
    for command in re.findall(r"(?:^ *|&& )(sae \w.*?)(?= && |$)", text, re.MULTILINE):
        _, name, *words = shlex.split(command, comments=True)
        load_command(name).make_context(name, words)
    assert {*re.findall(r"\bsaecli\.(\w+)\(", text)} <= {*saecli.__all__}


def test_the_readme_links_to_every_other_and_takes_two_minutes():
    assert len(README.splitlines()) <= 220
    assert {path for path, _ in links_of(ROOT / "README.md")} >= set(READMES)
