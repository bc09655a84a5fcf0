"""SAELens' SAEs on the rows of a store: trained by the Python of an environment that has sae-lens, measured by ours."""

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import saecli
from saecli import SAE, ActivationStore
from saecli.sae.metrics import reconstruction
from saecli.store.reader import Rows
from saecli.train.rows import fit_normalisation, on_raw_rows

SCRIPT = Path(__file__).with_name("saelens_training.py")
BATCH = 256  # that of `sae train`
DECAY = 1 / 3  # last fraction of its steps, over which its learning rate falls to zero
AGREEMENT = 1e-3  # relative, between SAELens' own measures of an SAE and ours


def trained(
    python: Path,
    store: ActivationStore,
    case: str,
    d_sae: int,
    steps: int,
    rate: str,
    seed: int = 0,
    threads: int = 1,
) -> tuple[SAE, dict[str, float]]:
    """A case of `saelens_training.py` as an SAE on raw rows, with its seconds of processor time and the fraction of its
    latents that it counts as dead. Rows are normalised by one scale, which saves centring to SAELens.

    Raises:
        RuntimeError: on the test rows, L0 or FVU of the SAE is not what SAELens' own encoding and decoding comes to.
    """
    train, test = store.split("train"), store.split("test")
    normalisation = fit_normalisation("scale", train.spread(), torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("train", train), ("test", test)):
            np.save(Path(folder) / f"{name}.npy", normalisation(every_row(rows)).numpy())
        options = [f"--seed={seed}", f"--decay={DECAY}", f"--threads={threads}"]
        command = [python, SCRIPT, folder, case, d_sae, steps, BATCH, rate, *options]
        done = subprocess.run(
            list(map(str, command)),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        sae = on_raw_rows(saecli.load_sae(Path(folder) / rate), normalisation)
    ours = reconstruction(sae, map(torch.from_numpy, test.sequential(2048)))
    for name in ("fvu", "l0"):
        if abs(ours[name] - found[name]) > AGREEMENT * found[name]:
            raise RuntimeError(
                f"{name} of SAELens' SAE: expected {found[name]}, as it measures itself, got {ours[name]}"
            )
    return sae, {"seconds": found["processor"], "dead": found["dead"]}


def every_row(rows: Rows) -> Tensor:
    return torch.cat([torch.from_numpy(batch.copy()) for batch in rows.sequential(2048)])
