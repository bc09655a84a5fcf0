"""`tests/cuda/run.sh` on a CPU: every part works, and one that fails or hangs is told and spares the others."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import captured

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, ROOT / "tests", ROOT / "tests" / "benchmarks", ROOT / "tests" / "cuda"]
LONG = {"correctness", "processes", "extraction", "rows"}  # which the whole script runs
sys.path.append(str(FOLDERS[-1]))
day = importlib.import_module("day")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))


def assert_found(figures: dict[str, Any]) -> None:
    assert "FAILED" not in figures and len(figures) > 1
    assert "OTHER BITS" not in figures.values()
    assert figures["seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(day.PARTS.keys() - LONG))
def test_a_part_finds_figures(part: str, tmp_path: Path):
    assert_found(day.in_process(part, day.Day("cpu", tmp_path), day.PARTS[part][1]))


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert "Error: " in day.run_part("machine", None)["FAILED"]
    on_cpu = day.Day("cpu", tmp_path)
    assert day.in_process("machine", on_cpu, 0.2)["FAILED"] == "took longer than 0 s"
    monkeypatch.setenv("PYTHONPATH", "")
    assert "ModuleNotFoundError" in day.in_process("steps", on_cpu, 60)["FAILED"]


@pytest.mark.long
@pytest.mark.slow
def test_the_script_runs_all_parts(tmp_path: Path):
    done = captured(
        [ROOT / "tests" / "cuda" / "run.sh", tmp_path / "out", "--device", "cpu"],
        env={**os.environ, "PYTHON": sys.executable},
    )
    found = json.loads((tmp_path / "out" / "cuda.json").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stderr
    assert [*found] == [*day.PARTS]
    for figures in found.values():
        assert_found(figures)
    table = (tmp_path / "out" / "cuda.md").read_text(encoding="utf-8")
    assert table.count("\n| ") == sum(map(len, found.values())) > 50
