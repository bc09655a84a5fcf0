"""Steering: `saecli.steering` against hooks written by hand, and `sae steer` against `model.generate`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import CommandLine, crosscoder_of, make_run, steerable, trained_on_docs, with_origin
from plain_hooks import blocks, noted, replaced
from tiny_models import EOS, open_model, prompt, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import saecli
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.sae.activations import Activation, JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE
from saecli.sae.formats import load, save_native

LATENTS, SCALES = [3, 11], [2.5, -4.0]
AT: dict[str, Any] = {"layer": 1, "site": "resid_post"}


def by_hand(sae: SAE, method: str, x: Tensor, scales: list[float] = SCALES) -> Tensor:
    """The reconstruction from changed codes, and the error of the one from the codes as they are, (B, T, D)."""
    z = sae.encode(x)
    new = z.clone()
    for latent, scale in zip(LATENTS, scales, strict=True):
        new[..., latent] = {"add": z[..., latent] + scale, "clamp": scale, "ablate": 0.0}[method]
    return new @ sae.W_dec + sae.b_dec + (x - (z @ sae.W_dec + sae.b_dec))


@torch.no_grad()
def hooked(model: nn.Module, block: nn.Module, change: Any, token_ids: Tensor) -> Tensor:
    """The logits with a plain hook on a block, which leaves BOS, EOS, padding and the first token as they are."""
    plain = (token_ids > EOS)[..., None]
    plain[:, 0] = False

    with replaced(block, lambda x: torch.where(plain, change(x), x)):
        return model(token_ids, use_cache=False).logits


def test_a_latent_of_a_crosscoder_is_added_at_the_hook_point_of_the_named_model(tmp_path: Path):
    folders = [save_model(tmp_path / name, "llama") for name in ("base", "chat")]
    inputs = [
        {"layer": layer, "site": "resid_post", "model": str(folder.resolve())}
        for layer, folder in ((1, folders[0]), (0, folders[1]))
    ]
    cross = crosscoder_of(inputs)
    for folder, layer, place in zip(folders, (1, 0), cross.hook_columns, strict=True):
        model, step = AutoModelForCausalLM.from_pretrained(folder).eval(), 3 * cross.W_dec[7, place]
        with torch.no_grad(), saecli.steering(model, cross, 7, scale=3):
            steered = model(prompt()).logits
        expected = hooked(model, blocks(model)[layer], lambda x, step=step: x + step, prompt())
        torch.testing.assert_close(steered, expected)
    with pytest.raises(saecli.SaeError, match="must choose one hook point of"):
        saecli.steer(cross, 7, "ab", scale=3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["add", "clamp", "ablate"])
@pytest.mark.parametrize("activation", [Relu(), TopK(k=3), JumpRelu()], ids=lambda act: act.name)
def test_logits_are_those_of_a_hook_written_by_hand(
    model: nn.Module, method: str, activation: Activation
):
    sae, token_ids = steerable(activation), prompt()
    scale = None if method == "ablate" else SCALES
    expected = hooked(model, blocks(model)[1], lambda x: by_hand(sae, method, x), token_ids)
    with torch.no_grad():
        before = model(token_ids).logits
        with saecli.steering(model, sae, torch.tensor(LATENTS), method=method, scale=scale, **AT):
            found = model(token_ids).logits
        after = model(input_ids=token_ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(before, after)
    assert (before - found).abs().max() > 0.1


def test_one_scale_is_for_all_latents_and_special_tokens_are_the_users(model: nn.Module):
    sae, token_ids = steerable(), prompt()
    token_ids = token_ids + 3

    def clamped(x: Tensor) -> Tensor:
        return by_hand(sae, "clamp", x, [3.0, 3.0])

    expected = hooked(model, blocks(model)[0], clamped, token_ids)
    options = {"method": "clamp", "scale": 3, "layer": 0, "site": "resid_post", "special": []}
    with torch.no_grad(), saecli.steering(model, sae, LATENTS, **options):
        steered = model(token_ids).logits
        embedded = model(inputs_embeds=model.get_input_embeddings()(token_ids)).logits
    torch.testing.assert_close(steered, expected, rtol=1e-4, atol=1e-4)
    if model.config.model_type != "gemma2":  # which scales embeddings made of ids
        torch.testing.assert_close(steered, embedded, rtol=1e-4, atol=1e-4)


def test_the_first_token_of_a_text_padded_on_the_left_stays(model: nn.Module):
    sae, token_ids = steerable(), prompt() + 3
    mask = torch.ones_like(token_ids)
    mask[1, :3] = 0

    def run() -> Tensor:
        with noted(blocks(model)[1]) as seen:
            model(token_ids, attention_mask=mask, use_cache=False)
        return seen[0]

    with torch.no_grad():
        before = run()
        with saecli.steering(model, sae, LATENTS, scale=SCALES, **AT):
            after = run()  # its hook comes last
    change = (after - before)[mask.bool()]
    step = torch.tensor(SCALES) @ sae.W_dec[LATENTS]
    expected = step.expand(len(change), -1).clone()
    expected[[0, 7]] = 0  # the first tokens of the two texts, of 7 and 4 tokens
    torch.testing.assert_close(change, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["add", "clamp", "ablate"])
def test_a_transcoder_changes_what_it_predicts_by_codes_of_what_it_reads(
    tmp_path: Path, method: str
):
    model = open_model(tmp_path, "llama")
    sae, token_ids, folder = steerable(), prompt(), tmp_path / "transcoder"
    folder.mkdir()
    place = {"layer": 1, "site": "mlp_in", "target_layer": 1, "target_site": "mlp_out"}
    save_native(with_origin(sae, place), folder)
    mlp = blocks(model)[1].mlp

    def changed(y: Tensor) -> Tensor:
        return y + by_hand(sae, method, seen[-1]) - seen[-1]

    with noted(mlp, "in") as seen:
        expected = hooked(model, mlp, changed, token_ids)
    scale = None if method == "ablate" else SCALES
    with torch.no_grad(), saecli.steering(model, folder, LATENTS, method=method, scale=scale):
        steered = model(token_ids).logits
    torch.testing.assert_close(steered, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def home(sae: CommandLine) -> CommandLine:
    """A home with an SAE of the bundled model's width, and the same SAE without its hook point."""
    sae_of_model = steerable(d_in=128)
    make_run(sae.home, "first", sae_of_model, origin={"model": TINY_GEMMA2, **AT})
    saecli.save_sae(sae_of_model, sae.home / "nowhere")
    return sae


TEXT = "Return the number of"
WORDS = ("--latent", "3", "--latent", "11", "--prompt", TEXT, "--max-new-tokens", "12", "--json")


@torch.no_grad()
def test_texts_are_those_of_generate_and_the_document_is_that_of_python(home: CommandLine):
    done = home("steer", "first", *WORDS, "--scale", "20", "--scale", "-9")
    (texts,) = done.json["continuations"]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED[TINY_GEMMA2])
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2]).float()
    encoded, exact = tokenizer(TEXT, return_tensors="pt"), steerable(d_in=128)
    for name in ("plain", "steered"):
        scales = [20.0, -9.0] if name == "steered" else [0.0, 0.0]
        token_ids = encoded["input_ids"]
        for _ in range(12):
            change = partial(by_hand, exact, "add", scales=scales)
            logits = hooked(model, blocks(model)[1], change, token_ids)
            token_ids = torch.cat([token_ids, logits[:, -1:].argmax(-1)], 1)
        assert TEXT + texts[name] == tokenizer.decode(token_ids[0], skip_special_tokens=True)
    assert texts["plain"] != texts["steered"]
    options = {"scale": [20, -9], "max_new_tokens": 12, "home": home.home}
    assert saecli.steer("first", LATENTS, TEXT, **options) == done.json
    lines = done.json["latents"]
    assert [(line["latent"], line["scale"]) for line in lines] == [(3, 20.0), (11, -9.0)]
    assert [line["store_max"] for line in lines] == [None, None]
    x = model(**encoded, output_hidden_states=True).hidden_states[2][0, 1:]
    norm = x.norm(dim=1).quantile(0.5).item()
    assert done.json["activation_norm"] == pytest.approx(norm, rel=1e-4)
    largest = exact.encode(x)[:, LATENTS].amax(0).tolist()
    assert [line["prompt_max"] for line in lines] == pytest.approx(largest, rel=1e-3)


def test_a_prompt_with_its_own_bos_is_continued_as_without_it(home: CommandLine):
    words = ("steer", "first", "--latent", "3", "--scale", "9", "--max-new-tokens", "3", "--json")
    plain, own = (home(*words, "--prompt", text) for text in (TEXT, f"<bos>{TEXT}"))
    assert "--prompt begins with BOS" in own.err and "BOS" not in plain.err
    (expected,), (found,) = plain.json["continuations"], own.json["continuations"]
    assert found == {**expected, "prompt": f"<bos>{TEXT}"}


def test_the_default_scale_is_the_largest_code_on_the_store(sae: CommandLine):
    z = trained_on_docs(sae)
    latent = int(z.amax(0).argmax())
    words = ("--latent", str(latent), "--prompt", "Return the", "--max-new-tokens", "3", "--json")
    done = sae("steer", "first", *words)
    (line,) = done.json["latents"]
    assert line["scale"] == line["store_max"] == pytest.approx(float(z[:, latent].max()), rel=1e-5)
    assert done.json["store_rows"] == len(z)
    run = sae.home / "runs" / "first"
    saved, other = load(run), (latent + 1) % 64
    saved.sae.b_enc[other] = -1e6
    save_native(saved, run)
    sae("steer", "first", "--latent", str(other), *words[2:]).fails(
        2, f"latent {other} does not fire on 2,000 rows"
    )
    assert sae("rm", "docs", "--yes").status == 0
    sae("steer", "first", *words).fails(2, "--scale is needed with --method add")
    ablated = sae("steer", "first", *words, "--method", "ablate")
    assert ablated.json["latents"][0]["store_max"] is None


def test_prompts_begin_as_windows_do_where_the_tokenizer_adds_no_bos(tmp_path: Path):
    folder = save_model(tmp_path / "gpt2", "gpt2", bos=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = "fgh"
    own = tokenizer(text)["input_ids"]
    beginning = tokenizer.bos_token_id or tokenizer.eos_token_id
    assert own[0] != beginning
    arguments = {"layer": 1, "site": "resid_post", "model": str(folder), "scale": 3}
    sae = steerable()
    found = saecli.steer(sae, LATENTS, text, **arguments, max_new_tokens=4)
    token_ids = torch.tensor([[beginning, *own]])
    whole = model.generate(
        token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=4, do_sample=False
    )
    expected = tokenizer.decode(whole[0, token_ids.shape[1] :])
    assert found["continuations"][0]["plain"].strip() == expected.strip()
    x = model(token_ids, output_hidden_states=True).hidden_states[2][0, 1:]
    assert found["activation_norm"] == pytest.approx(x.norm(dim=1).quantile(0.5).item(), rel=1e-4)


@pytest.mark.slow
def test_sampling_is_repeated_by_its_seed_and_the_table_has_both_texts(home: CommandLine):
    words = ("steer", "first", "--prompt", "The\nquick [b]", *WORDS, "--method", "ablate")
    words += ("--temperature", "1.5")
    first, repeated, other = (
        home(*words, *seed).json["continuations"] for seed in ((), ("--seed", "0"), ("--seed", "1"))
    )
    assert first == repeated != other and len(first) == 2
    done = home(*(word for word in words if word != "--json")).succeeds()
    assert r"prompt: The\nquick [b]" in done.out and "steered: " in done.out
    assert "scale" not in done.out


def test_a_text_that_stays_the_same_is_said_with_the_scale_of_a_large_change(home: CommandLine):
    words = ("steer", "first", "--latent", "3", "--prompt", "Return the number")
    small = home(*words, "--scale", "1e-7", "--max-new-tokens", "3")
    document = home(*words, "--scale", "1e-7", "--max-new-tokens", "3", "--json").json
    (latent,) = document["latents"]
    full = document["activation_norm"] / latent["decoder_norm"]
    assert (
        f"the text stayed the same: the change of latent 3 has {1e-7 / full:.2g} times" in small.out
    )
    assert f"--scale {full:.2g} would equal it" in small.out
    assert "stayed the same" not in home(*words, "--scale", "1e4", "--max-new-tokens", "3").out
    fired = saecli.read("first", "Return the number", latents="listed", top=20, home=home.home)
    silent = min({*range(20)} - {line["latent"] for line in fired["latents"]})
    ablated = home(
        *("steer", "first", "--latent", str(silent), "--prompt", "Return the number"),
        *("--method", "ablate", "--max-new-tokens", "3"),
    )
    assert "the text stayed the same: these latents do not fire there" in ablated.out


@pytest.mark.slow
def test_a_hook_point_that_a_file_does_not_name_is_given(home: CommandLine):
    words = ("--latent", "3", "--scale", "20", "--prompt", "Return", "--json")
    place = ("--layer", "1", "--site", "resid_post", "--model", TINY_GEMMA2)
    given = home("steer", home.home / "nowhere", *words, *place).json
    assert given | {"run": "first"} == home("steer", "first", *words).json
