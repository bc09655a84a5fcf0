"""The solvers: each trains an SAE from any re-iterable of row batches.

To add one, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`.
"""

from .base import DEFAULT_STEPS, Rows, Solver, SolverConfig, StepReport, Task
from .pam_sgd import PamSgd
from .sgd import Sgd
from .smoothing import WIDEST

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd)}

__all__ = ["DEFAULT_STEPS", "SOLVERS", "WIDEST", "Rows", "Solver", "SolverConfig", "StepReport", "Task"]
