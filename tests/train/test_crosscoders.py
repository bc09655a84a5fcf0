"""Crosscoders: an SAE over several places side by side."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine, make_store, same
from reports import index_of, pages_of
from ridge_problems import least_squares, problem, solved, system_of, terms_of

import saecli
from saecli.measure.hook_points import PlaceSums, classes, elsewhere
from saecli.sae.activations import Relu, TopK
from saecli.sae.dictionary import SAE, Batch
from saecli.store.joined import Joined
from saecli.store.values import Spread
from saecli.train.decoder_step import penalty_places
from saecli.train.ridge import Place, by_place, choose_alpha

SHARED, OWN, D = 16, 8, 24
COMMON = ("--d-sae", "40", "--batch-size", "128", "--json", "--epochs")
SHORT, QUICK = (*COMMON, "2"), (*COMMON, "10")


def two_models(rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two places that share some features, in directions of their own, and have some alone; the second on
    another scale."""
    generator = np.random.default_rng(0)
    count = SHARED + 2 * OWN
    codes = (generator.random((rows, count)) < 0.1) * (1 + generator.random((rows, count)))
    directions = generator.normal(size=(2, count, D)) / np.sqrt(D)
    directions[0, SHARED + OWN :] = directions[1, SHARED : SHARED + OWN] = 0
    noise = 0.01 * generator.normal(size=(2, rows, D))
    first, second = (codes @ directions[place] + noise[place] for place in range(2))
    return first.astype(np.float32), (50 * second + 3).astype(np.float32)


@pytest.fixture
def home(sae: CommandLine) -> Path:
    for name, rows in zip(("a", "b"), two_models(), strict=True):
        make_store(sae.home, name, rows)
    return sae.home


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["pam-sgd", "sgd"])
@pytest.mark.parametrize(
    "options", [("--act", "batchtopk", "--k", "4"), ("--act", "relu")], ids=" ".join
)
def test_features_of_one_place_and_of_both_are_told_apart(sae, home, solver, options):
    done = sae(
        "train", "--data", "a", "--data", "b", "--solver", solver, *options, *QUICK, "--name", "run"
    )
    assert done.status == 0, done.err
    assert (done.json["data"], done.json["d_in"]) == ("a + b", 2 * D)
    (found,) = sae("sparsity", "run", "--json").json["runs"]
    assert [place["name"] for place in found["places"]] == ["a", "b"]
    for place in found["places"]:
        assert place["width"] == D and place["fvu"] < 0.3 and 5 <= place["exclusive"] <= 14
    assert 10 <= found["shared"] <= 26
    share, scaling = np.array(found["share"]), np.array(found["scaling"], float)
    alone = (share.max(1) > 0.9) & np.isfinite(scaling).all(1)
    elsewhere = scaling[alone, 1 - share[alone].argmax(1)]
    assert np.median(np.abs(elsewhere)) < 0.1
    own = scaling[alone, share[alone].argmax(1)]
    assert np.median(own) == pytest.approx(1, abs=0.15)  # l1 shrinks codes
    out = sae("sparsity", "run").out
    assert "exclusive to one" in " ".join(out.split()) and "latent decoupling" in out
    exclusive = [f"only {name}" for name in "ab"]
    assert sum(found["class"].count(name) for name in exclusive) > 0.8 * alone.sum()
    assert f"run: only a: {found['class'].index('only a')}, " in out
    (measured,) = sae("eval", "run", "--json").json["runs"]
    assert measured["fvu"] == pytest.approx(done.json["final"]["test_fvu"], rel=1e-4)
    assert saecli.load_sae("run", home).widths == (D, D)


@pytest.mark.slow
def test_a_report_has_each_latents_places(sae, home, tmp_path):
    sae("train", "--data", "a", "--data", "b", "--act", "topk", "--k", "4", *SHORT, "--name", "run")
    assert sae("report", "run", "--out", str(tmp_path / "pages")).status == 0
    (found,) = sae("sparsity", "run", "--split", "all", "--json").json["runs"]
    pages = {page["latent"]: page for page in pages_of(tmp_path / "pages").values()}
    assert len(pages) == 40
    columns = index_of(tmp_path / "pages")["latents"]
    for latent, page in pages.items():
        assert [place[0] for place in page["places"]] == ["a", "b"]
        assert columns["classes"][columns["class"][latent]] == found["class"][latent]
        assert [place[1] for place in page["places"]] == pytest.approx(found["share"][latent])
        assert page["places"][0][2] == (
            None
            if found["scaling"][latent][0] is None
            else pytest.approx(found["scaling"][latent][0])
        )


@pytest.mark.slow
def test_one_place_is_the_sae_to_the_bit(sae, home):
    store = saecli.open_store("a", home)
    options = {"act": "topk", "k": 4, "d_sae": 40, "epochs": 2, "batch_size": 64}
    one, other = saecli.fit(store, **options), saecli.fit(Joined((store,)), **options)
    assert same(one, other)


def crosscoder(widths: tuple[int, ...] = (5, 3)) -> SAE:
    generator = torch.Generator().manual_seed(0)
    d, F = sum(widths), 12
    W_enc, W_dec = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((d, F), (F, d))
    )
    return SAE(
        W_enc, torch.zeros(F).double(), W_dec, torch.zeros(d).double(), Relu(), widths=widths
    )


def test_l1_weighs_the_sum_of_a_latents_norms_over_places():
    sae, x = (
        crosscoder(),
        torch.randn(30, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )
    z = sae.encode(x)
    norms = sae.W_dec[:, :5].norm(dim=1) + sae.W_dec[:, 5:].norm(dim=1)
    expected = (sae(x) - x).square().sum(1).mean() + 0.3 * (z * norms).sum(1).mean()
    torch.testing.assert_close(sae.loss(Batch.of(x), "l1", 0.3).value, expected)
    plain = SAE(**sae.tensors(), activation=sae.activation)
    assert plain.loss(Batch.of(x), "l1", 0.3).value < expected


def test_the_decoder_step_majorises_l1_at_each_hook_point():
    z, y, direction, W_t, b_t = problem(60, 12, 8)
    places, weights = [slice(0, 5), slice(5, 8)], torch.linspace(0, 2, 12).double()
    decay = [place.decay for place in penalty_places(W_t, weights, 1.0, places, (1.0, 1.0))]
    for place, own in zip(places, decay, strict=True):
        torch.testing.assert_close(own, weights / (2 * W_t[:, place].norm(dim=1)))
    terms = replace(
        terms_of((0.7, 2.0, 0.3, 5.0), None, W_t, b_t),
        decay=decay[0],
        places=[Place(*one) for one in zip(places, decay, strict=True)],
    )
    state = solved(system_of("sums", z, y), terms)
    for place, own in zip(places, decay, strict=True):
        alone = replace(terms_of((0.7, 2.0, 0.3, 5.0), None, W_t[:, place], b_t[place]), decay=own)
        expected = solved(system_of("sums", z, y[:, place].contiguous()), alone)
        torch.testing.assert_close(state.W[:, place], expected.W)
        torch.testing.assert_close(state.b[place], expected.b)
    directed = solved(system_of("sums", z, y), replace(terms, direction=direction))
    best = cost(z, y, terms, direction, directed.W, directed.b, directed.c, decay, places)
    for c in (0.0, 0.9 * directed.c, 1.1 * directed.c):  # c is the best of all places together
        other = of_multiple(z, y, terms, direction, c, decay, places)
        assert best <= cost(z, y, terms, direction, *other, decay, places) + 1e-8


def test_each_hook_point_has_its_own_best_alpha():
    z, y, direction, W_t, b_t = problem(60, 12, 8)
    y, direction = y.clone(), direction.clone()
    y[:, 5:] = (
        1e4 * torch.randn(60, 3, generator=torch.Generator().manual_seed(3)).double()
    )  # nothing to predict
    direction[:, 5:] *= 1e4
    decay, columns = [torch.zeros(12).double()] * 2, [slice(0, 5), slice(5, 8)]
    terms = replace(
        terms_of((0.0, 0, 0, 0), direction, W_t, b_t), places=list(map(Place, columns, decay))
    )
    together = choose_alpha(system_of("sums", z, y), terms, z, y, None).alpha
    found = by_place(system_of("sums", z, y), replace(terms, alpha=together), z, y)
    alone = [
        choose_alpha(
            system_of("sums", z, y[:, one].contiguous()),
            terms_of((0.0, 0, 0, 0), direction[:, one], W_t[:, one], b_t[one]),
            z,
            y[:, one],
            None,
        ).alpha
        for one in columns
    ]
    assert alone[1] > 30 * alone[0] and together > 10 * alone[0]
    for place, alpha in zip(found.places, alone, strict=True):
        assert place.ratio * together == pytest.approx(
            alpha, rel=0.3
        )  # each search ends near its minimum
    state = solved(system_of("sums", z, y), replace(found, alpha=together))
    rest = decay, columns, [place.ratio for place in found.places]

    def objective(W: torch.Tensor, c: float) -> float:
        return cost(z, y, replace(terms, alpha=together), direction, W, state.b, c, *rest)

    for factor in (0.9, 1.1):
        assert objective(state.W, state.c) < objective(
            state.W + (factor - 1) * state.c * direction, factor * state.c
        )
    assert objective(state.W, state.c) < objective(state.W, 1.01 * state.c)


def of_multiple(z, y, terms, direction, c, decay, places):
    """The best W and b for a given multiple c of the direction, place by place."""
    found = [
        least_squares(
            z,
            y[:, place],
            replace(
                terms,
                direction=direction[:, place],
                W_t=terms.W_t[:, place],
                b_t=terms.b_t[place],
                decay=own,
            ),
            c=c,
        )
        for place, own in zip(places, decay, strict=True)
    ]
    return np.concatenate([one.W for one in found], 1), np.concatenate([one.b for one in found]), c


def cost(z, y, terms, direction, W, b, c, decay, places, ratios=(1, 1)) -> float:
    """The objective, with alpha times its own ratio at each place."""
    W, b = torch.as_tensor(W), torch.as_tensor(b)
    parts = [
        (z @ W + b - y, 1),
        (b, terms.beta),
        (W - terms.W_t, terms.mu),
        (b - terms.b_t, terms.nu),
    ]
    for place, own, ratio in zip(places, decay, ratios, strict=True):
        parts += [
            (own.sqrt()[:, None] * W[:, place], 1),
            ((W - c * direction)[:, place], ratio * terms.alpha),
        ]
    return sum(weight * part.square().sum().item() for part, weight in parts)


def test_latent_scaling_is_the_least_squares_multiple_at_each_place():
    sae = crosscoder((4, 4))
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 + 1
    sums = PlaceSums(sae)
    for batch in x.split(37):
        sums.update(batch)
    fvu, share, beta, carried = sums.result(Spread.of(x.numpy().copy()))
    z, error, spread = (
        sae.encode(x),
        x - sae(x),
        [x[:, p].var(0, correction=0).mean().sqrt() for p in sae.places],
    )
    for place, scale in zip(range(2), spread, strict=True):
        at = sae.places[place]
        variance = (x[:, at] - x[:, at].mean(0)).square().sum()
        assert fvu[place].item() == pytest.approx((error[:, at].square().sum() / variance).item())
        for latent in range(12):
            sizes = [
                sae.W_dec[latent, p].norm() / s for p, s in zip(sae.places, spread, strict=True)
            ]
            assert share[latent, place].item() == pytest.approx((sizes[place] / sum(sizes)).item())
            best = int(torch.stack(sizes).argmax())
            part = z[:, latent, None] * sae.W_dec[latent, sae.places[best]] / spread[best]
            aim = (error[:, at] + z[:, latent, None] * sae.W_dec[latent, at]) / scale
            others = (sae(x) - sae.b_dec)[:, at] / scale
            for found, wanted in ((beta, aim), (carried, others)):
                expected = torch.linalg.lstsq(
                    part.reshape(-1, 1), wanted.reshape(-1, 1)
                ).solution.item()
                assert found[latent, place].item() == pytest.approx(expected)


def test_classes_are_told_by_norms_and_then_by_both_scalings():
    own = torch.tensor([0.95, 0.05])
    cases = {
        "only a": (own, 0.1, 0.4),
        "looks only a: complete shrinkage": (own, 0.3, 0.9),
        "looks only a: latent decoupling": (own, 0.1, 0.6),
        "only b": (own.flip(0), 0.1, 0.4),
        "only a by decoder norm": (own, torch.nan, torch.nan),
        "shared": (torch.tensor([0.6, 0.4]), 0.9, 0.9),
        "in between": (torch.tensor([0.8, 0.2]), 0.9, 0.9),
        "only b by latent scaling": (torch.tensor([0.4, 0.6]), 0.1, 0.4),
    }
    share, nu_error, nu_reconstruction = zip(*cases.values(), strict=True)
    assert classes(
        ["a", "b"], torch.stack(share), torch.tensor(nu_error), torch.tensor(nu_reconstruction)
    ) == [*cases]
    beta = torch.tensor([[0.5, 2.0, 0.1], [torch.nan] * 3])
    nu = elsewhere(torch.tensor([[0.2, 0.5, 0.3]] * 2), beta)
    assert nu[0] == 0.25 and nu[1].isnan()


def test_a_copy_keeps_the_places():
    sae = crosscoder()
    for copy in (
        sae.sae(),
        sae.changed(activation=TopK(k=3)),
        sae.without_training_parameters(),
        sae.copy_to("cpu"),
    ):
        assert copy.widths == (5, 3)
    assert "widths=(5, 3)" in repr(sae)
