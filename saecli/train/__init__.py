"""Training: rows in batches, the loop, run folders, and the solvers.

    options.py     options of all solvers and of sae finetune
    plan.py        defaults filled in, checks, warnings    start.py      start, learning rate, before against after
    rows.py        normalised batches; rows of arrays      live.py       rows streamed from a model
    training.py    an SAE in training, its loop            fit.py        saecli.fit, open_store, join
    runs.py        a run and the files of its folder       jobs.py       runs to train: new, resumed, several
    listing.py     stores and runs, listed and removed     descent.py    the task, the optimiser, the state
    solver.py      descent on batches; sgd                 pam.py        Algorithm 3.1, `--solver pam`
    pam_sgd.py     `--solver pam-sgd`                      moments.py    what a decoder step sums over rows
    upkeep.py      dead latents, silence, the release      ridge/        the closed-form decoder
    finetune.py    saecli.finetune, as a run               through.py    its descent, through the model

To add a solver, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`. README.md says
how the solvers differ.
"""

from .options import Pam, PamSgd, Sgd, SolverConfig

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd, Pam)}
