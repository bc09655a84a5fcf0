"""What `sae train` prints when it ends: results in a table, its solver's figures in a line, and where they are."""

import json
import re

import pytest
from homes import CommandLine, make_store, some_rows
from rich.console import Console

from saecli.show.tables import figures_table

QUICK = ("--d-sae", "24", "--epochs", "2")


def cells(text: str) -> list[list[str]]:
    """The cells of a table, line by line."""
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if line[:1] in "│┃"]


@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_a_run_ends_with_its_results_its_solvers_figures_and_its_files(sae: CommandLine, solver: str):
    make_store(sae.home, "rows", some_rows(1000))
    done = sae("train", "--solver", solver, *QUICK, "--name", "run")
    result = json.loads((sae.home / "runs" / "run" / "run.json").read_text())["result"]
    final = result["final"]
    head, line, _, *figures = cells(done.out)
    assert head == ["run", "data", "d_sae", "FVU", "L0", "dead latents"]
    assert line == ["run", "rows", "24", f"{final['test_fvu']:.4g}", f"{final['test_l0']:.4g}",
                    str(round(24 * final["dead_fraction"]))]
    title, *_, files = done.out.splitlines()
    assert title == (f"FVU and L0 on {result['rows_test']} held-out rows, dead latents on {result['rows_train']} "
                     "training rows")
    assert f"{solver}: 2 epochs, {result['steps']:,} steps in " in done.out
    shown = {name: value for name, value, _ in figures}
    assert next(iter(shown)) == "FVU on training rows"  # what a user can act on first
    assert shown["peak learning rate"] == f"{final['lr']:.4g}"
    ridge = f"{final['relative_alpha']:.4g}" if solver == "pam-sgd" else None
    assert shown.get("ridge of the decoder step") == ridge
    assert all(meaning for _, _, meaning in figures)

    assert files == f"saved in {sae.home / 'runs' / 'run'}; loss.png there has its curves"


def test_a_ridge_beside_codes_without_variance_has_no_size():
    one = {"solver": "pam-sgd", "epochs": 1, "steps": 2, "seconds": 1.0, "final": {"relative_alpha": 5.8e300}}
    console = Console(width=200)
    with console.capture() as printed:
        console.print(figures_table([one]))
    assert cells(printed.get())[1][:2] == ["ridge of the decoder step", "-"]


def test_several_runs_stand_in_one_table_with_what_they_differ_in(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    done = sae("train", *QUICK[2:], "--solver", "sgd", "--d-sae", "24", "--d-sae", "16", "--seed", "0", "--seed", "1")
    head, *lines = cells(done.out)
    assert head == ["run", "seed", "data", "d_sae", "FVU", "L0", "dead latents"]
    lines, (second, *figures) = lines[:4], lines[4:]
    assert [(line[3], line[1]) for line in lines] == [("24", "0"), ("24", "1"), ("16", "0"), ("16", "1")]
    assert second == ["figure", *(line[0] for line in lines)]
    assert all(len(figure) == 5 for figure in figures)
    assert done.out.splitlines()[-1] == f"saved in {sae.home / 'runs'}; loss.png in each has its curves"
