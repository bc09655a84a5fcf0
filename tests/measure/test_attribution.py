"""`saecli.read(..., why=...)` against plain autograd on hooks written by hand, and removals by `saecli.spliced`."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import crosscoder_of, make_run, steerable
from plain_hooks import blocks, noted, replaced
from tiny_models import save_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.sae.activations import Relu, TopK

PLACE: dict[str, Any] = {"layer": 1, "site": "resid_post"}
MLP = {"layer": 1, "site": "mlp_in", "target_layer": 1, "target_site": "mlp_out"}
EVERY = list(range(20))
TEXT, PROMPT = "fghabz", "Return the number of items"


def log_odds(logits: Tensor, token: int, against: int | None) -> Tensor:
    log_p = logits[0, -1].double().log_softmax(-1)
    return log_p[token] if against is None else log_p[token] - log_p[against]


def table(document: dict[str, Any]) -> np.ndarray:
    """The attributions of all latents, (T, F)."""
    found = np.zeros((len(document["tokens"]), len(EVERY)))
    for latent in document["latents"]:
        found[latent["positions"], latent["latent"]] = latent["attributions"]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose norms compute in float64 if it is in it."""
    return save_model(tmp_path / "gpt2", "gpt2")


def ids_of(folder: Path, text: str, special: bool = True) -> list[int]:
    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=special)["input_ids"]


def of_double(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.double()


@pytest.mark.parametrize("against", [None, "e"])
@pytest.mark.parametrize("steps", [1, 3])
def test_attributions_are_integrals_by_plain_autograd_in_float64(folder, steps, against):
    model, ids, sae = of_double(folder), ids_of(folder, TEXT), steerable(Relu())
    asked: dict[str, Any] = {"why": "d", "against": against, "steps": steps}
    document = saecli.read(sae, TEXT, str(folder), **asked, latents=EVERY, **PLACE)
    sae = sae.copy_to(torch.float64)
    (token,) = ids_of(folder, "d", special=False)
    metric = [token, None if against is None else ids_of(folder, against, special=False)[0]]
    with torch.no_grad(), noted(blocks(model)[1]) as seen:
        clean = model(torch.tensor([ids])).logits
    z = sae.encode(seen[0])
    z[:, 0] = 0  # <bos>
    error = seen[0] - z @ sae.W_dec - sae.b_dec
    integrals = {"codes": torch.zeros_like(z), "error": torch.zeros_like(error)}
    for step in range(1, steps + 1):
        parts = [(step / steps * z).requires_grad_(), error.clone().requires_grad_()]

        def summed(x: Tensor, parts: Sequence[Tensor] = parts) -> Tensor:
            y = parts[0] @ sae.W_dec + sae.b_dec + parts[1]
            return torch.cat([x[:, :1], y[:, 1:]], 1)

        with replaced(blocks(model)[1], summed):
            value = log_odds(model(torch.tensor([ids])).logits, *metric)
        gradients = torch.autograd.grad(value, parts)
        integrals["codes"] += z * gradients[0] / steps
        integrals["error"] += error * gradients[1] / steps
    near = {"rtol": 1e-3, "atol": 1e-5}
    np.testing.assert_allclose(table(document), integrals["codes"][0], **near)
    why, by = document["why"], document["why"]["attributed"]
    assert why["value"] == pytest.approx(float(log_odds(clean, *metric)), abs=1e-5)
    assert by["error"] == pytest.approx(float(integrals["error"].sum()), rel=1e-3, abs=1e-5)
    assert by["latents"] == pytest.approx(float(integrals["codes"].sum()), rel=1e-3, abs=1e-5)
    assert sum(by.values()) == pytest.approx(why["value"])
    of_tokens = [token["attribution"] for token in document["tokens"]]
    np.testing.assert_allclose(of_tokens, integrals["codes"][0].sum(1), **near)
    assert [why["token"].strip(), why["position"]] == ["d", len(ids) - 1]
    sizes = [abs(latent["attribution"]) for latent in why["latents"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0.01


@pytest.mark.parametrize("place", [PLACE, MLP])
def test_with_many_steps_attributions_sum_to_the_change_without_codes(folder, place):
    sae = steerable(Relu())
    sae.metadata = {"model": str(folder), **place}
    sums = []
    for steps in (50, 100):
        why = saecli.read(sae, TEXT, why="d", steps=steps)["why"]
        sums.append(why["attributed"]["latents"])
        without = why["removed"]["all"]["measured"]
    # A sum at n right ends is off by c / n and terms of 1 / n^2.
    assert 2 * sums[1] - sums[0] == pytest.approx(-without, rel=0.01)
    assert abs(without) > 0.3


@pytest.mark.parametrize("place", [PLACE, MLP])
@torch.no_grad()
def test_removals_are_those_of_spliced_codes_set_to_zero(place: dict[str, Any]):
    sae = steerable(TopK(k=6), d_in=128)
    if place is MLP:
        W_skip = torch.randn(128, 128, generator=torch.Generator().manual_seed(3)) / 12
        sae = sae.changed(W_skip=W_skip)
    sae.metadata = {"model": TINY_GEMMA2, **place}
    why = saecli.read(sae, PROMPT, why=" in", against="items", top=4)["why"]
    assert [why["token"], why["against"]] == [" in", " items"]
    model = AutoModelForCausalLM.from_pretrained(
        BUNDLED[TINY_GEMMA2], attn_implementation="eager", dtype=torch.float32
    )
    ids = torch.tensor([ids_of(BUNDLED[TINY_GEMMA2], PROMPT)])
    token, against = (
        ids_of(BUNDLED[TINY_GEMMA2], word, special=False)[0] for word in (" in", " items")
    )

    def measured(latents: list[int], error: bool = True) -> float:
        def change(z: Tensor) -> Tensor:
            z[..., latents] = 0
            return z

        with saecli.spliced(model, sae, change=change, error=error):
            logits = model(ids).logits
        return float(log_odds(logits, token, against)) - why["value"]

    assert measured([]) == pytest.approx(0, abs=1e-4)
    strongest = [latent["latent"] for latent in why["latents"]]
    assert len(strongest) == 4
    for latent in why["latents"]:
        assert latent["measured"] == pytest.approx(measured([latent["latent"]]), abs=1e-3)
        assert abs(latent["measured"]) > 0.01
        assert latent["predicted"] == pytest.approx(-latent["attribution"], rel=1e-4)
    together = sum(latent["predicted"] for latent in why["latents"])
    assert why["removed"]["together"]["predicted"] == pytest.approx(together, rel=1e-4)
    for name, expected in (
        ("together", measured(strongest)),
        ("all", measured(EVERY)),
        ("error", measured([], error=False)),
    ):
        assert why["removed"][name]["measured"] == pytest.approx(expected, abs=1e-3)


@torch.no_grad()
def test_latents_of_several_saes_are_removed_at_once_as_by_spliced():
    """One reads what another writes, and a third is a transcoder between them."""
    saes = {}
    for name, place in (
        ("late", {"layer": 2, "site": "resid_post"}),
        ("mlp", MLP | {"layer": 2, "target_layer": 2}),
        ("early", PLACE),
    ):
        saes[name] = steerable(TopK(k=6), d_in=128)
        saes[name].metadata = {"model": TINY_GEMMA2, **place}
    late, *others = saes.values()
    asked: dict[str, Any] = {"why": " in", "top": 3}
    why = saecli.read(late, PROMPT, also=others, **asked)["why"]
    answers = [why, *why["also"]]
    for answer, sae in zip(answers, saes.values(), strict=True):
        document = saecli.read(sae, PROMPT, **asked)
        alone = document["why"]
        assert [answer["latents"], answer["attributed"]] == [alone["latents"], alone["attributed"]]
        assert answer["removed"].items() >= alone["removed"].items()
    assert [other["site"] for other in why["also"]] == ["mlp_in", "resid_post"]
    chosen = [[latent["latent"] for latent in answer["latents"]] for answer in answers]
    model = AutoModelForCausalLM.from_pretrained(
        BUNDLED[TINY_GEMMA2], attn_implementation="eager", dtype=torch.float32
    )

    def without(latents: list[int]) -> Any:
        def change(z: Tensor) -> Tensor:
            z[..., latents] = 0
            return z

        return change

    changes = {name: without(latents) for name, latents in zip(saes, chosen, strict=True)}
    with saecli.spliced(model, saes, change=changes):
        logits = model(torch.tensor([ids_of(BUNDLED[TINY_GEMMA2], PROMPT)])).logits
    (token,) = ids_of(BUNDLED[TINY_GEMMA2], " in", special=False)
    jointly = why["removed"]["jointly"]
    expected = float(log_odds(logits, token, None)) - why["value"]
    assert jointly["measured"] == pytest.approx(expected, abs=1e-3)
    together = [answer["removed"]["together"] for answer in answers]
    assert abs(jointly["measured"] - sum(each["measured"] for each in together)) > 0.01
    assert jointly["predicted"] == pytest.approx(sum(each["predicted"] for each in together))


def test_several_saes_are_asked_about_the_first_ones_windows(tmp_path: Path):
    folder = save_model(tmp_path / "gpt2", "gpt2", bos=False)
    late, early = steerable(Relu()), steerable(Relu())
    late.metadata = {"model": str(folder), **PLACE, "prepend_bos": False}
    early.metadata = {"model": str(folder), "layer": 0, "site": "resid_post"}
    why = saecli.read(late, TEXT, why="d", also=[early])["why"]
    assert why["also"][0]["position"] == why["position"] == 5
    assert why["also"][0]["value"] == pytest.approx(why["value"], abs=1e-5)


@torch.no_grad()
def test_a_crosscoders_latents_are_removed_at_all_its_hook_points(folder: Path):
    layers = (2, 0)
    cross = crosscoder_of([{"layer": layer, "site": "mlp_out"} for layer in layers])
    why = saecli.read(cross, TEXT, str(folder), why="d", top=2)["why"]
    model, token_ids = of_double(folder), torch.tensor([ids_of(folder, TEXT)])
    (token,) = ids_of(folder, "d", special=False)
    cross = cross.copy_to(torch.float64)
    outputs = []
    for layer in layers:
        with noted(blocks(model)[layer].mlp) as seen:
            model(token_ids)
        outputs += seen
    z = cross.encode(torch.cat(outputs, dim=-1))
    z[:, 0] = 0
    for latent in why["latents"]:
        number = latent["latent"]
        with ExitStack() as opened:
            for layer, y, columns in zip(layers, outputs, cross.hook_columns, strict=True):
                left = y - z[..., [number]] * cross.W_dec[number, columns]
                mlp = blocks(model)[layer].mlp
                opened.enter_context(replaced(mlp, lambda x, left=left: left))
            value = float(log_odds(model(token_ids).logits, token, None))
        assert latent["measured"] == pytest.approx(value - why["value"], rel=1e-3, abs=1e-4)
        assert abs(latent["measured"]) > 0.01


def test_of_a_long_text_the_last_window_is_asked(folder: Path):
    sae = steerable(Relu())
    asked: dict[str, Any] = {"why": "d", "latents": EVERY, "model": str(folder), **PLACE}
    with pytest.warns(UserWarning, match="98 tokens: it is read in 2 windows"):
        whole = saecli.read(sae, TEXT * 16, **asked)
    last = saecli.read(sae, (TEXT * 16)[63:], **asked)
    np.testing.assert_allclose(table(whole)[64:], table(last), rtol=1e-4, atol=1e-7)
    assert not table(whole)[:64].any()
    assert whole["why"]["position"] == 64 + last["why"]["position"] == 97
    ended = saecli.read(sae, f"{TEXT}<eos>", **asked)["why"]
    plain = saecli.read(sae, TEXT, **asked)["why"]
    assert ended["position"] == plain["position"]
    assert ended["attributed"] == pytest.approx(plain["attributed"], rel=1e-4, abs=1e-5)
    for part, removal in plain["removed"].items():
        assert ended["removed"][part] == pytest.approx(removal, rel=1e-4, abs=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"why": " itemsitems"},
        r"--why must be one token, got ' itemsitems', which is 4 tokens: ' items', 'it'",
    ),
    ({"why": ""}, "--why must be in UTF-8 and not blank"),
    ({"why": "\udcff"}, "--why must be in UTF-8"),
    ({"why": " in", "against": " itemsitems"}, "--against must be one token"),
    ({"why": " in", "against": " in"}, "--against must be another token than --why's, got ' in'"),
    ({"against": " in"}, "--against does nothing without --why"),
    ({"why": " in", "compare": "Once"}, "cannot use both --why and --compare"),
    ({"why": " in", "steps": 0}, "--steps must be"),
]


def test_saes_that_cannot_be_asked_together_are_refused(folder: Path):
    sae = steerable()
    sae.metadata = {"model": str(folder), **PLACE}
    cross = crosscoder_of([{"layer": layer, "site": "mlp_out"} for layer in (2, 0)])
    cross.metadata = {**cross.metadata, "model": str(folder)}
    for also, sentence in (
        ([sae], "both replace layer 1, resid_post: expected one SAE there"),
        ([cross], "cannot use --also with .*, a crosscoder"),
    ):
        with pytest.raises(saecli.SaeError, match=sentence):
            saecli.read(sae, TEXT, why="d", also=also)
    with pytest.raises(saecli.SaeError, match="--also does nothing without --why"):
        saecli.read(sae, TEXT, also=[sae])


@pytest.mark.parametrize(("asked", "sentence"), REFUSED)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], sentence: str):
    sae = steerable(d_in=128)
    sae.metadata = {"model": TINY_GEMMA2, **PLACE}
    with pytest.raises(saecli.SaeError, match=sentence):
        saecli.read(sae, PROMPT, **asked)


def test_an_unknown_token_and_a_text_without_codes_are_refused(folder: Path):
    sae = steerable()
    with pytest.raises(saecli.SaeError, match="--why must be one token, got 'A', which is 1 token"):
        saecli.read(sae, TEXT, str(folder), why="A", **PLACE)
    with pytest.raises(saecli.SaeError, match="--why needs a token with codes"):
        saecli.read(sae, "<eos>", str(folder), why="d", **PLACE)


def test_the_terminal_and_the_page_show_attributions_beside_removals(sae, tmp_path):
    origin = {"model": TINY_GEMMA2, **PLACE}
    make_run(sae.home, "first", steerable(Relu(), d_in=128), origin=origin)
    words = ("read", "first", "--prompt", PROMPT, "--why", " in", "--against", " the", "--top", "3")
    document = sae(*words, "--json").json
    why = document["why"]
    python = saecli.read("first", PROMPT, why=" in", against=" the", top=3, home=sae.home)
    assert document == json.loads(json.dumps(python)) and len(why["latents"]) == 3
    page = tmp_path / "page.html"
    said = sae(*words, "--html", page).succeeds().out
    first = " ".join(said.split())
    assert f"log p(␣in) - log p(␣the) after ␣items is {why['value']:.4g}: " in first
    for name, part in (
        *((f"│ {latent['latent']} ", latent) for latent in why["latents"]),
        ("these 3 together", why["removed"]["together"]),
        ("reconstruction error", why["removed"]["error"]),
    ):
        (line,) = [line for line in said.splitlines() if name in line and line.count("│") == 6]
        assert [part["predicted"], part["measured"]] == pytest.approx(
            [float(cell) for cell in line.split("│")[2:4]], rel=1e-3
        )
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    make_run(sae.home, "later", steerable(Relu(), d_in=128), origin=origin | {"layer": 2})
    both = sae(*words, "--also", "later", "--json").json["why"]
    shown = " ".join(sae(*words, "--also", "later").succeeds().out.split())
    assert (
        f"later, layer 2, resid_post: {both['also'][0]['attributed']['latents']:.4g} attr" in shown
    )
    joint = both["removed"]["jointly"]
    assert f"predicted {joint['predicted']:.4g}, measured {joint['measured']:.4g}" in shown
    assert data["why"] == why and all("attributions" in latent for latent in data["latents"])
