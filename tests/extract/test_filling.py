"""Cutter, blocks and stores: every token once, for any batches, from wherever an earlier pass stopped."""

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storing import assert_same_pass
from tiny_models import loaded, save_model, save_tokenizer
from transformers import AutoTokenizer, LlamaModel

from saecli.base.errors import ConfigError, ModelError
from saecli.extract import windows as cutting
from saecli.extract.filling import Forward, fill
from saecli.extract.options import TOKEN_COLUMNS
from saecli.extract.texts import Document
from saecli.extract.windows import START, Block, Cursor, Cutter, in_blocks
from saecli.model.language_model import LanguageModel
from saecli.store.origin import HookPoint
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.values import TextWindow
from saecli.store.writer import StoreWriter

BOS, EOS, CONTEXT, ROWS = 1, 2, 16, 700
LETTERS = "abcdefghijklmnop"
POINTS = [HookPoint(0, "resid_post"), HookPoint(2, "mlp_out"), HookPoint(1, "resid_pre")]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """A tokenizer that puts <bos> before a text, and one that does not."""
    found = {}
    for bos in (True, False):
        folder = tmp_path_factory.mktemp("tokenizer")
        save_tokenizer(folder, bos)
        found[bos] = AutoTokenizer.from_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return loaded(save_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


def documents(texts: list[str], start: int = 0) -> list[Document]:
    return [Document(number, text, None) for number, text in enumerate(texts)][start:]


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 40 letters."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), rng.integers(0, 41))) for _ in range(count)]


def blocks(
    texts: list[str], cutter: Cutter, rows: int, cursor: Cursor = START
) -> Generator[Block, None, None]:
    return in_blocks(lambda begin: documents(texts, begin.document), cutter, rows, cursor)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few texts make many blocks."""
    monkeypatch.setattr(cutting, "BLOCK_TOKENS", 150)


TEXTS = st.lists(st.text(LETTERS, max_size=25), min_size=1, max_size=8)


@given(texts=TEXTS, context=st.integers(2, 12), bos=st.booleans())
def test_packed_windows_are_the_documents_joined(tokenizers, texts, context, bos):
    cutter = Cutter(tokenizers[bos], context, packed=True, prepend_bos=bos)
    windows = list(cutter.cut(documents(texts)))
    plain = {
        number: tokenizers[bos](text, add_special_tokens=False)["input_ids"]
        for number, text in enumerate(texts)
    }
    for window in windows:
        ids = window.token_ids.tolist()
        assert (ids[0] == BOS) == bos and ids[-1] not in (BOS, EOS)
        # BOS in the first place, and a separator wherever one document follows another, and nowhere else
        document = window.tokens["document"]
        edges = [i for i in range(1 + bos, len(ids)) if document[i] != document[i - 1]]
        assert [i for i in range(bos, len(ids)) if ids[i] in (BOS, EOS)] == edges
        assert all(ids[i] == (BOS if bos else EOS) for i in edges)
        assert window.is_row.tolist() == [token not in (BOS, EOS) for token in ids]
    assert all(context - 1 <= len(window.token_ids) <= context for window in windows[:-1])
    for number, token_ids in plain.items():
        assert [
            token
            for window in windows
            for token in window.token_ids[window.is_row & (window.tokens["document"] == number)]
        ] == token_ids


@given(texts=TEXTS, context=st.integers(2, 12), packed=st.booleans(), bos=st.booleans())
def test_cutting_after_a_window_gives_those_that_followed(tokenizers, texts, context, packed, bos):
    def cutter() -> Cutter:
        return Cutter(tokenizers[bos], context, packed=packed)

    whole, every = cutter(), []
    for window in whole.cut(documents(texts)):
        every.append((window, dict(whole.left_out)))
    lengths = [len(tokenizers[bos](text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert whole.left_out == +Counter(empty_texts=lengths.count(0))
    for index, (window, seen) in enumerate(every):
        again = cutter()
        rest = list(again.cut(documents(texts, window.after.document), window.after.token))
        assert len(rest) == len(every) - index - 1
        for found, (other, _) in zip(rest, every[index + 1 :], strict=True):
            assert found.token_ids.tolist() == other.token_ids.tolist()
            own, others = (window.tokens["document"][window.is_row] for window in (found, other))
            assert own.tolist() == others.tolist()
            assert found.after == other.after
        assert again.left_out + type(again.left_out)(seen) == whole.left_out


@given(texts=TEXTS, context=st.integers(2, 12), packed=st.booleans(), bos=st.booleans())
def test_a_text_that_begins_with_bos_is_cut_as_without_it(tokenizers, texts, context, packed, bos):
    """Wherever the pass begins; "<bos>" before a text, or twice, as decoded texts and rendered chats have it."""
    written = [f"{'<bos>' * (number % 3)}{text}" for number, text in enumerate(texts)]
    plain, other = (Cutter(tokenizers[bos], context, packed=packed) for _ in range(2))
    expected, found = list(plain.cut(documents(texts))), list(other.cut(documents(written)))
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
    repeats = sum(text.startswith("<bos>") for text in written)
    assert other.left_out == plain.left_out + Counter(repeated_bos=repeats)
    for number, window in enumerate(found, 1):
        rest = other.cut(documents(written, window.after.document), window.after.token)
        assert [each.token_ids.tolist() for each in rest] == [
            each.token_ids.tolist() for each in found[number:]
        ]


def test_a_text_without_added_bos_keeps_its_own(tokenizers):
    cutter = Cutter(tokenizers[False], CONTEXT, prepend_bos=False)
    (window,) = cutter.cut(documents(["<bos>abc"]))
    assert window.token_ids[0] == BOS and len(window.token_ids) == 4
    assert not window.is_row[0] and not cutter.left_out


def test_no_window_begins_with_bos_twice(tokenizers):
    """Chats that were rendered one after another into a text have BOS at any place."""
    cutter = Cutter(tokenizers[True], 5)
    windows = list(cutter.cut(documents(["<bos>abcd<bos>efgh<bos>ij"])))
    assert [window.token_ids.tolist().count(BOS) for window in windows] == [1, 1, 1]
    assert sum(int(window.is_row.sum()) for window in windows) == 10


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_from_any_cursor_are_the_same_blocks(tokenizers, small_blocks, packed):
    texts = some_texts(200)

    def from_(cursor: Cursor) -> list[tuple]:
        windows = Cutter(tokenizers[True], CONTEXT, packed=packed)
        return [
            (
                block.cursor.to_json(),
                block.offered,
                block.lengths.tolist(),
                {reason: own.tolist() for reason, own in block.before.items()},
                {name: column.tolist() for name, column in block.columns.items()},
            )
            for block in blocks(texts, windows, 2000, cursor)
        ]

    whole = from_(Cursor())
    # Ends where enough are offered.
    assert any(2000 <= offered < 2000 + CONTEXT for _, offered, *_ in whole)
    assert len(whole) > 8
    for index, (cursor, *_) in enumerate(whole):
        assert from_(Cursor.from_json(cursor)) == whole[index:]


def test_blocks_are_as_large_as_where_a_pass_was_stopped(tokenizers):
    """Another device makes blocks of another size, and several stores go on from several blocks."""
    texts, windows = some_texts(200), Cutter(tokenizers[True], CONTEXT)

    def cut(begin: Cursor, size: int) -> list[Block]:
        return list(in_blocks(lambda c: documents(texts, c.document), windows, 10**6, begin, size))

    large = cut(START, 400)
    rest = cut(Cursor.from_json(large[3].cursor.to_json()), 150)
    assert [block.cursor for block in rest] == [block.cursor for block in large[3:]]
    assert [one.lengths.tolist() for one in rest] == [one.lengths.tolist() for one in large[3:]]


def test_packing_needs_a_token_to_part_documents(tokenizers):
    bare = AutoTokenizer.from_pretrained(tokenizers[False].name_or_path)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ConfigError, match="packed needs a token to separate documents"):
        Cutter(bare, CONTEXT, packed=True)


def test_windows_without_rows_are_not_run(model):
    token_ids, seen = np.arange(3, 9), []
    bare = TextWindow(token_ids, np.zeros(6, bool))
    window = TextWindow(token_ids, token_ids % 2 == 1)
    forward = Forward([model], "float32", 100, print)
    found = forward([bare, window, bare], POINTS, lambda *done: seen.append(done))
    assert seen == [(6, 3)] and forward([bare], POINTS, print) == {}
    for point, rows in forward([window], POINTS, print).items():
        np.testing.assert_array_equal(found[point], rows)


class CrampedLlama(LlamaModel):
    """Has memory for only so many tokens in a forward pass."""

    most = 100

    def forward(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        if input_ids.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate some tokens")
        return super().forward(input_ids=input_ids, **settings)


def rows_of(model: LanguageModel, tokens: int, notes: list[str]) -> list[np.ndarray]:
    windows = Cutter(model.tokenizer, CONTEXT)
    (block,) = blocks(some_texts(60), windows, 10**6)
    seen = []
    forward = Forward([model], "float32", tokens, notes.append)
    found = forward(block.windows.each(), POINTS, lambda *done: seen.append(done))
    assert sum(rows for _, rows in seen) == block.rows == len(block.columns["position"])
    assert sum(tokens for tokens, _ in seen) == block.lengths.sum()
    return [found[point] for point in POINTS]


def test_a_batch_that_does_not_fit_is_halved(model, tmp_path: Path):
    notes: list[str] = []
    expected = rows_of(model, 40 * CONTEXT, notes)
    assert notes == []
    cramped = loaded(save_model(tmp_path / "llama", "llama"))
    cramped.model.__class__ = CrampedLlama
    for found, rows in zip(rows_of(cramped, 40 * CONTEXT, notes), expected, strict=True):
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-5)
    said = f"windows of {CONTEXT} tokens do not fit in the memory of cpu; going on with"
    assert notes == [f"40 {said} 20", f"20 {said} 10", f"10 {said} 5"]
    cramped.model.most = CONTEXT - 1
    with pytest.raises(ModelError, match=f"a window of {CONTEXT} tokens does not fit in"):
        rows_of(cramped, 40 * CONTEXT, notes)


def fill_stores(
    home: Path,
    model: LanguageModel,
    points: Iterable[HookPoint],
    stop_at: int | None = None,
    *,
    packed: bool = False,
    batch: int = 64,
    rows: int = ROWS,
    multiple: float | None = None,
) -> None:
    """Fill stores by batches of `batch` tokens, interrupted once `stop_at` rows were computed."""
    done = 0

    def show(tokens: int, rows: int) -> None:
        nonlocal done
        done += rows
        if stop_at is not None and done >= stop_at:
            raise KeyboardInterrupt

    writers = {}
    for point in points:
        limits = {"columns": TOKEN_COLUMNS, "max_norm_multiple": multiple}
        meta = StoreMeta({"point": str(point)}, "x", "bfloat16", 16, 90, **limits)
        writers[point] = StoreWriter.open(home / f"{point.layer}-{point.site}", meta, limit=rows)

    def blocks_from(cursor: Cursor) -> Generator[Block, None, None]:
        windows = Cutter(model.tokenizer, CONTEXT, packed=packed)
        return blocks(some_texts(100, seed=3), windows, rows, cursor)

    try:
        fill(writers, blocks_from, Forward([model], "bfloat16", batch, print), rows, show)
    finally:
        for writer in writers.values():
            writer.__exit__(None, None, None)


class Signalling(dict):
    """Stores during whose filling Ctrl-C is pressed again and again."""

    busy = False

    def items(self):
        if threading.current_thread() is not threading.main_thread():
            self.busy = True
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.03)
            self.busy = False
        return super().items()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, whatever the shell that runs the tests has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_no_store_is_being_written_once_filling_ends(model, small_blocks, tmp_path: Path):
    """Else a second Ctrl-C closes one while a thread writes it: a shard of other rows than its checksums."""
    meta = StoreMeta({}, "x", "bfloat16", 16, 90, columns=TOKEN_COLUMNS)
    with StoreWriter.open(tmp_path / "s", meta, limit=ROWS) as writer:
        writers = Signalling({POINTS[0]: writer})
        windows, texts = Cutter(model.tokenizer, CONTEXT), some_texts(100, seed=3)
        with pytest.raises(KeyboardInterrupt):
            fill(
                writers,
                lambda cursor: blocks(texts, windows, ROWS, cursor),
                Forward([model], "bfloat16", 64, print),
                ROWS,
                lambda *_: None,
            )
        assert not writers.busy
    store = ActivationStore.open(tmp_path / "s")
    assert store.rows and store.verify() == []


def test_any_batch_size_gives_the_same_store(model, small_blocks, tmp_path: Path):
    fill_stores(tmp_path / "large", model, POINTS[:1], batch=1000)
    fill_stores(tmp_path / "small", model, POINTS[:1], batch=100)
    name = f"{POINTS[0].layer}-{POINTS[0].site}"
    assert_same_pass(tmp_path / "large" / name, tmp_path / "small" / name)


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [None, 1.1])
def test_stores_stopped_apart_equal_whole_ones(model, small_blocks, tmp_path: Path, multiple):
    fill_stores(tmp_path / "whole", model, POINTS, multiple=multiple)
    stores = map(ActivationStore.open, (tmp_path / "whole").iterdir())
    dropped = [store.meta.dropped.get("high_norm", 0) for store in stores]
    assert len({*dropped}) == 1 and (dropped[0] > 10) == (multiple is not None)
    stopped = tmp_path / "stopped"
    folders = [stopped / f"{point.layer}-{point.site}" for point in POINTS]
    stood: set[int] = set()
    for stop_at, lost in zip((650, 450, 250), [folders[2], folders[1], None], strict=True):
        with pytest.raises(KeyboardInterrupt):
            fill_stores(stopped, model, POINTS, stop_at, multiple=multiple)
        stood |= {ActivationStore.open(folder).rows for folder in folders if folder.exists()}
        if lost:
            shutil.rmtree(lost)
    assert len(stood) > 1 and max(stood) < ROWS
    for _ in range(2):  # the second time, the others are finished
        fill_stores(stopped, model, POINTS, multiple=multiple)
        for folder in folders:
            assert_same_pass(folder, tmp_path / "whole" / folder.name, but_for=("shards",))
        shutil.rmtree(folders[2])
