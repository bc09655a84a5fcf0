"""`sae sparsity` against counts in numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, D, F, make_run, make_store, random_sae, some_rows

from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE
from saecli.store.split import is_test

KEYS = "run data split rows l0 l0_std density silent dense frequency dead_fraction".split()


def graded_sae() -> SAE:
    """Its latents copy the first dimension less a threshold each: from always on to never."""
    W_enc = torch.zeros(D, F)
    W_enc[0] = 1
    return SAE(W_enc, -torch.linspace(-9, 12, F), torch.zeros(F, D), torch.zeros(D), Relu())


def test_counts_match_numpy_and_dense_and_silent_latents_are_listed(sae: CommandLine):
    rows = make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "graded", graded_sae())
    fires = rows[is_test(np.arange(len(rows)))][:, :1] > np.linspace(-9, 12, F)
    (document,) = sae("sparsity", "graded", "--json").json["runs"]
    assert list(document) == KEYS
    frequency = fires.mean(0)
    assert document["frequency"] == pytest.approx(frequency.tolist())
    assert document["silent"] == (frequency == 0).sum()
    assert document["dense"] == (frequency > 0.1).sum()
    assert document["l0"] == pytest.approx(fires.sum(1).mean())
    assert document["l0_std"] == pytest.approx(fires.sum(1).std())
    assert document["density"] == pytest.approx(fires.mean())
    out, first = sae("sparsity", "graded").out, F - document["silent"]
    on = f"on these {document['rows']} rows"
    assert f"graded: dense {on}: 0 (100%), 1 (100%)" in out  # by frequency
    assert f"graded: silent {on}: {first}, {first + 1}" in out


def test_long_lists_end_with_how_many_more(sae: CommandLine):
    make_store(sae.home, "rows", some_rows())
    silent = random_sae()
    silent.b_enc.fill_(-1e3)
    make_run(sae.home, "silent", silent)
    listed = ", ".join(map(str, range(12)))
    on = f"on these {is_test(np.arange(3000)).sum()} rows"
    said = f"silent: dense {on}: none\nsilent: silent {on}: {listed} and 8 more\n"
    assert said in sae("sparsity").out


@pytest.mark.slow
def test_plot_saves_histograms_and_one_picture_of_patterns_a_run(sae: CommandLine, tmp_path: Path):
    make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "graded", graded_sae())
    make_run(sae.home, "random", random_sae())
    sae("sparsity", "random", "--plot", tmp_path / "one.png")
    sae("sparsity", "random", "graded", "--plot", tmp_path / "two.svg")
    pictures = "one-patterns.png one.png two-patterns-graded.svg two-patterns-random.svg two.svg"
    assert sorted(path.name for path in tmp_path.glob("*.*")) == pictures.split()
