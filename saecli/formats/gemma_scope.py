"""Gemma Scope: `params.npz` with W_enc, b_enc, W_dec, b_dec and threshold, a JumpReLU SAE on raw activations."""

import zipfile
from pathlib import Path

import numpy as np
import torch

from ..activations import JumpRelu
from ..errors import FormatError
from .common import WEIGHTS, SavedSAE, assemble

TENSORS = "params.npz"


def load_gemma_scope(folder: Path) -> SavedSAE:
    """Read an SAE of Gemma Scope.

    Raises:
        FormatError: the file is damaged, or holds other arrays than such an SAE has.
    """
    path = folder / TENSORS
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise FormatError(f"cannot read {path}: {error}") from error
    return SavedSAE(assemble(path, tensors, JumpRelu(), {*WEIGHTS, "threshold"}))
