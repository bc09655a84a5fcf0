"""Run extract, train and eval offline on a bundled model, printing each command.

Extracts activations from tiny-gemma2, trains an SAE with each of two solvers on all rows and on a tenth of them,
and compares them. Takes a minute or two without a network.

Example: sae demo --pictures pictures
"""

import itertools
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ..model import TINY_GEMMA2
from .options import PATH, Json, start

ROWS = 20_000
EPOCHS = 10
FRACTION, FEW_EPOCHS = 0.1, 40  # of the training rows, and passes over these


def command(
    ctx: typer.Context,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures.", show_default="demo/ in the home", **PATH),
    ] = None,
    json: Json = False,
) -> None:
    from ..train.listing import list_home

    session = start(ctx)
    runs_folder, pictures = session.home.runs.path, pictures or session.home.path / "demo"
    pictures.mkdir(parents=True, exist_ok=True)
    number = next(n for n in itertools.count(1) if not any(session.home.path.glob(f"*/demo-{n}*")))
    store = f"demo-{number}"
    runs = [f"{store}-{name}" for name in ("sgd", "pam-sgd", "few-sgd", "few-pam-sgd")]
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
    paths = [
        *(str(runs_folder / name / "loss.png") for name in runs),
        *(str(pictures / f"{name}.png") for name in ("frontier", "sparsity", "geometry")),
        *(str(pictures / f"sparsity-patterns-{name}.png") for name in runs),
    ]
    listed = list_home(session.home.path)["runs"]
    fvus = {run["name"]: run["test_fvu"] for run in listed if run["name"] in runs}
    sentence = conclusion(*(fvus[name] for name in runs))
    document = {"runs": runs, "pictures": paths, "conclusion": sentence}
    session.console.print_result(document, "", sentence, "", "pictures:", *paths)


def conclusion(sgd: float, pam: float, few_sgd: float, few_pam: float) -> str:

    def compared(fvu: float, other: float) -> str:
        side = "below" if fvu < other else "above"
        return f"{abs(fvu / other - 1):.1%} {side} SGD's ({fvu:.3f}, {other:.3f})"

    pays_most = few_pam / few_sgd < pam / sgd
    moral = ": its exact decoder pays most where rows are few" if pays_most else ""
    return (
        f"In short: from a tenth of the rows PAM-SGD's held-out FVU is {compared(few_pam, few_sgd)}, from "
        f"all of them {compared(pam, sgd)}{moral}. This is one seed of a tiny model; tests/benchmarks/README.md "
        "has real ones."
    )


def chain(store: str, runs: Sequence[str], pictures: Path) -> list[tuple[str, list[str]]]:
    """The commands to run, each after its purpose."""
    sgd, pam, few_sgd, few_pam = runs
    effect = ["--model", TINY_GEMMA2]
    train = ["train", "--data", store, "--act", "topk", "--k", "16"]
    every = [*train, "--epochs", str(EPOCHS)]
    few = [*train, "--fraction", str(FRACTION), "--epochs", str(FEW_EPOCHS)]
    frontier, sparsity, geometry = (
        str(pictures / f"{name}.png") for name in ("frontier", "sparsity", "geometry")
    )
    return [
        (
            "Store a small language model's activations after block 2, a row per token.",
            ["extract", *effect, "--layer", "2", "--rows", str(ROWS), "--name", store],
        ),
        (
            "Train an SAE by SGD; with topk, the 16 largest latents of a row fire.",
            [*every, "--solver", "sgd", "--name", sgd],
        ),
        (
            "Train another by PAM-SGD: SGD for the encoder, closed form for the decoder.",
            [*every, "--solver", "pam-sgd", "--name", pam],
        ),
        (
            "Train the same two on a tenth of the rows, as where data are few: SGD,",
            [*few, "--solver", "sgd", "--name", few_sgd],
        ),
        ("and PAM-SGD.", [*few, "--solver", "pam-sgd", "--name", few_pam]),
        (
            "Measure all on held-out rows: the variance they leave unexplained (fvu), and\n"
            "   how well the model predicts from their reconstructions (ce recovered, kl).",
            ["eval", *runs, *effect, "--plot", frontier],
        ),
        (
            "Count how often latents fire: silent ones never, dense ones on over a tenth.",
            ["sparsity", *runs, "--plot", sparsity],
        ),
        (
            "Look at the spline that an SAE is, affine on each cell of rows with the same\n"
            "   latents, next to k-means and local PCA.",
            ["geometry", pam, "--plot", geometry],
        ),
        ("List what is in the home folder now.", ["list"]),
    ]
