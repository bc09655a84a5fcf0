"""Problems for the tests of the decoder step, and oracles that know nothing of sums."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from saecli.sae.activations.selection import where
from saecli.sae.codes import Codes
from saecli.train.ridge import Factorisation, HeldRows, Sums, System, Terms, solve
from saecli.train.ridge.choice import Press


def problem(rows: int, d_sae: int, d_in: int, seed: int = 0, spread: float = 0.0) -> tuple:
    """Codes, inputs, a direction and a previous decoder; `spread` makes row norms differ, in powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    z = draw(rows, d_sae).relu()
    x = z @ draw(d_sae, d_in) * 0.5 + draw(rows, d_in) + 3
    size = 10 ** (spread * draw(rows, 1))
    return z * size, x * size, draw(d_sae, d_in), draw(d_sae, d_in), draw(d_in)


def terms_of(weights: tuple, direction: torch.Tensor | None, W_t: torch.Tensor, b_t: torch.Tensor,
             decayed: bool = False) -> Terms:
    decay = torch.linspace(0, 3, len(W_t), dtype=torch.float64) * decayed
    return Terms(*weights, direction=direction, W_t=W_t, b_t=b_t, decay=decay)


def codes_of(z: torch.Tensor) -> Codes:
    """The codes, sparse where few are non-zero."""
    return where(z, z != 0)


def sums_of(z: torch.Tensor, x: torch.Tensor, block: int) -> Sums:
    sums = Sums(z.shape[1], x.shape[1])
    for start in range(0, len(z), block):
        sums.add(codes_of(z[start : start + block]), x[start : start + block])
    return sums


def systems_of(z: torch.Tensor, x: torch.Tensor) -> dict:
    return {"sums": sums_of(z, x, 7), "held rows": HeldRows(z, x)}


def solved(system: System, terms: Terms, factorisation: Factorisation | None = None) -> SimpleNamespace:
    """The state that `solve` returns, with W for its method."""
    state = solve(system, terms, factorisation)
    return SimpleNamespace(**vars(state), W=state.W(terms.direction))


def press(system: System, terms: Terms, z: torch.Tensor, x: torch.Tensor, alpha: float | None = None) -> float:
    """The mean leave-one-out error over all rows, or some, as the choice of alpha has it."""
    terms = terms if alpha is None else replace(terms, alpha=alpha)
    index = torch.arange(len(z)) if len(z) == system.rows else None
    evaluated = replace(Press.of(system, terms, z, x), z=z.double(), y=x.double(), index=index,
                        weight=torch.ones(len(z)).double())
    return evaluated.model(system.factorise(terms), 0.0).value / len(z)


def stacked_least_squares(z, x, terms: Terms, target: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(W, b) by the pseudo-inverse of data, ridge and proximal rows stacked, as the paper's theorem has it."""
    d_sae, d_in = target.shape
    eye, ones, zero = np.eye(d_sae), np.ones((len(z), 1)), np.zeros((d_sae, 1))
    bias_row = np.eye(1, d_sae + 1, d_sae)
    left = [np.hstack([z, ones]), np.sqrt(terms.alpha) * np.hstack([eye, zero]), np.sqrt(terms.beta) * bias_row,
            np.sqrt(terms.mu) * np.hstack([eye, zero]), np.sqrt(terms.nu) * bias_row,
            np.hstack([np.diag(terms.decay.sqrt()), zero])]
    right = [x.numpy(), np.sqrt(terms.alpha) * target.numpy(), np.zeros((1, d_in)),
             np.sqrt(terms.mu) * terms.W_t.numpy(), np.sqrt(terms.nu) * terms.b_t.numpy()[None],
             np.zeros((d_sae, d_in))]
    both = np.linalg.pinv(np.vstack(left)) @ np.vstack(right)
    return both[:-1], both[-1]


def objective(z, x, terms: Terms, W, b, c: float) -> float:
    target = c * terms.direction if terms.direction is not None else torch.zeros_like(W)
    parts = [(z @ W + b - x, 1), (W - target, terms.alpha), (b, terms.beta), (W - terms.W_t, terms.mu),
             (b - terms.b_t, terms.nu), (terms.decay.sqrt()[:, None] * W, 1)]
    return sum(weight * part.square().sum().item() for part, weight in parts)
