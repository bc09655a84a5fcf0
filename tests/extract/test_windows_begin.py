"""What stands around every window: BOS, or what a tokenizer has in its place, and what it appends."""

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from homes import CommandLine
from tiny_models import save_model, save_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from saecli.extract.texts import Document
from saecli.extract.tokenizer import Chats, TokenTexts
from saecli.extract.windows import Window, Windows

NUCLEOTIDES = ["A", "C", "G", "T"]
SPECIAL = ["<first>", "<second>", "<third>"]
AROUND = ["<first> A C G <second>", "<first> T A <second>"]


def tokenizer_of(
    folder: Path, template: str | None = None, words: list[str] = NUCLEOTIDES, **roles: str
) -> Any:
    """A tokenizer of words, saved and loaded, with special tokens of these roles."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        added = [(word, vocabulary[word]) for word in template.split() if word in SPECIAL]
        processing = processors.TemplateProcessing(single=template, special_tokens=added)
        tokenizer.post_processor = processing
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def cut(tokenizer: Any, *texts: str, context: int = 5, **options: Any) -> list[Window]:
    documents = [Document(number, text, None) for number, text in enumerate(texts)]
    return list(Windows(tokenizer, context, **options).cut(documents))


def words_of(tokenizer: Any, windows: list[Window], column: str = "token_ids") -> list[str]:
    found = []
    for window in windows:
        ids = window.token_ids if column == "token_ids" else window.token_ids[window.kept]
        found.append(" ".join(tokenizer.convert_ids_to_tokens(ids.tolist())))
    return found


@pytest.mark.parametrize(
    ("roles", "template", "expected"),
    [
        ({"bos_token": "<first>", "eos_token": "<second>"}, None, ["<first> A C G T", "<first> A"]),
        ({"eos_token": "<second>"}, None, ["<second> A C G T", "<second> A"]),
        ({"sep_token": "<third>"}, None, ["<third> A C G T", "<third> A"]),
        ({"bos_token": "<first>"}, "<second> $A", ["<second> A C G T", "<second> A"]),
        ({"cls_token": "<first>", "sep_token": "<second>"}, "<first> $A <second>", AROUND),
        ({"bos_token": "<first>", "eos_token": "<second>"}, "$A <second>", AROUND),
    ],
)
def test_windows_have_around_them_what_the_tokenizer_says(tmp_path, roles, template, expected):
    tokenizer = tokenizer_of(tmp_path, template, **roles)
    windows = cut(tokenizer, "A C G T A", "")
    assert words_of(tokenizer, windows) == expected
    assert " ".join(words_of(tokenizer, windows, "kept")) == "A C G T A"
    for window, line in zip(windows, expected, strict=True):
        assert window.tokens["special"].sum() == line.count("<")
    (packed,) = cut(tokenizer, "A C", "G T", context=16, packed=True)
    begin, _, end = expected[0].partition(" A C G")
    end = end.removesuffix(" T")
    assert words_of(tokenizer, [packed]) == [f"{begin} A C{end} {begin} G T{end}"]


def test_without_any_token_to_begin_with_the_first_position_is_dropped(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    windows = cut(tokenizer, "A C G T A C")
    assert words_of(tokenizer, windows) == ["A C G T A", "C"]
    assert words_of(tokenizer, windows, "kept") == ["C G T A", ""]
    assert [window.tokens["special"].sum() for window in windows] == [1, 1]
    off = cut(tokenizer, "A C G T A C", prepend_bos=False)
    assert words_of(tokenizer, off, "kept") == ["A C G T A", "C"]


def test_a_word_used_for_padding_is_stored_and_special_tokens_in_a_text_are_not(tmp_path):
    roles = {"bos_token": "<first>", "eos_token": "<second>"}
    tokenizer = tokenizer_of(tmp_path / "word", pad_token="G", **roles)
    windows = cut(tokenizer, "A G <second> G T <first> C", context=16)
    assert words_of(tokenizer, windows) == ["<first> A G <second> G T <first> C"]
    assert words_of(tokenizer, windows, "kept") == ["A G G T C"]
    tokenizer = tokenizer_of(tmp_path / "eos", pad_token="<second>", **roles)
    windows = cut(tokenizer, "A G <second> T", context=16)
    assert words_of(tokenizer, windows, "kept") == ["A G T"]


def test_tokens_of_a_tokenizer_that_knows_no_letter_have_texts(tmp_path):
    tokenizer = tokenizer_of(tmp_path, words=["ACGT", "TT"], bos_token="<first>")
    texts = TokenTexts(tokenizer)
    assert texts[4].strip() == "TT"
    assert texts.joined([3, 4]).split() == ["ACGT", "TT"]


TURNS = (
    "{% for message in messages %}<bos>{{ message['role'][0] }}{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>a{% endif %}"
)


def chat_of(tokenizer: Any, *contents: str) -> Document:
    roles = cycle(("user", "assistant"))
    messages = [{"role": role, "content": own} for own, role in zip(contents, roles, strict=False)]
    read = Chats(tokenizer, TURNS, "it").read
    return Document(0, read({"messages": messages}, "messages", "it"), None)


@pytest.mark.parametrize("packed", [False, True])
def test_of_chats_whose_bos_opens_turns_only_the_first_of_a_window_is_special(tmp_path, packed):
    """As SmolLM2's: <|im_start|> is its BOS, and no window begins with two of them."""
    save_tokenizer(tmp_path, bos=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    whole = "<bos>uhello<eos><bos>ayes<eos><bos>uand<eos>"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    document = chat_of(tokenizer, "hello", "yes", "and")
    assert str(document.text) == whole

    (window,) = Windows(tokenizer, 64, packed=packed, control="keep").cut([document])
    assert window.token_ids.tolist() == ids
    assert window.tokens["special"].tolist() == [True] + [False] * (len(ids) - 1)
    assert window.kept.tolist() == (~window.tokens["special"]).tolist()

    twice = [document, document._replace(number=1)]
    windows = list(Windows(tokenizer, 8, packed=packed, control="keep").cut(twice))
    turns = [ids[0:8], ids[8:14], ids[14:20]]
    if not packed:
        assert [window.token_ids.tolist() for window in windows] == turns * 2
    for window in windows:
        assert window.token_ids[0] == 1 and window.token_ids[1] != 1
        separators = len(np.unique(window.tokens["document"][1:])) - 1
        assert window.tokens["special"][0] and window.tokens["special"][1:].sum() == separators

    dropped = Windows(tokenizer, 64, packed=packed, control="drop").cut([document])
    assert [window.kept.sum() for window in dropped] == [len(ids) - whole.count("<")]


def test_rows_of_massive_norm_that_remain_are_told_with_what_drops_them(
    sae: CommandLine, tmp_path: Path
):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 32)).astype(np.float32)
    x[rng.choice(2000, 7, replace=False)] += 100 * np.eye(32)[3]
    np.save(tmp_path / "x.npy", x)
    norms = np.linalg.norm(x, axis=1)
    massive = norms > 10 * np.median(norms)
    squares = ((x - x.mean(0)) ** 2).sum(1)
    assert massive.sum() == 7
    assert sae("import", tmp_path / "x.npy", "--name", "x").status == 0
    assert sae(f"import {tmp_path / 'x.npy'} --name less --max-norm-multiple 10").status == 0
    words = ("train", "--act", "topk", "--k", "2", "--d-sae", "8", "--epochs", "1", "--data")
    said = r"x: 7 of 2,000 rows have over 10 times the median norm, and hold at least ([\d.]+)% of "
    told = re.search(said + "the variance; --max-norm-multiple 10 drops", sae(*words, "x").err)
    assert float(told[1]) / 100 == pytest.approx(squares[massive].sum() / squares.sum(), abs=0.02)
    assert "median norm" not in sae(*words, "less").err


def test_extraction_tells_of_massive_rows(sae: CommandLine, tmp_path: Path):
    """Without BOS: the first position of an untrained GPT-2 with a massive position embedding."""
    folder = save_model(tmp_path / "model", "gpt2", bos=False)
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.transformer.wpe.weight.data[0] += 1000
    model.save_pretrained(folder)
    (tmp_path / "a.txt").write_text("\n\n".join(["abcdefghij" * 2] * 20))
    words = ("extract", "--model", folder, "--layer", "1", "--dataset", tmp_path / "a.txt")
    assert "median norm" not in sae(*words, "--context", "21").err
    told = sae(*words, "--context", "21", "--prepend-bos", "off").err
    assert "20 of 400 rows have over 10 times the median norm, and hold at least" in told
