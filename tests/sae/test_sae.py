"""The autoencoder as Python sees it: what `encode` and `decode` take, refuse and give, and how an SAE is shown."""

from pathlib import Path
from typing import Any

import pytest
import torch
from homes import D, F, activation_of, make_store, random_sae, some_rows

import saecli
from saecli.sae.activations import ACTIVATIONS, Activation, TopK
from saecli.sae.codes import Codes

EVERY = [*map(activation_of, ACTIVATIONS)]
LEADING = [(), (1,), (7,), (2, 3), (2, 1, 4), (0,), (3, 0), (0, 5, 2)]


def named(value: Any) -> str:
    return value.name if isinstance(value, Activation) else str(value)


@pytest.mark.parametrize("lead", LEADING, ids=named)
@pytest.mark.parametrize("activation", EVERY, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
def test_any_leading_shape_is_that_of_the_result_row_by_row(activation, lead, dtype):
    sae = random_sae(activation).copy_to(dtype)
    x = torch.randn(*lead, D, generator=torch.Generator().manual_seed(1), dtype=dtype)
    z, x_hat = sae.encode(x), sae(x)
    assert (z.shape, x_hat.shape, z.dtype, x_hat.dtype) == ((*lead, F), (*lead, D), dtype, dtype)
    for row, codes, result in zip(
        x.reshape(-1, D).unbind(), z.reshape(-1, F), x_hat.reshape(-1, D), strict=True
    ):
        pre = (row.double() @ sae.W_enc.double() + sae.b_enc.double())[None]
        learned = {name: value.double() for name, value in sae.activation_parameters.items()}
        expected = activation(pre, learned | {"W_enc": sae.W_enc.double()}).dense()[0]
        torch.testing.assert_close(codes.double(), expected, atol=1e-4, rtol=1e-4)
        expected = expected @ sae.W_dec.double() + sae.b_dec.double()
        torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", EVERY, ids=named)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float64], ids=named)
def test_other_floating_point_types_are_computed_on_in_the_saes_own(activation: Activation, given):
    sae = random_sae(activation)
    x = torch.from_numpy(some_rows(12)).reshape(3, 4, D).to(given)
    assert torch.equal(sae.encode(x), sae.encode(x.float()))
    z = sae.encode(x).to(given)
    assert torch.equal(sae.decode(z), sae.decode(z.float()))
    assert {sae.encode(x).dtype, sae.decode(z).dtype, sae(x).dtype} == {torch.float32}


def test_rows_in_the_saes_own_type_take_the_path_of_codes() -> None:
    sae, x = random_sae(TopK(k=3)), torch.from_numpy(some_rows(50)).requires_grad_()
    codes = sae.codes(x)
    assert torch.equal(sae.encode(x), codes.dense())
    torch.testing.assert_close(sae.decode(codes.dense()), sae.predicted(x, codes)[:, -1])
    assert torch.equal(sae(x), sae.predicted(x, codes)[:, -1])
    expected = torch.addmm(sae.b_dec, codes.dense(), sae.W_dec)
    torch.testing.assert_close(sae.predicted(x, Codes(codes.dense()))[:, -1], expected)
    sae(x[None]).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.ones(3, D + 1), rf"\(3, {D + 1}\) on cpu"),
        (torch.tensor(1.0), r"\(\) on cpu"),
        (torch.ones(0), r"\(0,\) on cpu"),
        (torch.ones(3, D, device="meta"), rf"\(3, {D}\) on meta"),
    ],
)
def test_other_shapes_and_devices_are_refused_in_one_sentence(given: torch.Tensor, got: str):
    sae = random_sae()
    expected = rf"expected a tensor of shape \(\.\.\., {D}\) .*`\.to\('cpu'\)`.*, got {got}$"
    for refusing in (sae.encode, sae):
        with pytest.raises(saecli.SaeError, match=f"^cannot encode: {expected}"):
            refusing(given)
    with pytest.raises(saecli.SaeError, match=rf"^cannot decode: .* \(\.\.\., {F}\) "):
        sae.decode(given)


def test_an_sae_is_shown_in_one_line() -> None:
    expected = f"SAE(Relu(), d_in={D}, d_out={D}, d_sae={F}, float32, cpu)"
    assert repr(random_sae()) == expected


def test_a_store_is_shown_in_one_line(tmp_path: Path) -> None:
    make_store(tmp_path, "rows", some_rows(20))
    where = str(tmp_path / "activations" / "rows")
    assert repr(saecli.open_store("rows", tmp_path)) == (
        f"ActivationStore('rows', rows=20, d_in={D}, float32, path={where!r})"
    )
