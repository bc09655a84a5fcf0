"""The solvers: each trains an SAE from any re-iterable of row batches.

To add one, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`.
"""

from .base import Rows, Solver, SolverConfig, StepReport, Task
from .pam_sgd import PamSgd
from .sgd import Sgd

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd)}

__all__ = ["SOLVERS", "Rows", "Solver", "SolverConfig", "StepReport", "Task"]
