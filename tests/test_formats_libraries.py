"""SAE formats against the real libraries, each in an environment of its own.

Set the variable of `PYTHONS` to the Python of an environment that has the library, for instance

    python -m venv /tmp/saelens && /tmp/saelens/bin/pip install sae-lens==6.54.12
    SAECLI_TEST_SAELENS=/tmp/saelens/bin/python pytest tests/test_formats_libraries.py
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from saecli.activations import Activation
from saecli.formats import FORMATS, SavedSAE, load, save
from saecli.sae import SAE

PYTHONS = {"saelens": "SAECLI_TEST_SAELENS", "sparsify": "SAECLI_TEST_SPARSIFY",
           "dictionary-learning": "SAECLI_TEST_DICTIONARY_LEARNING"}
D, F, K = 24, 60, 6
ORIGIN = {"model": "gpt2", "layer": 8, "site": "resid_post", "context": 128, "prepend_bos": True}


@dataclass(frozen=True)
class Exchange:
    """A folder in which a library has read what this tool wrote, and written SAEs of its own."""

    library: str
    folder: Path
    rows: torch.Tensor
    ours: dict[str, SAE]


def sae_with(kind: type[Activation]) -> SAE:
    generator = torch.Generator().manual_seed(1)
    activation = kind(k=K) if "k" in kind.__dataclass_fields__ else kind()
    shapes = ((D, F), (F,), (F, D), (D,))
    parameters = {name: torch.rand(start.shape, generator=generator) * 4
                  for name, start in activation.parameters(F).items()}
    return SAE(*(torch.randn(shape, generator=generator) for shape in shapes), activation, parameters)


@pytest.fixture(scope="module", params=PYTHONS)
def exchange(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    variable = PYTHONS[request.param]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python that has {request.param}")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "theirs").mkdir()
    rows = torch.randn(500, D, generator=torch.Generator().manual_seed(2)) + torch.linspace(-3, 3, D)
    np.save(folder / "rows.npy", rows.numpy())
    ours = {kind.name: sae_with(kind) for kind in FORMATS[request.param].activations}
    for name, sae in ours.items():
        save(SavedSAE(sae, ORIGIN), request.param, folder / "ours" / name)
    script = Path(__file__).parent / "libraries" / f"{request.param.replace('-', '_')}.py"
    done = subprocess.run([os.environ[variable], script, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Exchange(request.param, folder, rows, ours)


def assert_agree(x_hat: torch.Tensor, theirs: np.ndarray) -> None:
    assert np.abs(x_hat.numpy() - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_the_library_reconstructs_alike_from_what_is_written_here(exchange: Exchange) -> None:
    assert exchange.ours
    for name, sae in exchange.ours.items():
        with np.load(exchange.folder / "ours" / f"{name}.npz") as theirs:
            assert_agree(sae(exchange.rows), theirs["x_hat"])


def test_what_the_library_wrote_reconstructs_alike_here(exchange: Exchange) -> None:
    folders = [path for path in (exchange.folder / "theirs").iterdir() if path.is_dir()]
    assert folders
    for path in folders:
        sae = load(path).sae
        with np.load(path.with_suffix(".npz")) as theirs:
            assert_agree(sae(exchange.rows), theirs["x_hat"])
            assert np.abs(sae.encode(exchange.rows).numpy() - theirs["codes"]).max() < 1e-4
            assert 0 < (theirs["codes"] != 0).mean() < 1
