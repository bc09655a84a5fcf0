import itertools
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from ..extract.options import TINY_GEMMA2
from .options import PATH, Json, start

ROWS = 20_000
EPOCHS = 20


def command(
    ctx: typer.Context,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures.", show_default="demo/ in the home", **PATH),
    ] = None,
    json: Json = False,
) -> None:
    """Run extract, train and eval offline on a bundled model, printing each command.

    Extracts activations from tiny-gemma2, trains one SAE with each solver, and compares them. Takes a minute or two
    without a network.

    Example: sae demo --pictures pictures
    """
    session = start(ctx)
    runs_folder, pictures = session.home.runs.path, pictures or session.home.path / "demo"
    pictures.mkdir(parents=True, exist_ok=True)
    number = next(n for n in itertools.count(1) if not any(session.home.path.glob(f"*/demo-{n}*")))
    store, *runs = f"demo-{number}", f"demo-{number}-sgd", f"demo-{number}-pam-sgd"
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
    session.console.print_result({"runs": runs, "pictures": paths}, "", "pictures:", *paths)


def chain(store: str, runs: Sequence[str], pictures: Path) -> list[tuple[str, list[str]]]:
    """The commands to run, each after its purpose."""
    sgd, pam = runs
    effect = ["--model", TINY_GEMMA2]
    train = ["train", "--data", store, "--act", "topk", "--k", "16", "--epochs", str(EPOCHS)]
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
            [*train, "--solver", "sgd", "--name", sgd],
        ),
        (
            "Train another by PAM-SGD: SGD for the encoder, closed form for the decoder.",
            [*train, "--solver", "pam-sgd", "--name", pam],
        ),
        (
            "Measure both on held-out rows: the variance they leave unexplained (fvu), and\n"
            "   how well the model predicts from their reconstructions (ce recovered, kl).",
            ["eval", sgd, pam, *effect, "--plot", frontier],
        ),
        (
            "Count how often latents fire: silent ones never, dense ones on over a tenth.",
            ["sparsity", sgd, pam, "--plot", sparsity],
        ),
        (
            "Look at the spline that an SAE is, affine on each cell of rows with the same\n"
            "   latents, next to k-means and local PCA.",
            ["geometry", pam, "--plot", geometry],
        ),
        ("List what is in the home folder now.", ["list"]),
    ]
