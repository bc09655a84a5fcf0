"""Training: rows in batches, the loop, run folders, and the solvers.

    options.py        options common to all solvers, and of sgd and pam-sgd
    plan.py           defaults filled in, checks, warnings   start.py          random start or an SAE, learning rate
    rows.py           normalised batches; rows of arrays     live.py           rows streamed from a model
    loop.py           batches and decoder steps in turn      training.py       one SAE in training; before and after
    fit.py            saecli.fit, open_store, join           runs.py           a run and the files of its folder
    jobs.py           runs to train: new, resumed, several   solver.py         descent, revival, sgd
    adam.py           the optimiser                          pam.py            Algorithm 3.1, `--solver pam`
    moments.py        what a decoder step sums over rows     pam_sgd.py        `--solver pam-sgd`: release, re-aiming
    finetune.py       saecli.finetune, as a run              through.py        its solver and loop, through the model
    finetune_options.py   options of sae finetune                listing.py         stores and runs, listed and removed
    ridge/            the closed-form decoder

To add a solver, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`. README.md says
how the solvers differ.
"""

from .options import Pam, PamSgd, Sgd, SolverConfig

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd, Pam)}
