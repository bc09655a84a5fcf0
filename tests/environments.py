"""Other libraries, each in an environment of its own.

A variable such as SAECLI_TEST_SAELENS may name the Python of an environment that has the library. Else, where CI is
set, one is made inside the virtual environment of the tests, whose packages it sees, so that torch is not installed
again; it lasts as long as that one. Elsewhere the tests are skipped.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

PINNED = {"saelens": "sae-lens==6.54.12", "sparsify": "eai-sparsify==1.3.3",
          "dictionary-learning": "dictionary-learning==0.1.0", "circuit-tracer": "circuit-tracer==0.5.0",
          "sae-probes": "sae-probes==0.4.2", "wandb": "wandb==0.31.0", "trackio": "trackio==0.43.0"}

# Named among its requirements, imported nowhere there; PyPI's is built for one torch and fails beside another.
UNUSED = {"dictionary-learning": "torchvision"}
ALONE = {"sae-probes"}  # of which only the data are used, and none of the many packages that it requires


def python_with(library: str) -> Path:
    """The Python of an environment that has a library; the test is skipped where there can be none."""
    variable = f"SAECLI_TEST_{library.replace('-', '_').upper()}"
    if variable in os.environ:
        return Path(os.environ[variable])
    if not os.environ.get("CI"):
        pytest.skip(f"{variable} names no Python that has {PINNED[library]}, and CI is not set")
    if sys.prefix == sys.base_prefix:
        pytest.skip(f"an environment with {PINNED[library]} is only made inside a virtual environment")
    folder = Path(sys.prefix) / "libraries" / library
    if not (folder / PINNED[library]).exists():
        _install(library, folder)
    return folder / "bin" / "python"


def _install(library: str, folder: Path) -> None:
    venv.create(folder, clear=True)
    pinned, python = PINNED[library], folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    asked = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                           capture_output=True, text=True, check=True)
    (Path(asked.stdout.strip()) / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # What is there is taken where it will do; torch is named, lest a newer one come with gigabytes for a GPU.
    wanted = ["--no-deps", pinned] if library in ALONE else [pinned, f"torch=={torch.__version__}"]
    done = subprocess.run([*pip, "install", "-q", *wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{pinned} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    if library in UNUSED:
        subprocess.run([*pip, "uninstall", "-q", "-y", UNUSED[library]], check=True)
    (folder / pinned).touch()
