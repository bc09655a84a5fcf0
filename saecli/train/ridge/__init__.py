"""The decoder step: the decoder's closed-form optimum for given codes, its ridge chosen by leave-one-out.

Over (W, b), for codes z (F of them) and targets y (E of them; an SAE's inputs) of N rows, minimise

    sum ||z W + b - y||^2 + alpha ||W - T||_F^2 + beta ||b||^2 + mu ||W - W_t||_F^2 + nu ||b - b_t||^2
        + sum_i decay_i ||W_i||^2

(no term has a 1/2). With D = N + beta + nu, s = N/D, t = nu/D, r = alpha + mu and the means z_bar, y_bar,

    A = sum z z' - s N z_bar z_bar'                             C = sum z y' - N z_bar (s y_bar + t b_t)'
    W = (A + diag(decay) + r I)^-1 (C + alpha T + mu W_t)       b = t b_t + s (y_bar - z_bar W)

Source: the paper's theorem on the optimal decoding, for T = 0 and no decay. T may be a multiple of a given direction,
T = c T0, with c optimal jointly with W.

Of a nested dictionary, the squared error is the mean over prefixes, with masks Q_l, of `||z Q_l W + b - y||^2`. With
q_i the fraction of the prefixes that hold latent i, and u = q z_bar, all holds with

    A_ij = min(q_i, q_j) (sum z z')_ij - s N u_i u_j      C_i = q_i (sum z y')_i - N u_i (s y_bar + t b_t)'

and with u in place of z_bar in b. An affine skip adds `x S` to the prediction; see `decoder.py`.

    system = method_for(rows, d_sae, d_out, free_memory).system(W_t, codes_again)
    for codes, y in blocks:  # or of few rows: system = HeldRows(z, y)
        system.add(codes, y)
    factorisation = choose_alpha(system, terms, z, y, last_alpha)       # or None, for the alpha of `terms`
    state = optimal_decoder(system, terms, factorisation)

| system | holds | factorisation |
|---|---|---|
| `Sums` | N, means, sum z z', sum z y' | `Direct`: Cholesky in F dimensions |
| `HeldRows` | the rows, N < F | `Dual`: Cholesky in N dimensions |
| `StreamedCodes` | means, sum z y', sparse codes | `Iterative`: conjugate gradients, no F x F matrix |
"""

from .decoder import DecoderState, choose_alpha, method_for, optimal_decoder
from .iterative import TOLERANCE, StreamedCodes
from .sums import HeldRows, Sums
from .system import Factorisation, SkipSums, System, Terms

__all__ = [
    "TOLERANCE",
    "DecoderState",
    "Factorisation",
    "HeldRows",
    "SkipSums",
    "StreamedCodes",
    "Sums",
    "System",
    "Terms",
    "choose_alpha",
    "method_for",
    "optimal_decoder",
]
