"""From `sae push` to other libraries' own loading, by way of a hub on this machine, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from environments import python_with
from homes import MLP, make_run, make_store, make_transcoder, random_sae, some_rows
from model_hub import WRITER, ModelHub, serving

from saecli.sae.activations import Activation, BatchTopK, JumpRelu, ReluTopK

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "libraries" / "from_hub.py"


def environment(hub: ModelHub, folder: Path) -> dict[str, str]:
    """For processes that are to know no hub but this; its address is read at import."""
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return own | {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1",
                  "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": WRITER, "SAE_HOME": str(folder / "home")}


@pytest.mark.parametrize(("library", "activation"), [
    ("saelens", BatchTopK(k=4)), pytest.param("sparsify", ReluTopK(k=4), marks=pytest.mark.long),
    pytest.param("circuit-tracer", JumpRelu(), marks=pytest.mark.long)],
    ids=lambda value: getattr(value, "name", value))
def test_a_pushed_run_loads_from_the_hub_in_the_library_and_here(
        tmp_path: Path, library: str, activation: Activation) -> None:
    python = python_with(library)
    rows, mine = some_rows(), random_sae(activation)
    if library == "circuit-tracer":
        rows, _ = make_transcoder(tmp_path / "home", "first", mine, MLP | {"layer": 0, "target_layer": 0})
    else:
        make_store(tmp_path / "home", "rows", rows)
        make_run(tmp_path / "home", "first", mine)
    np.save(tmp_path / "rows.npy", rows)
    with serving() as hub:
        settings = {"env": environment(hub, tmp_path), "capture_output": True, "text": True, "cwd": tmp_path}
        for words in (("push", "first", "someone/saes", "--format", library),
                      ("eval", "someone/saes/first@main", "--data", "x", "--target", "y")
                      if library == "circuit-tracer" else ("geometry", "someone/saes/first@main", "--rows", "200")):
            done = subprocess.run([sys.executable, "-m", "saecli", *words], **settings)
            assert done.returncode == 0, done.stderr
            assert WRITER not in done.stdout + done.stderr
        done = subprocess.run([python, SCRIPT, library, "someone/saes", "first", tmp_path / "rows.npy",
                               tmp_path / "x_hat.npy"], **settings)
        assert done.returncode == 0, done.stderr
        assert "sae eval someone/saes/first" in hub.repos["someone/saes"].files["README.md"].decode()
    x_hat = mine(torch.from_numpy(rows)).numpy()
    assert np.abs(np.load(tmp_path / "x_hat.npy") - x_hat).max() <= 1e-5 * np.abs(x_hat).max()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(WRITER.encode() in content for content in written)
