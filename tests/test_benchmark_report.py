"""The solver benchmark's bookkeeping and report, on made-up results."""

import csv
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from solver_grid import Cell, Grid, Log, Outcome, Results, Trial, words
from solver_picture import draw
from solver_report import compare, frontier, l0_ratios, markdown, row, verdicts, write_tables

CELL = Cell("digits", "topk-4%", 4, 0.1, 64, 160)
Model = Callable[[Cell, Trial, int], Outcome]


def power_laws(cell: Cell, trial: Trial, seed: int) -> Outcome:
    """PAM-SGD at 0.9 of SGD's test FVU at 3e-3 tied, with half its L0 at equal FVU, in ten times its steps."""
    weight = trial.weight or 1.0
    error = cell.rows**-0.5 * weight**0.5 * (1 + 0.01 * seed)
    if trial.lr is None:
        return Outcome(0.9 * error, 0.5 / (0.9 * error), 0.0, 10 * trial.epochs)
    worse = 1 + abs(math.log(trial.lr / 3e-3)) + 0.1 * (not trial.tied)
    return Outcome(error * worse, 1 / error, 0.25, trial.epochs)


def made_up(grid: Grid, cells: list[Cell], model: Model = power_laws, extra: tuple[Trial, ...] = ()) -> Results:
    """All runs of the cells, but for those of equal steps."""
    results: Results = {}
    for cell in cells:
        for trial in (*grid.trials(cell), *extra):
            for seed in range(grid.seeds):
                found = model(cell, trial, seed)
                final = {"test_fvu": found.fvu, "test_l0": found.l0, "dead_fraction": found.dead}
                results[words(cell, trial, seed)] = {"final": final, "steps": found.steps}
    return results


def compared(grid: Grid, cells: list[Cell], model: Model = power_laws):
    results = made_up(grid, cells, model)
    return [compare(grid.measured(cell, results)) for cell in cells]


def test_a_frontier_leaves_out_what_another_point_beats():
    assert frontier([(0.3, 5), (0.1, 20), (0.2, 30), (0.3, 9), (0.2, 8), (math.inf, math.nan), (0.5, 0)]) == [
        (0.1, 20), (0.2, 8), (0.3, 5)]


def test_l0_at_equal_error_is_interpolated_in_logarithms():
    sgd = [(error, 3 / error**2) for error in (0.05, 0.1, 0.2, 0.4)]
    pam = [(error, 1.2 / error**2) for error in (0.03, 0.07, 0.31)]
    np.testing.assert_allclose(l0_ratios(pam, sgd), np.full(25, 0.4))
    worse_end = l0_ratios([(0.1, 100), (0.2, 50)], [(0.1, 200), (0.2, 50)])
    np.testing.assert_allclose(worse_end[[0, -1]], [0.5, 1])
    assert not len(l0_ratios([(0.1, 5), (0.2, 3)], [(0.3, 5), (0.4, 3)]))
    assert not len(l0_ratios([], sgd))


def test_the_best_sgd_is_compared_by_means_and_the_deviation_is_over_seeds():
    grid = Grid(("topk-4%",), (0.1,), (4,))

    def model(cell: Cell, trial: Trial, seed: int) -> Outcome:
        found = power_laws(cell, trial, seed)
        return replace(found, fvu=found.fvu * (1 - 0.1 * seed)) if trial.lr is None else found

    found, = compared(grid, [CELL], model)
    best = found.measured.best()
    assert (best.lr, best.tied) == (3e-3, True)
    pam, sgd = 0.9 * np.array([1, 0.909]), np.array([1, 1.01])
    assert found.ratio == pytest.approx(pam.mean() / sgd.mean())
    assert found.deviation == pytest.approx(np.std(pam / sgd, ddof=1))
    table = markdown([row(found)])
    assert "| digits | 256 | 160 | 0.62 | 0.07945 | tied, 0.003 |" in table and "| 0.855 |" in table


def test_a_failed_run_is_never_the_best_and_has_no_ratio():
    grid = Grid(("relu",), (0.1,), (4,), seeds=1)
    cell = replace(CELL, act="relu")
    results = made_up(grid, [cell])
    trials = grid.trials(cell)
    results[words(cell, next(trial for trial in trials if trial.lr == 3e-3 and trial.tied), 0)] = {"error": "NaN"}
    found = compare(grid.measured(cell, results))
    assert not found.measured.best().tied and found.deviation is None
    results[words(cell, trials[0], 0)] = {"error": "NaN"}
    found = compare(grid.measured(cell, results))
    assert found.ratio is None
    assert "ratio never above 1: 0 of 1 cells; not digits, d_sae 256, 160 rows" in verdicts("relu", [found])


def test_targets_count_cells_within_their_fractions_and_name_exceptions():
    rows = {0.05: 90, 0.1: 160, 0.45: 700, 1.0: 1600}
    cells = [replace(CELL, fraction=fraction, rows=count) for fraction, count in rows.items()]

    def model(cell: Cell, trial: Trial, seed: int) -> Outcome:
        found = power_laws(cell, trial, seed)
        return replace(found, fvu=2 * found.fvu) if trial.lr is None and cell.rows == 160 else found

    found = compared(Grid(("topk-4%",), tuple(rows), (4,)), cells, model)
    assert verdicts("topk-4%", found) == [
        "ratio of test FVU <= 0.95 at 10% to 45% of the rows: 1 of 2 cells",
        "ratio never above 1: 3 of 4 cells; not digits, d_sae 256, 160 rows (1.800, sd 0.000)",
        "SGD's best learning rate is the largest tried in 0 of 4 cells",
        "PAM-SGD's test FVU falls as rows are added (a rise of two standard errors or less passes): 2 of 3 cells; "
        "not digits, d_sae 256, 160 rows (1.800, sd 0.000)"]


def test_relu_l1_compares_the_frontiers_of_the_sweep():
    cell = replace(CELL, act="relu-l1")
    found, = compared(Grid(("relu-l1",), (0.1,), (4,)), [cell])
    assert found.ratio == pytest.approx(0.5) and found.worst == pytest.approx(0.5)
    assert found.deviation == pytest.approx(0, abs=1e-9)
    assert verdicts("relu-l1", [found])[0].endswith("<= 0.6: 1 of 1 cells")


def test_the_options_of_a_run():
    assert " ".join(words(CELL, Trial(50, None, 1e-2, True), 1)) == (
        "--data digits --act topk --k 10 --d-sae 256 --fraction 0.1 --epochs 50 --seed 1 --solver sgd --lr 0.01 --tied")
    assert words(replace(CELL, act="topk-0.1%"), Trial(1), 0)[4:6] == ("--k", "1")
    l1 = " ".join(words(replace(CELL, act="relu-l1"), Trial(1, 0.5), 0))
    assert "--act relu --sparsity l1 --sparsity-weight 0.4 --d-sae" in l1 and l1.endswith("--solver pam-sgd")
    grid = Grid(("relu",), (0.1,), (4,), batches=100, most_epochs=50)
    assert grid.trials(CELL)[0].epochs == 50
    assert grid.trials(replace(CELL, rows=5000))[0].epochs == 5


def test_equal_steps_follow_from_the_other_runs():
    grid = Grid(("topk-4%",), (0.1,), (4,), seeds=1, equal_steps=True)
    assert len(grid.runs(CELL, {})) == 7
    results = made_up(grid, [CELL])
    further, = set(grid.runs(CELL, results)) - set(results)
    assert further == words(CELL, Trial(500, None, 3e-3, True), 0)
    assert grid.measured(CELL, results) is None
    results = made_up(grid, [CELL], extra=(Trial(500, None, 3e-3, True),))
    assert row(compare(grid.measured(CELL, results)))["ratio at equal steps"] == pytest.approx(0.9)


def test_a_line_cut_short_is_run_again(tmp_path):
    log = Log(tmp_path / "runs.jsonl")
    log.add(("--seed", "0"), {"steps": 1})
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"words": ["--se')
    log = Log(log.path)
    assert log.results == {("--seed", "0"): {"steps": 1}}
    log.add(("--seed", "1"), {"steps": 2})
    assert len(Log(log.path).results) == 2


@pytest.mark.slow
def test_tables_and_picture_become_files(tmp_path):
    acts, fractions = ("relu", "relu-l1", "topk-4%"), (0.1, 1.0)
    cells = [Cell("digits", act, width, fraction, 64, round(1600 * fraction))
             for act in acts for width in (1, 4) for fraction in fractions]
    found = compared(Grid(acts, fractions, (1, 4)), cells)
    text = write_tables(tmp_path, found)
    assert [line for line in text.splitlines() if line.startswith("##")] == ["## relu", "## relu-l1", "## topk-4%"]
    with (tmp_path / "topk-4pct.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [one["training rows"] for one in rows] == ["160", "1600"] * 2
    assert float(rows[0]["ratio"]) == pytest.approx(0.9)
    draw(tmp_path / "solvers.png", found)
    assert (tmp_path / "solvers.png").read_bytes().startswith(b"\x89PNG")
