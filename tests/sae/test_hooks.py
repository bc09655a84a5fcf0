"""Other tools' hook points: an SAE read from such a tool has the codes and predictions on a store's
rows that it has there on the rows that the tool would give it, which hooks of these tests take from the model."""

import json
from pathlib import Path

import published
import pytest
import torch
from homes import CommandLine, change_json, fvu, load, random_sae, with_origin
from plain_hooks import noted
from published import D
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, WIDTH, loaded, save_model, stored
from transformers import BloomConfig, GemmaConfig, GPTJConfig

from saecli.model import BUNDLED
from saecli.model.saes import fold_in, why_not_folded
from saecli.sae.activations import JumpRelu, Relu
from saecli.sae.dictionary import SAE
from saecli.sae.formats import SavedSAE, save
from saecli.sae.formats.common import NORMALIZED
from saecli.store.origin import HookPoint, ModelName, Origin

LAYER = 1
DEEP = {"num_hidden_layers": 3, "hidden_size": WIDTH, "vocab_size": 64, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
MODELS = CONFIGS | {
    "gemma": lambda: GemmaConfig(**DEEP, **HEADS, intermediate_size=24),
    "bloom": lambda: BloomConfig(hidden_size=WIDTH, n_layer=3, n_head=2, vocab_size=64),
    "gptj": lambda: GPTJConfig(n_embd=WIDTH, n_layer=3, n_head=2, rotary_dim=4, vocab_size=64),
}
NORMS = {  # before the MLP
    "gemma2": "pre_feedforward_layernorm",
    "gemma": "post_attention_layernorm",
    "llama": "post_attention_layernorm",
    "gpt2": "ln_2",
    "gpt-neox": "post_attention_layernorm",
    "gptj": "ln_1",
}
MLP_2 = {"layer": 2, "site": "mlp_in", "target_layer": 2, "target_site": "mlp:out"}
TOKENS = torch.arange(60).reshape(2, 30) % 60 + 4


def model_of(folder: Path, name: str) -> Path:
    """A random model whose norms have weights, and biases where they have any, that matter."""
    folder = save_model(folder, MODELS[name]())
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key, tensor in weights.items():
        if tensor.ndim == 1:
            weights[key] = tensor + torch.randn(tensor.shape, generator=generator) / 3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def normalized(folder: Path, name: str) -> torch.Tensor:
    """What TransformerLens' ln2.hook_normalized gives, with LayerNorm from version 3 on, or with fold_ln."""
    model = loaded(folder)
    norm = model.blocks[LAYER].get_submodule(NORMS[name])
    with torch.no_grad(), noted(norm, "in") as seen:
        model.model(TOKENS)
    x = seen[0].double()
    if isinstance(norm, torch.nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(0, 1)


def rows_at(folder: Path, site: str) -> torch.Tensor:
    """What `sae extract` stores."""
    mask = torch.ones_like(TOKENS)
    (rows,) = loaded(folder).read(TOKENS, mask, [HookPoint(LAYER, site)], torch.clone)
    return rows.flatten(0, 1)


def some_sae(width: int, transcoder: bool) -> SAE:
    sae = random_sae(JumpRelu(), width)
    sae = sae.changed(threshold=torch.linspace(0, 1, sae.d_sae))
    skip = torch.randn(width, width, generator=torch.Generator().manual_seed(4))
    return sae.changed(W_skip=skip) if transcoder else sae


def write(
    folder: Path,
    sae: SAE,
    model: str | None,
    hook: str,
    transcoder: bool = True,
    **processing: bool,
) -> Path:
    """As SAELens writes it."""
    origin = {"target_layer": LAYER, "target_site": "mlp_out"} if transcoder else {}
    save(with_origin(sae, {"layer": LAYER, "site": "resid_pre", **origin}), "saelens", folder)
    config = json.loads((folder / "cfg.json").read_text())
    names = {"model_name": model, "hook_name": f"blocks.{LAYER}.{hook}"}
    config["metadata"] |= names | {"model_from_pretrained_kwargs": processing}
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("transcoder", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_an_sae_before_the_norms_weight_is_read_and_written_for_mlp_in(tmp_path, name, transcoder):
    folder = model_of(tmp_path / "model", name)
    theirs, ours = normalized(folder, name).float(), rows_at(folder, "mlp_in")
    original = some_sae(WIDTH, transcoder)
    has_layer_norm = {"fold_ln": True} if name in ("gpt2", "gpt-neox", "gptj") else {}
    path = write(tmp_path / "sae", original, str(folder), NORMALIZED, transcoder, **has_layer_norm)
    saved = load(path)
    assert saved.origin.read[0].site == "mlp_in" and "folded in" in saved.remarks[0]
    close(saved.sae.encode(ours), original.encode(theirs))
    # What the norm does after it has normalised, by regression of each dimension.
    x, y = theirs.double() - theirs.double().mean(0), ours.double() - ours.double().mean(0)
    weight = (x * y).sum(0) / x.square().sum(0)
    bias = ours.double().mean(0) - theirs.double().mean(0) * weight
    predicted = original(theirs)
    expected = predicted if transcoder else (predicted * weight + bias).float()
    close(saved.sae(ours), expected)
    save(saved, "saelens", tmp_path / "out")
    metadata = json.loads((tmp_path / "out" / "cfg.json").read_text())["metadata"]
    assert metadata["hook_name"] == f"blocks.{LAYER}.mlp.hook_in"
    assert metadata["model_from_pretrained_kwargs"] == {}
    close(load(tmp_path / "out").sae(ours), expected)


def test_heads_of_gpt2_without_value_biases_are_read_for_attn_z(tmp_path: Path) -> None:
    folder, unbiased = model_of(tmp_path / "model", "gpt2"), model_of(tmp_path / "unbiased", "gpt2")
    weights = load_file(unbiased / "model.safetensors")
    (name,) = (name for name in weights if name.endswith(f"h.{LAYER}.attn.c_attn.bias"))
    values = weights[name][2 * WIDTH :].clone()
    weights[name][2 * WIDTH :] = 0
    save_file(weights, unbiased / "model.safetensors", {"format": "pt"})
    theirs, ours = rows_at(unbiased, "attn_z"), rows_at(folder, "attn_z")
    original = some_sae(WIDTH, False)
    folds = {"fold_value_biases": True}
    path = write(tmp_path / "sae", original, str(folder), "attn.hook_z", False, **folds)
    saved = load(path)
    assert saved.origin.read[0].site == "attn_z" and "without value biases" in saved.remarks[0]
    close(saved.sae.encode(ours), original.encode(theirs))
    close(saved.sae(ours), original(theirs) + values)
    save(saved, "saelens", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "cfg.json").read_text())
    assert config["metadata"]["model_from_pretrained_kwargs"] == {}
    close(load(tmp_path / "out").sae(ours), original(theirs) + values)
    kept = load(write(tmp_path / "kept", original, "gpt2-absent", "attn.hook_z", False, **folds))
    assert kept.origin.read[0].site == "attn.hook_z" and torch.equal(kept.sae.W_enc, original.W_enc)


def test_an_sae_of_one_head_is_at_no_site(tmp_path: Path) -> None:
    metadata = {"hook_name": "blocks.8.attn.hook_z", "hook_head_index": 5}
    metadata |= {"model_name": "google/gemma-2-2b"}
    origin = load(published.saelens(tmp_path, metadata=metadata).path).origin
    assert origin == Origin((ModelName("google/gemma-2-2b"),))


def test_without_the_model_the_hook_point_keeps_its_name_and_is_not_mlp_in(tmp_path: Path) -> None:
    original = some_sae(D, False)
    for number, model in enumerate(("google/gemma-2-2b", "some/model", "~x", "a" * 300, None)):
        path = write(tmp_path / str(number), original, model, NORMALIZED, False)
        saved = load(path)
        assert saved.origin.read[0].site == NORMALIZED and saved.remarks == ()
        assert torch.equal(saved.sae.W_enc, original.W_enc)
        save(saved, "saelens", path / "again")
        assert torch.equal(load(path / "again").sae.W_enc, original.W_enc)
        origin = {"model": model, "layer": 1, "site": "mlp_in"}
        save(with_origin(original, origin), "saelens", path / "out")
        config = json.loads((path / "out" / "cfg.json").read_text())
        assert config["metadata"]["hook_name"] == "blocks.1.mlp.hook_in"
        assert load(path / "out").origin.read[0].site == "mlp_in"
    rows, before_weight = (Origin(read=(HookPoint(1, site),)) for site in ("mlp_in", NORMALIZED))
    assert "hf download" in str(why_not_folded(before_weight, rows))


@pytest.mark.slow
def test_eval_and_export_of_a_transcoder_at_the_hook_point_are_those_on_its_own_rows(sae, tmp_path):
    for site in ("mlp_in", "mlp_out"):
        words = ("--model", "tiny-gemma2", "--layer", "1", "--site", site, "--rows", "3000")
        assert sae("extract", *words, "--name", site).status == 0
    x, y = (
        torch.from_numpy(stored(sae.home / "activations" / site)[0])
        for site in ("mlp_in", "mlp_out")
    )
    weights = load_file(BUNDLED["tiny-gemma2"] / "model.safetensors")
    theirs = x / (1 + weights["model.layers.1.pre_feedforward_layernorm.weight"].float())
    # Latents in pairs, the signs of a direction, are linear together: the regression of targets on rows.
    slopes = torch.linalg.lstsq(theirs - theirs.mean(0), y - y.mean(0)).solution
    basis = torch.linalg.qr(torch.randn(128, 128, generator=torch.Generator().manual_seed(0)))[0]
    W_enc = torch.cat([basis, -basis], 1)
    b_dec = y.mean(0) - theirs.mean(0) @ slopes
    original = SAE(W_enc, torch.zeros(256), W_enc.T @ slopes, b_dec, Relu(), {})
    expected = fvu(original(theirs), y)
    assert expected < 0.97 * fvu(original(x), y)
    saelens_file = write(tmp_path / "saelens", original, "tiny-gemma2", NORMALIZED)
    ends = {"layer": 1, "site": NORMALIZED, "target_layer": 1, "target_site": "mlp_out"}
    for number, origin in enumerate((ends | {"model": "tiny-gemma2"}, ends)):
        save(with_origin(original, origin), "circuit-tracer", tmp_path / f"tracer-{number}")
    for path in (saelens_file, tmp_path / "tracer-0", tmp_path / "tracer-1"):
        words = (path, "--data", "mlp_in", "--target", "mlp_out", "--split", "all")
        done = sae("eval", *words, "--json")
        assert done.json["runs"][0]["fvu"] == pytest.approx(expected, rel=1e-4), done.err
    done = sae("export", saelens_file, "--to", "saelens", "--out", tmp_path / "out").succeeds()
    assert "is written for mlp.hook_in" in done.err
    assert fvu(load(tmp_path / "out").sae(x), y) == pytest.approx(expected, rel=1e-4)
    elsewhere = write(tmp_path / "elsewhere", original, "google/gemma-2-2b", NORMALIZED)
    done = sae("eval", elsewhere, "--data", "mlp_in", "--target", "mlp_out").fails(
        2, "before the norm's weight"
    )
    assert "google/gemma-2-2b" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "transcode", "origin"),
    [
        ("layers.2", False, {"layer": 2, "site": "resid_post"}),
        ("layers.2.mlp", False, {"layer": 2, "site": "mlp:out"}),
        ("layers.2.mlp", True, MLP_2),
        ("embed_tokens", False, {}),
    ],
)
def test_sparsifys_folders_are_named_as_modules(tmp_path, place, transcode, origin):
    assert load(published.sparsify(tmp_path / place, transcode).path).origin.to_json() == origin


def test_the_outputs_of_blooms_modules_are_the_rows_of_their_sites(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", "bloom")
    for module, site in (("mlp", "resid_post"), ("mlp.dense_4h_to_h", "mlp_out")):
        origin = {"model": str(folder), "layer": LAYER, "site": f"{module}:out"}
        saved = with_origin(random_sae(Relu(), WIDTH), origin)
        assert fold_in(saved).origin.read[0].site == site
        close(rows_at(folder, site), rows_at(folder, f"{module}:out"))


def test_eval_says_that_a_module_is_not_the_stores_site(sae: CommandLine, tmp_path: Path) -> None:
    for name, model, site, said in (
        ("gemma", "gemma2", "mlp_out", "was trained on layer 1 mlp:out"),
        ("llama", "llama", "mlp_out", None),
        ("residual", "llama", "resid_post", "was trained on layer 1 mlp_out"),
    ):
        (tmp_path / "text.txt").write_text("\n\n".join("abcdefghij" * 9 for _ in range(9)))
        folder = save_model(tmp_path / name, model)
        words = ("--model", folder, "--layer", "1", "--site", site, "--context", "16")
        words += ("--dataset", tmp_path / "text.txt", "--rows", "200", "--name", name)
        assert sae("extract", *words).status == 0
        original = random_sae(Relu(), WIDTH)
        save(SavedSAE(original), "sparsify", tmp_path / "runs" / name / "layers.1.mlp")
        done = sae("eval", tmp_path / "runs" / name / "layers.1.mlp", "--data", name).succeeds()
        assert said in done.err if said else "was trained on" not in done.err


@pytest.mark.parametrize(
    ("name", "io", "site"),
    [
        ("resid_post_layer_8", "out", "resid_post"),
        ("resid_post_layer_8", "in", "resid_pre"),
        ("mlp_out_layer8", "out", "mlp_out"),
        ("mlp_out", "in", "mlp_in"),
        ("some_module", "out", "some_module"),
        (None, "out", None),
    ],
)
def test_submodules_of_dictionary_learning(tmp_path, name, io, site):
    path = published.dictionary_learning(tmp_path, submodule_name=name).path
    change_json(path / "config.json", buffer={"io": io})
    assert load(path).origin.read[0].site == (site or "")


@pytest.mark.parametrize(
    ("hook", "site"),
    [
        ("hook_mlp_out", "mlp_out"),
        ("hook_attn_out", "attn_out"),
        ("mlp.hook_in", "mlp_in"),
        ("ln2.hook_normalized", "ln2.hook_normalized"),  # of an unknown model
        ("mlp.hook_out", "mlp.hook_out"),
        ("hook_resid_mid", "resid_mid"),
        ("not a hook", None),
    ],
)
def test_saelens_hook_names_that_are_sites(tmp_path: Path, hook: str, site: str | None) -> None:
    hooks = {"hook_name": f"blocks.8.{hook}", "hook_name_out": f"blocks.9.{hook}"}
    saved = load(published.saelens(tmp_path, "transcoder", metadata=hooks).path)
    ends = {"layer": 8, "site": site, "target_layer": 9, "target_site": site}
    assert saved.origin.to_json() == (ends if site else {})
    save(saved, "saelens", tmp_path / "out")
    assert load(tmp_path / "out").origin == saved.origin


@pytest.mark.parametrize(
    ("model", "site"),
    [
        ("google/gemma-2-2b", "attn_z"),
        ("Qwen/Qwen3-0.6B", "attn_z"),
        ("Qwen/Qwen2.5-7B", "attn.hook_z"),
        ("gpt2", "attn.hook_z"),  # its values have a bias, which TransformerLens folds away
        (None, "attn.hook_z"),
    ],
)
def test_hook_z_is_attn_z_where_values_have_no_bias(tmp_path: Path, model: str | None, site: str):
    hooks = {"hook_name": "blocks.8.attn.hook_z"} | ({"model_name": model} if model else {})
    saved = load(published.saelens(tmp_path, metadata=hooks).path)
    assert saved.origin.read[0].site == site
    save(saved, "saelens", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "cfg.json").read_text())
    assert written["reshape_activations"] == "hook_z"
    assert load(tmp_path / "out").origin == saved.origin


@pytest.mark.parametrize(
    ("hook", "origin"),
    [
        ("model.layers.3.post_feedforward_layernorm.output", {"layer": 3, "site": "mlp_out"}),
        ("model.layers.3.self_attn.o_proj.input", {"layer": 3, "site": "attn_z"}),
        ("model.layers.3.mlp.down_proj.input", {"layer": 3, "site": "mlp.down_proj:in"}),
        ("model.layers.{all}.output", {}),
        (5, {}),
    ],
)
def test_gemma_scope_2_modules_that_are_sites(tmp_path: Path, hook: object, origin: dict) -> None:
    ends = {"hf_hook_point_in": hook, "hf_hook_point_out": hook}
    saved = load(published.gemma_scope_2(tmp_path, **ends).path)
    assert saved.origin.to_json() == {"model": "google/gemma-3-4b-pt"} | origin


def test_rows_less_their_mean_are_so_in_the_encoder_and_said_to_be(sae, tmp_path):
    original = some_sae(D, False)
    rows = torch.randn(50, D, generator=torch.Generator().manual_seed(1)) + 3
    centred = rows - rows.mean(1, keepdim=True)
    for model, hook, folds in (
        ("gpt2", "hook_resid_pre", True),
        (None, "hook_mlp_out", True),
        ("gpt2", "mlp.hook_out", True),
        ("gpt2", NORMALIZED, False),  # a LayerNorm subtracts the mean anyhow
        ("google/gemma-2b", "hook_resid_pre", False),  # TransformerLens leaves RMSNorm models alone
    ):
        folder = tmp_path / f"{model}{hook}".replace("/", "-")
        path = write(folder, original, model, hook, False, center_writing_weights=True)
        close(load(path).sae.encode(rows), original.encode(centred if folds else rows))
        done = sae("export", path, "--to", "saelens", "--out", path / "out").succeeds()
        assert ("center_writing_weights" in done.err) == folds
        close(load(path / "out").sae.encode(rows), original.encode(centred if folds else rows))
