"""Small trainings that take every way through solvers and activations, for tests of devices."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from saecli.sae.dictionary import SAE
from saecli.train.fit import planned
from saecli.train.loop import Loop, Record, start_training

random = np.random.default_rng(0)
ROWS = (random.standard_normal((300, 12)) @ random.standard_normal((12, 20)) + 1).astype(np.float32)
ACTS = [("relu", {}), ("relu", {"sparsity": "kl"}), ("jumprelu", {}), ("topk", {"k": 3}), ("abs-topk", {"k": 3}),
        ("batchtopk", {"k": 3}), ("swish", {}), ("soft-topk", {"k": 3, "d_sae": 16})]
SOLVERS = [("sgd", {}), ("sgd", {"tied": True, "clip_norm": 1.0}), ("pam-sgd", {}), ("pam-sgd", {"decoder": "free"}),
           ("pam-sgd", {"solve": "iterative"}), ("pam-sgd", {"decoder_every": 1, "inner_steps": 1, "d_sae": 24}),
           ("pam-sgd", {"d_sae": 400}), ("pam-sgd", {"alpha": 1.0, "bias": "after", "mu_enc": 0.1, "mu_dec": 0.1})]
# The last but one solves in the dimension of the rows, of which there are fewer than latents; the one before solves
# after every batch.


class Kept(Record):
    """Keeps the first epoch's state as a file would, on the CPU, and begins with what it is given."""

    def __init__(self, start: Any = None) -> None:
        self.start, self.kept = start, None

    def checkpoint(self) -> Any:
        return self.start

    def epoch(self, sae: SAE, state: dict[str, Tensor], progress: Any, test: Any) -> None:
        self.kept = self.kept or ({name: t.cpu().clone() for name, t in state.items()}, replace(progress))


def trained(device: str, solver: str, act: str, options: dict[str, Any], start: Any = None,
            rows: np.ndarray = ROWS) -> tuple[SAE, Any]:
    """The SAE, and the state after the first epoch."""
    record = Kept(start)
    given = {"d_sae": 32, "epochs": 2, "batch_size": 100, "device": device} | options
    (sae,) = Loop([start_training(planned(rows, solver, act, given), record)]).train()
    return sae, record.kept
