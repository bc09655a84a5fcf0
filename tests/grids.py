"""All combinations of a test's parameters, of which the default run takes a few."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def grid(*axes: Sequence[Any]) -> list[Any]:
    """Every combination, for `pytest.mark.parametrize`: those that differ from the last entries in more than one axis
    are slow, so that the default run has each entry once at least."""
    def is_quick(combination: tuple) -> bool:
        return sum(one is not axis[-1] for one, axis in zip(combination, axes, strict=True)) <= 1

    return [pytest.param(*combination, marks=() if is_quick(combination) else pytest.mark.slow)
            for combination in product(*axes)]
