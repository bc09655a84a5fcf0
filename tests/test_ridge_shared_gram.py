"""A Gram matrix whose columns several processes share, against NumPy's whole one: one panel each, several, and last
ones that are not whole."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from launching import PATIENCE, torchrun

SCRIPT = Path(__file__).with_name("shared_gram.py")


def outcome(folder: Path, processes: int, problem: dict) -> list[dict]:
    """What each process found."""
    np.savez(folder / "problem.npz", **problem)
    done = subprocess.run([*torchrun(processes), SCRIPT, folder / "problem.npz", folder], capture_output=True,
                          text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [dict(np.load(folder / f"{place}.npz")) for place in range(processes)]


def some_problem(side: int, active: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(side)
    z = rng.normal(size=(90, side)) * (rng.random((90, side)) < active)
    return {"z": z, "u": rng.normal(size=side), "v": 0.01 * rng.normal(size=side), "diagonal": rng.random(side),
            "right": rng.normal(size=(5, side)), "ridge": np.array(3.0)}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "side", "active"), [(2, 64, 1.0), (3, 150, 0.05)])
def test_solutions_norms_and_conditions_are_those_of_the_whole_matrix(tmp_path: Path, processes, side, active):
    problem = some_problem(side, active)
    found = outcome(tmp_path, processes, problem)
    z, u, v, right = (problem[name] for name in ("z", "u", "v", "right"))
    gram = 0.5 * z.T @ z + np.outer(u, v) + np.outer(v, u)
    whole = gram + np.diag(problem["diagonal"] + 3.0) + 0.3 * np.outer(u, u)
    solution = np.linalg.solve(whole, right.T)
    np.testing.assert_allclose(np.concatenate([one["own_diagonal"] for one in found]), gram.diagonal(), rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([one["solution"] for one in found]), solution, rtol=1e-8, atol=1e-10)
    exactly = np.linalg.cond(whole, 1)
    for one in found:
        assert (one["ridge"], one["raised"], one["same"]) == (3.0, False, True)
        np.testing.assert_allclose(one["norms"], (right.T * solution).sum(0), rtol=1e-9)
        assert exactly / 3 <= one["condition"] <= exactly * (1 + 1e-9)
        assert "not finite; lower --lr" in str(one["refused"])


@pytest.mark.slow
def test_a_ridge_is_raised_by_all_until_the_matrix_is_positive_definite(tmp_path: Path):
    problem = some_problem(64, 1.0)
    problem["diagonal"][40] = -1000.0  # in a later panel of the second process
    found = outcome(tmp_path, 2, problem)
    assert {(float(one["ridge"]), bool(one["raised"])) for one in found} == {(3000.0, True)}
