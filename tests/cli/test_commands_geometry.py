"""`sae geometry` against brute force over the same rows in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import walls
from homes import CommandLine, D, F, make_run, make_store, random_sae, some_rows
from threadpoolctl import threadpool_limits

import saecli
from saecli.base.console import Silent, Step
from saecli.sae.activations import AbsTopK, BatchTopK, MatchingPursuit, Relu, TopK
from saecli.sae.metrics import reconstruction
from saecli.store.split import is_test

KEYS = """run data split act rows l0 cells_visited cells_possible_log10 cells_share_log10 occupancy
rank power_diagram margin complexity other_split references""".split()
SPREAD = ["mean", "min", "p5", "p25", "median", "p75", "p95", "max"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of k-means in several threads come in any order."""
    with threadpool_limits(1):
        yield


@pytest.fixture
def sae(sae: CommandLine) -> CommandLine:
    make_store(sae.home, "rows", all_rows())
    return sae


def all_rows() -> np.ndarray:
    rows = some_rows()
    rows[5] = 0
    return rows


def held_out() -> np.ndarray:
    return all_rows()[is_test(np.arange(3000))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", [Relu(), BatchTopK(3), TopK(3), AbsTopK(3)], ids=lambda a: a.name
)
def test_document_equals_brute_force(sae: CommandLine, activation: Relu):
    trained = random_sae(activation)
    make_run(sae.home, "one", trained)
    document = sae("geometry", "--json").json
    exact, rows = trained.copy_to(torch.float64), torch.from_numpy(held_out()).double()
    assert list(document) == KEYS
    heading = ["one", "rows", "test", activation.name, len(rows)]
    assert [document[key] for key in KEYS[:5]] == heading
    supports = exact.encode(rows) != 0
    assert document["cells_visited"] == len(supports.unique(dim=0)) >= document["rank"]["cells"]
    share = np.log10(document["cells_visited"]) - document["cells_possible_log10"]
    assert document["cells_share_log10"] == pytest.approx(share)
    assert document["l0"] == pytest.approx(supports.sum(1).double().mean())
    distances = [sorted(distance for distance, _ in walls(exact, row)) for row in rows.numpy()]
    nearest = np.array([row[0] for row in distances])
    near, margin = document["complexity"], document["margin"]
    assert list(margin) == [*SPREAD, "relative"]
    median = np.sort(nearest)[round(0.5 * (len(nearest) - 1))]
    assert margin["median"] == pytest.approx(median, rel=1e-9)
    assert margin["mean"] == pytest.approx(nearest.mean(), rel=1e-9)
    relative = nearest / rows.norm(dim=1).numpy()
    assert margin["relative"]["max"] == pytest.approx(relative.max(), rel=1e-5)
    radius = 0.01 * np.median((rows - rows.mean(0)).norm(dim=1))
    assert near["radius"] == pytest.approx(radius, rel=1e-4)
    boundaries = [np.sum(np.array(row) < near["radius"]) for row in distances]
    assert near["mean"] == pytest.approx(np.mean(boundaries))
    assert (document["power_diagram"] or {}).get("agreement", 1.0) == 1.0
    assert (document["power_diagram"] is not None) == isinstance(activation, TopK | AbsTopK)
    references, other = document["references"], document["other_split"]
    assert references["sae_fvu"] == pytest.approx(reconstruction(exact, [rows])["fvu"], rel=1e-4)
    assert references["local_pca_rank"] == min(D, round(document["l0"]))
    assert 0 <= references["local_pca_fvu"] < references["kmeans_fvu"] < 1
    assert references["held_out"] is True
    assert (other["split"], other["rows"]) == ("train", 3000 - len(rows))
    assert references["rows_fitted"] == other["rows"]


def test_only_the_rows_that_the_run_was_trained_on_fit_the_references(sae: CommandLine):
    make_run(sae.home, "half", random_sae(TopK(3)), fraction=0.5)
    document = sae("geometry", "half", "--split", "train", "--json").json
    assert document["rows"] == document["references"]["rows_fitted"] < 1500
    other = document["other_split"]
    assert (other["split"], other["rows"]) == ("test", len(held_out()))
    assert document["references"]["held_out"] is False
    everything = sae("geometry", "half", "--split", "all", "--json").json
    assert (everything["rows"], everything["other_split"]) == (3000, None)
    few = sae("geometry", "half", "--fit-rows", "100", "--json").json["references"]
    assert (few["rows_fitted"], few["kmeans_cells"]) == (100, 20)


@pytest.mark.slow
def test_several_runs_are_measured_as_each_alone(sae: CommandLine):
    make_run(sae.home, "early", random_sae(TopK(3)))
    make_run(sae.home, "late", random_sae(TopK(3), seed=1))
    make_run(sae.home, "other", random_sae(Relu(), seed=2))
    done = sae("geometry", "early", "late", "other", "--json")
    assert [run["run"] for run in done.json["runs"]] == ["early", "late", "other"]
    assert sae("geometry", "e*", "--json").json == {"runs": done.json["runs"][:1]}
    for run in done.json["runs"]:
        assert run == sae("geometry", run["run"], "--json").json
    out = sae("geometry", "early", "late").out
    assert out.index("early") < out.index("late")
    make_run(sae.home, "pursuit", random_sae(MatchingPursuit(3)))
    done = sae("geometry", "early", "pursuit")
    assert "the activation matching-pursuit has no cells" in done.err
    assert "early" not in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--rows", "1"], ["--fit-rows", "1"], ["--split", "train", "--rows", "2"]]
)
def test_a_row_or_two_are_measured_and_drawn(sae: CommandLine, tmp_path: Path, words: list[str]):
    for activation in (TopK(3), Relu(), AbsTopK(F)):
        make_run(sae.home, activation.name, random_sae(activation))
        done = sae(f"geometry {activation.name} --slice pca --plot", tmp_path / "x.png", *words)
        assert (done.status, done.out.count("FVU of")) == (0, 3), done.err


@pytest.mark.slow
def test_more_rows_than_the_limit_are_sampled_and_the_same_again(sae: CommandLine):
    make_run(sae.home, "one", random_sae(TopK(3)))
    first = sae("geometry --split all --rows 1500 --json").json
    assert first == sae("geometry --split all --rows 1500 --json").json
    assert first["rows"] == first["references"]["rows_measured"] == 1500
    whole = sae("geometry", "--split", "all", "--json").json
    assert first["margin"]["median"] == pytest.approx(whole["margin"]["median"], rel=0.2)


def test_a_row_at_the_origin_and_an_sae_without_boundaries_are_no_error(sae: CommandLine):
    make_run(sae.home, "whole", random_sae(TopK(F)))
    document = sae("geometry", "--split", "all", "--json").json
    occupancy = document["occupancy"]
    assert (document["cells_visited"], occupancy["max"], occupancy["entropy"]) == (1, 3000, 0)
    assert document["margin"]["median"] is None  # infinite
    assert document["power_diagram"]["agreement"] == 1.0


@pytest.mark.parametrize("k", [3, F])
def test_the_rows_where_the_power_diagram_agrees_are_counted(sae: CommandLine, k: int):
    make_run(sae.home, "run", random_sae(TopK(k)))
    done = sae("geometry", "--split", "all", "--rows", "200")
    (line,) = [line for line in done.out.splitlines() if "power diagram" in line]
    _, measure, value, detail, _ = (cell.strip() for cell in line.split("│"))
    assert (measure, value) == ("rows where the power diagram agrees", "200")
    assert detail == "of 200 rows compared, 0 ties left out"


class Recording(Silent):
    def __init__(self) -> None:
        self.shown: dict[tuple[str, float | None, str], list[float]] = {}

    @contextmanager
    def progress(self, label: str, total: float | None, unit: str) -> Iterator[Step]:
        steps = self.shown.setdefault((label, total, unit), [])
        yield lambda done, words="": steps.append(done)


def test_all_long_parts_show_their_progress_up_to_a_known_end(sae: CommandLine):
    make_run(sae.home, "run", random_sae(TopK(3)))
    recording = Recording()
    document = saecli.geometry("run", home=sae.home, progress=recording)
    test, train = document["rows"], document["other_split"]["rows"]
    cells = sum(document["references"][f"{name}_cells"] for name in ("kmeans", "local_pca"))
    assert list(recording.shown) == [
        ("measuring run", test, "rows"),
        ("margins of train rows", train, "rows"),
        ("k-means and local PCA", cells, "cells"),
        ("power diagram", test, "rows"),
    ]
    assert all(steps[-1] == total for (_, total, _), steps in recording.shown.items())
