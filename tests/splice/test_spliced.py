"""`saecli.spliced` against hooks written by hand, finite differences in float64, and `sae eval`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine, crosscoder_of, random_sae, steerable
from plain_hooks import Replace, blocks, noted, replaced
from tiny_models import EOS, WIDTH, open_model, prompt
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import saecli
from saecli.model import BUNDLED, TINY_GEMMA2
from saecli.sae.activations import Activation, JumpRelu, Relu, TopK
from saecli.sae.dictionary import SAE

MIDDLE = {"layer": 1, "site": "resid_post"}
MLP = {"layer": 1, "site": "mlp_in", "target_layer": 1, "target_site": "mlp_out"}
TARGET = 7  # a token


def at(place: dict[str, Any], activation: Activation | None = None, skip: bool = False) -> SAE:
    sae = steerable(activation)
    if skip:
        W_skip = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / 4
        sae = sae.changed(W_skip=W_skip)
    sae.metadata = dict(place)
    return sae


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    return open_model(tmp_path)


def at_texts(new: Replace) -> Replace:
    """At all tokens but special ones and the first."""
    plain = (prompt() > EOS)[..., None]
    return lambda x: torch.where(plain, new(x), x)


def halved(z: Tensor) -> Tensor:
    z[..., 3] /= 2
    return z


def objective(logits: Tensor) -> Tensor:
    return logits[:, -1, TARGET].double().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_its_error_a_model_is_unchanged_and_codes_are_exact(model: Any, dtype: torch.dtype):
    model, sae = model.to(dtype), at(MIDDLE, TopK(k=3))
    with torch.no_grad(), noted(blocks(model)[1]) as seen:
        clean = model(prompt()).logits
    with saecli.spliced(model, sae) as codes:
        with pytest.raises(saecli.SaeError, match="no codes of sae yet: run the model first"):
            codes[0]
        logits = model(prompt()).logits
    assert torch.equal(logits, clean)
    pre = seen[0].float() @ sae.W_enc + sae.b_enc
    top = pre.topk(3, dim=-1)
    expected = torch.zeros(2, 7, sae.d_sae).scatter(-1, top.indices, top.values.relu())
    torch.testing.assert_close(codes[0], expected)
    assert list(codes) == [0] and repr(codes) == "SplicedCodes({0: (2, 7, 20)})"
    with pytest.raises(KeyError):
        codes["first"]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("change", [None, halved, torch.zeros_like, lambda z: z.detach() * 2])
@torch.no_grad()
def test_logits_are_those_of_a_hook_by_hand(llama: Any, everywhere: bool, change: Replace | None):
    sae = at(MIDDLE)
    edited = change or (lambda z: z)

    def plain(x: Tensor) -> Tensor:
        return edited(sae.encode(x)) @ sae.W_dec + sae.b_dec

    def with_error(x: Tensor) -> Tensor:
        return plain(x) + x - (sae.encode(x) @ sae.W_dec + sae.b_dec)

    for error, new in ((False, plain), (True, with_error)):
        with replaced(blocks(llama)[1], new if everywhere else at_texts(new)):
            expected = llama(prompt()).logits
        options = {"error": error, "change": change, "everywhere": everywhere}
        with saecli.spliced(llama, sae, **options):
            found = llama(input_ids=prompt()).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - llama(prompt()).logits).abs().max() > 0.01 or change is None


@pytest.mark.parametrize("activation", [Relu(), TopK(k=3), JumpRelu()], ids=lambda act: act.name)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_finite_differences(tmp_path: Path, activation: Activation, frozen: bool):
    """Of an SAE, and of a transcoder with a skip after it, whose error is a constant too."""
    # Llama's norms compute in float32.
    gpt2 = open_model(tmp_path, "gpt2").double().requires_grad_(not frozen)
    first = at({"layer": 0, "site": "resid_post"}, activation).copy_to(torch.float64)
    second = at(MLP, activation, skip=True).copy_to(torch.float64)
    first.metadata, second.metadata = {"layer": 0, "site": "resid_post"}, MLP
    with saecli.spliced(gpt2, {"sae": first, "transcoder": second}) as codes:
        objective(gpt2(prompt()).logits).backward()
    assert codes["sae"].grad is not None and codes["transcoder"].grad is not None
    plain = (prompt() > EOS)[..., None]
    mlp, reads, clean = blocks(gpt2)[1].mlp, [], {}
    handle = mlp.register_forward_pre_hook(lambda module, args: reads.append(args[0]))

    def decoded(z: Tensor, sae: SAE, x: Tensor | None) -> Tensor:
        y_hat = z @ sae.W_dec + sae.b_dec
        return y_hat if x is None else y_hat + x @ sae.W_skip

    def loss(step: Tensor, of: str) -> Tensor:
        """With codes moved by a step; the first pass keeps the clean activations for the errors."""

        def at_first(x: Tensor) -> Tensor:
            clean.setdefault("x", x)
            z = first.encode(clean["x"])
            error = clean["x"] - decoded(z, first, None)
            new = decoded(z + (step if of == "sae" else 0), first, None) + error
            return torch.where(plain, new, clean["x"])

        def at_second(y: Tensor) -> Tensor:
            x = reads[-1]
            clean.setdefault("error", y - decoded(second.encode(x), second, x))
            z = second.encode(x) + (step if of == "transcoder" else 0)
            return torch.where(plain, decoded(z, second, x) + clean["error"], y)

        with replaced(blocks(gpt2)[0], at_first), replaced(mlp, at_second):
            return objective(gpt2(prompt()).logits)

    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        loss(torch.zeros(()), "sae")
        for name, z in codes.items():
            for _ in range(4):
                direction = torch.randn(z.shape, generator=generator, dtype=torch.float64)
                step = 1e-6 * direction
                slope = (loss(step, name) - loss(-step, name)) / 2e-6
                torch.testing.assert_close((z.grad * direction).sum(), slope, rtol=1e-5, atol=1e-7)
            assert z.grad.abs().sum() > 0 and not (z.grad * ~plain).any()
    handle.remove()


@torch.no_grad()
def test_a_transcoder_with_a_skip_takes_the_mlps_place(llama: Any):
    sae, seen, mlp = at(MLP, TopK(k=3), skip=True), [], blocks(llama)[1].mlp

    def instead(y: Tensor) -> Tensor:
        return sae.encode(seen[-1]) @ sae.W_dec + sae.b_dec + seen[-1] @ sae.W_skip

    def double(module: nn.Module, args: tuple[Tensor]) -> None:
        """In place, as some models add to activations."""
        args[0].mul_(2)

    first = mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    last = mlp.register_forward_pre_hook(double)
    with replaced(mlp, at_texts(instead)):
        expected = llama(prompt()).logits
    first.remove()
    last.remove()
    with saecli.spliced(llama, sae, error=False) as codes:
        last = mlp.register_forward_pre_hook(double)
        found = llama(prompt()).logits
        last.remove()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(codes[0], sae.encode(seen[-1]))


def test_codes_of_another_text_are_patched_in_and_stay_the_users(llama: Any):
    with torch.no_grad(), saecli.spliced(llama, at(MIDDLE)) as codes:
        llama(prompt().flip(0))
    others = codes[0]
    with saecli.spliced(llama, at(MIDDLE), change=lambda z: others) as patched:
        objective(llama(prompt()).logits).backward()
    assert torch.equal(patched[0], others) and patched[0].grad.abs().sum() > 0
    assert others.grad is None and not others.requires_grad


def test_saes_are_changed_each_by_its_function_and_keyed_as_given(llama: Any, tmp_path: Path):
    early, late = at({"layer": 0, "site": "resid_post"}), at(MIDDLE)
    saecli.save_sae(late, tmp_path / "late")
    with torch.no_grad(), saecli.spliced(llama, [early, str(tmp_path / "late")]) as codes:
        llama(prompt())
    assert list(codes) == [0, str(tmp_path / "late")]
    assert codes[1] is codes[str(tmp_path / "late")]
    unplaced = steerable()
    with torch.no_grad():
        changes = {"a": halved}
        with saecli.spliced(llama, {"a": early, "b": late}, change=changes) as changed:
            found = llama(prompt()).logits
        with saecli.spliced(llama, {(0, "resid_post"): unplaced}, change=halved) as placed:
            torch.testing.assert_close(llama(prompt()).logits, found)
    assert torch.equal(placed[0, "resid_post"], changed["a"])
    assert torch.equal(changed["a"][..., 3], codes[0][..., 3] / 2)
    texts = prompt() > EOS
    assert not torch.equal(changed["b"][texts], codes[1][texts])


def test_generation_with_a_cache_writes_what_generation_without_one_does(model: Any):
    def raised(z: Tensor) -> Tensor:
        z[..., 3] += 90
        return z

    text = prompt()[:1, 1:]  # its first token, which stays as it is, is none of the special ones
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings["attention_mask"] = torch.ones(1, 6)
    with saecli.spliced(model, at(MIDDLE), change=raised) as codes:
        whole = model.generate(text, use_cache=False, **settings)
        cached = model.generate(text, use_cache=True, **settings)
        assert codes[0].shape == (1, 1, 20)
        static = model.generate(text, cache_implementation="static", **settings)
        padding = torch.zeros(1, 2, dtype=torch.int64)
        settings["attention_mask"] = torch.cat([padding, torch.ones(1, 6, dtype=torch.int64)], 1)
        longer = torch.cat([padding, text], 1)
        padded = model.generate(longer, cache_implementation="static", **settings)
    assert torch.equal(cached, whole) and torch.equal(static, whole)
    assert torch.equal(padded[:, 2:], whole)
    assert not torch.equal(padded, model.generate(longer, **settings))


@torch.no_grad()
def test_a_model_is_itself_again_after_an_error_and_after_one_in_a_pass(llama: Any):
    before = llama(prompt()).logits

    def fails(z: Tensor) -> Tensor:
        raise KeyError("mine")

    for change in (None, fails):
        with pytest.raises(KeyError), saecli.spliced(llama, at(MIDDLE), error=False, change=change):
            llama(prompt())
            raise KeyError
        assert torch.equal(llama(prompt()).logits, before)
        assert not any(module._forward_hooks for module in llama.modules())


@torch.no_grad()
def test_the_cross_entropy_is_that_of_sae_eval(sae: CommandLine):
    extract = f"extract --model {TINY_GEMMA2} --layer 1 --rows 1500 --dtype float32 --name docs"
    assert sae(*extract.split()).status == 0
    store = saecli.open_store("docs", home=sae.home)
    own = random_sae(TopK(k=8), d_in=128)
    own.metadata = {"model": TINY_GEMMA2, **MIDDLE}
    measured = saecli.evaluate(own, store, model=TINY_GEMMA2, home=sae.home)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED[TINY_GEMMA2]).float()
    losses = []
    with saecli.spliced(model, own, error=False):
        for token_ids, replaced in store.split("test").windows():
            logits = model(torch.from_numpy(token_ids)[None]).logits[0]
            at_rows = torch.from_numpy(replaced[:-1])
            targets = torch.from_numpy(token_ids)[1:][at_rows]
            losses.append(
                nn.functional.cross_entropy(logits[:-1][at_rows], targets, reduction="none")
            )
    assert torch.cat(losses).mean().item() == pytest.approx(measured["ce_spliced"], rel=1e-4)


def test_steering_has_the_gradient_of_a_hook_written_by_hand(llama: Any):
    """The error passes gradients on there: steering is part of the model."""
    sae = at(MIDDLE)

    def clamped(x: Tensor) -> Tensor:
        z = sae.encode(x)
        return x + (5 - z[..., 3:4]) * sae.W_dec[3]

    gradients = []
    for context in (
        saecli.steering(llama, sae, 3, method="clamp", scale=5),
        replaced(blocks(llama)[1], at_texts(clamped)),
    ):
        embedded = llama.get_input_embeddings().weight
        with context:
            gradients += torch.autograd.grad(objective(llama(prompt()).logits), [embedded])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


BACKWARDS = {**MLP, "layer": 2}
BOTH = [{"layer": layer, "site": "resid_post"} for layer in (0, 1)]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (crosscoder_of(BOTH), {}, "cannot splice sae, a crosscoder: its codes need the activations"),
    (steerable(), {}, "sae records no hook point; give it as a key"),
    ({(0, "resid_post"): at(MIDDLE)}, {}, "--layer must be 1, as sae says, got 0"),
    ({(0, "mlp:input"): steerable()}, {}, "--site must be one of resid_post, "),
    ([at(MIDDLE), at(MIDDLE)], {}, "both replace layer 1, resid_post"),
    ([at(MIDDLE), at(MLP)], {"change": halved}, r"mapping .* with 2 SAEs, got one function"),
    (at(MIDDLE), {"change": {"mine": halved}}, "change names 'mine': expected keys of the SAEs, 0"),
    (at(MIDDLE), {"change": 3}, "change must be a function of codes, got 3"),
    ({"a": at(MIDDLE)}, {"change": {"a": "halved"}}, "a function of codes, got 'halved'"),
    (["first", Path("first"), "other"], {}, "first is named twice: expected each SAE once"),
    ({(np.int64(0), "resid_post"): at(MIDDLE)}, {}, "--layer must be 1, as sae says, got 0"),
    ({(1, "mlp_out"): at(MIDDLE)}, {}, "--site must be resid_post, as sae says, got mlp_out"),
    ({"model.layers.0.mlp:out": at(MIDDLE)}, {}, "--module must be resid_post, as sae says"),
    (at(MIDDLE), {"change": lambda z: None}, r"of the shape .*\(2, 7, 20\), got NoneType"),
    (at(MIDDLE), {"change": lambda z: z[0]}, r"\(2, 7, 20\), got \(7, 20\)"),
    (at(BACKWARDS), {}, "reads layer 2, mlp_in after layer 1, mlp_out"),
    (at({"layer": 3, "site": "resid_post"}), {}, "--layer must be from 0 to 2"),
    ({(1, "resid_post"): random_sae(d_in=WIDTH + 1)}, {}, "the model's width, 16, got 17"),
]


@pytest.mark.parametrize(("sae", "options", "sentence"), REFUSED)
def test_what_cannot_be_is_refused(llama: Any, sae: Any, options: dict[str, Any], sentence: str):
    before = llama(prompt()).logits
    with pytest.raises(saecli.SaeError, match=sentence), saecli.spliced(llama, sae, **options):
        llama(prompt())
    assert torch.equal(llama(prompt()).logits, before)


def test_models_are_loaded_and_called_whole(llama: Any):
    for wrong in ("llama", nn.Linear(2, 2)):
        with pytest.raises(saecli.SaeError, match="must be one of transformers, loaded, got"):
            saecli.spliced(wrong, at(MIDDLE)).__enter__()
    with (
        pytest.raises(saecli.SaeError, match="call the model itself, or give that module"),
        saecli.spliced(llama, at(MIDDLE)),
    ):
        llama(prompt())
        llama.model(prompt())
    with saecli.spliced(llama.model, at(MIDDLE)) as codes:
        llama.model(inputs_embeds=llama.get_input_embeddings()(prompt()))
    assert np.prod(codes[0].shape) == 2 * 7 * 20
