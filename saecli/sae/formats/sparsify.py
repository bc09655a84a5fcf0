"""sparsify by EleutherAI (checked against 1.3): `cfg.json` and `sae.safetensors`.

Its encoder subtracts `b_dec`, clips at zero, and keeps the `k` largest: `relu-topk` here; `relu` is written with `k`
equal to the number of latents. A transcoder (`transcode`) does not subtract, and its targets are as wide as its rows.
No file says where rows or targets came from.
"""

from pathlib import Path
from typing import Any

from ...base.files import write_json
from ..activations import Activation, Relu, ReluTopK
from .common import (
    SavedSAE,
    assemble,
    bias_with_subtraction,
    configured,
    ours,
    read_config,
    read_safetensors,
    refuse_unless,
    theirs,
    write_safetensors,
)

CONFIG, TENSORS = "cfg.json", "sae.safetensors"
NAMES = {"encoder.weight": "W_enc.T", "encoder.bias": "b_enc", "W_dec": "W_dec", "b_dec": "b_dec"}
SKIP = {"W_skip": "W_skip.T"}
WRITTEN: tuple[type[Activation], ...] = (ReluTopK, Relu)


def load_sparsify(folder: Path) -> SavedSAE:
    """Read an SAE or a transcoder."""
    path = folder / CONFIG
    config = read_config(path, dict[str, Any])
    refuse_unless(path, config, "activation", "topk")
    refuse_unless(path, config, "signed", False)
    refuse_unless(path, config, "transcode", False, True)
    transcodes = config.get("transcode", False)
    refuse_unless(path, config, "skip_connection", *((False, True) if transcodes else (False,)))
    activation = configured(path, ReluTopK, k=config.get("k"))
    tensors = ours(folder / TENSORS, read_safetensors(folder / TENSORS)[0],
                   NAMES | (SKIP if config.get("skip_connection", False) else {}))
    sae = assemble(folder / TENSORS, tensors, activation, subtracts=not transcodes, transcodes=transcodes)
    return SavedSAE(sae, transcodes=transcodes)


def save_sparsify(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE, or a transcoder of one width, so that sparsify's `SparseCoder.load_from_disk` reads it."""
    sae = saved.sae
    write_json(folder / CONFIG, {
        "activation": "topk", "expansion_factor": max(1, sae.d_sae // sae.d_in), "normalize_decoder": False,
        "num_latents": sae.d_sae, "k": sae.k or sae.d_sae, "multi_topk": False,
        "skip_connection": sae.W_skip is not None, "transcode": saved.is_transcoder, "d_in": sae.d_in})
    tensors = sae.tensors()
    if not saved.is_transcoder:
        tensors["b_enc"] = bias_with_subtraction(sae.b_enc, sae.b_dec, sae.W_enc)
    write_safetensors(folder / TENSORS, theirs(tensors, NAMES | SKIP))
