"""The solvers: each trains a dictionary on batches that are pushed to it.

To add one, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`.
"""

from .base import Solver, SolverConfig
from .optimizers import OPTIMIZERS
from .pam_sgd import PamSgd
from .sgd import Sgd
from .smoothing import WIDEST
from .task import DECAY, DEFAULT_STEPS, PENALTY_WARM_UP, WARM_UP, StepReport, Task

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd)}

__all__ = ["DECAY", "DEFAULT_STEPS", "OPTIMIZERS", "PENALTY_WARM_UP", "SOLVERS", "WARM_UP", "WIDEST", "Solver",
           "SolverConfig", "StepReport", "Task"]
