"""`sae refit`: the exact decoder for given rows, whatever holds the SAE; what it prints, saves and refuses."""

import json
import math
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import (
    PREFIXES,
    CommandLine,
    activation_of,
    change_json,
    fvu,
    make_run,
    make_store,
    make_transcoder,
    nested_rows,
    nested_sae,
    random_sae,
    some_rows,
)
from ridge_problems import least_squares, terms_of

import saecli
from saecli.base.console import Silent
from saecli.base.devices import free_memory
from saecli.derive import refit as decoder
from saecli.derive.refit import refit_decoder
from saecli.sae.activations import ACTIVATIONS, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import load_native, save_native
from saecli.store.split import is_test
from saecli.train.ridge import method_for
from saecli.train.rows import ArrayRows


def solved(sae: SAE, rows: np.ndarray) -> decoder.Refitted:
    return refit_decoder(sae, ArrayRows(rows), Silent())


class CountedRows(ArrayRows):
    """Rows that count how often they are read."""

    reads = 0

    def sequential(self, *arguments: Any) -> Any:
        self.reads += 1
        return super().sequential(*arguments)


def demand_least_squares(sae: SAE, rows: np.ndarray, *prefixes: tuple[int, ...]):
    refitted, x, T0 = solved(sae, rows), torch.from_numpy(rows), sae.W_dec.detach()
    decoder = refitted.decoder
    terms = terms_of((decoder.alpha, 0, 0, 0), T0, torch.zeros_like(T0), torch.zeros(8))
    exact = least_squares(sae.encode(x), x, terms, *prefixes, c=decoder.c)
    np.testing.assert_allclose(refitted.sae.W_dec, exact.W, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(refitted.sae.b_dec, exact.b, rtol=1e-6, atol=1e-7)
    return refitted


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("rows", [900, 15])
def test_decoder_matches_stacked_least_squares_with_the_best_c(act: str, rows: int):
    sae = random_sae(activation_of(act)).copy_to(torch.float64)
    refitted = demand_least_squares(sae, some_rows(rows).astype(np.float64))
    W_dec, T0 = refitted.sae.W_dec, sae.W_dec
    derivative_in_c = (T0 * (W_dec - refitted.decoder.c * T0)).sum()
    assert derivative_in_c.abs() < 1e-6 * T0.norm() * W_dec.norm()
    for name in ("W_enc", "b_enc", *sae.activation_parameters):
        assert torch.equal(refitted.sae.tensors()[name], sae.tensors()[name])
    assert W_dec.dtype == torch.float64


def test_nested_decoder_matches_stacked_least_squares():
    refitted = demand_least_squares(nested_sae("topk"), nested_rows(200).astype(float), PREFIXES)
    assert refitted.sae.prefixes == PREFIXES


def test_rows_moved_and_scaled_have_the_decoder_moved_and_scaled():
    sae, rows = random_sae(TopK(k=4)).copy_to(torch.float64), some_rows(800).astype(np.float64)
    mean, scale = torch.full((8,), 5.0).double(), torch.full((8,), 3.0).double()
    other = sae.on_raw_rows(replace(sae.normalisation, mean=mean, scale=scale))
    plain, moved = solved(sae, rows), solved(other, 3 * rows + 5)
    torch.testing.assert_close(moved.sae.W_dec, 3 * plain.sae.W_dec)
    torch.testing.assert_close(moved.sae.b_dec, 3 * plain.sae.b_dec + 5)
    assert moved.decoder.alpha == pytest.approx(plain.decoder.alpha)


def test_latents_that_never_fire_keep_their_direction_and_are_counted():
    sae = random_sae()
    sae.b_enc[:7] = -1e3
    refitted = solved(sae, some_rows(900))
    assert refitted.dead_fraction == pytest.approx(7 / 20)
    torch.testing.assert_close(refitted.sae.W_dec[:7], refitted.decoder.c * sae.W_dec[:7])


@pytest.mark.slow
def test_without_room_for_its_matrix_the_decoder_is_solved_by_iteration(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    W_enc = torch.randn(4, 400, generator=generator)
    sae = SAE(W_enc, torch.zeros(400), W_enc.T / 10, torch.zeros(4), TopK(k=4))
    rows, alpha = some_rows(3000, 4), []
    x = torch.from_numpy(rows)
    direct = solved(sae, rows)
    assert math.isnan(direct.decoder.residual)
    reads = []
    for memory in (200_000, 900_000):  # codes read again in each iteration; kept

        def in_memory(*sizes: Any, memory: int = memory, **more: Any) -> Any:
            return method_for(*sizes[:3], memory, **more)

        monkeypatch.setattr(decoder, "method_for", in_memory)
        counted = CountedRows(rows)
        refitted = refit_decoder(sae, counted, Silent())
        assert 0 <= refitted.decoder.residual < 2e-4
        alpha.append(refitted.decoder.alpha)
        reads.append(counted.reads)
        assert fvu(refitted.sae(x), x) == pytest.approx(fvu(direct.sae(x), x), rel=0.02)
    assert alpha[0] == pytest.approx(alpha[1])
    assert reads[0] > 10 and reads[1] == 2, reads
    monkeypatch.setattr(decoder, "free_memory", lambda device: 0)
    with pytest.raises(saecli.SaeError, match="refitting 400 latents needs"):
        solved(sae, rows)
    assert free_memory(torch.device("cpu"), 2) < free_memory(torch.device("cpu"))


def test_command_saves_a_run_and_prints_what_eval_measures(sae: CommandLine, tmp_path: Path):
    rows = make_store(sae.home, "rows", some_rows())
    old = random_sae(TopK(k=4))
    make_run(sae.home, "run", old)
    document = sae("refit", "run", "--json").json
    names = [document[name] for name in ("run", "source", "data", "act")]
    assert names == ["refit-run", "run", "rows", "topk"]
    assert {*os.listdir(document["path"])} == {"run.json", "sae.safetensors"}
    runs = sae("eval", "run", "refit-run", "--json").json["runs"]
    for run, refitted in zip(runs, (document["before"], document["after"]), strict=True):
        assert list(run) == list(refitted)
        numbers = [name for name, value in run.items() if isinstance(value, float)]
        for name in numbers:
            assert refitted.pop(name) == pytest.approx(run.pop(name), rel=1e-6), name
        assert refitted == run
    new = saecli.load_sae("refit-run", sae.home)
    held_out = is_test(np.arange(len(rows)))
    assert document["rows_train"] == (~held_out).sum()
    torch.testing.assert_close(new.W_dec, solved(old, rows[~held_out]).sae.W_dec)
    assert torch.equal(new.encode(torch.from_numpy(rows)), old.encode(torch.from_numpy(rows)))
    (listed,) = [run for run in sae("list", "--json").json["runs"] if run["name"] == "refit-run"]
    shown = [listed[name] for name in ("solver", "act", "d_sae", "state", "test_l0")]
    assert shown == ["refit", "topk", 20, "complete", 4]
    dead = 1 - (old.encode(torch.from_numpy(rows[~held_out])) != 0).any(0).double().mean()
    sparsity = sae("sparsity", "refit-run", "--json").json["runs"][0]
    assert sparsity["dead_fraction"] == pytest.approx(dead.item())
    for words in (
        "geometry refit-run --rows 50 --fit-rows 200",
        f"report refit-run --latents 2 --out {tmp_path / 'pages'}",
        f"export refit-run --to saelens --out {tmp_path / 'out'}",
    ):
        assert sae(*words.split()).status == 0
    assert "refit-run is finished" in sae("train", "--resume", "--name", "refit-run").err
    saved = json.loads((sae.home / "runs" / "refit-run" / "run.json").read_text())
    assert saved["solver"] == {"name": "refit", "source": "run"}
    assert (saved["data"], saved["data_hash"]) == ("rows", "rows")


def test_table_shows_both_and_notes_say_how_far_it_went(sae: CommandLine):
    make_store(sae.home, "rows", nested_rows(2000))
    make_run(sae.home, "nested", nested_sae("topk"))
    done = sae("refit", "--name", "mine").succeeds()
    assert "using the newest run, nested" in done.err
    for words in ("mine: the decoder for", "before", "after", "fvu of the first 3"):
        assert words in done.out
    assert "ridge towards the old decoder," in done.out and "factor of the old" in done.out
    make_run(sae.home, "own", nested_sae("topk"), data_hash="rows")
    done = sae("refit", "own").succeeds()
    assert "ridge towards W_enc'," in done.out and "factor of W_enc'" in done.out
    make_transcoder(sae.home, "across", random_sae())
    x, y = (saecli.open_store(name, home=sae.home) for name in "xy")
    across = saecli.join(x, target=y)
    change_json(sae.home / "runs" / "across" / "run.json", data_hash=across.hash)
    done = sae("refit", "across").succeeds()
    assert "ridge, over" in done.out and "factor" not in done.out
    assert saecli.load_sae("mine", sae.home).prefixes == PREFIXES


def test_a_run_on_a_fraction_is_refitted_on_all_its_training_rows(sae: CommandLine, capsys):
    rows = make_store(sae.home, "rows", some_rows())
    make_run(sae.home, "run", random_sae(), split_seed=3, fraction=0.2)
    document = sae("refit", "run", "--json").json
    held_out = is_test(np.arange(len(rows)), seed=3)
    assert (document["rows_train"], document["rows_test"]) == ((~held_out).sum(), held_out.sum())
    (measured,) = sae("eval", "refit-run", "--json").json["runs"]
    assert measured["fvu"] == pytest.approx(document["after"]["fvu"], rel=1e-6)
    saved, before = saecli.load_sae("refit-run", sae.home), set(sae.home.rglob("*"))
    capsys.readouterr()
    store = saecli.open_store("rows", sae.home)
    train = store.split("train", seed=3)
    for source, data in product(("run", random_sae()), (rows[~held_out], train)):
        torch.testing.assert_close(saecli.refit(source, data, home=sae.home).W_dec, saved.W_dec)
    for data in ("rows", ["rows"], store, None):
        torch.testing.assert_close(saecli.refit("run", data, home=sae.home).W_dec, saved.W_dec)
    assert set(sae.home.rglob("*")) == before
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.slow
def test_effect_on_the_model_is_measured_before_and_after(sae: CommandLine):
    train = "train --solver sgd --act topk --k 8 --d-sae 64 --steps 20 --name run"
    model = ["--model", "tiny-gemma2"]
    assert sae("extract", *model, "--rows", "3000", "--name", "notes").status == 0
    assert sae(*train.split()).status == 0
    model += ["--tokens", "50", "--json"]
    refitted = sae("refit", "run", *model).json
    runs = sae("eval", "run", "refit-run", *model).json["runs"]
    for run, document in zip(runs, (refitted["before"], refitted["after"]), strict=True):
        for name in ("kl", "ce_clean", "ce_spliced"):
            assert document[name] == pytest.approx(run[name], abs=1e-6)


def test_decoder_that_is_worse_on_rows_held_out_is_not_saved(sae: CommandLine):
    rows = some_rows(1000)
    held_out = is_test(np.arange(len(rows)))
    make_run(sae.home, "run", saecli.refit(random_sae(), rows))
    make_store(sae.home, "rows", np.where(held_out[:, None], rows, -rows))
    sae("refit", "run").fails(1, "nothing is saved: expected the exact decoder for")
    assert not (sae.home / "runs" / "refit-run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("transcodes", [False, True])
def test_on_its_training_rows_the_target_is_not_the_decoder_fitted_to_them(sae, transcodes):
    """An overfitted decoder: leave-one-out would keep it, since it knows each row that is left out."""
    x = some_rows(250, 24)
    make_store(sae.home, "rows", x)
    target = []
    if transcodes:
        make_store(sae.home, "targets", np.abs(some_rows(250, 24, seed=1)) + x)
        target = ["--target", "targets"]
    words = ["--act", "topk", "--k", "4", "--d-sae", "48", "--steps", "10", "--smoothing", "0"]
    assert sae("train", *words, *target, "--name", "run").status == 0
    run = sae.home / "runs" / "run"
    saved, joined = load_native(run), saecli.open_store("rows", sae.home)
    if transcodes:
        joined = saecli.join(joined, target=saecli.open_store("targets", sae.home))
    rows = torch.from_numpy(np.concatenate(list(joined.split("train").sequential(1000))))
    z = saved.sae.encode(rows[:, :24]).double()
    y = rows[:, -24:].double()
    both = torch.linalg.lstsq(torch.cat([z, torch.ones(len(z), 1).double()], 1), y).solution
    fitted = saved.sae.changed(W_dec=both[:-1].float(), b_dec=both[-1].float())
    save_native(replace(saved, sae=fitted), run)
    done = sae("refit", "run", "--json")
    assert done.json["after"]["fvu"] < 0.97 * done.json["before"]["fvu"]
