"""Neuronpedia's names of published SAEs against SAELens' list of them, in an environment of its own."""

import json
import subprocess

import pytest
from launching import python_with

from saecli.show.report.pages import SITE, neuronpedia_url

HUB = "google/gemma-scope-2b-pt-res/layer_20/width_16k"
LIST = """
import json, pathlib, importlib.util, yaml
folder = pathlib.Path(importlib.util.find_spec("sae_lens").origin).parent
entries = yaml.safe_load((folder / "pretrained_saes.yaml").read_text()).values()
print(json.dumps([[f"{entry['repo_id']}/{sae.get('path') or sae['id']}", sae.get("neuronpedia")]
                  for entry in entries if "repo_id" in entry for sae in entry["saes"]]))
"""


@pytest.mark.slow
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
        elif name.startswith("google/gemma-scope") and any(
            "__" not in source for source in sources
        ):
            missing.append(name)
    assert known > 700
    # Of some layers only; the rest of that folder is not on Neuronpedia.
    assert all("gemma-scope-2-4b-it/transcoder_all" in name and "16k" in name for name in missing)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (f"{HUB}/average_l0_71", "gemma-2-2b/20-gemmascope-res-16k"),
        (f"hf://{HUB}/average_l0_71@main", "gemma-2-2b/20-gemmascope-res-16k"),
        (f"{HUB}/average_l0_139", None),  # Neuronpedia shows another of this width
        (
            "google/gemma-scope-2-1b-it/resid_post/layer_13_width_65k_l0_medium",
            "gemma-3-1b-it/13-gemmascope-2-res-65k",
        ),
        ("jbloom/GPT2-Small-SAEs-Reformatted/blocks.8.hook_resid_pre", "gpt2-small/8-res-jb"),
        (
            "fnlp/Llama3_1-8B-Base-LXM-32x/Llama3_1-8B-Base-L5M-32x",
            "llama3.1-8b/5-llamascope-mlp-131k",
        ),
        ("someone/gemma-scope/layer_20/width_16k/average_l0_71", None),
        ("run", None),
        ("./run/epoch-1", None),
    ],
)
def test_neuronpedias_pages_of_published_saes_are_known(name: str, source: str | None):
    assert neuronpedia_url(name) == (
        None if source is None else f"https://www.neuronpedia.org/{source}"
    )
    assert neuronpedia_url(name, "a-b/3.c") == "https://www.neuronpedia.org/a-b/3.c"
