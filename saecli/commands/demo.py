"""`sae demo`."""

import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from ..home import Home, read_settings
from ..language_model import TINY_GEMMA2
from ..report import table
from .options import Json, start

ROWS = 20_000
SIDE_BY_SIDE = ("test_fvu", "test_l0", "train_fvu", "dead_fraction", "alpha")

Pictures = Annotated[Path | None, typer.Option("--pictures", help="Folder for the pictures.",
                                               show_default="demo/ in the home")]


def command(ctx: typer.Context, pictures: Pictures = None, json: Json = False) -> None:
    """Run the whole chain offline, printing each command first.

    Extracts activations from tiny-gemma2, the bundled language model, trains one SAE with each solver, and looks at
    what came out. Takes a minute or two, and needs no network.

    Example: sae demo --pictures pictures
    """
    session = start(ctx, json)
    pictures = pictures or session.home.path / "demo"
    pictures.mkdir(parents=True, exist_ok=True)
    store, sgd, pam = free_names(session.home)
    common = ["--data", store, "--act", "topk", "--k", "16", "--epochs", "20"]
    drawn = {name: pictures / f"{name}.png" for name in ("frontier", "sparsity", "geometry")}
    chain = [
        ["extract", "--model", TINY_GEMMA2, "--layer", "2", "--rows", str(ROWS), "--name", store],
        ["train", *common, "--solver", "sgd", "--name", sgd],
        ["train", *common, "--solver", "pam-sgd", "--name", pam],
        ["eval", sgd, pam, "--model", TINY_GEMMA2, "--plot", str(drawn["frontier"])],
        ["sparsity", sgd, pam, "--plot", str(drawn["sparsity"])],
        ["geometry", pam, "--plot", str(drawn["geometry"])],
        ["list"],
    ]
    with redirect_stdout(sys.stderr if json else sys.stdout):
        for arguments in chain:
            print(f"\n$ sae {shlex.join(arguments)}", flush=True)
            ctx.find_root().command.main(["--home", str(session.home.path), *arguments], standalone_mode=False)
    finals = {name: read_settings(session.home.runs.path / name / session.home.runs.marker)["result"]
              for name in (sgd, pam)}
    curves = [session.home.runs.path / name / "loss.png" for name in (sgd, pam)]
    paths = [str(path) for path in (*curves, *sorted(pictures.glob("*.png")))]
    session.report.result({"runs": finals, "pictures": paths}, "", comparison(finals), "pictures:", *paths)


def free_names(home: Home) -> tuple[str, str, str]:
    """Names for the demo's store and two runs that nothing has yet."""
    number = 1
    while any(home.path.glob(f"*/demo-{number}*")):
        number += 1
    return f"demo-{number}", f"demo-{number}-sgd", f"demo-{number}-pam-sgd"


def comparison(finals: dict[str, dict[str, Any]]) -> Any:
    """The two solvers side by side, a column each."""
    rows = [[key.replace("_", " "), *(result["final"].get(key) for result in finals.values())]
            for key in SIDE_BY_SIDE]
    rows += [[key, *(result[key] for result in finals.values())] for key in ("seconds", "steps")]
    return table("the two solvers, same rows, as many passes over them", ["", *finals], rows)
