"""Weights whose shapes do not fit each other, in each format's own file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from homes import sae_for
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from saecli.base.errors import FormatError
from saecli.sae.formats import WRITABLE, load, save


@pytest.mark.parametrize("format", [name for name in WRITABLE if name != "circuit-tracer"])
@pytest.mark.parametrize(("name", "shape"), [("b_dec", (5,)), ("b_enc", (1,)), ("W_dec", (20, 3)), ("W_enc", (0, 20))])
def test_weights_that_do_not_fit_each_other_are_refused_by_name(tmp_path: Path, format: str, name: str, shape: tuple):
    save(sae_for(format, "relu-topk", "jumprelu"), format, tmp_path / "sae")
    theirs = {"sparsify": {"W_enc": "encoder.weight", "b_enc": "encoder.bias"},
              "dictionary-learning": {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "decoder.weight"},
              "gemma-scope-2": {"W_enc": "w_enc", "W_dec": "w_dec"}}
    rename(tmp_path / "sae", theirs.get(format, {}).get(name, name), torch.zeros(shape))
    with pytest.raises(FormatError, match=f"expected {name} of shape"):
        load(tmp_path / "sae")


def rename(folder: Path, name: str, tensor: torch.Tensor):
    """Put another tensor in the place of one, in whichever file holds it."""
    (file,) = (path for path in folder.iterdir() if path.suffix not in (".json", ".yaml"))
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        save_file(load_file(file) | {name: tensor}, file, metadata)
    elif file.suffix == ".npz":
        with np.load(file) as arrays:
            held = dict(arrays)
        np.savez(file, **held | {name: tensor.numpy()})
    else:
        torch.save(torch.load(file) | {name: tensor}, file)

