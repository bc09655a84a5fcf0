"""Run extract, train and eval offline on a bundled model, printing each command.

Extracts activations from tiny-gemma2, trains an SAE with each of two solvers on all rows, on three tenths and on a
tenth of them, and compares them. Takes about a minute without a network.

Example: sae demo --pictures pictures
"""

import itertools
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ..model import TINY_GEMMA2
from .options import PATH, Json, start

ROWS = 20_000
PASSES = {1.0: 10, 0.3: 20, 0.1: 40}  # over these fractions of the training rows
SOLVERS = ("sgd", "pam-sgd")


def command(
    ctx: typer.Context,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures.", show_default="demo/ in the home", **PATH),
    ] = None,
    json: Json = False,
) -> None:
    from ..show.pictures import draw_errors
    from ..train.listing import list_home

    session = start(ctx)
    runs_folder, pictures = session.home.runs.path, pictures or session.home.path / "demo"
    pictures.mkdir(parents=True, exist_ok=True)
    number = next(n for n in itertools.count(1) if not any(session.home.path.glob(f"*/demo-{n}*")))
    store = f"demo-{number}"
    runs = {
        (share, solver): f"{store}-{solver}-{share:.0%}".removesuffix("%")
        for share in PASSES
        for solver in SOLVERS
    }
    root = ctx.find_root()
    home = ["--home", str(session.home.path)]
    source = root.get_parameter_source("home")
    shown_home = home if source is not None and source.name == "COMMANDLINE" else []
    with redirect_stdout(sys.stderr if json else sys.stdout):
        for step, (purpose, words) in enumerate(chain(store, runs, pictures), 1):
            print(f"\n{step}. {purpose}\n$ sae {shlex.join([*shown_home, *words])}", flush=True)
            status = root.command.main([*home, *words], standalone_mode=False)
            if status:  # of Ctrl-C
                raise typer.Exit(status)
    listed = list_home(session.home.path)["runs"]
    fvus = {run["name"]: run["test_fvu"] for run in listed}
    errors = {
        solver: {share: fvus[runs[share, solver]] for share in sorted(PASSES)} for solver in SOLVERS
    }
    draw_errors(pictures / "rows.png", errors)
    paths = [
        *(str(runs_folder / name / "loss.png") for name in runs.values()),
        *(str(pictures / f"{name}.png") for name in ("frontier", "sparsity", "geometry")),
        *(str(pictures / f"sparsity-patterns-{name}.png") for name in runs.values()),
        str(pictures / "rows.png"),
    ]
    sentence = conclusion(errors["sgd"], errors["pam-sgd"])
    document = {"runs": [*runs.values()], "pictures": paths, "conclusion": sentence}
    on = "`sae serve --demo` shows an SAE of the same model in a browser, and answers while you type."
    session.console.print_result(document, "", sentence, "", "pictures:", *paths, "", on)


def conclusion(sgd: Mapping[float, float], pam: Mapping[float, float]) -> str:
    """Of held-out FVUs by fraction of the training rows."""

    def compared(share: float) -> str:
        fvu, other = pam[share], sgd[share]
        side = "below" if fvu < other else "above"
        return f"{abs(fvu / other - 1):.1%} {side} SGD's ({fvu:.3f}, {other:.3f})"

    few, every = min(pam), max(pam)
    pays_most = pam[few] / sgd[few] < pam[every] / sgd[every]
    moral = ": its exact decoder pays most where rows are few" if pays_most else ""
    return (
        f"In short: from a tenth of the rows PAM-SGD's held-out FVU is {compared(few)}, from all of them "
        f"{compared(every)}{moral}. This is one seed of a tiny model; tests/benchmarks/README.md has real ones."
    )


def chain(
    store: str, runs: Mapping[tuple[float, str], str], pictures: Path
) -> list[tuple[str, list[str]]]:
    """The commands to run, each after its purpose; `runs` are named by fraction of the rows and solver."""
    effect = ["--model", TINY_GEMMA2]
    purposes = (
        "Train an SAE by SGD; with topk, the 16 largest latents of a row fire.",
        "Train another by PAM-SGD: SGD for the encoder, closed form for the decoder.",
        "Train the same two on three tenths of the rows: SGD,",
        "and PAM-SGD.",
        "Train them on a tenth of the rows, as where data are few: SGD,",
        "and PAM-SGD.",
    )
    trainings = []
    for purpose, ((share, solver), name) in zip(purposes, runs.items(), strict=True):
        passes = ["--fraction", f"{share:g}", "--epochs", str(PASSES[share])]
        options = [*passes, "--act", "topk", "--k", "16", "--solver", solver]
        trainings.append((purpose, ["train", "--data", store, *options, "--name", name]))
    frontier, sparsity, geometry = (
        str(pictures / f"{name}.png") for name in ("frontier", "sparsity", "geometry")
    )
    return [
        (
            "Store a small language model's activations after block 2, a row per token.",
            ["extract", *effect, "--layer", "2", "--rows", str(ROWS), "--name", store],
        ),
        *trainings,
        (
            "Measure all on held-out rows: the variance they leave unexplained (fvu), and\n"
            "   how well the model predicts from their reconstructions (ce recovered, kl).",
            ["eval", *runs.values(), *effect, "--plot", frontier],
        ),
        (
            "Count how often latents fire: silent ones never, dense ones on over a tenth.",
            ["sparsity", *runs.values(), "--plot", sparsity],
        ),
        (
            "Look at the spline that an SAE is, affine on each cell of rows with the same\n"
            "   latents, next to k-means and local PCA.",
            ["geometry", runs[1.0, "pam-sgd"], "--plot", geometry],
        ),
        ("List what is in the home folder now.", ["list"]),
    ]
