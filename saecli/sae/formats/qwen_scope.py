"""Qwen-Scope: `layerL.sae.pt` for each layer of a Qwen model, a state_dict of a TopK SAE of its residual stream.

Tensors are W_enc (F, D), W_dec (D, F), b_enc and b_dec. Its model card takes the k largest pre-activations with their
signs: `topk` here. The file says neither k nor the model: both are in the repository's name, such as
`Qwen/SAE-Res-Qwen3-8B-Base-W64K-L0_50`, and in a `config.json` that may lie beside it. Checked against what SAELens
6.54 reads, whose TopK clips at zero.
"""

import re
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError, FormatError
from ..activations import TopK
from .common import WEIGHTS, SavedSAE, assemble, expect_names, origin_from, read_config, read_torch, transposed

CONFIG, TENSORS = "config.json", "layer*.sae.pt"

_LAYER = re.compile(r"layer(\d{1,9})\.sae\.pt")
_K = re.compile(r"(?:.*[-_.])?(?:L0_|[kK]_?)(\d{1,9})")
_MODEL = re.compile(r"(?:.*--)?SAE-Res-(.+)-W\d+K-L0_\d+")


def load_qwen_scope(file: Path) -> SavedSAE:
    """Read the SAE of one layer from its file; FormatError if it is damaged, or nothing says k: neither config.json
    beside it, nor the name of its folder or of one above, as in the hub client's cache."""
    layer = _LAYER.fullmatch(file.name)
    if layer is None:
        raise FormatError(f"{file}: expected layerL.sae.pt, L the number of its layer")
    path = file.parent / CONFIG
    config = read_config(path, dict[str, Any]) if path.is_file() else {}
    names = [folder.name for folder in file.absolute().parents]
    found = [int(match[1]) for name in names if (match := _K.fullmatch(name))]
    if "k" not in config and not found:
        raise FormatError(f"{file} does not say k, the number of latents that fire: expected a folder whose name ends "
                          f"with it, such as L0_50 or k50, got {names[0]!r}; rename the folder")
    try:
        activation = TopK(k=config.get("k", next(iter(found), None)))
    except ConfigError as error:
        raise FormatError(f"{path if 'k' in config else file}: {error}") from error
    tensors = read_torch(file)
    expect_names(file, tensors, set(WEIGHTS))
    models = [f"Qwen/{match[1]}" for name in names if (match := _MODEL.fullmatch(name))]
    sae = assemble(file, {name: transposed(tensor) for name, tensor in tensors.items()}, activation)
    return SavedSAE.of(sae, origin_from({"model": config.get("base_model", next(iter(models), None)),
                                         "layer": int(layer[1]), "site": "resid_post"}))
