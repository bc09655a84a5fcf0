"""sparsify by EleutherAI (checked against 1.3): `cfg.json` and `sae.safetensors`.

Its encoder subtracts `b_dec`, clips at zero, and keeps the `k` largest: `relu-topk` here. `relu` is written with `k`
equal to the number of latents, which drops nothing. A transcoder's (`transcode`) does not subtract, and its targets are
as wide as its rows; its skip (`skip_connection`) is stored as (E, D). No file says where rows or targets came from.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...base.errors import ConfigError, FormatError
from ...base.files import write_json
from ..activations import Activation, Relu, ReluTopK
from ..dictionary import SAE
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
    """Read an SAE or a transcoder that sparsify saved; FormatError if the files are damaged, or hold another activation
    than TopK, or an SAE with a skip."""
    path = folder / CONFIG
    config = read_config(path, dict[str, Any])
    refuse_unless(path, config, "activation", "topk")
    refuse_unless(path, config, "signed", False)
    refuse_unless(path, config, "transcode", False, True)
    transcodes = config.get("transcode", False)
    refuse_unless(path, config, "skip_connection", *((False, True) if transcodes else (False,)))
    skips = config.get("skip_connection", False)
    try:
        activation = ReluTopK(k=config.get("k"))
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error
    found, _ = read_safetensors(folder / TENSORS)
    expect_names(folder / TENSORS, found, {"encoder.weight", "encoder.bias", "W_dec", "b_dec",
                                           *(["W_skip"] if skips else [])})
    tensors = {"W_enc": transposed(found["encoder.weight"]), "b_enc": found["encoder.bias"], "W_dec": found["W_dec"],
               "b_dec": found["b_dec"]} | ({"W_skip": transposed(found["W_skip"])} if skips else {})
    sae = assemble(folder / TENSORS, tensors, activation, subtracts=not transcodes, transcodes=transcodes)
    return SavedSAE(sae, transcodes=transcodes)


def save_sparsify(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE, or a transcoder of one width, its activation one of `LATENTS_KEPT`, to an existing folder so that
    sparsify's `SparseCoder.load_from_disk` reads it."""
    sae, skips = saved.sae.copy_to(torch.float32), saved.sae.W_skip is not None
    write_json(folder / CONFIG, {
        "activation": "topk", "expansion_factor": max(1, sae.d_sae // sae.d_in), "normalize_decoder": False,
        "num_latents": sae.d_sae, "k": LATENTS_KEPT[type(sae.activation)](sae), "multi_topk": False,
        "skip_connection": skips, "transcode": saved.is_transcoder, "d_in": sae.d_in})
    b_enc = sae.b_enc if saved.is_transcoder else bias_with_subtraction(sae.b_enc, sae.b_dec, sae.W_enc)
    write_safetensors(folder / TENSORS, {"encoder.weight": sae.W_enc.T, "encoder.bias": b_enc, "W_dec": sae.W_dec,
                                         "b_dec": sae.b_dec} | ({"W_skip": sae.W_skip.T} if skips else {}))
