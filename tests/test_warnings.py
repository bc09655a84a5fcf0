"""What decides a result is a warning in Python, where notes are not shown; commands print each as a line."""

from pathlib import Path

import pytest
import torch
from homes import change_json, make_run, make_store, random_sae, some_rows
from tiny_models import WIDTH, save_model

import saecli
from saecli.sae.activations import TopK


def massive(home: Path) -> None:
    rows = some_rows(300)
    rows[7] *= 1000
    make_store(home, "rows", rows)
    saecli.fit("rows", solver="sgd", d_sae=8, epochs=1)


def unfinished_store(home: Path) -> None:
    make_store(home, "rows", some_rows(300))
    change_json(home / "activations" / "rows" / "store.json", complete=False)
    saecli.fit("rows", solver="sgd", d_sae=8, epochs=1)


def unfinished_run(home: Path) -> None:
    make_run(home, "run", random_sae(), complete=False)
    saecli.load_sae("run")


def remade(home: Path) -> None:
    make_store(home, "rows", some_rows(300))
    make_run(home, "run", random_sae(TopK(k=2)), data_hash="another")
    saecli.sparsity("run")


def other_rows(home: Path) -> None:
    make_store(home, "rows", some_rows(300))
    for seed in (0, 1):
        make_run(home, f"run-{seed}", random_sae(TopK(k=2)), split_seed=seed)
    saecli.evaluate(["run-0", "run-1"])


def short_text(home: Path) -> None:
    (home / "text.txt").write_text("A few words.\n\nAnd others.\n\nNo more.")
    saecli.extract("tiny-gemma2", dataset=str(home / "text.txt"), rows=9000)


def short_part(home: Path) -> None:
    texts = [home / "one.txt", home / "other.txt"]
    for text, count in zip(texts, (3, 90), strict=True):
        text.write_text("\n\n".join(f"Some text, number {number}." for number in range(count)))
    saecli.extract("tiny-gemma2", dataset=[*map(str, texts)], rows=300)


def other_model(home: Path) -> None:
    sae = random_sae(TopK(k=2), d_in=WIDTH)
    sae.metadata = {"model": "someone/else", "layer": 1, "site": "resid_post"}
    saecli.read(sae, "abc", str(save_model(home / "model", "llama")))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (massive, "rows: 1 of 300 rows have over 10 times the median norm"),
        (unfinished_store, "rows is not finished; its whole shards hold 300 rows so far"),
        (unfinished_run, "run is not finished; this is its last checkpoint"),
        (remade, "rows is not the store that run was trained on, though it has its name"),
        (other_rows, "these runs are measured on different rows"),
        (short_text, "the text ended after .* rows of 9,000"),
        (short_part, "one.txt ends after .* rows; others go on"),
        (other_model, "trained on activations of someone/else, and is used in"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_python_warns(tmp_path, monkeypatch, act, said):
    monkeypatch.setenv("SAE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match=said):
        act(tmp_path)


def test_more_dimensions_than_rows_are_warned_of_before_training() -> None:
    rows = torch.from_numpy(some_rows(2000)).T
    with pytest.warns(UserWarning, match="rows, 8, than dimensions, 2,000: .* rows.T"):
        saecli.fit(rows, d_sae=4, epochs=1, solver="sgd")
