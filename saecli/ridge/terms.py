"""The quadratic terms that the decoder's objective holds beside its sum of squared errors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Weights of the quadratic terms, each competing with a sum over all rows, and what the terms pull towards.

    Args:
        alpha: weight of `||W - T||_F^2`, at least 0.
        beta: weight of `||b||^2`, at least 0.
        mu: weight of `||W - W_t||_F^2`, at least 0.
        nu: weight of `||b - b_t||^2`, at least 0.
        direction: T0, (F, E), whose best multiple is T = c T0; None for T = 0.
        W_t: the decoder before this step, (F, E).
        b_t: its bias, (E,).
        decay: weights of each latent's own `||W_i||^2`, (F,), at least 0.
        joint: whether b is optimal jointly with W; if not, W is solved as if b were 0, and b is then the best for
            that W.
    """

    alpha: float
    beta: float
    mu: float
    nu: float
    direction: Tensor | None
    W_t: Tensor
    b_t: Tensor
    decay: Tensor
    joint: bool = True

    def rows_fraction(self, rows: float) -> float:
        """`N / (N + beta + nu)`, the part of the bias that N rows decide."""
        return rows / (rows + self.beta + self.nu)

    def shrink(self, rows: float) -> float:
        """s, with which W is solved: 0 without a joint bias, as with an infinite beta."""
        return self.rows_fraction(rows) if self.joint else 0.0

    def bare_bias(self, rows: float, y_bar: Tensor) -> Tensor:
        """`s y_bar + t b_t`, (E,), the bias for codes that predict nothing."""
        return self.rows_fraction(rows) * y_bar + self.nu / (rows + self.beta + self.nu) * self.b_t.double()

    def centre(self, rows: float, y_bar: Tensor) -> Tensor:
        """What is subtracted from targets before W is solved, (E,): that bias, or 0 without a joint one."""
        return self.bare_bias(rows, y_bar) if self.joint else torch.zeros_like(y_bar)
