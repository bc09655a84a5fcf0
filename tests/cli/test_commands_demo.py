"""`sae demo` on a small store: the commands that it prints, and the table that it ends with."""

import re

import pytest
from homes import CommandLine

from saecli.cli import demo


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "ROWS", 1500)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.long
@pytest.mark.usefixtures("brief")
def test_demo_ends_with_error_sparsity_effect_and_cost_of_both_runs(sae: CommandLine):
    done = sae("demo").succeeds()
    printed = re.findall(r"^\d\. .*?\$ sae --home \S+ (\w+)", done.out, re.MULTILINE | re.DOTALL)
    assert printed == ["extract", "train", "train", "eval", "sparsity", "geometry", "list"]
    last = done.out[done.out.index("both SAEs") :]
    header, *lines = [
        [cell.strip() for cell in line[1:-1].split(line[0])]
        for line in last.splitlines()
        if line[0:1] in ("┃", "│")
    ]
    assert header == ["run", "l0", "fvu", "ce recovered", "kl", "steps", "seconds"]
    assert " unbeaten (*): every other run" in " " + " ".join(last.split())
    evaluated = {
        run["run"]: run
        for run in sae("eval demo-1-sgd demo-1-pam-sgd --model tiny-gemma2 --json").json["runs"]
    }
    assert {name.removesuffix(" *") for name, *_ in lines} == evaluated.keys()
    for marked, *figures in lines:
        run = evaluated[marked.removesuffix(" *")]
        assert (" *" in marked) == run["unbeaten"]
        assert figures[:4] == [f"{run[name]:.4g}" for name in ("l0", "fvu", "ce_recovered", "kl")]
    assert all((sae.home / path).exists() for path in last.partition("pictures:")[2].split())
