"""`sae` in a process that a signal meets, or in several of PyTorch's launcher; none outlives a test."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import Done

PATIENCE = 100.0  # seconds
# Variables with which `sae` and `python` are those of this environment.
HERE = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def captured(
    command: Sequence[str | Path], *, check: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with its output; `check`: its status must be 0."""
    done = subprocess.run(command, capture_output=True, text=True, **settings)
    assert not check or done.returncode == 0, done.stderr
    return done


MET_BY_A_SIGNAL = """
import os, sys
left = {nth}

def hook(event, arguments):
    global left
    if event == "os.rename" and str(arguments[1]).endswith({name!r}):
        left -= 1
        if not left:
            os.kill(os.getpid(), {signal})

sys.addaudithook(hook)
sys.argv = ["sae", *{words!r}]
from saecli.__main__ import main
main()
"""


def signalled(
    home: Path,
    words: Iterable[object],
    name: str,
    nth: int = 1,
    what: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[str]:
    """`sae` in a process that sends itself a signal before its nth renaming to a path that ends with a name."""
    program = MET_BY_A_SIGNAL.format(
        nth=nth, name=name, signal=int(what), words=["--home", str(home), *map(str, words)]
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    heard = subprocess.DEVNULL if what == signal.SIGSTOP else subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=heard,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    if what == signal.SIGSTOP:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    else:
        process.said = process.communicate(timeout=PATIENCE)[1]
        assert what != signal.SIGKILL or process.returncode == -signal.SIGKILL, process.said
    return process


def torchrun(processes: int, *more: str) -> list[str]:
    """The launcher's command line, up to the script or module; for one machine where it is not told of others."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *(more or ["--standalone"])]
    return [*launcher, "--nproc-per-node", str(processes)]


@dataclass
class Launched:
    """A launcher under way."""

    process: subprocess.Popen  # the launcher's own

    def ranks(self) -> dict[int, int]:
        """The process id of each process that it started, by rank."""
        processes = {}
        for child in _children(self.process.pid):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            own = [entry for entry in environment if entry.startswith(b"RANK=")]
            processes |= {int(entry.removeprefix(b"RANK=")): child for entry in own}
        return processes

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until that is so."""
        begun = time.monotonic()
        while not reached():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() - begun < PATIENCE
            time.sleep(0.005)

    def done(self) -> Done:
        """What it left in the end."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return Done(self.process.returncode, out, err)


def _children(process: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{process}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


@contextmanager
def launched(command: list[str], *words: str | Path, **variables: str) -> Iterator[Launched]:
    """Start `sae` under a launcher, with these environment variables; what is left of it is killed in the end."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [*command, "-m", "saecli", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | own | variables,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    started = Launched(process)
    try:
        yield started
    finally:
        for running in [process.pid, *started.ranks().values()] if process.poll() is None else []:
            os.kill(running, signal.SIGKILL)
        process.communicate()


def together(processes: int, *words: str | Path) -> Done:
    """Run `sae` in so many processes to its end."""
    with launched(torchrun(processes), *words) as started:
        return started.done()


def own_words(err: str) -> list[str]:
    """The lines of stderr that are the command's own, without the launcher's."""
    begins = "W1 E1 I1 W0 E0 I0 Traceback torch. = - saecli Failures: Root [ *".split()
    return [line for line in err.splitlines() if line and not line.startswith((" ", *begins))]


PINNED = {
    "saelens": "sae-lens==6.54.12",
    "sparsify": "eai-sparsify==1.3.3",
    "dictionary-learning": "dictionary-learning==0.1.0",
    "circuit-tracer": "circuit-tracer==0.5.0",
    "sae-bench": "sae-bench==0.6.0",
    "sae-probes": "sae-probes==0.4.2",
    "wandb": "wandb==0.31.0",
}

# Named among its requirements, imported nowhere there; PyPI's is built for one torch and fails beside another.
UNUSED = {"dictionary-learning": "torchvision", "sae-bench": "torchvision"}
# Of which only the data are used, and none of the many packages that it requires.
ALONE = {"sae-probes"}


def python_with(library: str) -> Path:
    """The Python of an environment that has a library; the test is skipped where there can be none."""
    variable = f"SAECLI_TEST_{library.replace('-', '_').upper()}"
    if variable in os.environ:
        return Path(os.environ[variable])
    if not os.environ.get("CI"):
        pytest.skip(f"{variable} names no Python that has {PINNED[library]}, and CI is not set")
    if sys.prefix == sys.base_prefix:
        pytest.skip(f"{PINNED[library]} is only installed inside a virtual environment")
    folder = Path(sys.prefix) / "libraries" / library
    if not (folder / PINNED[library]).exists():
        _install(library, folder)
    return folder / "bin" / "python"


def _install(library: str, folder: Path) -> None:
    venv.create(folder, clear=True)
    pinned, python = PINNED[library], folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", program], text=True).strip()
    own_packages = sysconfig.get_path("purelib") + "\n"
    (Path(packages) / "packages_of_the_tests.pth").write_text(own_packages)
    # What is there is taken where it will do; torch is named, lest a newer one come with gigabytes for a GPU.
    wanted = ["--no-deps", pinned] if library in ALONE else [pinned, f"torch=={torch.__version__}"]
    done = captured([*pip, "install", "-q", *wanted])
    if done.returncode:
        pytest.skip(f"{pinned} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    if library in UNUSED:
        subprocess.run([*pip, "uninstall", "-q", "-y", UNUSED[library]], check=True)
    (folder / pinned).touch()
