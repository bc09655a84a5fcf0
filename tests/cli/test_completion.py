"""Shell completion: what the shells are told, by the protocol that their scripts speak, and bash itself."""

import os
import sys
from pathlib import Path

import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from launching import captured

from saecli.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("completion") / "home"
    for name in ("first", "second"):
        make_store(home, name, some_rows(20))
    make_run(home, "half", random_sae(), created="2026-01-01", complete=False)
    make_run(home, "whole", random_sae(), created="2026-01-02")
    return home


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sae tr", ["train"]),
        ("sae train --so", ["--solver"]),
        ("sae train --solver ", ["sgd", "pam-sgd", "pam"]),
        ("sae train --alpha ", ["auto"]),
        ("sae extract --site res", ["resid_post", "resid_pre", "resid_mid"]),
        ("sae export --to sp", ["sparsify"]),
        ("sae train --data ", ["second", "first"]),
        ("sae train --resume --name ", ["half"]),
        ("sae eval ", ["whole", "half"]),
        ("sae --home nowhere eval ", []),
    ],
)
def test_options_choices_and_names_of_runs_and_stores(
    sae: CommandLine, home: Path, line: str, words: list[str]
):
    asked = {
        "_SAE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "SAE_HOME": str(home),
        "COMP_CWORD": str(len(line.split()) - (not line.endswith(" "))),
    }  # what a bash sets
    for name, value in asked.items():
        sae.monkeypatch.setenv(name, value)
    sae.monkeypatch.setattr(sys, "argv", ["sae"])
    with pytest.raises(SystemExit) as stop:
        main()
    said = sae.capsys.readouterr()
    assert (stop.value.code or 0, said.err, said.out.split()) == (0, "", words)


@pytest.fixture
def shell_home(tmp_path: Path) -> dict[str, str]:
    """An environment with a home folder of its own, in which `sae` is a command."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "sae"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m saecli "$@"\n')
    script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sae e", ["extract", "eval", "explain", "export"]),
        pytest.param("sae eval ", ["first"], marks=pytest.mark.slow),
    ],
)
def test_bash_completes_with_the_script_it_is_given(
    shell_home: dict[str, str], tmp_path: Path, line: str, words: list[str]
):
    make_run(tmp_path, "first", random_sae())
    *before, last = line.split(" ")
    program = (
        f'eval "$(sae --show-completion bash)"\ncomplete -p sae\nCOMP_WORDS=({" ".join(before)} "{last}")\n'
        f'COMP_CWORD={len(before)}\n_sae_completion sae\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = captured(
        ["bash", "--norc", "-c", program], check=True, env={**shell_home, "SAE_HOME": str(tmp_path)}
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["complete -o default -F _sae_completion sae", *words]
