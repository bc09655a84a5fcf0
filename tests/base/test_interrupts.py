"""Ctrl-C at any moment ends a command with status 130 and no traceback, and does nothing once its status is settled."""

import subprocess
import sys
from pathlib import Path

import pytest
from homes import make_store, some_rows

PROGRAM = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that runs the tests has set
from saecli.base import interrupts
from saecli.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if {when}:
            {interrupt}

sys.meta_path.insert(0, Interrupting())
sys.argv = ["sae", "--home", {home!r}, "train", "--d-sae", "12", "--epochs", "1", "--name", "run"]
{before}
main()
"""
KILL = "os.kill(os.getpid(), signal.SIGINT)"


def run(
    tmp_path: Path, when: str = "False", interrupt: str = KILL, before: str = ""
) -> subprocess.CompletedProcess:
    make_store(tmp_path, "rows", some_rows(60))
    program = PROGRAM.format(when=when, interrupt=interrupt, home=str(tmp_path), before=before)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "module",
    [
        "saecli.cli.main",
        "typer",
        "torch",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("rich", "numpy", "torch.nn", "safetensors")
        ),
    ],
)
def test_while_libraries_are_loaded_nothing_has_begun(tmp_path: Path, module: str):
    done = run(tmp_path, f"name == {module!r}")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "stopped before it began; nothing was changed\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "interrupt",
    [
        KILL,
        "\n            ".join(
            [
                "try:",
                f"    {KILL}",
                "except KeyboardInterrupt:",
                "    raise ImportError('cannot load module more than once per process') from None",
            ]
        ),
    ],
    ids=["plain", "turned"],
)
def test_what_a_library_that_is_loaded_late_makes_of_it_is_an_interrupt_all_the_same(
    tmp_path: Path, interrupt: str
):
    done = run(tmp_path, "name == 'matplotlib.figure'", interrupt)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr and "unexpected" not in done.stderr


@pytest.mark.slow
def test_after_the_end_the_status_is_that_of_the_work(tmp_path: Path):
    done = run(tmp_path, before=f"atexit.register(lambda: {KILL})")
    last = f"saved in {tmp_path / 'runs' / 'run'}; loss.png there has its curves"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, last)
    assert (tmp_path / "runs" / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_falls_into_a_callback_still_stops_the_command():
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from saecli.base import interrupts\ninterrupts.watch()\n"
        "import saecli.cli.main as cli\ninterrupts.begin()\n"
        "class Late:\n    def __del__(self): raise KeyboardInterrupt\n"
        "def app(**_):\n    late = Late()\n    del late\n    time.sleep(30)\n    print('went on')\n"
        "cli.app = app\ncli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "stopped; nothing was written\n",
    )
