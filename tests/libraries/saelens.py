"""SAELens' side of the format tests: run by the Python of an environment that has sae-lens.

    python saelens.py FOLDER

FOLDER/ours/CASE holds SAEs that saecli wrote; each reconstruction of FOLDER/rows.npy goes to FOLDER/ours/CASE.npz.
FOLDER/theirs/CASE receives SAEs that SAELens makes, with their reconstructions beside them.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from sae_lens import SAE
from sae_lens.saes import (
    AbsTopKSAE,
    AbsTopKSAEConfig,
    JumpReLUSAE,
    JumpReLUSAEConfig,
    StandardSAE,
    StandardSAEConfig,
    TopKSAE,
    TopKSAEConfig,
)

D, F, K = 24, 60, 6

MADE = {
    "standard": (StandardSAE, StandardSAEConfig, {}),
    "standard-subtracting": (StandardSAE, StandardSAEConfig, {"apply_b_dec_to_input": True}),
    "jumprelu": (JumpReLUSAE, JumpReLUSAEConfig, {"apply_b_dec_to_input": True}),
    "topk": (TopKSAE, TopKSAEConfig, {"k": K}),
    "topk-rescaled": (TopKSAE, TopKSAEConfig, {
        "k": K, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": True}),
    "abstopk": (AbsTopKSAE, AbsTopKSAEConfig, {"k": K}),
}


def record(sae: SAE, rows: torch.Tensor, path: Path) -> None:
    """Keeps codes and reconstructions of the rows."""
    codes = sae.encode(rows)
    np.savez(path, codes=codes.numpy(), x_hat=sae.decode(codes).numpy())


@torch.no_grad()
def main() -> None:
    """Reads ours, makes theirs."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    for path in sorted((folder / "ours").iterdir()):
        record(SAE.load_from_disk(path), rows, path.with_suffix(".npz"))
    torch.manual_seed(0)
    for case, (kind, config, settings) in MADE.items():
        sae = kind(config(d_in=D, d_sae=F, **({"apply_b_dec_to_input": False} | settings)))
        for name, parameter in sae.named_parameters():
            parameter.data.normal_()
            if name == "threshold":
                parameter.data.abs_()
        sae.save_model(folder / "theirs" / case)
        record(sae, rows, folder / "theirs" / f"{case}.npz")


main()
