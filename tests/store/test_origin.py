"""The JSON of an origin, which older stores and SAEs hold."""

import pytest

from saecli.store.origin import HookPoint, ModelName, Origin

GPT2 = {"model": "gpt2", "revision": "607a30d"}
POST, PRE = ({"layer": n, "site": site} for n, site in ((3, "resid_post"), (4, "resid_pre")))
TEXT = {"dataset": "a.txt + b.txt", "context": 128, "prepend_bos": False}
STORES = {"data": "x", "data_hash": "6a", "beside": ["y", "z"], "target": "t"}
SPLIT = {"split_seed": 0, "fraction": 0.5}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"model": "gpt2"},
        {"layer": 3},
        GPT2 | POST | TEXT | STORES | SPLIT,
        {"model": "gpt2", "layer": None, "site": "transformer.ln_f:out"},
        POST | {"target_layer": 4, "target_site": "mlp_out"},
        POST | {"target_layer": None, "target_site": "ln_f:out"},
        GPT2 | POST | {"inputs": [POST, PRE]},
        GPT2 | POST | {"inputs": [POST | GPT2, PRE | {"model": "distilgpt2"}]},
    ],
)
def test_an_origin_has_the_entries_of_its_json_and_their_order(entries: dict) -> None:
    found = Origin.from_json(entries | {"unknown": 1}).to_json()
    order = "model revision layer site dataset context prepend_bos target_layer target_site inputs"
    names = [*order.split(), *STORES, *SPLIT]
    assert found == entries and [*found] == [name for name in names if name in entries]


def test_side_by_side_the_origins_of_two_models_name_each_ones() -> None:
    first, second = Origin.from_json(GPT2 | POST | TEXT), Origin.from_json({"model": "b"} | PRE)
    joined = Origin.joined([first, second, first])
    assert joined.models == (ModelName("gpt2", "607a30d"), ModelName("b"))
    assert joined.read == tuple(
        HookPoint(*point)
        for point in ((3, "resid_post", 0), (4, "resid_pre", 1), (3, "resid_post", 0))
    )
    assert joined.hook_points()[0][1] == "layer 4 resid_pre of b"
    assert Origin.joined([first, Origin()]) == first  # a store that names no hook point


@pytest.mark.parametrize(
    ("entries", "said"),
    [({"layer": -1}, "layer: expected"), ({"inputs": [{"site": 3}]}, "inputs.0.site: expected")],
)
def test_an_entry_of_another_type_is_named(entries: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Origin.from_json(entries)
