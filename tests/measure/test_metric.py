"""The metric of training stays with an SAE; errors, distances and directions are compared in it: float64 oracles."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, make_store, some_rows, with_origin
from sklearn.cluster import KMeans

import saecli
from saecli.base.console import Silent
from saecli.base.errors import ConfigError
from saecli.derive.refit import refit_decoder
from saecli.geometry.references import measure_references
from saecli.measure.cosines import neighbours
from saecli.measure.hook_points import HookPointSums
from saecli.measure.stability import matching
from saecli.sae.activations import Relu
from saecli.sae.dictionary import SAE
from saecli.sae.formats import FORMATS, load, save
from saecli.sae.metrics import reconstruction
from saecli.store.values import Spread
from saecli.train.rows import ArrayRows

SCALE = np.array([0.02, 0.3, 1, 1, 2, 5, 40, 100.0])  # of the dimensions of rows
QUICK: dict[str, Any] = {"d_sae": 32, "steps": 60, "batch_size": 64, "smoothing": 0.0}


def rows(count: int = 600, seed: int = 0, scale: np.ndarray = SCALE) -> np.ndarray:
    return (some_rows(count, len(scale), seed) * scale + 3 * scale).astype(np.float32)


def trained(x: np.ndarray, normalize: str = "standardize", **options: Any) -> SAE:
    return saecli.fit(x, act="topk", k=3, normalize=normalize, **QUICK | options)


def stored(home: Path, reads: np.ndarray | None = None) -> saecli.ActivationStore:
    make_store(home, "rows", rows(), reads=() if reads is None else tuple(reads.tolist()))
    return saecli.open_store("rows", home)


def fvu(y: np.ndarray, y_hat: np.ndarray, scale: np.ndarray) -> float:
    """Of targets in a metric, by NumPy in float64."""
    y, y_hat = y / scale, y_hat / scale
    return np.square(y - y_hat).sum() / np.square(y - y.mean(0)).sum()


def normalised(sae: SAE) -> np.ndarray:
    return sae.normalisation.target_scale.double().numpy()


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("standardize", lambda x: x.std(0)),
        ("model", lambda x: SCALE**-0.5),
        ("scale", lambda x: np.ones(8)),
        ("none", lambda x: np.ones(8)),
    ],
)
def test_an_sae_keeps_the_scales_of_its_training(tmp_path, normalize, expected) -> None:
    store = stored(tmp_path, SCALE)
    sae = trained(store, normalize)
    x = np.concatenate(list(store.split("train").sequential(1000))).astype(np.float64)
    scale = expected(x)
    np.testing.assert_allclose(normalised(sae), scale / scale.max(), rtol=1e-5)
    assert sae.cfg["metric"] == ("training" if normalize in ("standardize", "model") else "raw")
    if normalize in ("scale", "none"):  # exactly, so that nothing changes by rounding
        assert (normalised(sae) == 1).all()


def test_a_transcoder_with_a_skip_has_a_metric_for_rows_and_one_for_targets() -> None:
    x, y = rows(), rows(seed=1, scale=SCALE[:5])
    sae = saecli.fit(x, target=y, act="topk", k=3, normalize="standardize", skip=True, **QUICK)
    assert sae.scale is not None and sae.scale.shape == (13,)
    scale, target_scale = x.astype(float).std(0), y.astype(float).std(0)
    both = np.concatenate([scale, target_scale]) / target_scale.max()
    np.testing.assert_allclose(sae.scale.numpy(), both, rtol=1e-5)
    measures = saecli.evaluate(sae, x, target=y)
    predicted = sae(torch.from_numpy(x)).double().numpy()
    assert measures["metric_fvu"] == pytest.approx(fvu(y, predicted, target_scale), rel=1e-5)
    assert measures["fvu"] == pytest.approx(fvu(y, predicted, np.ones(5)), rel=1e-5)


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.save])
def test_files_of_every_format_keep_it(tmp_path: Path, form: str) -> None:
    x = rows()
    transcodes = form == "circuit-tracer"
    given = {"target": x[:, ::-1].copy()} if transcodes else {}
    sae = saecli.fit(x, act="relu", normalize="standardize", **given, **QUICK)
    origin = {"layer": 0, "site": "mlp_in", "target_layer": 0, "target_site": "mlp_out"}
    save(with_origin(sae, origin if transcodes else {}), form, tmp_path / "sae")
    found = load(tmp_path / "sae").sae
    assert sae.scale is not None and found.scale is not None
    assert torch.equal(found.scale, sae.scale) and found.scale.dtype == torch.float32
    sae.scale = None
    save(with_origin(sae, origin if transcodes else {}), form, tmp_path / "unknown")
    assert load(tmp_path / "unknown").sae.scale is None


def test_moving_copying_and_folding_keep_it() -> None:
    sae = trained(rows())
    for other in (sae.copy_to(torch.float64), sae.sae(), sae.changed(b_dec=sae.b_dec + 1)):
        torch.testing.assert_close(other.scale, sae.scale.to(other.W_enc))
    assert "scale" not in sae.state_dict() and sae.sae().to(torch.float64).scale.dtype.itemsize == 8
    factor = torch.tensor([2.0, -2, 1, 1, 4, 1, 1, 1])
    folded = sae.on_raw_rows(replace(sae.normalisation, scale=factor.repeat(2)))
    torch.testing.assert_close(folded.scale, sae.scale * factor.abs().repeat(2))


@pytest.mark.filterwarnings("ignore:training did not lower the loss")
def test_training_goes_on_in_the_saes_metric_unless_another_is_asked_for(tmp_path: Path) -> None:
    store = stored(tmp_path, SCALE[::-1].copy())
    old = trained(store)
    on = saecli.fit(store, init=old, lr=1e-4, **QUICK | {"d_sae": 32})
    np.testing.assert_allclose(normalised(on), normalised(old), rtol=0.1)
    assert on.metadata["normalize"] == "init"
    other = trained(store, "model", init=old, lr=1e-2, steps=100)
    assert not torch.allclose(other.W_dec, old.W_dec)
    expected = SCALE[::-1] ** -0.5
    np.testing.assert_allclose(normalised(other), expected / expected.max(), rtol=1e-5)
    as_it_was = trained(store, "model", init=old, lr=1.0)
    torch.testing.assert_close(as_it_was.W_dec, old.W_dec)
    torch.testing.assert_close(as_it_was.scale, old.scale)
    old.scale = None
    assert saecli.fit(store, init=old, lr=1e-4, **QUICK).metadata["normalize"] == "model"
    with pytest.raises(ConfigError, match="--normalize init needs"):
        trained(store, "init")


@pytest.mark.parametrize("transcodes", [False, True])
def test_refit_is_the_ridge_regression_of_normalised_rows(transcodes: bool) -> None:
    x, y = rows(), rows(seed=1, scale=SCALE[:5]) if transcodes else None
    sae = trained(x, target=y)
    targets = x if y is None else y
    refitted = refit_decoder(sae, ArrayRows(x, y), Silent())
    scale, decoder = normalised(sae), refitted.decoder
    z = sae.encode(torch.from_numpy(x)).double().numpy()
    centred, T0 = z - z.mean(0), sae.W_dec.double().numpy() / scale
    A = centred.T @ centred + decoder.alpha * np.eye(32)
    W = np.linalg.solve(A, centred.T @ (targets / scale) + decoder.alpha * decoder.c * T0)
    np.testing.assert_allclose(refitted.sae.W_dec.numpy() / scale, W, rtol=1e-3, atol=1e-4)
    b = (targets / scale).mean(0) - z.mean(0) @ W
    np.testing.assert_allclose(refitted.sae.b_dec.numpy() / scale, b, rtol=1e-3, atol=1e-4)
    assert torch.equal(refitted.sae.W_enc, sae.W_enc)
    assert sae.scale is not None and torch.equal(refitted.sae.scale, sae.scale)


@pytest.mark.parametrize("kind", [pytest.param("nested", marks=pytest.mark.slow), "skip"])
def test_refitting_in_the_metric_commutes_with_normalising_the_rows(kind: str) -> None:
    """As a raw SAE refitted on rows that were normalised beforehand, of the paths that `train/ridge` tests."""
    x, y = rows(), rows(seed=1, scale=SCALE[:5]) if kind == "skip" else None
    options = {"skip": True, "target": y} if kind == "skip" else {"prefixes": "8,32"}
    sae = trained(x, **options)
    _, scale, _, target_scale = (part.double().numpy() for part in sae.normalisation.of_sae())
    before = sae.on_raw_rows(sae.normalisation.inverse())
    within = ArrayRows(x / scale, None if y is None else y / target_scale)
    expected = refit_decoder(before, within, Silent())
    got = refit_decoder(sae, ArrayRows(x, y), Silent())
    assert got.decoder.alpha == pytest.approx(expected.decoder.alpha, rel=1e-2)
    inside = got.sae.on_raw_rows(sae.normalisation.inverse())
    for name in ("W_dec", "b_dec", *(["W_skip"] if kind == "skip" else [])):
        wanted = getattr(expected.sae, name)
        torch.testing.assert_close(getattr(inside, name), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("count", [150, pytest.param(900, marks=pytest.mark.slow)])
def test_refit_on_its_own_rows_leaves_the_tie_of_training_as_good_as_it_was(count: int) -> None:
    """A raw tie `W_enc'` and a raw ridge made the error in the metric of training a third larger."""
    x, test = rows(count), rows(4000, seed=5)
    sae = trained(x, steps=300)
    refitted = refit_decoder(sae, ArrayRows(x), Silent(), own=True).sae
    errors = []
    for each in (sae, refitted):
        y_hat = each(torch.from_numpy(test)).double().numpy()
        errors.append(fvu(test, y_hat, normalised(sae)))
    assert errors[1] < 1.01 * errors[0]


def test_a_refit_is_kept_for_its_fvu_in_the_metric_of_training(sae: CommandLine) -> None:
    stored(sae.home)
    words = "--solver sgd --act topk --k 3 --d-sae 32 --steps 60 --normalize standardize --name run".split()
    assert sae("train", *words, "--data", "rows").status == 0
    document = sae("refit", "run", "--json").json
    assert document["metric"] == "training"
    assert document["after"]["metric_fvu"] < document["before"]["metric_fvu"]
    assert saecli.load_sae("refit-run", sae.home).cfg["metric"] == "training"
    assert "metric of training" in sae("refit", "run", "--name", "again").out


def test_k_means_local_pca_and_the_sae_are_measured_in_one_metric() -> None:
    train, x = rows(400), rows(150, seed=1)
    sae = trained(train, d_sae=100)
    scale = normalised(sae)
    measures = measure_references(sae, x, train, 3)
    y_hat = sae(torch.from_numpy(x)).detach().double().numpy()
    assert measures["sae_fvu"] == pytest.approx(fvu(x, y_hat, scale), rel=1e-5)
    batched = reconstruction(sae, torch.from_numpy(x).split(77))
    assert batched["metric_fvu"] == pytest.approx(measures["sae_fvu"], rel=1e-5)
    assert batched["fvu"] == pytest.approx(fvu(x, y_hat, np.ones(8)), rel=1e-5)
    single = scale.astype(np.float32)
    fitted = KMeans(100, n_init=1, random_state=0).fit(train / single)
    labels = fitted.predict(x / single)
    means = np.stack([(train[fitted.labels_ == c] / scale).mean(0) for c in range(100)])
    assert measures["kmeans_fvu"] == pytest.approx(fvu(x, means[labels] * scale, scale), rel=1e-5)
    assert measures["metric"] == "training"
    sae.scale = None
    raw = measure_references(sae, x, train, 3)
    assert raw["metric"] == "raw" and raw["sae_fvu"] != pytest.approx(measures["sae_fvu"], rel=1e-3)


def cosines(W: np.ndarray, V: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    unit, other = (w / scale / np.linalg.norm(w / scale, axis=1, keepdims=True) for w in (W, V))
    return unit @ other.T


def test_seeds_are_matched_and_neighbours_found_by_cosines_of_training() -> None:
    x = rows()
    saes = [trained(x, seed=seed) for seed in (0, 1)]
    W, V = (sae.W_dec.double().numpy() for sae in saes)
    found, scale = matching(*saes), normalised(saes[0])
    table = np.abs(cosines(W, V, scale))
    np.testing.assert_allclose(found.similarity, table[found.first, found.second], atol=1e-5)
    assert saecli.stability(saes, x)["pairs"][0]["metric"] == found.metric == "training"
    other = trained(x, "scale")
    assert matching(saes[0].copy_to(torch.float64), saes[1]).metric == "training"
    mixed = matching(saes[0], other)
    table = np.abs(cosines(W, other.W_dec.double().numpy(), 1.0))
    np.testing.assert_allclose(mixed.similarity, table[mixed.first, mixed.second], atol=1e-5)
    assert mixed.metric == "raw"
    own = cosines(W, W, scale)
    np.fill_diagonal(own, -np.inf)
    values, latents = neighbours(saes[0], torch.arange(32), 3, lambda done: None)
    np.testing.assert_allclose(values, -np.sort(-own, 1)[:, :3], atol=1e-5)
    assert (latents.numpy() == np.argsort(-own, 1)[:, :3]).all()


def test_a_crosscoders_shares_and_scaling_are_of_normalised_rows() -> None:
    x = rows()
    generator = torch.Generator().manual_seed(0)
    W_enc, W_dec = (torch.randn(8, 16, generator=generator) for _ in range(2))
    tensors = (W_enc, torch.zeros(16), W_dec.T.contiguous(), torch.zeros(8))
    raw = SAE(*tensors, Relu(), widths=(4, 4))
    scale = torch.from_numpy(SCALE).float()
    sae = raw.on_raw_rows(replace(raw.normalisation, scale=scale.repeat(2)))
    sae.scale = scale.repeat(2)
    measures = []
    for each, own in ((raw, x / SCALE), (sae, x)):
        sums = HookPointSums(each)
        sums.update(torch.from_numpy(own).float())
        measures.append(sums.result(Spread.measured([own], 8)))
    for name in ("share", "beta", "beta_predicted"):
        expected, got = (getattr(each, name) for each in measures)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_the_table_of_eval_says_which_fvu_is_raw(sae: CommandLine) -> None:
    stored(sae.home)
    words = "--act topk --k 3 --d-sae 32 --steps 30 --data rows".split()
    for normalize in ("scale", "standardize"):
        assert sae("train", *words, "--normalize", normalize, "--name", normalize).status == 0
    assert "metric fvu" not in sae("eval", "scale").out
    shown = sae("eval", "standardize", "scale")
    assert (
        "metric fvu is in the metric of training; the rest is on raw activations"
        in shown.out.replace("\n", " ")
    )
    runs = json.loads(json.dumps(sae("eval", "scale", "--json").json))["runs"]
    assert runs[0]["metric_fvu"] == runs[0]["fvu"]
