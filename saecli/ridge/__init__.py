"""The decoder step: the decoder's closed-form optimum for given codes, its ridge chosen by leave-one-out.

Over (W, b), for codes z and inputs x of N rows, minimise

    sum ||z W + b - x||^2 + alpha ||W - T||_F^2 + beta ||b||^2 + mu ||W - W_t||_F^2 + nu ||b - b_t||^2
        + sum_i decay_i ||W_i||^2

(no term has a 1/2). With D = N + beta + nu, s = N/D, t = nu/D, r = alpha + mu and the means z_bar, x_bar,

    A = sum z z' - s N z_bar z_bar'                             C = sum z x' - N z_bar (s x_bar + t b_t)'
    W = (A + diag(decay) + r I)^-1 (C + alpha T + mu W_t)       b = t b_t + s (x_bar - z_bar W)

Source: the paper's theorem on the optimal decoding, which states it with a stacked pseudo-inverse of N + 2
columns, T = 0 and no decay. Here T may be a multiple of a given direction, T = c T0, with c optimal jointly with W.
Where b is fitted after W (`Terms.joint`), W is solved with s = t = 0, and b follows by the last formula as it stands.

The normal equations are gathered in one pass, as `systems.py` says: summed (`moments.py`, `gram.py`), by processes
that share the latents too (`shared_gram.py`), as rows where those are few (`held.py`), or without a Gram matrix where
that does not fit in memory (`iterative.py`). `solve.py` solves them,
`choice.py` chooses alpha by their leave-one-out error.
"""

from .choice import Choice, choose_alpha
from .held import HeldRows, memory_needed
from .iterative import CodeProducts, iterative_memory
from .leverage import effective_dof
from .moments import Moments
from .shared_gram import shared_memory
from .solve import Decoder, Terms, solve
from .systems import System

__all__ = ["Choice", "CodeProducts", "Decoder", "HeldRows", "Moments", "System", "Terms", "choose_alpha",
           "effective_dof", "iterative_memory", "memory_needed", "shared_memory", "solve"]
