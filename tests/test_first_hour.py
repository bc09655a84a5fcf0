"""The whole chain in Python, as a newcomer would write it."""

from pathlib import Path

import pytest
import torch

import saecli


def test_from_text_to_an_understood_sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAE_HOME", str(tmp_path))
    store = saecli.extract("tiny-gemma2", layer=2, rows=2000)
    sae = saecli.fit(store, solver="pam-sgd", act="topk", k=16, d_sae=128, steps=100)

    measures = saecli.evaluate(sae, store, model="tiny-gemma2")
    assert measures["l0"] == 16
    assert measures["fvu"] < 0.4
    assert measures["ce_recovered"] > 0.6

    x = torch.from_numpy(next(store.split("test").sequential(100)))
    error = (sae.decode(sae.encode(x)) - x).square().sum() / (x - x.mean(0)).square().sum()
    assert error < 0.5

    saecli.save_sae(sae, tmp_path / "mine")
    assert torch.equal(saecli.load_sae(tmp_path / "mine").W_dec, sae.W_dec)
    assert saecli.geometry(sae, data=store)["cells_visited"] > 50
