"""SAELens' loaders of Gemma Scope 2, Llama Scope and Qwen-Scope, for the format tests: run by the Python of an
environment that has sae-lens.

    python saelens_scopes.py FOLDER NAME=PATH ...

PATH, in FOLDER, is a folder or a file laid out as on the hub, NAME the release up to a `-`; codes and reconstructions
of FOLDER/rows.npy go to FOLDER/NAME.npz.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens import SAE
from sae_lens.loading import pretrained_sae_loaders as loaders
from safetensors.torch import load_file

CONVERTERS = {"gemma": loaders.gemma_3_sae_huggingface_loader, "transcoder": loaders.gemma_3_sae_huggingface_loader,
              "llama": loaders.llama_scope_sae_huggingface_loader, "qwen": loaders.qwen_scope_sae_huggingface_loader}
MODEL = {"gemma": "google", "transcoder": "google", "llama": "fnlp", "qwen": "Qwen"}


@torch.no_grad()
def record(folder: Path, name: str, repo: Path, place: Path, rows: torch.Tensor) -> None:
    """Keeps codes and reconstructions of the rows."""
    kind = name.partition("-")[0]
    loaders.hf_hub_download = lambda repo_id, filename, subfolder="", force_download=False: str(
        repo / subfolder / filename)
    loaders.get_safetensors_tensor_shapes = lambda repo_id, filename: {
        key: list(one.shape) for key, one in load_file(repo / filename).items()}

    def load(cfg_overrides: dict[str, Any], **further: Any) -> tuple:
        widths = {"d_in": rows.shape[1], "d_sae": 20} if kind == "qwen" else {}  # else of Qwen's own models
        return CONVERTERS[kind](cfg_overrides=cfg_overrides | widths | {"dtype": "float32"}, **further)

    sae = SAE.from_pretrained(f"{MODEL[kind]}/{repo.name}", place.as_posix(), converter=load, dtype="float32")
    if kind == "llama":  # which SAELens does for the releases that it knows by name
        config = json.loads((repo / place / "hyperparams.json").read_text())
        sae.fold_activation_norm_scaling_factor(
            config["d_model"] ** 0.5 / config["dataset_average_activation_norm"]["in"])
    np.savez(folder / f"{name}.npz", codes=sae.encode(rows).numpy(), x_hat=sae(rows).numpy())


def main() -> None:
    """Reads them all."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    for word in sys.argv[2:]:
        name, path = word.split("=")
        repo, *inside = Path(path).parts
        record(folder, name, folder / repo, Path(*inside), rows)


main()
