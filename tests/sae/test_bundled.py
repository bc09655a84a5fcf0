"""The run that comes with the package: opened by name in any home, never written to; the script that trained it."""

import os
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, fvu, make_run, random_sae, same
from launching import captured

import saecli
from saecli.base.home import ASSETS, TINY_GEMMA2, Home

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_tiny_gemma2_sae.py"
RUN = ASSETS / "runs" / TINY_GEMMA2


@pytest.mark.slow
def test_the_bundled_run_is_read_steered_and_measured_in_a_home_without_runs(sae: CommandLine):
    read = sae("read tiny-gemma2 --json --prompt", "Return a list of files").json
    assert read["run"] == read["model"] == TINY_GEMMA2 and read["latents"]
    sae("steer tiny-gemma2 --latent 3 --scale 8 --prompt", "Return a").succeeds()
    sae("eval tiny-gemma2").fails(2, "make one of its text by `sae extract --model tiny-gemma2")
    sae("extract --model tiny-gemma2 --layer 2 --rows 20000 --name docs").succeeds()
    measured = sae("eval tiny-gemma2 --data docs --model tiny-gemma2 --json").json["runs"][0]
    rows = saecli.open_store("docs", home=sae.home).split("test").sequential(500)
    x = torch.from_numpy(np.concatenate(list(rows))).double()
    loaded = saecli.load_sae(TINY_GEMMA2, home=sae.home)
    oracle = fvu(loaded.decode(loaded.encode(x.float())).double(), x)
    assert measured["fvu"] == pytest.approx(oracle, rel=1e-4)
    assert measured["ce_recovered"] > 0.9
    recorded = float(re.search(r"FVU (\S+)", SCRIPT.read_text())[1])
    assert recorded == pytest.approx(oracle, rel=0.1)


def test_a_run_of_the_home_goes_before_the_bundled_one(tmp_path: Path):
    runs = Home(tmp_path).runs
    assert runs.find(TINY_GEMMA2) == RUN and runs.names() == []
    own = random_sae()
    folder = make_run(tmp_path, TINY_GEMMA2, own)
    assert runs.find(TINY_GEMMA2) == folder
    assert same(saecli.load_sae(TINY_GEMMA2, home=tmp_path), own)


def test_the_bundled_run_is_not_listed_removed_or_labelled(sae: CommandLine):
    before = {path: path.stat().st_mtime_ns for path in RUN.iterdir()}
    assert sae("list --json").json["runs"] == []
    sae("rm tiny-gemma2 --yes").fails(1, "there is no store and no run named 'tiny-gemma2'")
    sae("extract --model tiny-gemma2 --layer 2 --rows 300 --name docs").succeeds()
    sae("explain tiny-gemma2 --data docs").fails(2, "--out is needed: tiny-gemma2 has no folder")
    sae("eval").fails(1, "make one with `sae train`, or try the bundled one: tiny-gemma2")
    assert {path: path.stat().st_mtime_ns for path in RUN.iterdir()} == before


def test_all_assets_are_in_the_package_and_the_run_is_small():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["saecli"]
    packaged = {path for pattern in patterns for path in (ROOT / "saecli").glob(pattern)}
    assert {path for path in ASSETS.rglob("*") if path.is_file()} <= packaged
    assert sum(path.stat().st_size for path in RUN.iterdir()) < 1e6


@pytest.mark.long
def test_the_script_trains_the_same_weights_from_the_same_seed(tmp_path: Path):
    written = []
    for number, seed in enumerate("334"):
        out = tmp_path / str(number)
        words = f"--rows 1500 --d-sae 16 --seed {seed} --out".split()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = captured([sys.executable, SCRIPT, *words, out], env=environment, check=True)
        assert re.search(r"'fvu': .*'l0': .*'ce_recovered': ", done.stdout)
        assert {path.name for path in out.iterdir()} == {path.name for path in RUN.iterdir()}
        written.append((out / "sae.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]
