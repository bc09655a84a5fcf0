"""Public functions give the same whatever state of torch the caller has set, and leave it as it was."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from homes import grid, make_run, make_store, random_sae, same_tensors, some_rows
from tiny_models import open_model, prompt

import saecli
from saecli.sae.activations import Gated, TopK
from saecli.sae.dictionary import SAE


@contextmanager
def set_by(setter: Callable[[Any], None], value: Any, usual: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(usual)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": lambda: set_by(torch.set_grad_enabled, False, True),
    "inference": torch.inference_mode,
    "float64": lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: set_by(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta": lambda: set_by(torch.set_default_device, "meta", None),
    "within meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
QUICK = {"d_sae": 24, "epochs": 2, "batch_size": 64}
PLAIN: dict[str, Callable[[SimpleNamespace], Any]] = {
    "fit gated": lambda here: saecli.fit("rows", act="gated", target_l0=3.0, solver="sgd", **QUICK),
    "evaluate": lambda here: saecli.evaluate(here.sae, "rows"),
    "sparsity": lambda here: saecli.sparsity("run", data="rows"),
    "load_sae": lambda here: saecli.load_sae("run"),
    "open_store": lambda here: np.concatenate(
        [*saecli.open_store("rows").split("all").sequential(90)]
    ),
    "an SAE": lambda here: [here.sae(here.x), here.sae.encode(here.x), here.sae.decode(here.z)],
    "fit": lambda here: saecli.fit(here.rows, act="topk", k=3, **QUICK),
}
OF_A_MODEL: dict[str, Callable[[SimpleNamespace], Any]] = {
    "extract": lambda here: read_anew(saecli.extract, "tiny-gemma2", layer=1, rows=300),
    "import_array": lambda here: read_anew(saecli.import_array, here.path / "rows.npy"),
    "import_synthetic": lambda here: read_anew(saecli.import_synthetic, rows=300),
    "evaluate": lambda here: saecli.evaluate(here.first, "docs", model="tiny-gemma2"),
    "finetune": lambda here: saecli.finetune(here.first, "tiny-gemma2", data="docs", tokens=1500),
    "geometry": lambda here: saecli.geometry(here.first, "docs"),
    "read": lambda here: saecli.read(here.first, "Hello there", model="tiny-gemma2"),
    "refit": lambda here: saecli.refit(here.first, data="docs"),
    "stability": lambda here: saecli.stability([here.first, here.other]),
    "steer": lambda here: saecli.steer(here.first, 3, "Hello", scale=4.0, max_new_tokens=5),
}
NAMES = iter(range(1000))


def read_anew(make: Callable[..., Any], *given: Any, **options: Any) -> np.ndarray:
    store = make(*given, name=f"new-{next(NAMES)}", **options)
    return np.concatenate([*store.split("all").sequential(200)])


def equal(first: Any, other: Any) -> bool:
    if isinstance(first, SAE):
        return same_tensors(first.tensors(), other.tensors())
    if isinstance(first, torch.Tensor):
        return first.dtype == other.dtype and torch.equal(first, other)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, other)
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(equal(first[key], other[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(equal, first, other))
    return first == other or first != first


def found_in() -> list[Any]:
    kinds = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return [*kinds, *gradients, torch.get_default_dtype(), torch.get_default_device()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("SAE_HOME", str(tmp_path))
    rows, sae = some_rows(500), random_sae(TopK(k=3))
    make_store(tmp_path, "rows", rows)
    make_run(tmp_path, "run", random_sae(Gated(), seed=1))
    np.save(tmp_path / "rows.npy", rows)
    x = torch.from_numpy(rows[:50])
    return SimpleNamespace(path=tmp_path, rows=rows, sae=sae, x=x, z=sae.encode(x))


def assert_undisturbed(call: Callable[[], Any], state: str) -> None:
    expected, usual = call(), found_in()
    with STATES[state]():
        before = found_in()
        found = call()
        assert found_in() == before != usual
    assert equal(found, expected)


@pytest.mark.parametrize(("name", "state"), grid([*PLAIN], [*STATES]))
def test_functions_are_undisturbed(here: SimpleNamespace, name: str, state: str):
    assert_undisturbed(lambda: PLAIN[name](here), state)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_functions_of_a_model_are_undisturbed(here: SimpleNamespace, state: str):
    docs = saecli.extract("tiny-gemma2", layer=1, rows=1500, name="docs")
    options = {"act": "topk", "k": 4, "d_sae": 96, "steps": 20}
    here.first = here.path / "first"
    saecli.save_sae(saecli.fit(docs, **options), here.first)
    here.other = saecli.fit(docs, **options, seed=1)
    for call in OF_A_MODEL.values():
        assert_undisturbed(lambda call=call: call(here), state)


@pytest.mark.parametrize("state", ["bfloat16", "meta", "autocast"])
def test_an_sae_is_spliced_into_a_model_alike(here: SimpleNamespace, state: str):
    model, logits = open_model(here.path / "model"), []
    sae = random_sae(TopK(k=3), d_in=model.config.hidden_size)
    for begun in (STATES["no gradients"], STATES[state]):
        for spliced in (
            saecli.spliced(model, {(1, "resid_post"): sae}, error=False),
            saecli.steering(model, sae, 3, scale=8.1, layer=1, site="resid_post"),
        ):
            opening = begun()
            with opening:
                spliced.__enter__()
            with torch.no_grad():
                logits.append(model(prompt()).logits)
            spliced.__exit__(None, None, None)
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    assert not torch.equal(logits[0], logits[1])


def test_gradients_of_an_sae_are_the_callers():
    sae = random_sae(TopK(k=3)).requires_grad_()
    x = torch.from_numpy(some_rows(20))
    assert sae(x).requires_grad and sae.encode(x).requires_grad
    with torch.no_grad():
        assert not sae(x).requires_grad
    with torch.autocast("cpu"):
        before = sae(x)
        with torch.no_grad():
            sae.W_dec *= 2
            sae.b_dec *= 2
        torch.testing.assert_close(sae(x), 2 * before)  # by no copy of the weights before
