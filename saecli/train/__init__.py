"""Training: rows in batches, the loop, run folders, and the solvers.

    config.py         options common to all solvers          options.py        options of sgd and pam-sgd
    plan.py           defaults filled in, checks, warnings   start.py          random start or an SAE, learning rate
    rows.py           normalised rows in batches             array_rows.py     rows of an array, rows kept on a GPU
    live.py           rows streamed from a model             loop.py           epochs, batches, checkpoints
    runs.py           run folders: new, resumed, several     files.py          their files, trackers
    fit.py            saecli.fit, open_store, join           task.py           what a solver is given, smoothing
    solver.py         descent steps, revival, Adam, sgd      pam_sgd.py        descent and decoder steps in turn
    decoder_step.py   a decoder step's pass and upkeep       ridge/            the closed-form decoder
    refit_decoder.py  the decoder of an SAE on other rows

To add a solver, write its file (a configuration whose `build` makes a `Solver`) and a line in `SOLVERS`. README.md says
how the solvers differ.
"""

from .options import PamSgd, Sgd, SolverConfig

SOLVERS: dict[str, type[SolverConfig]] = {kind.name: kind for kind in (Sgd, PamSgd)}
