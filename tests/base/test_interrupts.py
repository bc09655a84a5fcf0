"""Ctrl-C at any moment ends a command with status 130 and no traceback."""

import sys
from pathlib import Path

import pytest
from homes import make_store, some_rows
from launching import captured

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that runs the tests has set
from saecli.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["sae", "--home", {home!r}, "train", "--d-sae", "12", "--epochs", "1", "--name", "run"]
main()
"""


@pytest.mark.parametrize(
    "module",
    [
        "saecli.cli.main",
        "typer",
        "torch",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rich", "numpy", "torch.nn", "safetensors", "matplotlib.figure")
        ),
    ],
)
def test_while_libraries_are_loaded(tmp_path: Path, module: str):
    make_store(tmp_path, "rows", some_rows(60))
    done = captured([sys.executable, "-c", PROGRAM.format(module=module, home=str(tmp_path))])
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr
