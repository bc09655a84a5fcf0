"""What each process of `test_ridge_shared_gram.py` does: sums a Gram matrix, factorises it and solves, and writes what
it has of everything to a file of its own. Started by torchrun with the file of the problem and a folder."""

import sys
from pathlib import Path

import numpy as np
import torch

from saecli import distributed
from saecli.errors import TrainingError
from saecli.ridge import cholesky
from saecli.ridge.shared_gram import SharedGram


def main(problem: str, folder: str) -> None:
    cholesky.PANEL = 16
    distributed.join()
    distributed.share_latents(distributed.processes())
    given = {name: torch.from_numpy(array) for name, array in np.load(problem).items()}
    axis = distributed.latents_axis()

    def own(name: str) -> torch.Tensor:
        return given[name].chunk(axis.size, -1)[axis.place].contiguous()

    matrix = SharedGram(own("z").shape[1])
    for block in own("z").split(40):
        matrix.add(block, None)
    matrix.fade(0.5)
    matrix.add_outer(own("u"), own("v"))
    matrix.add_outer(own("v"), own("u"))
    updates = [(0.3, own("u"))]
    ridge, raised = matrix.factorise(given["ridge"].item(), own("diagonal"), updates)
    again = matrix.factorise(given["ridge"].item(), own("diagonal"), updates)  # the matrix is as it was
    right = own("right").T.contiguous()
    found = {"ridge": ridge, "raised": raised, "same": again == (ridge, raised), "own_diagonal": matrix.diagonal(),
             "solution": matrix.solve(right), "norms": matrix.squared_norms(right), "condition": matrix.condition()}
    matrix.add(torch.full_like(own("z")[:1], torch.nan if axis.place == 0 else 1.0), None)
    try:
        matrix.factorise(1.0, own("diagonal"))
    except TrainingError as error:
        found["refused"] = str(error)
    np.savez(Path(folder) / f"{axis.place}.npz", **{name: np.asarray(value) for name, value in found.items()})
    distributed.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
