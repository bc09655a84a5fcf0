"""dictionary_learning's side of the format tests: run by the Python of an environment that has it.

    python dictionary_learning.py FOLDER

Reads FOLDER/ours/CASE, makes FOLDER/theirs/CASE, and writes what each gives for FOLDER/rows.npy to CASE.npz.
"""

import json
import sys
from pathlib import Path

sys.path.pop(0)  # this file's folder, where the library's name would be this file

import numpy as np
import torch
from dictionary_learning.dictionary import (
    AutoEncoder,
    AutoEncoderNew,
    Dictionary,
    GatedAutoEncoder,
    JumpReluAutoEncoder,
)
from dictionary_learning.evaluation import evaluate
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
from dictionary_learning.trainers.top_k import AutoEncoderTopK
from dictionary_learning.utils import load_dictionary

D, F, K = 24, 60, 6


def record(sae: Dictionary, rows: torch.Tensor, path: Path) -> None:
    """Keeps codes and reconstructions of the rows, and the library's own measure of them."""
    codes = sae.encode(rows)
    explained = evaluate(sae, iter([rows]))["frac_variance_explained"]
    x_hat = sae.decode(codes).numpy()
    np.savez(path, codes=codes.numpy(), x_hat=x_hat, frac_variance_explained=explained)


@torch.no_grad()
def main() -> None:
    """Reads ours, makes theirs."""
    folder = Path(sys.argv[1])
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    for path in sorted((folder / "ours").iterdir()):
        record(load_dictionary(str(path), "cpu")[0], rows, path.with_suffix(".npz"))
    torch.manual_seed(0)
    for kind, further in (
        (AutoEncoder, ()),
        (AutoEncoderNew, ()),
        (AutoEncoderTopK, (K,)),
        (BatchTopKSAE, (K,)),
        (MatryoshkaBatchTopKSAE, (K, [20, F - 20])),
        (JumpReluAutoEncoder, ()),
        (GatedAutoEncoder, ()),
    ):
        sae = kind(D, F, *further)
        for name, parameter in sae.named_parameters():
            parameter.normal_()
            if name == "threshold":
                parameter.abs_()
        if kind in (BatchTopKSAE, MatryoshkaBatchTopKSAE):
            sae.threshold.fill_(2.5)
        path = folder / "theirs" / kind.__name__
        path.mkdir()
        torch.save(sae.state_dict(), path / "ae.pt")
        trainer = {"dict_class": kind.__name__, "k": K}
        (path / "config.json").write_text(json.dumps({"trainer": trainer}))
        record(sae, rows, path.with_suffix(".npz"))


main()
