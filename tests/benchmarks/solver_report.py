"""What the solver benchmark reports: tables, how many cells meet their targets, and L0 at equal error.

A ratio is PAM-SGD's figure by SGD's: below 1, PAM-SGD is better.
"""

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from solver_grid import RELU, RELU_L1, Measured, Outcome

Point = tuple[float, float]
Row = dict[str, str | int | float | None]

COMPARED = 25  # errors at which two frontiers are compared


@dataclass(frozen=True)
class Target:
    """What PAM-SGD is meant to reach.

    Args:
        ratio: at most this.
        fractions: of the training rows, from and to, where it is meant to.
        falling: test FVU is also meant to fall as training rows are added.
    """

    ratio: float
    fractions: tuple[float, float]
    falling: bool = False


def target(act: str) -> Target:
    """An activation's target."""
    if act == RELU_L1:
        return Target(0.6, (0, 1))
    return Target(0.8, (0.05, 0.45)) if act == RELU else Target(0.95, (0.1, 0.45), falling=True)


def frontier(points: Iterable[Point]) -> list[Point]:
    """The points (FVU, L0) that no other one is at least as good as in both, by rising FVU, so by falling L0."""
    kept: list[Point] = []
    for fvu, l0 in sorted(point for point in points if all(math.isfinite(x) and x > 0 for x in point)):
        if not kept or l0 < kept[-1][1]:
            kept.append((fvu, l0))
    return kept


def l0_ratios(pam: Iterable[Point], sgd: Iterable[Point]) -> np.ndarray:
    """PAM-SGD's L0 by SGD's at equal FVU, along the errors that both frontiers cover.

    Either frontier is taken as straight between its points in log FVU and log L0.

    Returns:
        (25,), at errors evenly apart in their logarithm; (0,) where the frontiers share no range.
    """
    fronts = [np.log(frontier(points)).reshape(-1, 2) for points in (pam, sgd)]
    if not all(len(front) for front in fronts):
        return np.empty(0)
    low, high = max(front[0, 0] for front in fronts), min(front[-1, 0] for front in fronts)
    if low >= high:
        return np.empty(0)
    pam_l0, sgd_l0 = (np.interp(np.linspace(low, high, COMPARED), *front.T) for front in fronts)
    return np.exp(pam_l0 - sgd_l0)


@dataclass(frozen=True)
class Comparison:
    """PAM-SGD against SGD in one cell.

    Args:
        measured: what was measured.
        ratio: of the mean test FVU over the seeds; with relu-l1 the geometric mean of the ratios of L0. None where
            there is none, as frontiers share no range or a run failed.
        deviation: of the ratio over the seeds; None for one seed.
        worst: with relu-l1, the largest ratio of L0.
    """

    measured: Measured
    ratio: float | None
    deviation: float | None
    worst: float | None = None

    @property
    def pam(self) -> tuple[Outcome, ...]:
        return next(iter(self.measured.pam.values()))

    @property
    def sgd(self) -> tuple[Outcome, ...]:
        return self.measured.sgd[self.measured.best()]


def compare(measured: Measured) -> Comparison:
    """Compare the solvers in a cell."""
    if measured.cell.act == RELU_L1:
        along = l0_ratios(mean_points(measured.pam.values()), mean_points(measured.sgd.values()))
        seeds = [l0_ratios(*([(way[seed].fvu, way[seed].l0) for way in ways.values()]
                             for ways in (measured.pam, measured.sgd)))
                 for seed in range(len(next(iter(measured.pam.values()))))]
        return Comparison(measured, _geometric(along), _deviation([_geometric(each) for each in seeds]),
                          float(along.max()) if len(along) else None)
    found = Comparison(measured, None, None)
    each = [_ratio(pam.fvu, sgd.fvu) for pam, sgd in zip(found.pam, found.sgd, strict=True)]
    return Comparison(measured, _ratio(fvu(found.pam), fvu(found.sgd)), _deviation(each))


def mean_points(ways: Iterable[Sequence[Outcome]]) -> list[Point]:
    """The mean FVU and L0 over the seeds of each way to train."""
    return [(fvu(outcomes), _mean([outcome.l0 for outcome in outcomes])) for outcomes in ways]


def fvu(outcomes: Sequence[Outcome]) -> float:
    """The mean test FVU over the seeds."""
    return _mean([outcome.fvu for outcome in outcomes])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _geometric(ratios: np.ndarray) -> float | None:
    return float(np.exp(np.log(ratios).mean())) if len(ratios) else None


def _ratio(pam: float, sgd: float) -> float | None:
    return pam / sgd if math.isfinite(pam) and math.isfinite(sgd) and sgd > 0 else None


def _deviation(values: Sequence[float | None]) -> float | None:
    return None if None in values or len(values) < 2 else statistics.stdev(values)


def row(found: Comparison) -> Row:
    """A line of an activation's table."""
    cell, measured = found.measured.cell, found.measured
    head: Row = {"data": cell.data, "d_sae": cell.d_sae, "training rows": cell.rows, "N/d_sae": cell.rows / cell.d_sae}
    if cell.act == RELU_L1:
        seen = [frontier(mean_points(ways.values())) for ways in (measured.sgd, measured.pam)]
        spans = [f"{front[0][0]:.3g} to {front[-1][0]:.3g}" if front else "failed" for front in seen]
        dead = (_mean([outcome.dead for way in ways.values() for outcome in way])
                for ways in (measured.sgd, measured.pam))
        return head | {"SGD FVU": spans[0], "PAM-SGD FVU": spans[1], "L0 ratio, mean": found.ratio,
                       "L0 ratio, worst": found.worst, "sd": found.deviation, **_named_dead(*dead)}
    cells = head | {"SGD FVU": fvu(found.sgd), "SGD": measured.best().name, "PAM-SGD FVU": fvu(found.pam),
                    "ratio": found.ratio, "sd": found.deviation,
                    **_named_dead(*(_mean([outcome.dead for outcome in way]) for way in (found.sgd, found.pam)))}
    if measured.equal is not None:
        equal = fvu(measured.equal)
        cells |= {"SGD FVU at equal steps": equal, "ratio at equal steps": _ratio(fvu(found.pam), equal)}
    return cells


def _named_dead(sgd: float, pam: float) -> Row:
    return {"dead, SGD": sgd, "dead, PAM-SGD": pam}


def markdown(rows: Sequence[Row]) -> str:
    """Rows of the same keys as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_shown(name, row[name]) for name in rows[0]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(name: str, value: str | int | float | None) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if name == "sd" or "ratio" in name else f"{value:.2f}" if "/" in name else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def verdicts(act: str, found: Sequence[Comparison]) -> list[str]:
    """How far an activation's cells meet its target, a sentence each, exceptions by name."""
    aim = target(act)
    low, high = aim.fractions
    within = [one for one in found if low <= one.measured.cell.fraction <= high]
    what = "ratio of L0 at equal FVU (mean along the sweep)" if act == RELU_L1 else "ratio of test FVU"
    where = "" if act == RELU_L1 else f" at {low:.0%} to {high:.0%} of the rows"
    lines = [_met(f"{what} <= {aim.ratio:g}{where}", within, lambda one: one.ratio is not None
                  and one.ratio <= aim.ratio, list_misses=False)]
    if act == RELU_L1:
        return [*lines, _met("frontiers share a range of FVU", found, lambda one: one.ratio is not None)]
    lines.append(_met("ratio never above 1", found, lambda one: one.ratio is not None and one.ratio <= 1))
    if found[0].measured.equal is not None:
        lines.append(_met("against SGD at equal steps, ratio never above 1", found, lambda one: one.measured.equal
                          is not None and fvu(one.pam) <= fvu(one.measured.equal), list_misses=False))
    edge = max(trial.lr for trial in found[0].measured.sgd)
    at_edge = sum(one.measured.best().lr == edge for one in found)
    lines.append(f"SGD's best learning rate is the largest tried in {at_edge} of {len(found)} cells")
    if aim.falling:
        after = {id(later): earlier for earlier, later in _successive(found)}
        lines.append(_met("PAM-SGD's test FVU falls as rows are added (a rise of two standard errors or less passes)",
                          [one for one in found if id(one) in after],
                          lambda one: not _rises(after[id(one)].pam, one.pam)))
    return lines


def _met(what: str, cells: Sequence[Comparison], good: Callable[[Comparison], bool], list_misses: bool = True) -> str:
    misses = [one for one in cells if not good(one)]
    named = "; ".join(f"{cell.data}, d_sae {cell.d_sae}, {cell.rows:,} rows" + (
        f" ({one.ratio:.3f}{'' if one.deviation is None else f', sd {one.deviation:.3f}'})" if one.ratio else "")
        for one in misses for cell in [one.measured.cell])
    return f"{what}: {len(cells) - len(misses)} of {len(cells)} cells" + (
        f"; not {named}" if misses and list_misses else "")


def _successive(found: Sequence[Comparison]) -> list[tuple[Comparison, Comparison]]:
    """Cells that differ only in their rows, each with the one of the next larger share."""
    ordered = sorted(found, key=lambda one: (one.measured.cell.data, one.measured.cell.width, one.measured.cell.rows))
    return [(a, b) for a, b in pairwise(ordered)
            if (a.measured.cell.data, a.measured.cell.width) == (b.measured.cell.data, b.measured.cell.width)]


def _rises(before: Sequence[Outcome], after: Sequence[Outcome]) -> bool:
    """Whether the mean test FVU rises by more than two standard errors; with one seed, whether it rises."""
    rise = fvu(after) - fvu(before)
    if len(before) < 2 or not math.isfinite(rise):
        return not rise <= 0
    variance = sum(statistics.variance([outcome.fvu for outcome in one]) / len(one) for one in (before, after))
    return rise > 2 * math.sqrt(variance)


def write_tables(folder: Path, found: Sequence[Comparison]) -> str:
    """Write one CSV file an activation, and all tables with their verdicts as `solvers.md`.

    Returns:
        The Markdown.
    """
    parts = []
    for act in dict.fromkeys(one.measured.cell.act for one in found):
        chosen = [one for one in found if one.measured.cell.act == act]
        rows = [row(one) for one in chosen]
        with (folder / f"{act.replace('%', 'pct')}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        said = "\n".join(f"- {line}" for line in verdicts(act, chosen))
        parts.append(f"## {act}\n\n{markdown(rows)}\n\n{said}\n")
    text = "\n".join(parts)
    (folder / "solvers.md").write_text(text, encoding="utf-8")
    return text
