"""Neuronpedia's names of published SAEs against SAELens' list of them, in an environment of its own."""

import json
import subprocess

import pytest
from launching import python_with

from saecli.show.report.overview import SITE, neuronpedia_url

pytestmark = pytest.mark.slow
LIST = """
import json, pathlib, importlib.util, yaml
folder = pathlib.Path(importlib.util.find_spec("sae_lens").origin).parent
entries = yaml.safe_load((folder / "pretrained_saes.yaml").read_text()).values()
print(json.dumps([[f"{entry['repo_id']}/{sae.get('path') or sae['id']}", sae.get("neuronpedia")]
                  for entry in entries if "repo_id" in entry for sae in entry["saes"]]))
"""


def test_every_name_that_is_known_is_the_one_that_saelens_lists():
    done = subprocess.run([python_with("saelens"), "-c", LIST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    known, missing = 0, []
    listed: dict[str, set[str]] = {}
    for name, source in json.loads(done.stdout):
        listed.setdefault(name, set()).update([source] if source else [])
    for name, sources in listed.items():
        if (url := neuronpedia_url(name)) is not None:
            assert url.removeprefix(SITE) in sources, name
            known += 1
        elif name.startswith("google/gemma-scope") and any("__" not in source for source in sources):
            missing.append(name)
    assert known > 700
    # Of some layers only; the rest of that folder is not on Neuronpedia.
    assert all("gemma-scope-2-4b-it/transcoder_all" in name and "16k" in name for name in missing)
