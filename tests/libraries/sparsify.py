"""sparsify's side of the format tests: run by the Python of an environment that has eai-sparsify.

    python sparsify.py FOLDER

Reads FOLDER/ours/CASE, makes FOLDER/theirs/CASE, and writes what each gives for FOLDER/rows.npy to CASE.npz.
"""

import sys
from pathlib import Path

sys.path.pop(0)  # this file's folder, where the library's name would be this file

import numpy as np
import torch
from sparsify import SparseCoder, SparseCoderConfig

D, F, K = 24, 60, 6


def record(sae: SparseCoder, rows: torch.Tensor, path: Path) -> None:
    """Keeps codes, reconstructions and the library's measure; a transcoder's targets are the rows reversed."""
    values, indices, pre = sae.encode(rows)
    codes = torch.zeros_like(pre).scatter(1, indices, values)
    output = sae(rows, rows.flip(1) if sae.cfg.transcode else rows)
    np.savez(path, codes=codes.numpy(), x_hat=output.sae_out.numpy(), fvu=output.fvu.numpy())


@torch.no_grad()
def main() -> None:
    """Reads ours, makes theirs."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    for path in sorted((folder / "ours").iterdir()):
        record(SparseCoder.load_from_disk(path), rows, path.with_suffix(".npz"))
    torch.manual_seed(0)
    for case, config in {
        "fresh": SparseCoderConfig(num_latents=F, k=K),
        "drifted": SparseCoderConfig(num_latents=F, k=K, normalize_decoder=False),
        "transcoder": SparseCoderConfig(num_latents=F, k=K, transcode=True),
        "skip": SparseCoderConfig(num_latents=F, k=K, transcode=True, skip_connection=True),
    }.items():
        sae = SparseCoder(D, config)
        for parameter in [sae.encoder.bias, sae.b_dec] if case == "fresh" else sae.parameters():
            parameter.normal_()
        sae.save_to_disk(folder / "theirs" / case)
        record(sae, rows, folder / "theirs" / f"{case}.npz")


main()
