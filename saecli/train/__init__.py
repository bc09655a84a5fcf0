"""Training: rows in batches, the loop, run folders, and the solvers.

    options.py        options common to all solvers, and of sgd and pam-sgd
    plan.py           defaults filled in, checks, warnings   start.py          random start or an SAE, learning rate
    rows.py           normalised batches; rows of arrays     live.py           rows streamed from a model
    loop.py           epochs, batches, checkpoints           fit.py            saecli.fit, open_store, join
    runs.py           run folders: new, resumed, several     files.py          their files, trackers
    solver.py         what a solver is given; descent, revival, Adam, sgd
    decoder_step.py   a decoder step's pass and upkeep       pam_sgd.py        descent and decoder steps in turn
    finetune.py       saecli.finetune, as a run              through.py        its solver, through the model
    ridge/            the closed-form decoder

To add a solver, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`. README.md says
how the solvers differ.
"""

from .options import Pam, PamSgd, Sgd, SolverConfig

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd, Pam)}
