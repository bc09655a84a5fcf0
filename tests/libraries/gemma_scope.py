"""SAELens' loader of Gemma Scope, for the format tests: run by the Python of an environment that has sae-lens.

    python gemma_scope.py FOLDER

FOLDER/ours/CASE holds SAEs that saecli wrote; each reconstruction of FOLDER/rows.npy goes to FOLDER/ours/CASE.npz.
FOLDER/theirs/CASE receives arrays as Gemma Scope publishes them, with what SAELens makes of them beside them.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens import SAE
from sae_lens.loading import pretrained_sae_loaders as loaders

D, F = 24, 60


def sae_in(folder: Path) -> SAE:
    """The SAE of a folder, as SAELens reads it after its download from google/gemma-scope-2b-pt-res."""
    loaders.hf_hub_download = lambda repo_id, filename, subfolder, force_download: str(folder / filename)

    def load(cfg_overrides: dict[str, Any], **further: Any) -> tuple:
        return loaders.gemma_2_sae_huggingface_loader(cfg_overrides=cfg_overrides | {"d_in": D, "d_sae": F}, **further)

    return SAE.from_pretrained("someone/gemma-scope-2b-pt-res", "layer_12/width_16k/average_l0_82", converter=load)


@torch.no_grad()
def record(folder: Path, rows: torch.Tensor) -> None:
    """Keeps codes and reconstructions of the rows."""
    sae = sae_in(folder)
    codes = sae.encode(rows)
    np.savez(folder.with_suffix(".npz"), codes=codes.numpy(), x_hat=sae.decode(codes).numpy())


def main() -> None:
    """Reads ours, makes theirs."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    generator = np.random.default_rng(0)
    theirs = folder / "theirs" / "published"
    theirs.mkdir()
    shapes = {"W_dec": (F, D), "W_enc": (D, F), "b_dec": (D,), "b_enc": (F,), "threshold": (F,)}
    arrays = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    np.savez(theirs / "params.npz", **arrays | {"threshold": np.abs(arrays["threshold"])})
    for path in [*sorted((folder / "ours").iterdir()), theirs]:
        record(path, rows)


main()
