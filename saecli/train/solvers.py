"""The solvers: each trains a dictionary on batches that are pushed to it.

To add one, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`.
"""

from .options import PamSgd, Sgd, SolverConfig

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd)}
