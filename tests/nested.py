"""Nested (Matryoshka) SAEs and rows for them."""

import numpy as np
import torch

from saecli.sae.activations import ACTIVATIONS
from saecli.sae.dictionary import SAE

D, F, PREFIXES = 8, 20, (3, 8, 20)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nested_rows(rows: int, seed: int = 0) -> np.ndarray:
    """Rows of a few directions at a time, far from zero, the first directions the largest."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(9).normal(size=(20, D)) * np.linspace(2, 0.5, 20)[:, None]
    codes = rng.exponential(size=(rows, 20)) * (rng.random((rows, 20)) < 0.15)
    return (codes @ directions + 3).astype(np.float32)


def nested_sae(act: str) -> SAE:
    kind = ACTIVATIONS[act]
    activation = kind(k=4) if "k" in kind.__dataclass_fields__ else kind()
    parameters = {name: torch.full_like(start.double(), 0.3) for name, start in activation.parameters(F).items()}
    shapes = ((D, F), (F,), (F, D), (D,))
    return SAE(*(normal(*shape, seed=seed) for seed, shape in enumerate(shapes)), activation, parameters, PREFIXES)
