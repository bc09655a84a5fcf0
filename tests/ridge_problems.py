"""Problems for the tests of the decoder step, and oracles that know nothing of sums."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from saecli.sae.codes import where
from saecli.train.ridge import (
    Factorisation,
    HeldRows,
    SkipSums,
    StreamedCodes,
    Sums,
    System,
    Terms,
    optimal_decoder,
)
from saecli.train.ridge.decoder import press_of

NOTHING = (0.0, 0.0, 0.0, 0.0)
WEIGHTS = {"all": (0.7, 2.0, 0.3, 5.0), "ridge only": (0.7, 0.0, 0.0, 0.0)}  # alpha, beta, mu, nu


def problem(rows: int, d_sae: int, d_in: int, seed: int = 0, spread: float = 0.0) -> tuple:
    """Codes, targets, a direction and a previous decoder; `spread` makes row norms differ, in powers of ten."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    z = draw(rows, d_sae).relu()
    y = z @ draw(d_sae, d_in) * 0.5 + draw(rows, d_in) + 3
    size = 10 ** (spread * draw(rows, 1))
    return z * size, y * size, draw(d_sae, d_in), draw(d_sae, d_in), draw(d_in)


def terms_of(
    weights: tuple,
    direction: torch.Tensor | None,
    W_t: torch.Tensor,
    b_t: torch.Tensor,
    decayed: bool = False,
) -> Terms:
    decay = torch.linspace(0, 3, len(W_t), dtype=torch.float64) if decayed else None
    given = dict(zip(("alpha", "beta", "mu", "nu"), weights, strict=True))
    return Terms(W_t=W_t, b_t=b_t, direction=direction, decay=decay, **given)


def with_skip(terms: Terms, x: torch.Tensor, y: torch.Tensor) -> Terms:
    """The terms with an affine skip from x, (N, D), to y."""
    skip = SkipSums(x.shape[1], y.shape[1], x.device)
    for rows, targets in zip(x.split(11), y.split(11), strict=True):
        skip.add(rows, targets)
    return replace(terms, skip=skip, b_t=torch.cat([terms.b_t, terms.b_t.new_zeros(x.shape[1])]))


def system_of(
    kind: str,
    z: torch.Tensor,
    y: torch.Tensor,
    prefixes: Sequence[int] = (),
    block: int = 7,
    budget: float = np.inf,
    start: torch.Tensor | None = None,
) -> System:
    """Normal equations of rows that come in blocks."""
    if kind == "held rows":
        return HeldRows(z, y)
    codes = [where(part, part != 0) for part in z.split(block)]  # sparse where few are non-zero
    if kind == "sums":
        system: Sums | StreamedCodes = Sums(z.shape[1], y.shape[1], prefixes=tuple(prefixes))
    else:
        start = torch.zeros(z.shape[1], y.shape[1], dtype=z.dtype) if start is None else start
        system = StreamedCodes(start, lambda: iter(codes), budget, tuple(prefixes))
    for part, targets in zip(codes, y.split(block), strict=True):
        system.add(part, targets)
    return system


def solved(
    system: System, terms: Terms, factorisation: Factorisation | None = None
) -> SimpleNamespace:
    """The state that `optimal_decoder` returns, with W for its method."""
    state = optimal_decoder(system, terms, factorisation)
    return SimpleNamespace(**vars(state), W=state.W(terms.direction))


def press(
    system: System, terms: Terms, z: torch.Tensor, y: torch.Tensor, alpha: float | None = None
) -> float:
    """The mean leave-one-out error over all rows, or some, as the choice of alpha has it."""
    terms = terms if alpha is None else replace(terms, alpha=alpha)
    return press_of(system, terms, z, y, len(z))(system.factorise(terms)) / len(z)


def copies(z: torch.Tensor, prefixes: Sequence[int] = ()) -> np.ndarray:
    """The codes that each prefix has of each row, (n, L, F)."""
    ends = np.array(prefixes or (z.shape[1],))
    return z.numpy()[:, None] * (np.arange(z.shape[1]) < ends[:, None])


def least_squares(
    z: torch.Tensor,
    y: torch.Tensor,
    terms: Terms,
    prefixes: Sequence[int] = (),
    x: torch.Tensor | None = None,
    c: float | None = None,
) -> SimpleNamespace:
    """W, S, b and c by one least squares over all entries, its terms stacked, or with c given."""
    F, E, D, count = z.shape[1], y.shape[1], 0 if x is None else x.shape[1], max(1, len(prefixes))
    beside = np.hstack([np.zeros((len(z), 0)) if x is None else x.numpy(), np.ones((len(z), 1))])
    left = np.hstack([copies(z, prefixes).reshape(-1, F), np.repeat(beside, count, 0)])
    width = F + D + 1
    decay = torch.zeros(F) if terms.decay is None else terms.decay
    on_W, on_b = np.eye(F, width), np.eye(1, width, width - 1)
    # Unknowns column by column of the targets; if it is one, last c, in which alpha's rows alone are linear.
    c_is_unknown = terms.direction is not None and c is None
    direction = np.zeros((F, E))
    if terms.direction is not None:
        direction = np.sqrt(terms.alpha) * terms.direction.numpy()
    blocks = [
        (left / np.sqrt(count), np.repeat(y.numpy(), count, 0) / np.sqrt(count)),
        (np.sqrt(terms.beta) * on_b, np.zeros((1, E))),
        (np.sqrt(terms.nu) * on_b, np.sqrt(terms.nu) * terms.b_t.numpy()[None, :E]),
        (np.sqrt(terms.mu) * on_W, np.sqrt(terms.mu) * terms.W_t.numpy()),
        (decay.sqrt().numpy()[:, None] * on_W, np.zeros((F, E))),
        (np.sqrt(terms.alpha) * on_W, (c or 0.0) * direction),
    ]
    rows = np.vstack([np.kron(np.eye(E), part) for part, _ in blocks])
    if c_is_unknown:
        rows = np.hstack([rows, np.zeros((len(rows), 1))])
        rows[-F * E :, -1] = -direction.T.ravel()
    targets = np.concatenate([part.T.ravel() for _, part in blocks])
    solution = np.linalg.lstsq(rows, targets, rcond=None)[0]
    both = solution[: E * width].reshape(E, width).T
    c = solution[-1] if c_is_unknown else c or 0.0
    objective = np.square(rows @ solution - targets).sum()
    return SimpleNamespace(W=both[:F], skip=both[F:-1], b=both[-1], c=c, objective=objective)
