"""Loads an SAE from the hub at HF_ENDPOINT as a library does: run by the Python of an environment that has it.

python from_hub.py saelens|sparsify|circuit-tracer REPO FOLDER ROWS.npy OUT.npy
"""

import sys
from pathlib import Path

sys.path.pop(0)  # this file's folder, where a library's name would be another file's

import numpy as np
import torch

library, repo, folder, rows_file, out = sys.argv[1:]
rows = torch.from_numpy(np.load(rows_file))
with torch.no_grad():
    if library == "saelens":
        from sae_lens import SAE

        x_hat = SAE.from_pretrained(repo, folder)(rows)
    elif library == "circuit-tracer":
        from circuit_tracer.utils.hf_utils import load_transcoder_from_hub

        transcoders, _ = load_transcoder_from_hub(f"{repo}/{folder}")
        x_hat = transcoders[0](rows)
    else:
        from sparsify import SparseCoder

        x_hat = SparseCoder.load_from_hub(repo, hookpoint=folder)(rows).sae_out
np.save(Path(out), x_hat.numpy())
