"""Nested (Matryoshka) dictionaries: their loss, from training to files and measures, with both solvers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import PREFIXES, CommandLine, D, F, k_of, make_store, nested_rows, nested_sae, normal

import saecli
from saecli.sae.activations import ACTIVATIONS
from saecli.sae.codes import Codes, where
from saecli.sae.dictionary import Batch
from saecli.sae.formats import SavedSAE, load, save


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_products_of_prefixes_and_gradients_equal_masked_codes(density: float):
    z = normal(30, 50) * (torch.rand(30, 50, generator=torch.Generator().manual_seed(1)) < density)
    ends, below = (2, 17, 18, 50), normal(30, 4, 5, seed=4)
    masks = (torch.arange(50) < torch.tensor(ends)[:, None]).double()
    for codes in (Codes(z), where(z, z != 0), Codes(z.clone().requires_grad_())):
        right = normal(50, 5, seed=3).requires_grad_()
        product, expected = codes.prefix_times(right, ends), (z[:, None] * masks) @ right
        torch.testing.assert_close(product, expected)
        torch.testing.assert_close(
            torch.autograd.grad((product * below).sum(), right, retain_graph=True),
            torch.autograd.grad((expected * below).sum(), right),
        )
        if codes.values.requires_grad:
            (gradient,) = torch.autograd.grad((product * below).sum(), codes.values)
            expected = torch.einsum("blc,fc,lf->bf", below, right.detach(), masks)
            torch.testing.assert_close(gradient, expected)
        expected = torch.einsum("bf,lf,blc->fc", z, masks, below)
        torch.testing.assert_close(codes.prefix_transposed_times(below, ends), expected)
    torch.testing.assert_close(Codes(z).prefix_times(right, ()), (z @ right)[:, None])


@pytest.mark.parametrize("act", [name for name in ACTIVATIONS if name != "gated"])
def test_the_loss_is_the_mean_over_prefixes(act: str):
    sae, x = nested_sae(act).requires_grad_(True), normal(25, D, seed=7)
    loss = sae.loss(Batch.of(x))
    z = sae.activated(sae.pre_activations(x), training=True).dense()
    errors = [(z[:, :m] @ sae.W_dec[:m] + sae.b_dec - x).square().sum(1).mean() for m in PREFIXES]
    torch.testing.assert_close(loss.value, sum(errors) / 3)
    torch.testing.assert_close(loss.squared_error, errors[-1])
    for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
        own, expected = (
            torch.autograd.grad(value, getattr(sae, name), retain_graph=True)[0]
            for value in (loss.value, sum(errors) / 3)
        )
        torch.testing.assert_close(own, expected)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["topk", "relu", "batchtopk", "jumprelu"])
@pytest.mark.parametrize("solver", ["sgd", "pam-sgd"])
def test_nested_first_latents_reconstruct_better_than_plain_ones(solver: str, act: str):
    rows = torch.from_numpy(nested_rows(2000))
    options = {"solver": solver, "act": act, "d_sae": F, "epochs": 12, "lr": 0.05, "device": "cpu"}
    options |= k_of(act, 3)
    nested, plain = saecli.fit(rows, prefixes="3,8", **options), saecli.fit(rows, **options)
    assert nested.prefixes == PREFIXES and plain.prefixes == ()
    x = torch.from_numpy(nested_rows(500, seed=1))
    total = (x - x.mean(0)).square().sum()
    first, others = (
        sae.squared_errors(Batch.of(x), sae.codes(x), sae.W_dec)[0] / total
        if sae.prefixes
        else (sae.decode(sae.encode(x) * (torch.arange(F) < 3)) - x).square().sum() / total
        for sae in (nested, plain)
    )
    assert first < 0.9 and first < 0.8 * others


def test_the_last_decoder_step_is_the_optimum_for_all_prefixes():
    rows = torch.from_numpy(nested_rows(3000)).double()
    options = {"act": "topk", "k": 3, "d_sae": F, "prefixes": "3,8", "epochs": 2, "alpha": 1e-6}
    sae = saecli.fit(rows, solver="pam", dtype="float64", device="cpu", **options)
    z = sae.codes(rows)
    best = sae.squared_errors(Batch.of(rows), z, sae.W_dec).mean()
    for size in (1e-4, 1e-2):
        moved = sae.W_dec + size * normal(F, D, seed=1)
        assert sae.squared_errors(Batch.of(rows), z, moved).mean() > best
    masks = (torch.arange(F) < torch.tensor(PREFIXES)[:, None]).double()
    copies = (z.dense()[:, None] * masks).reshape(-1, F)
    left = torch.cat([copies, torch.ones(len(copies), 1).double()], 1).numpy()
    both = np.linalg.lstsq(left, rows.repeat_interleave(3, 0).numpy(), rcond=None)[0]
    np.testing.assert_allclose(sae.W_dec.numpy(), both[:-1], rtol=1e-4, atol=1e-4)


def test_automatic_prefixes_double_up_to_all_latents():
    sae = saecli.fit(nested_rows(100), act="topk", k=3, d_sae=F, prefixes="auto", epochs=1)
    assert sae.prefixes == (2, 5, 10, 20)


QUICK = ("--d-sae", "20", "--act", "topk", "--k", "3", "--epochs", "3", "--json")


@pytest.mark.slow
def test_eval_says_how_well_each_prefix_reconstructs(sae: CommandLine):
    rows = nested_rows(2000)
    make_store(sae.home, "rows", rows)
    assert sae("train", *QUICK, "--prefixes", "3,8", "--name", "nested").status == 0
    assert sae("train", *QUICK, "--name", "plain").status == 0
    done = sae("eval nested plain --split all --json")
    measures = {run["run"]: run for run in done.json["runs"]}
    assert "prefixes" not in measures["plain"]
    trained = load(sae.home / "runs" / "nested").sae
    x = torch.from_numpy(rows)
    z, total = trained.encode(x).double(), (x.double() - x.double().mean(0)).square().sum()
    for prefix, latents in zip(measures["nested"]["prefixes"], PREFIXES, strict=True):
        kept = z[:, :latents]
        x_hat = kept @ trained.W_dec[:latents].double() + trained.b_dec
        l0, fvu = (kept != 0).sum(1).double().mean(), (x_hat - x).square().sum() / total
        expected = {"latents": latents, "l0": l0.item(), "fvu": fvu.item()}
        assert prefix == pytest.approx(expected, rel=1e-4)
    assert prefix["fvu"] == pytest.approx(measures["nested"]["fvu"], rel=1e-5)
    for name in ("nested", "plain"):
        assert ("by the first latents alone" in sae("eval", name).out) == (name == "nested")


def test_files_keep_the_prefixes_that_they_can_express(tmp_path: Path):
    sae = nested_sae("batchtopk").copy_to(torch.float32)
    x = normal(40, D, seed=5).float()
    for name in ("native", "dictionary-learning", "saelens"):
        save(SavedSAE(sae), name, tmp_path / name)
        read = load(tmp_path / name).sae
        assert read.prefixes == (() if name == "saelens" else PREFIXES)
        torch.testing.assert_close(read(x), sae(x), rtol=1e-4, atol=1e-4)
    written = json.loads((tmp_path / "dictionary-learning" / "config.json").read_text())["trainer"]
    assert written["dict_class"] == "MatryoshkaBatchTopKSAE"
