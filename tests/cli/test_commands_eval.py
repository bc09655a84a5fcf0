"""`sae eval` and `sae sparsity` against numpy in float64 over the same rows."""

from pathlib import Path

import numpy as np
import pytest
import storing
import torch
from homes import D, F, make_run, make_store, random_sae, reconstruction_oracle, some_rows

from saecli.sae.activations import JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save
from saecli.store.split import is_test

KEYS = """run data split rows mse fvu metric_fvu explained_variance cosine l0 l1 silent_fraction
massive_rows massive_variance ordinary_fvu dead_fraction""".split()


@pytest.fixture
def sae(sae):
    make_store(sae.home, "rows", some_rows())
    return sae


def relu_oracle(sae: SAE, rows: np.ndarray) -> dict[str, float]:
    exact, x = sae.copy_to(torch.float64), torch.from_numpy(rows).double()
    z = (x @ exact.W_enc + exact.b_enc).relu()
    return reconstruction_oracle(x, z @ exact.W_dec + exact.b_dec, z)


@pytest.mark.parametrize("split", ["test", "train", "all"])
def test_measures_match_numpy_on_the_rows_of_the_runs_own_split(sae, split: str):
    rows = some_rows()
    make_run(sae.home, "run", random_sae(), split_seed=3)
    held_out = is_test(np.arange(len(rows)), seed=3)
    chosen = {"test": rows[held_out], "train": rows[~held_out], "all": rows}[split]
    (measures,) = sae("eval", "run", "--split", split, "--json").json["runs"]
    assert list(measures) == KEYS
    assert (measures["run"], measures["data"], measures["split"]) == ("run", "rows", split)
    oracle = relu_oracle(random_sae(), chosen)
    assert {key: measures[key] for key in oracle} == pytest.approx(oracle, rel=1e-5)


def test_a_few_rows_that_hold_most_of_the_variance_are_told(sae, tmp_path: Path):
    values = some_rows()
    held_out = is_test(np.arange(len(values)))
    sinks = np.flatnonzero(held_out)[[1, 50]]
    values[sinks] = [1e4] + [0] * (D - 1)
    rows = make_store(sae.home, "massive", values)
    make_run(sae.home, "run", random_sae(), data="massive")
    done = sae("eval", "run", "--json")
    (measures,) = done.json["runs"]
    ordinary = held_out.copy()
    ordinary[sinks] = False
    assert measures["massive_rows"] == 2
    assert measures["massive_variance"] == pytest.approx(0.9931, abs=1e-4)
    for name, chosen in (("ordinary_fvu", ordinary), ("fvu", held_out)):
        expected = relu_oracle(random_sae(), rows[chosen])["fvu"]
        assert measures[name] == pytest.approx(expected, rel=1e-5)
    said = "2 rows of massive norm hold 99.3% of the variance, and FVU is "
    assert said in done.err and f"but {measures['ordinary_fvu']:.4g} on the others" in done.err
    for command in ("sparsity", "geometry"):
        assert "2 of 3,000 rows have over 10 times the median norm" in sae(command, "run").err
    report = sae("report", "run", "--out", tmp_path / "pages", "--json").json
    assert any("2 rows of massive norm hold" in note for note in report["notes"])


def test_dead_latents_are_those_of_the_record_on_any_rows(sae, tmp_path: Path):
    words = "train --act topk --k 1 --d-sae 64 --epochs 2 --solver sgd --lr 0.1 --no-revive --json"
    run = sae(*words.split()).json
    dead = run["final"]["dead_fraction"]
    train, test = (
        sae("eval", run["run"], "--split", split, "--json").json["runs"][0]
        for split in ("train", "test")
    )
    assert 0 < train["dead_fraction"] == test["dead_fraction"] == dead == train["silent_fraction"]
    assert test["silent_fraction"] >= dead
    assert sae("sparsity", run["run"], "--json").json["runs"][0]["dead_fraction"] == dead
    save(SavedSAE(random_sae()), "sparsify", tmp_path / "theirs")
    theirs = sae("eval", tmp_path / "theirs", "--json").json["runs"][0]
    assert theirs["dead_fraction"] is None
    assert " - │" in sae("eval", tmp_path / "theirs").out


def exact_sae(k: int = D) -> SAE:
    return SAE(torch.eye(D, F), torch.zeros(F), torch.eye(F, D), torch.zeros(D), TopK(k=k))


def test_runs_make_one_table_sparsest_first_and_a_picture(sae, tmp_path: Path):
    make_run(sae.home, "random", random_sae())  # some 11 latents fire
    make_run(sae.home, "sparse", exact_sae(4))
    make_run(sae.home, "exact", exact_sae())
    out = sae("eval", "random", "exact", "sparse", "--plot", tmp_path / "x.png").out
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    first = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert first == ["sparse", "exact", "random"]
    document = sae("eval", "random", "exact", "sparse", "--json").json
    assert [run["run"] for run in document["runs"]] == ["random", "exact", "sparse"]


@pytest.mark.parametrize(
    ("rows", "documents", "said"),
    [
        (53, 20, "figures on 53 rows are noise"),
        (300, 1, "figures on 300 rows of 1 document are noise"),
        (300, 4, "figures on 300 rows of 4 documents are noise"),
        (99, None, "figures on 99 rows are noise"),
        (300, 20, ""),
        (300, None, ""),
    ],
)
def test_few_rows_are_called_noise(sae, rows: int, documents: int | None, said: str):
    columns = {}
    if documents:
        numbers = np.arange(rows)
        columns = {"document": numbers % documents, "position": numbers}
        columns["document"].sort()
    storing.make_store(sae.home / "activations" / "few", some_rows(rows), columns=columns)
    make_run(sae.home, "run", random_sae(), data="few")
    err = sae("eval", "--split", "all").succeeds().err
    assert said in err and ("noise" in err) == bool(said)


def test_runs_of_different_splits_are_said_to_be_measured_on_different_rows(sae):
    for name, seed in (("a", 0), ("c", 1)):
        make_run(sae.home, name, random_sae(), split_seed=seed)
    assert "measured on different rows" in sae("eval", "a", "c").err
    assert len(sae("eval", "a", "a", "--json").json["runs"]) == 1


def test_a_folder_of_another_library_is_measured_on_the_newest_store(sae, tmp_path):
    make_run(sae.home, "native", random_sae(JumpRelu()))
    save(SavedSAE(random_sae(JumpRelu())), "dictionary-learning", tmp_path / "theirs")
    done = sae("eval", "native", tmp_path / "theirs", "--json")
    assert "using the newest store, rows" in done.err
    native, theirs = done.json["runs"]
    for key in ("rows", "mse", "fvu", "cosine", "l0", "silent_fraction"):
        assert theirs[key] == pytest.approx(native[key], rel=1e-4)


SPARSITY_KEYS = "run data split rows l0 l0_std density silent dense frequency dead_fraction".split()


def graded_sae() -> SAE:
    """Its latents copy the first dimension less a threshold each: from always on to never."""
    W_enc = torch.zeros(D, F)
    W_enc[0] = 1
    return SAE(W_enc, -torch.linspace(-9, 12, F), torch.zeros(F, D), torch.zeros(D), Relu())


def test_counts_match_numpy_and_dense_and_silent_latents_are_listed(sae):
    rows = some_rows()
    make_run(sae.home, "graded", graded_sae())
    fires = rows[is_test(np.arange(len(rows)))][:, :1] > np.linspace(-9, 12, F)
    (document,) = sae("sparsity", "graded", "--json").json["runs"]
    assert list(document) == SPARSITY_KEYS
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


def test_long_lists_end_with_how_many_more(sae):
    silent = random_sae()
    silent.b_enc.fill_(-1e3)
    make_run(sae.home, "silent", silent)
    listed = ", ".join(map(str, range(12)))
    on = f"on these {is_test(np.arange(3000)).sum()} rows"
    said = f"silent: dense {on}: none\nsilent: silent {on}: {listed} and 8 more\n"
    assert said in sae("sparsity").out


@pytest.mark.slow
def test_plot_saves_histograms_and_one_picture_of_patterns_a_run(sae, tmp_path: Path):
    make_run(sae.home, "graded", graded_sae())
    make_run(sae.home, "random", random_sae())
    sae("sparsity", "random", "--plot", tmp_path / "one.png")
    sae("sparsity", "random", "graded", "--plot", tmp_path / "two.svg")
    pictures = "one-patterns.png one.png two-patterns-graded.svg two-patterns-random.svg two.svg"
    assert sorted(path.name for path in tmp_path.glob("*.*")) == pictures.split()
