"""The README's claims on what is to be written to add a part: each is added to a copy of the package, and run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import captured

import saecli

PACKAGE = Path(saecli.__file__).parent

ACTIVATION = '''
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..codes import Codes
from ..codes import where
from .base import Activation, Parameters


@dataclass(frozen=True)
class Doubled(Activation):
    """Twice the positive pre-activations."""

    name: ClassVar[str] = "doubled"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        return where(pre, pre > 0).map(lambda values: 2 * values)
'''

SOLVER = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..sae.dictionary import SAE, Dictionary
from .options import Sgd
from .solver import SgdSolver, Task


class UnitNorm(Dictionary):
    """A kind of dictionary: its decoder's rows have norm 1."""

    LATENT_DIMENSIONS: ClassVar[dict[str, int]] = {**Dictionary.LATENT_DIMENSIONS, "directions": 0}

    def __init__(self, start: SAE) -> None:
        tensors = {"W_enc": start.W_enc, "b_enc": start.b_enc, "b_dec": start.b_dec, "W_skip": None}
        super().__init__(tensors, start.activation)
        self.directions = Parameter(start.W_dec.detach().clone())

    def decoder(self) -> Tensor:
        return torch.nn.functional.normalize(self.directions, dim=1)


class UnitSgdSolver(SgdSolver):
    @staticmethod
    def dictionary_of(initial: SAE, task: Task, config: Sgd) -> UnitNorm:
        return UnitNorm(initial)


@dataclass(frozen=True)
class UnitSgd(Sgd):
    """SGD with a decoder of unit norm."""

    name: ClassVar[str] = "unit-sgd"
    implementation: ClassVar[str] = "unit_sgd:UnitSgdSolver"
'''

COMMAND = '''"""Count the runs."""

import typer

from .options import Json, start


def command(ctx: typer.Context, json: Json = False) -> None:
    session = start(ctx)
    session.console.print_result({"runs": len(session.home.runs.names())})
'''

FORMAT = """
import json
from pathlib import Path

import numpy as np
import torch

from ..activations import activation_from_json, activation_to_json
from ..dictionary import SAE
from .common import SavedSAE


def load(folder: Path) -> SavedSAE:
    with np.load(folder / "sae.npz") as held:
        tensors = {name: torch.from_numpy(held[name]) for name in held.files if name != "activation"}
        return SavedSAE(SAE(**tensors, activation=activation_from_json(json.loads(str(held["activation"])))))


def save(saved: SavedSAE, folder: Path) -> None:
    activation = json.dumps(activation_to_json(saved.sae.activation))
    np.savez(folder / "sae.npz", activation=activation,
             **{name: tensor.numpy() for name, tensor in saved.sae.tensors().items()})
"""


def added(root: Path) -> dict[str, str]:
    """A copy of the package with one of each part; returns the environment that runs it."""
    package = root / "saecli"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    def write(name: str, text: str) -> None:
        (package / name).write_text(text)

    def line(name: str, before: str, after: str) -> None:
        """One line of a table changed, with the import that it needs."""
        text = (package / name).read_text()
        assert before in text
        write(name, text.replace(before, after, 1))

    write("sae/activations/doubled.py", ACTIVATION)
    line("sae/activations/__init__.py", "KINDS = (", "KINDS = (Doubled, ")
    line("sae/activations/__init__.py", "from .base", "from .doubled import Doubled\nfrom .base")
    write("train/unit_sgd.py", SOLVER)
    line("train/__init__.py", "(Sgd, PamSgd, Pam)}", "(Sgd, PamSgd, Pam, UnitSgd)}")
    line("train/__init__.py", "from .options ", "from .unit_sgd import UnitSgd\nfrom .options ")
    write("sae/formats/npz.py", FORMAT)
    line(
        "sae/formats/__init__.py",
        '    "native": ',
        '    "npz": Format(("sae.npz",), npz.load, npz.save, ACTIVATIONS.values()),\n    "native": ',
    )
    line("sae/formats/__init__.py", "libraries, scopes", "libraries, npz, scopes")
    write("cli/count.py", COMMAND)
    line("cli/main.py", '"eval sparsity', '"count eval sparsity')
    return {**os.environ, "PYTHONPATH": str(root), "SAE_HOME": str(root / "home")}


def run(environment: dict[str, str], *words: str) -> dict:
    done = captured(
        [sys.executable, "-m", "saecli", *words, "--json"],
        env=environment,
        cwd=environment["PYTHONPATH"],
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_activation_solver_dictionary_format_and_command_are_a_file_and_a_line_each(tmp_path):
    environment = added(tmp_path)
    run(environment, "import", "digits", "--name", "digits")
    quick = ("--d-sae", "96", "--epochs", "6")
    fvus = {}
    for solver in "unit-sgd", "pam-sgd":
        final = run(environment, "train", "--solver", solver, "--act", "doubled", *quick)["final"]
        fvus[solver] = final["test_fvu"]
    assert max(fvus.values()) < 0.9
    assert run(environment, "count") == {"runs": 2}
    run(environment, "export", "unit-sgd-doubled-1", "--to", "npz", "--out", "exported")
    for words in (["unit-sgd-doubled-1"], ["exported", "--data", "digits"]):
        (measures,) = run(environment, "eval", *words)["runs"]
        assert measures["fvu"] == pytest.approx(fvus["unit-sgd"], rel=1e-4)
    load = (
        "import saecli, torch\n"
        "norms = saecli.load_sae('unit-sgd-doubled-1').W_dec.norm(dim=1)\n"
        "assert (norms / norms[0]).sub(1).abs().max() < 1e-4, norms"
    )
    subprocess.run([sys.executable, "-c", load], env=environment, cwd=tmp_path, check=True)
