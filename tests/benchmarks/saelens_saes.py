"""SAEs that SAELens trains on a store's training rows, in an environment of its own, and this tool reads."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import saecli
from saecli import SAE, ActivationStore
from saecli.sae.metrics import reconstruction
from saecli.train.rows import fit_normalisation, on_raw_rows

SCRIPT = Path(__file__).with_name("saelens_training.py")
AGREEMENT = 1e-3  # relative, between SAELens' own measures of an SAE and ours


def trained_by_saelens(python: Path, store: ActivationStore, folder: Path, case: str, d_sae: int, steps: int,
                       rates: Sequence[str], batch: int = 256, **options: float) -> list[tuple[SAE, dict[str, Any]]]:
    """SAELens' SAEs, one a learning rate, and what it says of each.

    Args:
        python: of an environment that has sae-lens.
        store: its training rows are trained on, normalised as `sae train` does, which saves centring to SAELens.
        folder: an existing one, for its files.
        case, d_sae, steps, rates, batch, options: as of `saelens_training.py`.

    Returns:
        The SAEs, which act on raw rows, each with the JSON that the script prints of it.

    Raises:
        RuntimeError: on the test rows, L0 or FVU of an SAE is not what its own encoding and decoding comes to.
    """
    train = store.split("train")
    normalisation = fit_normalisation("scale", train.spread(), torch.float32)
    for name, rows in (("train", train), ("test", store.split("test"))):
        every = torch.cat([torch.from_numpy(batch.copy()) for batch in rows.sequential(2048)])
        np.save(folder / f"{name}.npy", normalisation(every).numpy())
    words = [folder, case, d_sae, steps, batch, *rates, *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run([python, SCRIPT, *map(str, words)], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    saes = [on_raw_rows(saecli.load_sae(folder / one["rate"]), normalisation) for one in found]
    for sae, one in zip(saes, found, strict=True):
        ours = reconstruction(sae, map(torch.from_numpy, store.split("test").sequential(2048)))
        for name in ("fvu", "l0"):
            if abs(ours[name] - one[name]) > AGREEMENT * one[name]:
                raise RuntimeError(f"{name} of SAELens' SAE: expected {one[name]}, as it measures itself, "
                                   f"got {ours[name]}")
    return list(zip(saes, found, strict=True))
