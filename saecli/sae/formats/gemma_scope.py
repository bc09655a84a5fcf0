"""Gemma Scope: `params.npz` with W_enc, b_enc, W_dec, b_dec and threshold, a JumpReLU SAE on raw activations.

A `relu` is written with thresholds of zero, and a trained `batchtopk` with equal thresholds. The file does not record
where its rows came from: Gemma Scope names model, layer and width in the names of repository and folders.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...base.files import appearing_whole
from ..activations import Activation, BatchTopK, JumpRelu, Relu
from ..dictionary import SAE
from .common import WEIGHTS, SavedSAE, assemble, read_npz

TENSORS = "params.npz"
WRITTEN: tuple[type[Activation], ...] = (Relu, JumpRelu, BatchTopK)


def load_gemma_scope(folder: Path) -> SavedSAE:
    """Read an SAE of Gemma Scope; FormatError if the file is damaged, or holds other arrays than such an SAE has."""
    path = folder / TENSORS
    return SavedSAE(assemble(path, read_npz(path), JumpRelu()))


def arrays_of(sae: SAE) -> dict[str, Tensor]:
    """The arrays of an SAE in float32, its activation one of `WRITTEN`, by Gemma Scope's names."""
    thresholds = sae.activation.thresholds(sae.activation_parameters, sae.d_sae).to(torch.float32)
    return {name: sae.tensors()[name] for name in WEIGHTS} | {"threshold": thresholds}


def save_gemma_scope(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE, its activation one of `WRITTEN`, to an existing folder as Gemma Scope's are published, in float32
    and atomically."""
    tensors = arrays_of(saved.sae.copy_to(torch.float32))
    with appearing_whole(folder / TENSORS) as temporary, temporary.open("wb") as file:
        np.savez(file, **{name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()})
