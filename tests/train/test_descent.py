"""The paper's descent theorem, on the loop of `examples/convergence`: no half step raises the objective, and steps go
to zero."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from solver_problems import sparse_mixture

EXAMPLES = Path(__file__).parents[2] / "examples"
OUTERS = 24


@pytest.mark.parametrize("name", ["swish", pytest.param("soft-topk", marks=pytest.mark.slow)])
def test_the_objective_never_rises_and_steps_go_to_zero(name, monkeypatch):
    for folder in (EXAMPLES, EXAMPLES / "convergence"):
        monkeypatch.syspath_prepend(str(folder))
    import descent

    values, steps = descent.descended(sparse_mixture(40).x, descent.ACTIVATIONS[name], OUTERS)
    assert max(after - before for before, after in pairwise(values)) <= descent.ROUNDING * values[0]
    assert descent.MU * sum(steps) <= values[0] - values[-1]
    assert sum(steps[OUTERS // 2:]) < 0.2 * sum(steps)
    sys.modules.pop("descent")
