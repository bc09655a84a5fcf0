"""Chats: who says a token, where windows begin, and stores of them, by the formats of four model families."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from homes import CommandLine
from hypothesis import given
from hypothesis import strategies as st
from launching import signalled
from storing import assert_same_pass
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import saecli
from saecli.base.errors import ModelError
from saecli.extract.chats import Chats
from saecli.extract.splice import stored_windows
from saecli.extract.texts import Document, TextSource
from saecli.extract.windows import Windows

TEMPLATES = Path(__file__).parents[1] / "templates"
FAMILIES = {"gemma": ("<bos>", "<eos>", "<start_of_turn> <end_of_turn>"), "qwen": (None, "<|im_end|>", "<|im_start|>"),
            "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|> <|end_header_id|>"),
            "mistral": ("<s>", "</s>", "[INST] [/INST]")}
WORDS = st.sampled_from(["user", "im", "end_of_turn", " spaced  ", "你好 🙂", "model\nassistant\n\nb", "a b c d e f g h"])


def save_model(folder: Path, family: str) -> Path:
    """A random Llama with a tokenizer of bytes and the control tokens of a family, without a template."""
    bos, eos, control = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = [token for token in ("<pad>", bos, eos, *control.split()) if token]
    tokenizer.train_from_iterator(["a user and a model or assistant say hello\n"] * 3, trainers.BpeTrainer(
        vocab_size=320, special_tokens=tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos,
                            pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                 num_attention_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@cache
def chats(folder: Path, template: str) -> Chats:
    return Chats(AutoTokenizer.from_pretrained(folder), (TEMPLATES / f"{template}.jinja").read_text(), "it")


def messages(contents: list[str], system: str | None = None) -> list[dict[str, Any]]:
    told = [{"role": "system", "content": system}] if system else []
    return told + [{"role": ("user", "assistant")[i % 2], "content": one} for i, one in enumerate(contents)]


@pytest.mark.parametrize("family", FAMILIES)
@given(contents=st.lists(WORDS, min_size=1, max_size=6), system=st.sampled_from([None, "Be brief.", "user"]))
def test_roles_found_turn_by_turn_are_those_of_generation_tags(folders, family, contents, system):
    row = {"messages": messages(contents, None if family == "gemma" else system)}
    plain, tagged = (chats(folders[family], template) for template in (family, f"{family}_generation"))
    texts = [one.read(row, "messages", "it") for one in (plain, tagged)]
    assert texts[0] == texts[1]
    (ids, roles, turns), other = plain.tokens(texts[0], True), tagged.tokens(texts[1], True)
    assert (ids, roles) == other[:2]
    tokenizer = plain._tokenizer
    assert ids == tokenizer(str(texts[0]), add_special_tokens=False)["input_ids"]
    for role, parity in ((2, 0), (3, 1)):
        said = tokenizer.decode([token for token, one in zip(ids, roles, strict=True) if one == role])
        at = 0
        for content in contents[parity::2]:
            assert (at := said.find(content.strip(), at) + len(content.strip())) >= len(content.strip())
        assert len(said) <= sum(len(one) + 14 for one in contents[parity::2])
    assert [bool(roles[turn - 1] or tokenizer.decode(ids[turn - 1]).strip() != "model") for turn in turns]
    assert len(turns) == len(contents) + (row["messages"][0]["role"] == "system" and family != "mistral")


def test_windows_begin_with_turns_and_go_on_from_where_one_ended(folders):
    renderer = chats(folders["gemma"], "gemma")
    documents = [Document(number, renderer.read({"m": messages(["a b c"] * 7 + ["x" * 40])}, "m", "it"), None)
                 for number in range(3)]
    cutter = Windows(renderer._tokenizer, 40, control="keep")
    windows, (begin,) = list(cutter.cut(documents)), renderer._tokenizer.convert_tokens_to_ids(["<start_of_turn>"])
    ids, _, turns = renderer.tokens(documents[0].text, True)
    assert [token for window in windows for token in window.token_ids[1:]] == ids[1:] * 3
    assert all(window.token_ids[1] == begin and len(window.token_ids) <= 40 for window in windows[:-1:4])
    for index, window in enumerate(windows):
        rest = Windows(renderer._tokenizer, 40, control="keep").cut(documents[window.after.document:], window.after.token)
        assert [one.token_ids.tolist() for one in rest] == [one.token_ids.tolist() for one in windows[index + 1:]]
