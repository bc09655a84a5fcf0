"""Codes and their products against dense matrices in float64, and the gradients of encoding against plain autograd."""

from collections.abc import Callable

import pytest
import torch
from homes import activation_of, normal
from torch import Tensor

from saecli.sae.activations import ACTIVATIONS, Activation, MatchingPursuit
from saecli.sae.codes import DENSITY, Codes, SparseCodes, few_entries, joined, largest_of_rows
from saecli.sae.dictionary import SAE, Batch
from saecli.sae.pursuit import RIDGE

B, D, F = 30, 7, 50
BANDWIDTH = 0.3  # of jumprelu
KEPT = {"few": 2, "many": 20}  # latents that each row keeps
DENSITIES = [0.0, 0.02, 0.08, 0.5, 1.0]


def matrix(density: float) -> Tensor:
    kept = torch.rand(B, F, generator=torch.Generator().manual_seed(1)) < density
    return normal(B, F, seed=2) * kept


def entries_of(dense: Tensor, zeros: float = 0.1) -> SparseCodes:
    """All non-zero entries of a matrix and some of its zeros, each row's in random order."""
    generator = torch.Generator().manual_seed(3)
    held = (dense != 0) | (torch.rand(dense.shape, generator=generator) < zeros)
    indices = [row.nonzero()[:, 0] for row in held]
    indices = [own[torch.randperm(len(own), generator=generator)] for own in indices]
    sizes = torch.tensor([len(own) for own in indices])
    values = torch.cat([row[own] for row, own in zip(dense, indices, strict=True)])
    return SparseCodes(values, sizes.cumsum(0) - sizes, torch.cat(indices), dense.shape[1])


FORMS: dict[str, Callable[[Tensor], Codes]] = {"dense": Codes, "sparse": entries_of}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[Tensor], Codes]:
    return FORMS[request.param]


@pytest.mark.parametrize("density", DENSITIES)
def test_products_equal_those_with_the_matrix(density: float, form: Callable[[Tensor], Codes]):
    dense, right, below = matrix(density), normal(F, D, seed=3), normal(B, D, seed=4)
    codes = form(dense)
    assert codes.shape == (B, F)
    assert torch.equal(codes.dense(), dense)
    rows = torch.tensor([4, 1, 29, 7])
    assert torch.equal(codes.dense_rows(rows), dense[rows])
    torch.testing.assert_close(codes.times(right), dense @ right)
    torch.testing.assert_close(codes.transposed_times(below), dense.T @ below)
    torch.testing.assert_close(codes.sums(), dense.sum(0))
    torch.testing.assert_close(codes.squares(), dense.square().sum(0))
    torch.testing.assert_close(codes.map(torch.relu).dense(), dense.relu())
    torch.testing.assert_close(codes.l1(), dense.abs().sum())
    by_latent = codes.with_values(codes.values * codes.by_latent(torch.arange(F).double()))
    torch.testing.assert_close(by_latent.dense(), dense * torch.arange(F))


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("cached", [1, 130, 1 << 18])
def test_counts_equal_those_of_the_matrix(density: float, cached: int, form: Callable, monkeypatch):
    monkeypatch.setattr("saecli.sae.codes.CACHED_CODES", cached)
    dense = matrix(density)
    codes = form(dense)
    assert codes.count() == (dense != 0).sum()
    assert torch.equal(codes.latent_counts(), (dense != 0).sum(0))
    assert torch.equal(codes.row_counts(), (dense != 0).sum(1))
    assert torch.equal(codes.fired(), (dense != 0).any(0))
    torch.testing.assert_close(codes.l1(), dense.abs().sum())


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("pairs", [1, 40, 1 << 19])
@pytest.mark.parametrize("fraction", [0.0, 1e9], ids=["by panels", "by pairs"])
@pytest.mark.parametrize("more", [0, 1], ids=["alone", "in a wider array"])
def test_grams_are_added_to_the_lower_triangle(density, pairs, fraction, more, form, monkeypatch):
    monkeypatch.setattr("saecli.sae.codes.PRODUCT_PAIRS", pairs)
    for name, value in {"PAIRS_FRACTION": fraction, "PANEL": 16, "SPARSE_PANEL": 12}.items():
        monkeypatch.setattr(f"saecli.sae.codes.{name}", value)
    dense, before = matrix(density), normal(F, F + more, seed=5)
    array = before.clone()
    form(dense).add_gram(array[:, :F])
    torch.testing.assert_close(array[:, :F].tril(), before[:, :F].tril() + (dense.T @ dense).tril())
    assert torch.equal(array[:, F:], before[:, F:])


def test_gram_products_are_added_in_the_precision_of_the_sum(form: Callable) -> None:
    dense = matrix(0.05).float()
    gram, expected = torch.full((F, F), 1e9, dtype=torch.float64), (dense.T @ dense).double()
    form(dense).add_gram(gram)
    torch.testing.assert_close((gram - 1e9).tril(), expected.tril(), rtol=1e-5, atol=1e-5)


def test_joined_codes_are_those_of_all_rows() -> None:
    dense = matrix(0.05)
    parts = [entries_of(part) for part in dense.split([1, 12, 17])]
    assert torch.equal(joined(parts).dense(), dense)
    zeros = torch.zeros(4, F).double()
    nothing = entries_of(zeros, zeros=0)
    assert torch.equal(joined([nothing, *parts]).dense(), torch.cat([zeros, dense]))


def test_non_zeros_are_searched_for_where_they_are_few() -> None:
    assert few_entries(matrix(1.5 * DENSITY) != 0) is None
    few = matrix(0.5 * DENSITY)
    assert torch.equal(few_entries(few != 0), few.flatten().nonzero()[:, 0])


@pytest.mark.parametrize("levels", [3, 10**6])  # of values: mostly equal, or distinct
def test_places_of_the_largest_ascend_and_hold_topks_values(levels: int) -> None:
    values = torch.randint(levels, (B, F), generator=torch.Generator().manual_seed(5)).float()
    values[3, 5], values[4, 6] = torch.nan, -torch.inf
    places = largest_of_rows(values, 7)
    assert (places.diff() > 0).all()
    kept, expected = values.gather(1, places), values.topk(7).values
    torch.testing.assert_close(kept.sort(descending=True).values, expected, equal_nan=True)


def written_out(activation: Activation, pre: Tensor, sae: SAE) -> Tensor:
    """The codes of a training batch by dense tensors and plain autograd alone."""
    if activation.name == "jumprelu":
        threshold, value = sae.threshold, sae.threshold.detach()
        near = ((pre - threshold).abs() < BANDWIDTH / 2).double()
        # Zero, with the straight-through gradient of the threshold.
        straight_through = -value / BANDWIDTH * near.detach() * (threshold - value)
        return pre * (pre > threshold) + straight_through
    if activation.name == "relu":
        return pre.relu()
    if activation.name == "matching-pursuit":
        return torch.stack([pursued(row, sae.W_enc, activation) for row in pre])
    kept = torch.zeros_like(pre)
    if activation.name == "batchtopk":
        kept.view(-1)[pre.detach().flatten().topk(activation.k * len(pre)).indices] = 1
        return (pre * kept).relu()
    ranked = pre.detach().abs() if activation.name == "abs-topk" else pre.detach()
    kept.scatter_(1, ranked.topk(activation.k, dim=1).indices, 1.0)
    return (pre * kept).relu() if activation.name == "relu-topk" else pre * kept


def pursued(pre: Tensor, W_enc: Tensor, activation: Activation) -> Tensor:
    """Matching pursuit of one row, step by step; least squares by solving for all that were chosen."""
    norms = W_enc.norm(dim=0)
    directions, left, chosen, shares = W_enc / norms, pre / norms, [], []
    while len(chosen) < activation.k and left.max() > 0:
        latent = int(left.argmax())
        chosen.append(latent)
        shares.append(left[latent])
        left = left - left[latent] * directions.T @ directions[:, latent]
        left = left.index_fill(0, torch.tensor(latent), -torch.inf)
    v, own = torch.stack(shares), directions[:, chosen]
    if activation.least_squares:
        ridge = RIDGE * torch.eye(len(chosen), dtype=pre.dtype)
        v = torch.linalg.solve(own.T @ own + ridge, pre[chosen] / norms[chosen]).relu()
    return torch.zeros_like(pre).index_put((torch.tensor(chosen),), v * norms[chosen])


def sae_of(activation: Activation, many: bool) -> SAE:
    parameters = {name: tensor.double() for name, tensor in activation.parameters(F).items()}
    if activation.name == "jumprelu":
        parameters = {"threshold": torch.linspace(0.05, 1, F, dtype=torch.float64)}
    W_enc, W_dec, b_dec = normal(D, F, seed=4) / 4, normal(F, D, seed=5), normal(D, seed=7)
    b_enc = normal(F, seed=6) / 2
    if not many and activation.name in ("relu", "jumprelu"):
        b_enc -= 1.5
    sae = SAE(W_enc, b_enc, W_dec, b_dec, activation, parameters)
    for name, parameter in sae.named_parameters():
        parameter.requires_grad_(name not in sae.estimates)
    return sae


@pytest.mark.parametrize(
    "name", [name for name in ACTIVATIONS if name != "gated"] + ["least-squares"]
)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("sparsity", ["none", "l1", "l1-codes"])
def test_gradients_of_the_loss_equal_plain_autograd(name: str, kept: str, sparsity: str) -> None:
    if name == "least-squares":
        activation = MatchingPursuit(KEPT[kept], least_squares=True)
    else:
        activation = activation_of(name, KEPT[kept])
    sae, y = sae_of(activation, kept == "many"), normal(B, D, seed=8)
    x = normal(B, D, seed=3).requires_grad_()
    loss = sae.loss(Batch(x, y, B), sparsity, 0.3)
    z = written_out(activation, x @ sae.W_enc + sae.b_enc, sae)
    torch.testing.assert_close(loss.codes.dense(), z)
    expected = (z @ sae.W_dec + sae.b_dec - y).square().sum(1).mean()
    torch.testing.assert_close(loss.squared_error, expected)
    if sparsity == "l1":
        expected = expected + 0.3 * (z.abs() * sae.W_dec.norm(dim=1)).sum(1).mean()
    if sparsity == "l1-codes":
        expected = expected + 0.3 * z.abs().sum(1).mean()
    torch.testing.assert_close(loss.value, expected)
    leaves = [x, *(parameter for parameter in sae.parameters() if parameter.requires_grad)]
    assert len(leaves) == 5 + (activation.name == "jumprelu")
    ours, theirs = torch.autograd.grad(loss.value, leaves), torch.autograd.grad(expected, leaves)
    torch.testing.assert_close(ours, theirs)
    assert isinstance(loss.codes, SparseCodes) == (kept == "few")


@pytest.mark.parametrize("name", ["topk", "relu-topk", "abs-topk", "batchtopk", "matching-pursuit"])
def test_codes_that_are_known_are_not_searched_for(name: str, monkeypatch: pytest.MonkeyPatch):
    def search(mask: Tensor) -> None:
        pytest.fail("searched")

    monkeypatch.setattr("saecli.sae.codes.few_entries", search)
    sae = sae_of(ACTIVATIONS[name](k=2), many=False)
    loss = sae.loss(Batch.of(normal(B, D, seed=3)), "l1", 0.3)
    loss.value.backward()
    codes = loss.codes.detach()
    codes.transposed_times(normal(B, D, seed=4))
    codes.add_gram(torch.zeros(F, F, dtype=torch.float64))
    assert codes.count() <= 2 * B
