"""Which of several SAEs come out best: those that no other beats at like sparsity."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from .sae_and_rows import Measured, by_rows

LIKE_L0 = 1.05  # an L0 of at most this many times another's counts as no larger
ERRORS = {"fvu": 1, "ce_recovered": -1, "kl": 1}  # what runs of like L0 are compared by; times its sign, less is better


def marked(found: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> list[dict[str, Any]]:
    """The measures of each SAE with one more, `unbeaten`: what `unbeaten` says of those that share its rows.

    Args:
        found: the measures of each.
        everything: the SAEs and their rows, in the same order.

    Returns:
        The measures, in the same order; `unbeaten` is None for an SAE that shares its rows with no other.
    """
    marks: list[bool | None] = [None] * len(found)
    for members in by_rows(everything):
        if len(members) > 1:
            for index, mark in zip(members, unbeaten([found[index] for index in members]), strict=True):
                marks[index] = mark
    return [run | {"unbeaten": mark} for run, mark in zip(found, marks, strict=True)]


def unbeaten(runs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which runs no other beats, of several that are measured on the same rows.

    A run is beaten by one whose L0 is at most `LIKE_L0` times its own, which is no worse in any of the `ERRORS` that
    were measured and better in at least one. To be no worse in any and better in one is a strict partial order, so runs
    never beat each other in a circle, although L0s are compared with a tolerance: at least one is unbeaten.

    Args:
        runs: the measures of each, among them `l0`.

    Returns:
        One a run. A run with an error that is no finite number beats none, and is not unbeaten either.
    """
    errors = [tuple(sign * run[name] for name, sign in ERRORS.items() if name in run) for run in runs]
    finite = [all(map(math.isfinite, error)) for error in errors]

    def beats(other: int, run: int) -> bool:
        return (finite[other] and runs[other]["l0"] <= LIKE_L0 * runs[run]["l0"] and errors[other] != errors[run]
                and all(map(operator.le, errors[other], errors[run])))

    return [finite[run] and not any(beats(other, run) for other in range(len(runs))) for run in range(len(runs))]


def meaning(run: Mapping[str, Any]) -> str:
    """What the mark of an unbeaten run says, in a sentence, where these measures of runs were taken."""
    *others, last = [name.replace("_", " ") for name in ERRORS if name in run]
    errors = f"{', '.join(others)} or {last}" if others else last
    return f"unbeaten (*): every other run on the same rows with at most {LIKE_L0:g} times its l0 is worse in {errors}"
