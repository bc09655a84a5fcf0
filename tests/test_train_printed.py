"""What `sae train` prints when it ends: results in a table, its solver's figures in a line, and where they are."""

import json
import re

import pytest
from homes import CommandLine, make_store, some_rows

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
    head, line = cells(done.out)
    assert head == ["run", "data", "d_sae", "FVU", "L0", "dead latents"]
    assert line == ["run", "rows", "24", f"{final['test_fvu']:.4g}", f"{final['test_l0']:.4g}",
                    str(round(24 * final["dead_fraction"]))]
    title, *_, figures, files = done.out.splitlines()
    assert title == (f"FVU and L0 on {result['rows_test']} held-out rows, dead latents on {result['rows_train']} "
                     "training rows")
    assert figures.startswith(f"{solver}: 2 epochs, {result['steps']:,} steps in ")
    assert f"peak learning rate {final['lr']:.4g}" in figures
    assert (f"decoder ridge alpha {final['alpha']:.4g}" in figures) if solver == "pam-sgd" else "alpha" not in figures
    assert files == f"saved in {sae.home / 'runs' / 'run'}; loss.png there has its curves"


def test_several_runs_stand_in_one_table_with_what_they_differ_in(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(1000))
    done = sae("train", *QUICK[2:], "--solver", "sgd", "--d-sae", "24", "--d-sae", "16", "--seed", "0", "--seed", "1")
    head, *lines = cells(done.out)
    assert head == ["run", "seed", "data", "d_sae", "FVU", "L0", "dead latents"]
    assert [(line[3], line[1]) for line in lines] == [("24", "0"), ("24", "1"), ("16", "0"), ("16", "1")]
    assert done.out.count(" peak learning rate ") == 4
    assert done.out.splitlines()[-1] == f"saved in {sae.home / 'runs'}; loss.png in each has its curves"


@pytest.mark.parametrize("option", ["--epochs", "--steps"])
def test_a_run_is_not_lengthened_by_resuming_and_both_ways_that_are_named_work(sae: CommandLine, option: str):
    make_store(sae.home, "rows", some_rows(300))
    assert sae("train", *QUICK, "--name", "run").status == 0
    done = sae("train", "--resume", "--name", "run", option, "40")
    assert done.status == 2 and f"{option} cannot lengthen a run by --resume: the learning rate falls to 0" in done.err
    ways = re.findall(r"`sae (train --(?:init|config) [^`]+)`", done.err)
    assert len(ways) == 2
    for way in ways:
        assert sae(*way.split(), "--epochs", "3", "--json").json["epochs"] == 3
    assert "train on from its SAE with `sae train --init run`" in sae("train", "--resume", "--name", "run").err
