"""Chats: who says a token, where windows begin, stores of them; and the special tokens around every window."""

import json
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from homes import CommandLine, random_sae
from hypothesis import given
from hypothesis import strategies as st
from launching import signalled
from reports import pages_of
from storing import assert_same_pass
from tiny_models import save_model, save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import saecli
from saecli.base.errors import ConfigError, ModelError
from saecli.extract.texts import ROLES, Chats, Document, TextSource
from saecli.extract.windows import Cutter, Window
from saecli.model.windows import stored_windows

TEMPLATES, CONTEXT, BOS = Path(__file__).parents[1] / "templates", 40, 1
CONTROL = (
    "<pad> <s> </s> <start_of_turn> <end_of_turn> <|im_start|> <|im_end|> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> [INST] [/INST]"
).split()
WORDS = st.sampled_from(
    ["user", "im", "end_of_turn", " spaced  ", "\u4f60\u597d \U0001f642", "model\nassistant\n\nb"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama without a template, with a tokenizer of bytes, a few words, and all families' control tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=CONTROL, initial_alphabet=alphabet)
    texts = ["a user and a model or assistant say hello\n"] * 3
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=320, hidden_size=16, intermediate_size=24, **layers)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@cache
def opened(folder: Path, template: str) -> tuple[Any, Chats]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, Chats(tokenizer, (TEMPLATES / f"{template}.jinja").read_text(), "it")


def chat(contents: list[str], system: str | None = None) -> dict[str, Any]:
    roles = cycle(("user", "assistant"))
    said = [{"role": role, "content": text} for text, role in zip(contents, roles, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *said] if system else said}


@pytest.mark.parametrize("family", ["gemma", "llama3", "qwen", "mistral"])
@given(
    contents=st.lists(WORDS, min_size=1, max_size=6),
    system=st.sampled_from([None, "Be brief.", "user"]),
)
def test_roles_found_turn_by_turn_are_those_of_generation_tags(folder, family, contents, system):
    row = chat(contents, None if family == "gemma" else system)
    (tokenizer, plain), (_, tagged) = (
        opened(folder, template) for template in (family, f"{family}_generation")
    )
    texts = [one.read(row, "messages", "it") for one in (plain, tagged)]
    ids, roles, turns = texts[0].tokens([], True)
    tagged_ids, tagged_roles, tagged_turns = texts[1].tokens([], True)
    assert (str(texts[0]), ids, turns) == (str(texts[1]), tagged_ids, tagged_turns)
    assert ids == tokenizer(str(texts[0]), add_special_tokens=False)["input_ids"]
    for token, role, tagged_role in zip(ids, roles, tagged_roles, strict=True):
        # Tags also hold the space that a template has before the answer.
        assert role == tagged_role or (role == 0 and tokenizer.decode(token).isspace())
    for role, own in ((2, contents[::2]), (3, contents[1::2])):
        of_role = np.array(ids)[(np.array(roles) == role) & (np.array(ids) >= len(CONTROL))]
        said = of_role.tolist()
        assert "".join(tokenizer.decode(said).split()) == "".join("".join(own).split())


def test_windows_begin_with_turns_and_go_on_from_where_one_ended(folder):
    tokenizer, gemma = opened(folder, "gemma")
    text = gemma.read(chat(["a b c"] * 7 + ["x" * 90] + ["hello"] * 4), "messages", "it")
    (ids, _, turns), ends, room = text.tokens([BOS]), [0], CONTEXT - 1
    while ends[-1] < len(ids):
        most = min(len(ids), ends[-1] + room)
        within = [turn for turn in turns if ends[-1] < turn <= most]
        ends.append(max(within) if within and most < len(ids) else most)
    expected = [[BOS, *ids[begin:end]] for begin, end in pairwise(ends)] * 2
    cut = Cutter(tokenizer, CONTEXT, control="keep").cut
    documents = [Document(number, text, None) for number in (0, 1)]
    found = list(cut(documents))
    assert [window.token_ids.tolist() for window in found] == expected
    for number, window in enumerate(found, 1):
        rest = cut(documents[window.after.document :], window.after.token)
        assert [one.token_ids.tolist() for one in rest] == expected[number:]


ROWS = [chat([f"ask {n}", f"say {n} well", "and so?", "x" * (n % 30)]) for n in range(40)]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def extract(folder: Path, path: Path, **options: Any) -> dict[str, np.ndarray]:
    options = {"chat_template": str(TEMPLATES / "gemma.jinja")} | options
    options |= {"layer": 0, "context": CONTEXT, "dtype": "float32", "home": path.parent}
    store = saecli.extract(str(folder), dataset=str(path), **options)
    rows = store.split("all")
    columns = {name: np.concatenate(list(rows.column(name, 512))) for name in store.meta.columns}
    return columns | {"x": np.concatenate([batch.copy() for batch in rows.sequential(512)])}


def test_stores_hold_the_rows_asked_for_from_every_kind_of_file(folder, tmp_path):
    path = written(tmp_path / "a.jsonl", [*ROWS, *ROWS, {"messages": []}, *ROWS])
    whole, store = extract(folder, path, name="s"), saecli.open_store("s", home=tmp_path)
    assert whole["role"].dtype.itemsize == 1 and {*whole["role"].tolist()} == {0, 2, 3}
    ids, counts = np.unique(whole["token_id"][whole["token_id"] < len(CONTROL)], return_counts=True)
    assert store.meta.control_tokens == dict(zip(map(str, ids), counts, strict=True))
    assert len(ids) > 1
    assert store.meta.dropped["empty_texts"] == 1 and whole["document"].max() == 120
    for options, kept in (
        ({"positions": "assistant"}, whole["role"] == 3),
        ({"control_tokens": "drop"}, whole["token_id"] >= len(CONTROL)),
    ):
        some = extract(folder, path, **options)
        assert all((some[name] == whole[name][kept]).all() for name in whole if name != "x")
        assert not kept.all()
        np.testing.assert_allclose(some["x"], whole["x"][kept], rtol=1e-4, atol=1e-5)
    tokenizer, gemma = opened(folder, "gemma")
    documents = TextSource(str(path), column="messages", chat=True).documents(read_chat=gemma.read)
    windows = Cutter(tokenizer, CONTEXT, control="keep").cut(documents)
    found = stored_windows(store.split("all"), 10**9)
    for one, expected in zip(found, windows, strict=True):
        assert one.token_ids.tolist() == expected.token_ids.tolist()
        assert one.is_row.tolist() == expected.is_row.tolist()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    names = {"user": "human", "assistant": "gpt"}
    gpt = [
        [
            {"from": names[message["role"]], "value": [{"text": message["content"]}]}
            for message in row["messages"]
        ]
        for row in ROWS
    ]
    gpt_file = written(tmp_path / "b.jsonl", [{"chat": talk} for talk in gpt])
    for path, options in ((tmp_path / "a.parquet", {}), (gpt_file, {"text_column": "chat"})):
        found = extract(folder, path, **options)
        for name in whole.keys() - {"x"}:
            assert (found[name] == whole[name][: len(found[name])]).all()


def test_a_report_says_on_whose_tokens_a_latent_acts_and_who_speaks(folder, tmp_path):
    columns = extract(folder, written(tmp_path / "a.jsonl", ROWS), name="s")
    sae = random_sae(d_in=16)
    saecli.report(sae, tmp_path / "report", "s", home=tmp_path)
    sizes = sae.encode(torch.from_numpy(columns["x"])).double().numpy()
    expected = np.stack([sizes[columns["role"] == role].sum(0) for role in range(len(ROLES))])
    for latent, page in pages_of(tmp_path / "report").items():
        shares = [share for _, share in page.get("roles", [("", 0)] * len(ROLES))]
        own = expected[:, latent]
        np.testing.assert_allclose(shares, own / (own.sum() or 1), atol=1e-3)
        for example in page["examples"]:
            before = [role for place, role in example["roles"] if place <= example["peak"]]
            assert before[-1] == ROLES[columns["role"][example["row"]]]


@pytest.mark.long
def test_killed_extractions_of_chats_equal_whole_ones(sae: CommandLine, folder, tmp_path):
    line = (
        f"extract --model {folder} --layer 0 --dataset {written(tmp_path / 'a.jsonl', ROWS * 40)}"
    )
    chats = f"--chat-template {TEMPLATES / 'gemma.jinja'} --positions assistant"
    words = split(f"{line} {chats} --shard-rows 2000 --name")
    signalled(sae.home, [*words, "k"], ".h5", 3)
    assert [sae(*words, name).status for name in "kw"] == [0, 0]
    assert_same_pass(sae.home / "activations" / "k", sae.home / "activations" / "w")
    killed, whole = (saecli.open_store(name, home=sae.home).meta.control_tokens for name in "kw")
    assert killed == whole != {}


@pytest.mark.parametrize(
    ("row", "options", "sentence"),
    [
        (ROWS[0], {"chat_template": None}, "has no chat template; .* with --chat-template"),
        (ROWS[0], {"chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja"),
        ({"text": "a"}, {}, "--chat-template .* needs chats"),
        ({"messages": [{"content": "a"}]}, {}, "message 1 of line 1 of .* has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "has no text"),
        (chat(["a"], "b"), {}, "line 1 of .* does not fit the chat template: System role not"),
    ],
)
def test_what_is_no_chat_gives_one_sentence(folder, tmp_path, row, options, sentence):
    with pytest.raises((ConfigError, ModelError), match=sentence) as caught:
        extract(folder, written(tmp_path / "a.jsonl", [row] * 3), **options)
    assert "\n" not in str(caught.value)


NUCLEOTIDES = ["A", "C", "G", "T", "a"]
SPECIAL = ["<first>", "<second>", "<third>"]
AROUND = ["<first> A C G <second>", "<first> T A <second>"]


def tokenizer_of(folder: Path, template: str | None = None, **roles: str) -> Any:
    """A tokenizer of words, saved and loaded, with special tokens of these roles."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *NUCLEOTIDES])}
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
    return list(Cutter(tokenizer, context, **options).cut(documents))


def words_of(tokenizer: Any, windows: list[Window], column: str = "token_ids") -> list[str]:
    found = []
    for window in windows:
        ids = window.token_ids if column == "token_ids" else window.token_ids[window.is_row]
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

    (window,) = Cutter(tokenizer, 64, packed=packed, control="keep").cut([document])
    assert window.token_ids.tolist() == ids
    assert window.tokens["special"].tolist() == [True] + [False] * (len(ids) - 1)
    assert window.is_row.tolist() == (~window.tokens["special"]).tolist()

    twice = [document, document._replace(number=1)]
    windows = list(Cutter(tokenizer, 8, packed=packed, control="keep").cut(twice))
    turns = [ids[0:8], ids[8:14], ids[14:20]]
    if not packed:
        assert [window.token_ids.tolist() for window in windows] == turns * 2
    for window in windows:
        assert window.token_ids[0] == 1 and window.token_ids[1] != 1
        separators = len(np.unique(window.tokens["document"][1:])) - 1
        assert window.tokens["special"][0] and window.tokens["special"][1:].sum() == separators

    dropped = Cutter(tokenizer, 64, packed=packed, control="drop").cut([document])
    assert [window.is_row.sum() for window in dropped] == [len(ids) - whole.count("<")]


def test_massive_rows_that_remain_are_told_with_what_drops_them(sae: CommandLine, tmp_path: Path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 32)).astype(np.float32)
    x[rng.choice(2000, 7, replace=False)] += 100 * np.eye(32)[3]
    np.save(tmp_path / "x.npy", x)
    norms = np.linalg.norm(x, axis=1)
    assert (norms > 10 * np.median(norms)).sum() == 7
    assert sae("import", tmp_path / "x.npy", "--name", "x").status == 0
    assert sae(f"import {tmp_path / 'x.npy'} --name less --max-norm-multiple 10").status == 0
    words = ("train", "--act", "topk", "--k", "2", "--d-sae", "8", "--epochs", "1", "--data")
    told = "x: 7 of 2,000 rows have over 10 times the median norm; --max-norm-multiple 10 drops"
    assert told in sae(*words, "x").err
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
    assert "20 of 400 rows have over 10 times the median norm" in told
