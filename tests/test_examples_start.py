"""Every script of examples/ and of the benchmarks: it can be imported, and answers --help."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import HERE, captured

ROOT = Path(__file__).parents[1]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "tests" / "benchmarks"
FOLDERS = (EXAMPLES, BENCHMARKS, ROOT / "tests" / "cuda")
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
FOREIGN = ("sae_bench", "sae_lens")  # want environments of their own
NORMALISE = EXAMPLES / "mnist" / "normalise.py"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_is_imported_and_answers_help(script, monkeypatch, capfd):
    text = script.read_text()
    if any(re.search(rf"^(from|import) {package}", text, re.MULTILINE) for package in FOREIGN):
        done = captured([sys.executable, script, "--help"], env=HERE)
        assert "usage:" in done.stdout or "No module named 'sae_" in done.stderr
        return
    for folder in (BENCHMARKS, EXAMPLES, script.parent, ROOT):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    before = set(sys.modules)
    try:
        if '__name__ == "__main__"' in text:
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(script), run_name="__main__")
            assert stop.value.code in (None, 0)
            assert "usage:" in capfd.readouterr().out.lower()
        else:
            runpy.run_path(str(script))
    finally:  # scripts of several folders import neighbours of one name
        folders = {script.parent for script in SCRIPTS}
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or "/"
            if Path(file).parent in folders:
                del sys.modules[name]


def normalised(pixels: np.ndarray, folder: Path) -> subprocess.CompletedProcess[str]:
    np.save(folder / "images.npy", pixels)
    return captured([sys.executable, NORMALISE, folder / "images.npy", folder / "out.npy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "white"), [(np.uint8, 255), (np.float32, 255), (np.float32, 1), (np.float64, 1)]
)
def test_pixels_are_normalised_by_their_range(tmp_path: Path, kind: type, white: int):
    fractions = np.random.default_rng(0).integers(0, 256, (20, 9)) / 255
    done = normalised((fractions * white).round(6).astype(kind), tmp_path)
    assert done.returncode == 0 and done.stdout == "18 9\n", done.stderr
    expected = (fractions - 0.1307) / 0.3081
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-1.0, 16.0, 300.0])
def test_pixels_of_another_range_are_refused(tmp_path: Path, scale: float):
    done = normalised(np.linspace(0, scale, 90, dtype=np.float32).reshape(10, 9), tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("cannot tell the scale of pixels from ")
