"""Qwen-Scope: `layerL.sae.pt` for each layer of a Qwen model, a state_dict of a TopK SAE of its residual stream.

Its model card takes the k largest pre-activations with their signs: `topk` here. k and the model are in the
repository's name, such as `Qwen/SAE-Res-Qwen3-8B-Base-W64K-L0_50`, or in a `config.json` next to the file. Checked
against what SAELens 6.54 reads, whose TopK clips at zero.
"""

import re
from pathlib import Path
from typing import Any

from ...base.errors import FormatError
from ..activations import TopK
from .common import SavedSAE, assemble, configured, origin_from, ours, read_config, read_torch

CONFIG, TENSORS = "config.json", "layer*.sae.pt"
NAMES = {"W_enc": "W_enc.T", "b_enc": "b_enc", "W_dec": "W_dec.T", "b_dec": "b_dec"}

_LAYER = re.compile(r"layer(\d{1,9})\.sae\.pt")
_K = re.compile(r"(?:.*[-_.])?(?:L0_|[kK]_?)(\d{1,9})")
_MODEL = re.compile(r"(?:.*--)?SAE-Res-(.+)-W\d+K-L0_\d+")


def load_qwen_scope(file: Path) -> SavedSAE:
    """Read one layer's SAE; k may be in the name of any folder above, as in the hub client's cache."""
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
    activation = configured(path if "k" in config else file, TopK, k=config.get("k", next(iter(found), None)))
    tensors = ours(file, read_torch(file), NAMES)
    models = [f"Qwen/{match[1]}" for name in names if (match := _MODEL.fullmatch(name))]
    return SavedSAE.of(assemble(file, tensors, activation), origin_from({
        "model": config.get("base_model", next(iter(models), None)),
        "layer": int(layer[1]), "site": "resid_post"}))
