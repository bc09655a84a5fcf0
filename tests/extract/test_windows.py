"""Every window is rebuilt from the store, whatever drops rows, and spliced into only at the rows; its rows are those of
the window alone, whatever is in its batch or ran before."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from homes import CommandLine, make_run, random_sae
from plain_hooks import assert_same_effects, effects_by_hooks
from reports import pages_of
from tiny_models import DEEP, loaded, random_letters, save_model
from tokenizers import processors
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
)

import saecli
from saecli.base.errors import ModelError
from saecli.store.origin import HookPoint
from saecli.store.reader import ActivationStore
from saecli.store.split import is_test
from saecli.store.values import TextWindow

BOS, EOS, CONTEXT, LAYER = 1, 2, 12, 1
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    (save_model(folder, "llama") / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def texts(seed: int = 0, count: int = 60) -> list[str]:
    """Letters, with an <eos> written in some texts."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        letters = random_letters(draw, draw.integers(1, 40))
        found.append(letters if number % 5 else f"{letters[:3]}<eos>{letters[3:]}")
    return found


def extract(folder: Path, home: Path, **options: Any) -> ActivationStore:
    home.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts()]
    (home / "text.jsonl").write_text("\n".join(lines))
    said = [
        {"role": role, "content": text}
        for text, role in zip(texts(), ("user", "assistant") * 30, strict=True)
    ]
    lines = [json.dumps({"messages": said[at : at + 2]}) for at in range(0, 60, 2)]
    (home / "chats.jsonl").write_text("\n".join(lines))
    name = "chats.jsonl" if options.pop("chats", False) else "text.jsonl"
    fixed = {"layer": LAYER, "context": CONTEXT, "dtype": "float32", "shard_rows": 50}
    return saecli.extract(str(folder), dataset=str(home / name), home=home, **fixed | options)


DROPPING = [
    {"max_norm_multiple": 1.1},
    {"packed": True, "max_norm_multiple": 1.1},
    {"positions": "last"},
    {"prepend_bos": "off"},
    {"chats": True, "packed": True},
    {"chats": True, "positions": "assistant"},
]
FURTHER = [
    {},
    {"rows": 333},
    {"max_norm_multiple": 1.1, "shard_rows": 8},  # fewer than a window has
    {"packed": True},
    {"chats": True},
    {"chats": True, "control_tokens": "drop"},
]
SLOW = [pytest.param(options, marks=pytest.mark.slow) for options in FURTHER]


@torch.no_grad()
def rows_of(model: Any, token_ids: Any) -> torch.Tensor:
    """What plain transformers has at the layer for each token of a window, (T, D)."""
    states = model(torch.tensor([[*token_ids]]), output_hidden_states=True).hidden_states
    return states[LAYER + 1][0]


def column(rows: Any, name: str) -> list[int]:
    return np.concatenate(list(rows.column(name, 64))).tolist()


@pytest.fixture(scope="module", params=[*DROPPING, *SLOW], ids=str)
def store(request, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> ActivationStore:
    return extract(folder, tmp_path_factory.mktemp("home"), **request.param)


def test_windows_hold_the_whole_input_and_mark_the_rows(folder, store):
    """The model, run on the windows, gives the rows at the marked tokens, in order; nothing else is marked."""
    model = loaded(folder).model
    for which in ("all", "train", "test"):
        rows = store.split(which)
        windows = list(rows.windows())
        tokens, positions, x = [], [], []
        for token_ids, mask in windows:
            assert mask.any() and len(token_ids) <= CONTEXT and token_ids[0] == BOS
            tokens += token_ids[mask].tolist()
            positions += np.flatnonzero(mask).tolist()
            x.append(rows_of(model, token_ids)[mask].numpy())
        assert tokens == column(rows, "token_id")
        assert positions == column(rows, "position")
        stored = np.concatenate([batch.copy() for batch in rows.sequential(64)])
        np.testing.assert_allclose(np.concatenate(x), stored, rtol=1e-4, atol=1e-5)


def test_windows_are_those_of_the_text_also_where_rows_are_dropped(tmp_path, folder):
    store = extract(folder, tmp_path, max_norm_multiple=1.1)
    assert store.meta.dropped["high_norm"] > 100
    tokenizer, expected = loaded(folder).tokenizer, []
    for text in texts():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected += [[BOS, *ids[at : at + CONTEXT - 1]] for at in range(0, len(ids), CONTEXT - 1)]
    found = [token_ids.tolist() for token_ids, _ in store.split("all").windows()]
    model, having = loaded(folder).model, []
    for window in expected:
        ordinary = torch.tensor(window) > EOS
        norms = rows_of(model, window)[ordinary].norm(dim=1)
        if (norms <= 1.1 * store.meta.median_norm).any():
            having.append(window)
    assert found == having


@pytest.mark.parametrize("rows", [1, 100, 333])
def test_counts_of_what_was_dropped_end_with_the_last_row_kept(tmp_path, folder, rows):
    store = extract(folder, tmp_path, rows=rows, max_norm_multiple=1.1)
    loaded_model, left, counts = loaded(folder), rows, {}
    limit = 1.1 * store.meta.median_norm
    for text in texts():
        ids = loaded_model.tokenizer(text, add_special_tokens=False)["input_ids"]
        for at in range(0, len(ids), CONTEXT - 1):
            window = [BOS, *ids[at : at + CONTEXT - 1]]
            norms = rows_of(loaded_model.model, window).norm(dim=1).tolist()
            for token, norm in zip(window, norms, strict=True):
                if not left:
                    break
                reason = "special" if token <= EOS else "high_norm" if norm > limit else "kept"
                counts[reason] = counts.get(reason, 0) + 1
                left -= reason == "kept"
    assert counts.pop("kept") == store.rows == rows
    assert store.meta.dropped == counts


def test_a_shard_holds_the_windows_as_the_format_says(tmp_path, folder):
    """Read with h5py alone."""
    store = extract(folder, tmp_path, max_norm_multiple=1.1)
    found, start = [], 0
    for path in sorted((store.path / "shards").glob("*.h5")):
        with h5py.File(path) as shard:
            group, rows = shard["windows"], len(shard["activations"])
            names = ("offset", "first", "token_id", "stored")
            offset, first, token_id, stored = (group[name][:] for name in names)
        assert offset[0] == 0 and offset[-1] == len(token_id) == len(stored)
        assert (first < rows).all() and (np.diff(first) > 0).all()
        for number, begin in enumerate(first):
            own = slice(offset[number], offset[number + 1])
            found.append((start + begin, stored[own].sum()))
        start += rows
    ends = [begin + count for begin, count in found]
    assert [begin for begin, _ in found] == [0, *ends[:-1]] and ends[-1] == store.rows


@pytest.mark.parametrize("options", [{"max_norm_multiple": 1.1}, {"packed": True}, {"chats": True}])
def test_effects_of_held_out_rows_match_plain_torch(sae: CommandLine, folder, options):
    """Only held-out rows are replaced and scored, in windows that hold other rows too."""
    store = extract(folder, sae.home, name="store", **options)
    one = random_sae(d_in=store.d_in, seed=0)
    make_run(sae.home, "random", one, data="store", split_seed=3)
    done = sae("eval", "random", "--model", folder, "--tokens", "1000000", "--json")
    (found,) = done.json["runs"]

    llama, double = LlamaForCausalLM.from_pretrained(folder).double(), one.copy_to(torch.float64)
    everything = store.split("all")
    held_out = is_test(np.array(column(everything, "document")), seed=3)
    windows, at = [], 0
    for token_ids, mask in everything.windows():
        own = mask.copy()
        own[mask] = held_out[at : at + mask.sum()]
        at += mask.sum()
        if own.any():
            windows.append(TextWindow(token_ids, own))
    expected = effects_by_hooks(llama, llama.model.layers[LAYER], windows, double)
    assert expected["tokens"] == held_out.sum()
    assert_same_effects(found, expected)
    effect = ["ce_clean", "ce_spliced", "ce_zero", "ce_recovered", "kl", "tokens"]
    assert list(found)[-6:] == effect


def test_report_texts_show_every_token_of_a_window(tmp_path, folder, store):
    """A window is shorter than an excerpt, so that each text is a whole window; rows alone have codes."""
    mine = random_sae(d_in=store.d_in, seed=0)
    saecli.report(mine, tmp_path / "pages", store)
    tokenizer, rows = loaded(folder).tokenizer, store.split("all")
    codes = mine.encode(torch.from_numpy(np.concatenate(list(rows.sequential(10**6))))).numpy()
    windows, window_of = list(rows.windows()), []
    for number, (_, mask) in enumerate(windows):
        window_of += [number] * int(mask.sum())
    seen = set()
    for latent, page in pages_of(tmp_path / "pages").items():
        for example in page["examples"] + page["samples"]:
            number = window_of[example["row"]]
            token_ids, mask = windows[number]
            shown = [token.removeprefix(" ") for token in example["tokens"]]
            assert shown == tokenizer.convert_ids_to_tokens(token_ids.tolist())
            expected = np.zeros(len(mask))
            expected[mask] = codes[np.array(window_of) == number, latent]
            assert example["codes"] == pytest.approx(expected, rel=1e-3, abs=page["scale"])
            assert example["peak"] == example["position"]
            seen.add(number)
    assert len(seen) > 5


@pytest.mark.slow
def test_an_eos_that_the_tokenizer_appends_is_not_scored(sae: CommandLine, tmp_path):
    folder = save_model(tmp_path / "llama", "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.save_pretrained(folder)
    store = extract(folder, sae.home, name="store")
    make_run(sae.home, "random", random_sae(d_in=store.d_in, seed=0), data="store")
    done = sae("eval", "random", "--model", folder, "--split", "all", "--json")
    llama, losses = LlamaForCausalLM.from_pretrained(folder).double(), []
    for token_ids, mask in store.split("all").windows():
        assert token_ids[-1] == EOS and not mask[-1]
        ids = torch.tensor(token_ids)
        scored = np.flatnonzero(mask[:-2])
        with torch.no_grad():
            scores = llama(ids[None]).logits[0].log_softmax(-1)
        losses.append(functional.nll_loss(scores[scored], ids[scored + 1], reduction="none"))
    (found,) = done.json["runs"]
    assert found["ce_clean"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


LENGTHS = [10, 40, 25, 16, 40]
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
SHARED = {**DEEP, "num_key_value_heads": 2}
CONFIGS = {
    "dynamic": lambda: LlamaConfig(**SHARED, max_position_embeddings=16, rope_parameters=DYNAMIC),
    "longrope": lambda: Phi3Config(
        **SHARED,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=LONG,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_of_a_batch_are_those_of_a_new_model_and_each_window_alone(kind: str, tmp_path: Path):
    folder = save_model(tmp_path, CONFIGS[kind]())
    model, point = loaded(folder), HookPoint(1, "resid_post")
    random = torch.Generator().manual_seed(0)
    token_ids = torch.randint(3, 60, (len(LENGTHS), 40), generator=random)
    mask = (torch.arange(40) < torch.tensor(LENGTHS)[:, None]).long()
    found = model.read(token_ids, mask, [point], torch.clone)[0]
    for row, length in enumerate(LENGTHS):
        new = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            states = new(token_ids[row : row + 1, :length], output_hidden_states=True).hidden_states
        torch.testing.assert_close(found[row, :length], states[2][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{"use_bidirectional_attention": True}, {}])
def test_a_model_that_sees_later_tokens_predicts_none(more: dict[str, Any], tmp_path: Path):
    sizes = {**DEEP, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
    folder = save_model(tmp_path, Gemma3TextConfig(**sizes, **more))
    if more:
        with pytest.raises(ModelError, match="one whose tokens see later ones"):
            loaded(folder, head=True)
    else:
        loaded(folder, head=True)
    loaded(folder).read(
        torch.ones(1, 3).long(), torch.ones(1, 3).long(), [HookPoint(0, "resid_post")], torch.clone
    )
