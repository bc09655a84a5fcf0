"""Figures in a notebook, and the examples that go the whole way in Python."""

import sys
from pathlib import Path

import pytest
from homes import CommandLine, make_run, make_store, random_sae, some_rows
from launching import captured

import saecli
from saecli.sae.activations import TopK
from saecli.show.drawing import PICTURES
from saecli.show.pictures import draw_losses

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = ("train", "--act", "topk", "--k", "3", "--d-sae", "24", "--epochs", "2")


def test_an_sae_says_what_it_is_and_how_it_was_trained(sae: CommandLine):
    make_store(sae.home, "rows", some_rows(300))
    assert sae(*TRAIN, "--name", "run").status == 0
    loaded = saecli.load_sae("run", sae.home)
    fitted = saecli.fit(saecli.open_store("rows", sae.home), act="topk", k=3, d_sae=24, epochs=2)
    assert (loaded.k, fitted.k, random_sae().k) == (3, 3, None)
    expected = {"solver": "pam-sgd", "act": "topk", "k": 3, "d_in": 8, "d_sae": 24, "epochs": 2}
    for trained in loaded, fitted, loaded.copy_to("cpu"):
        assert expected | {"seed": 0} == {name: trained.cfg[name] for name in (*expected, "seed")}
    assert loaded.cfg["data"] == "rows" and random_sae(TopK(k=2)).cfg["act"] == "topk"
    assert repr(loaded).count("\n") == 0


@pytest.mark.slow
def test_pictures_are_figures_and_no_file_is_written(sae, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_store(sae.home, "rows", some_rows(300))
    for seed in "0", "1":
        sae(*TRAIN, "--seed", seed, "--name", seed)
    # Tests of training have a stand-in.
    monkeypatch.setattr("saecli.show.pictures.draw_losses", draw_losses)
    home = {"home": sae.home}
    expected = {"loss": 2, "frontier": 1, "sparsity": 3, "stability": 1}
    drawn = {picture: saecli.draw(picture, "0", "1", **home) for picture in expected}
    drawn["geometry"] = saecli.draw("geometry", "0", rows=50, **home)
    numbers = {picture: len(figures) for picture, figures in drawn.items()}
    assert numbers == expected | {"geometry": 1}
    for figures in drawn.values():
        assert all(figure.axes for figure in figures)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("los",), "--picture must be one of loss, .*; did you mean loss"),
        (("geometry", "run", "run"), "geometry is drawn of one SAE, got 2"),
        (("stability", "run"), "compares runs that differ in seed: expected two or more, got 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, words: tuple[str, ...], said: str):
    make_store(tmp_path, "rows", some_rows(300))
    make_run(tmp_path, "run", random_sae())
    with pytest.raises(saecli.SaeError, match=said):
        saecli.draw(*words, home=tmp_path)


@pytest.mark.parametrize("picture", PICTURES)
def test_an_unknown_option_of_a_picture_is_named(picture: str):
    with pytest.raises(saecli.SaeError, match=f"^{picture} has no option foo; expected "):
        saecli.draw(picture, foo=1)


@pytest.mark.long
def test_the_example_goes_from_a_model_to_pages(tmp_path: Path):
    words = [sys.executable, EXAMPLES / "whole_chain.py", tmp_path, "3000"]
    done = captured(words, check=True)
    assert done.stdout.count("CE recovered") == 2
    assert {"geometry-0.png", "sparsity-0.png", "sparsity-1.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert (tmp_path / "pages" / "index.html").exists()


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom_and_shows_its_figures(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.read(EXAMPLES / "first_hour.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert "CE recovered" in str(outputs) and "steered:" in str(outputs)
