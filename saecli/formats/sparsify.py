"""sparsify by EleutherAI (checked against 1.3): `cfg.json` and `sae.safetensors`.

Its encoder subtracts `b_dec`, clips at zero, and keeps the `k` largest: `relu-topk` here. `relu` is written with `k`
equal to the number of latents, which drops nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..activations import Activation, Relu, ReluTopK
from ..dictionary import SAE
from ..errors import ConfigError, FormatError
from ..files import write_json
from .common import (
    SavedSAE,
    assemble,
    bias_with_subtraction,
    expect_names,
    read_config,
    read_safetensors,
    refuse_unless,
    transposed,
    write_safetensors,
)

CONFIG, TENSORS = "cfg.json", "sae.safetensors"

LATENTS_KEPT: dict[type[Activation], Callable[[SAE], int]] = {
    ReluTopK: lambda sae: sae.activation.k, Relu: lambda sae: sae.d_sae}


def load_sparsify(folder: Path) -> SavedSAE:
    """Read an SAE that sparsify saved; FormatError if the files are damaged, or hold a transcoder or another activation
    than TopK."""
    path = folder / CONFIG
    config = read_config(path, dict[str, Any])
    refuse_unless(path, config, "activation", "topk")
    for key in ("transcode", "skip_connection", "signed"):
        refuse_unless(path, config, key, False)
    try:
        activation = ReluTopK(k=config.get("k"))
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error
    found, _ = read_safetensors(folder / TENSORS)
    expect_names(folder / TENSORS, found, {"encoder.weight", "encoder.bias", "W_dec", "b_dec"})
    tensors = {"W_enc": transposed(found["encoder.weight"]), "b_enc": found["encoder.bias"], "W_dec": found["W_dec"],
               "b_dec": found["b_dec"]}
    return SavedSAE(assemble(folder / TENSORS, tensors, activation, subtracts=True))


def save_sparsify(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE, its activation one of `LATENTS_KEPT`, to an existing folder so that sparsify's
    `SparseCoder.load_from_disk` reads it."""
    sae = saved.sae.copy_to(torch.float32)
    write_json(folder / CONFIG, {
        "activation": "topk", "expansion_factor": max(1, sae.d_sae // sae.d_in), "normalize_decoder": False,
        "num_latents": sae.d_sae, "k": LATENTS_KEPT[type(sae.activation)](sae), "multi_topk": False,
        "skip_connection": False, "transcode": False, "d_in": sae.d_in})
    write_safetensors(folder / TENSORS, {
        "encoder.weight": sae.W_enc.T, "encoder.bias": bias_with_subtraction(sae.b_enc, sae.b_dec, sae.W_enc),
        "W_dec": sae.W_dec, "b_dec": sae.b_dec})
