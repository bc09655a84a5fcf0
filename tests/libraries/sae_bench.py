"""SAEBench's side of the test of `examples/saebench.py`: run by the Python of an environment that has SAEBench.

    python sae_bench.py FOLDER

Codes, reconstruction of FOLDER/rows.npy and hook point of each SAE of FOLDER/runs go to FOLDER/NAME.npz.
"""

import sys
from pathlib import Path

sys.path.pop(0)  # this file's folder, where the library's name would be another file's
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import numpy as np
import torch
from sae_bench.custom_saes.base_sae import BaseSAE
from saebench import Benched

import saecli

folder = Path(sys.argv[1])
rows = torch.from_numpy(np.load(folder / "rows.npy"))
for path in (folder / "runs").iterdir():
    sae = Benched(saecli.load_sae(path), "gpt2", "cpu", torch.float32)
    assert isinstance(sae, BaseSAE) and sae.check_decoder_norms()
    with torch.no_grad():
        codes = sae.encode(rows)
        found = {"codes": codes, "x_hat": sae(rows), "decoded": sae.decode(codes)}
    np.savez(
        folder / f"{path.name}.npz",
        **{name: tensor.numpy() for name, tensor in found.items()},
        hook=sae.cfg.hook_name,
    )
