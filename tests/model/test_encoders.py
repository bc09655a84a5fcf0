"""Models that predict masked tokens: their rows, sites and effects against transformers and own hooks."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from homes import CommandLine
from plain_hooks import noted, replaced
from tiny_models import loaded, save_model, stored
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    EsmConfig,
    EsmTokenizer,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

import saecli
from saecli.splice.passes import hidden_tokens
from saecli.store.origin import SITES, HookPoint

WORDS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<mask>"]
CLS, EOS, MASK = 0, 2, WORDS.index("<mask>")
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 1}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
ESM = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": MASK}
LOCAL = {"global_attn_every_n_layers": 2, "local_attention": 4}
SPECIAL = {"bos_token_id": CLS, "eos_token_id": EOS, "cls_token_id": CLS, "sep_token_id": EOS}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES),
    "esm": EsmConfig(**SIZES, **ESM),
    "modernbert": ModernBertConfig(**SIZES, **LOCAL, **SPECIAL),
}
BERT = {  # modules of a block, whose input or output is the site
    "attn_z": ("attention.output.dense", "in"),
    "attn_out": ("attention.output.dense", "out"),
    "resid_mid": ("attention", "out"),
    "mlp_in": ("intermediate", "in"),
    "mlp_out": ("output.dense", "out"),
}
MODERN = {
    "attn_z": ("attn.Wo", "in"),
    "attn_out": ("attn", "out"),
    "resid_mid": ("mlp_norm", "in"),
    "mlp_in": ("mlp", "in"),
    "mlp_out": ("mlp", "out"),
}
IDS = torch.randint(4, 24, (2, 9), generator=torch.Generator().manual_seed(1))
IDS[:, 0], IDS[:, -1] = CLS, EOS


def masked_model(folder: Path, kind: str) -> Path:
    """With weights large enough for its blocks to matter, and ESM-2's tokenizer, or one like it."""
    save_model(folder, CONFIGS[kind], loader=AutoModelForMaskedLM)
    for path in folder.glob("*token*"):  # of another model
        path.unlink()
    if kind == "esm":
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        EsmTokenizer(folder / "vocab.txt").save_pretrained(folder)
        return folder
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(99), strict=False)), "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    around = [("<cls>", CLS), ("<eos>", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing("<cls> $A <eos>", None, around)
    special = {f"{name}_token": f"<{name}>" for name in ("cls", "pad", "unk", "mask")}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, sep_token="<eos>", **special
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
def test_sites_of_an_encoder_are_what_plain_hooks_see(tmp_path: Path, kind: str):
    folder = masked_model(tmp_path, kind)
    model = loaded(folder)
    mask = torch.ones_like(IDS)
    sites = MODERN if kind == "modernbert" else BERT
    for layer, block in enumerate(model.blocks):
        with ExitStack() as hooks:
            seen = {
                site: hooks.enter_context(noted(block.get_submodule(path), side))
                for site, (path, side) in {**sites, "resid_post": ("", "out")}.items()
            }
            model.forward(IDS, mask)
            for site in {*SITES} - {"resid_pre"}:
                (found,) = model.read(IDS, mask, [HookPoint(layer, site)], torch.clone)
                torch.testing.assert_close(found, seen[site][0], rtol=0, atol=0)
            other = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2))
            with model.modules.intercepted(HookPoint(layer, "resid_mid"), lambda _, x=other: x):
                model.forward(IDS, mask)
        after = other + seen["mlp_out"][-1]
        if kind in ("bert", "roberta"):
            after = block.output.LayerNorm(after)
        torch.testing.assert_close(seen["resid_post"][-1], after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "longest"), [("bert", 64), ("roberta", 62), ("esm", 62)])
def test_windows_of_an_encoder_are_as_long_as_its_positions(tmp_path: Path, kind: str, longest):
    """Those of RoBERTa and ESM begin after the padding token."""
    folder = masked_model(tmp_path / "model", kind)
    (tmp_path / "a.txt").write_text("MKTAYIAKGG" * 20)
    options = {"layer": 0, "dataset": str(tmp_path / "a.txt"), "home": tmp_path}
    store = saecli.extract(str(folder), **options)
    assert store.meta.source["context"] == longest
    with pytest.raises(saecli.SaeError, match=f"windows of at most {longest} tokens"):
        saecli.extract(str(folder), context=longest + 1, **options)


@pytest.mark.parametrize("kind", ["bert", "esm"])
def test_an_encoder_reads_the_tokens_that_its_tokenizer_appends(tmp_path: Path, kind: str):
    """It sees the last token from every position; rows against transformers run on the tokenizer's own input."""
    folder = masked_model(tmp_path / "model", kind)
    texts = ["MKTAYIAK", "GG", "MXBUZOWCHKLLA"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    dataset = str(tmp_path / "a.txt")
    options = {"layer": 0, "dataset": dataset, "context": 16, "dtype": "float32", "home": tmp_path}
    store = saecli.extract(str(folder), **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    expected, token_ids = [], []
    for text in texts:
        whole = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = model(**whole, output_hidden_states=True).hidden_states
        expected.append(states[1][0, 1:-1])
        token_ids += whole["input_ids"][0, 1:-1].tolist()
    rows, columns = stored(store.path)
    assert columns["token_id"].tolist() == token_ids
    np.testing.assert_allclose(rows, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert store.meta.dropped == {"special": 6}


@pytest.mark.parametrize(
    ("kind", "site"), [("esm", "resid_mid"), ("bert", "mlp_out"), ("modernbert", "attn_z")]
)
def test_effects_are_of_masked_tokens(sae: CommandLine, tmp_path: Path, kind: str, site: str):
    folder, random = masked_model(tmp_path / "model", kind), np.random.default_rng(0)
    # Windows of one length: ESM of transformers 5.0 gives padded ones other activations.
    texts = ["".join(random.choice([*"LAGVSERTIDPK"], 18)) for _ in range(60)]
    (tmp_path / "proteins.txt").write_text("\n\n".join(texts))
    line = f"extract --rows 2000 --context 20 --layer 0 --site {site} --dtype float32 --name x"
    words = ("--model", folder, "--dataset", tmp_path / "proteins.txt")
    assert sae(line, *words).status == 0
    assert sae("train --act topk --k 4 --d-sae 32 --steps 20 --name run").status == 0
    (measured,) = sae("eval run --json --model", folder).json["runs"]
    trained = saecli.load_sae("run", home=sae.home)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    block = loaded(folder).modules
    path, side = block.at(HookPoint(0, site))
    if kind == "esm":  # what its LayerNorm reads; by a plain hook on the sum itself
        path, side = path.replace("LayerNorm", "attention"), "out"
    module = model.get_submodule(block.name(path))
    clean = spliced = kl = 0.0
    count = rows = 0
    for window in saecli.open_store("x", home=sae.home).split("test").windows():
        ids, kept = window
        hidden = hidden_tokens([window], torch.from_numpy(kept)[None])
        assert hidden.sum() == max(1, round(0.15 * kept.sum()))
        assert not (hidden[0].numpy() & ~kept).any()
        given = torch.from_numpy(ids)[None].masked_fill(hidden, MASK)

        def swapped(x: Tensor, kept: Any = kept) -> Tensor:
            new = x.clone()
            new[0, torch.from_numpy(kept)] = trained(x[0, torch.from_numpy(kept)])
            return new

        logits = model(given).logits
        with replaced(module, swapped, side):
            spliced_logits = model(given).logits
        p, q = (each[hidden].detach().double().log_softmax(-1) for each in (logits, spliced_logits))
        target = torch.from_numpy(ids)[None][hidden][:, None]
        clean -= float(p.gather(1, target).sum())
        spliced -= float(q.gather(1, target).sum())
        kl += float((p.exp() * (p - q)).sum())
        count, rows = count + int(hidden.sum()), rows + int(kept.sum())
    assert (measured["tokens"], measured["rows"]) == (count, rows)
    assert measured["ce_clean"] == pytest.approx(clean / count, rel=1e-4)
    assert measured["ce_spliced"] == pytest.approx(spliced / count, rel=1e-4)
    assert measured["kl"] == pytest.approx(kl / count, rel=1e-3) and measured["kl"] > 0
    for command in ("steer run --latent 1 --scale 1 --prompt LAG", "finetune run"):
        assert "expected a causal language model" in sae(command).err
    assert sae("read run --prompt LAGVSE").status == 0
