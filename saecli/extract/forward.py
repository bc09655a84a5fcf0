"""Running blocks through the model, and filling stores with their activations in one pass over the text.

A row that one store of a pass drops is dropped from all. So every block is read at all hook points, also where a store
has its rows already: stores interrupted at different shards get the same blocks again, each from its own cursor on.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..base.devices import moved
from ..base.errors import ModelError, StoreError
from ..base.machine import is_out_of_memory
from ..store.shard_writer import Admission, jointly
from ..store.writer import StoreWriter
from .options import HookPoint
from .windows import LOOK_AHEAD, Batch, Block, Cursor, Run

if TYPE_CHECKING:
    from .language_model import LanguageModel, SideBySide

CPU_TOKENS = 1 << 11  # tokens per forward pass on a CPU: more were no faster
SHORTEST = 7 / 8  # of a batch's longest window: a narrower range has less padding, but more passes
PROBED = (
    1,
    1,
    3,
)  # windows per measured pass; in the first, libraries allocate memory for themselves
USED = 0.7  # fraction of the free memory for a batch
COLUMNS = ("token_id", "position", "document")
NONFINITE_ROWS = 10_000  # if none of the first 10,000 rows can be stored, none will

Item = TypeVar("Item")


class Found(NamedTuple):
    """A block's activations at a hook point. R rows, D the site's width, S special tokens."""

    rows: np.ndarray  # (R, D) in document order, float32, or bfloat16 as its bits in uint16
    special_norms: np.ndarray  # (S,) float64, norms at special tokens


class Forward:
    """Runs blocks in batches of windows of similar length, of at most `tokens` tokens, including padding; a longer
    window is a batch of its own. Batches that do not fit in memory are halved, with a `note`."""

    def __init__(
        self,
        model: "LanguageModel | SideBySide",
        dtype: str,
        tokens: int,
        note: Callable[[str], None],
    ) -> None:
        # bfloat16 halves the copy from the device. float16 would overflow, and lose the norms of rows dropped for it.
        encoding = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self._model, self._dtype, self.tokens, self.note = model, encoding, tokens, note

    def each(
        self, blocks: Sequence[Block], points: Sequence[HookPoint], show: Callable[[int, int], None]
    ) -> list[dict[HookPoint, Found]]:
        """The activations of each of several blocks, run together; of one without windows none."""
        whole = self(Run.joined(blocks), points, show) if any(map(len, blocks)) else []
        rows = special = 0
        found = []
        for block in blocks:
            own = slice(rows, rows + block.rows), slice(special, special + block.specials)
            rows, special = own[0].stop, own[1].stop
            parts = [Found(one.rows[own[0]], one.special_norms[own[1]]) for one in whole]
            found.append(dict(zip(points, parts, strict=True)) if len(block) else {})
        return found

    def __call__(
        self, block: Run, points: Sequence[HookPoint], show: Callable[[int, int], None]
    ) -> list[Found]:
        """A block's activations; `show` is called after each batch with its numbers of tokens and rows."""
        found: list[tuple[Tensor, Tensor]] = []
        order, done = (
            np.argsort(-block.lengths, kind="stable"),
            0,
        )  # longest first: a lack of memory shows at once
        while done < len(order):
            lengths = block.lengths[order[done:]]
            alike = np.searchsorted(-lengths, -SHORTEST * lengths[0], side="right")
            windows = order[done : done + max(1, min(alike, self.tokens // lengths[0]))]
            batch = block.batch(windows)
            try:
                parts = self._read(batch, points)
                found = found or [
                    (rows.new_empty(block.rows, rows.shape[1]), norms.new_empty(block.specials))
                    for rows, norms in parts
                ]
                for (all_rows, all_norms), (rows, norms) in zip(found, parts, strict=True):
                    all_rows.index_copy_(0, moved(batch.rows, rows.device), rows)
                    all_norms.index_copy_(0, moved(batch.specials, norms.device), norms)
                fits = True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            if fits:
                done += len(windows)
                show(int(batch.mask.sum()), len(batch.rows))
            else:  # outside the except clause, where the error has released the tensors of its frames
                self._halve(len(windows), int(block.lengths[windows[0]]))
        return [Found(_on_host(rows), norms.cpu().numpy()) for rows, norms in found]

    def _read(self, batch: Batch, points: Sequence[HookPoint]) -> list[tuple[Tensor, Tensor]]:
        """A batch's rows, and its norms at special tokens, at each hook point."""
        kept, special = (
            moved(batch.kept, self._model.device),
            moved(batch.special, self._model.device),
        )

        def take(activations: Tensor) -> tuple[Tensor, Tensor]:
            flat = activations.flatten(0, 1)
            return flat.index_select(0, kept).to(self._dtype), flat.index_select(
                0, special
            ).double().norm(dim=1)

        return self._model.read(batch.token_ids, batch.mask, points, take)

    def _halve(self, windows: int, longest: int) -> None:
        if windows == 1:
            raise ModelError(
                f"a window of {longest:,} tokens does not fit in the memory of {self._model.device}; "
                f"lower --context, or use --model-dtype bfloat16"
            )
        self.tokens = windows // 2 * longest
        self.note(
            f"{windows} windows of {longest:,} tokens do not fit in the memory of {self._model.device}; "
            f"going on with {windows // 2}"
        )
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def batch_tokens(
    model: "LanguageModel | SideBySide",
    batch_size: int | str,
    context: int,
    points: Sequence[HookPoint],
) -> int:
    """Tokens per batch, of `batch_size` windows of `context` tokens; `auto` is what fits in a GPU's free memory, at
    most `LOOK_AHEAD` tokens, and on a CPU a fixed number."""
    if batch_size != "auto":
        return int(batch_size) * context
    if model.device.type != "cuda":
        return CPU_TOKENS
    try:
        _, few, more = (_peak_bytes(model, windows, context, points) for windows in PROBED)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return context
    window = max(1, (more - few) // (PROBED[-1] - PROBED[0]))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return tokens_that_fit(free, window, context)


def tokens_that_fit(free: int, window: int, context: int) -> int:
    """Tokens per batch, given the free bytes and the bytes that each window adds to a forward pass: a power of two of
    windows, so that slightly more or less memory changes no batch."""
    fitting = min(int(USED * free) // window, LOOK_AHEAD // context)
    return (1 << max(0, fitting.bit_length() - 1)) * context


def _peak_bytes(
    model: "LanguageModel | SideBySide", windows: int, context: int, points: Sequence[HookPoint]
) -> int:
    """Peak memory of a forward pass, without the weights."""
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    token_ids = torch.zeros(windows, context, dtype=torch.int64)
    model.read(token_ids, torch.ones_like(token_ids), points, torch.clone)
    return torch.cuda.max_memory_allocated(model.device) - before


def _on_host(rows: Tensor) -> np.ndarray:
    if rows.device.type == "cuda":  # copying into pinned memory is several times faster
        rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
    rows = rows.cpu()
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


class Ahead(Generic[Item]):
    """Runs a generator in a thread, up to `count` items ahead of its consumer, which gets its errors.

    Leaving the context stops the thread at the next item, and waits for that at most `patience` seconds.
    """

    def __init__(
        self, items: Generator[Item, None, None], count: int = 1, patience: float = 1.0
    ) -> None:
        self._items, self._patience = items, patience
        self._queue: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(count)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sae-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(self._patience)

    def __iter__(self) -> Iterator[Item]:
        while True:
            item, error = self._queue.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item

    def _run(self) -> None:
        try:
            for item in self._items:
                self._put(item, None)
                if self._stopped.is_set():
                    break
            self._put(None, None)
        except BaseException as error:  # raised again in the consumer's thread
            self._put(None, error)
        finally:
            self._items.close()

    def _put(self, item: Item | None, error: BaseException | None) -> None:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._queue.put((item, error), timeout=0.1)
                return


def demand_some(stored: int, dtype: str, offered: int, points: int, ended: bool = False) -> None:
    """Raise a StoreError if none of at least `NONFINITE_ROWS` rows, or of a text that has `ended`, could be stored in
    that dtype."""
    if stored or offered < (1 if ended else NONFINITE_ROWS):
        return
    advice = (
        "the model itself gives them, so check its weights"
        if dtype == "float32"
        else f"use {' or '.join(f'--dtype {name}' for name in ('bfloat16', 'float32') if name != dtype)}"
    )
    if points > 1:
        advice = "extract each hook point alone to see which of them drops its rows"
    raise StoreError(
        f"no row can be stored: none of {offered:,} is finite in {dtype}"
        + f", and within --max-norm-multiple if given, at all {points} hook points" * (points > 1)
        + f"; {advice}"
    )


def in_groups(blocks: Iterable[Block], tokens: int, rows: int) -> Iterator[list[Block]]:
    """Blocks to run together: as many as a batch of `tokens` needs, up to the last of `rows` rows."""
    group: list[Block] = []
    for block in blocks:
        group.append(block)
        if sum(int(one.lengths.sum()) for one in group) >= tokens or block.offered >= rows:
            yield group
            group = []
    if group:
        yield group


def store_block(
    writer: StoreWriter, block: Block, found: Found | None, verdict: np.ndarray | None
) -> None:
    """Append a block to a store; without activations if no window is in it."""
    dropped = {reason: np.full(len(own), np.nan) for reason, own in block.before.items()}
    if found is not None:
        dropped["special"] = found.special_norms
    writer.append(
        np.empty((0, writer.meta.d_in), np.float32) if found is None else found.rows,
        {name: block.columns[name] for name in writer.meta.columns},
        block.cursor.to_json(),
        dropped,
        verdict,
        block.windows if writer.meta.windows else None,
        block.before,
    )


def fill(
    writers: Mapping[HookPoint, StoreWriter],
    blocks_from: Callable[[Cursor], Generator[Block, None, None]],
    forward: Forward,
    rows: int,
    show: Callable[[int, int], None],
    others: Mapping[HookPoint, Admission] | None = None,
) -> None:
    """Fill stores until each has `rows` rows or the text ends, and finish them; the next block is prepared, and the
    last one stored, while the model runs. `others`: finished stores, which also decide which rows are dropped."""
    if not writers:
        return
    admissions = {point: writer.admission for point, writer in writers.items()} | dict(others or {})
    offered = 0
    cursors = {point: Cursor.from_json(writer.cursor) for point, writer in writers.items()}
    first = min(cursors.values(), key=lambda cursor: cursor.order)

    def store(group: Sequence[Block], parts: Sequence[Mapping[HookPoint, Found]]) -> None:
        for block, found in zip(group, parts, strict=True):
            verdicts = jointly(
                {point: admissions[point].judge(own.rows) for point, own in found.items()}
            )
            for point, writer in writers.items():
                if not writer.full and block.cursor.order >= cursors[point].order:
                    store_block(writer, block, found.get(point), verdicts.get(point))
                    demand_some(writer.rows, writer.meta.dtype, block.offered, len(admissions))
            for words in block.notes:
                forward.note(words)

    with (
        Ahead(blocks_from(first)) as blocks,
        ThreadPoolExecutor(1, thread_name_prefix="sae-write") as pool,
    ):
        under_way: Future[None] = pool.submit(lambda: None)
        for group in in_groups(blocks, forward.tokens, rows):
            offered = group[-1].offered
            needed = any(
                not writer.full and group[-1].cursor.order >= cursors[point].order
                for point, writer in writers.items()
            )
            parts = forward.each(group, list(admissions), show) if needed else [{}] * len(group)
            under_way.result()
            under_way = pool.submit(store, group, parts)
            if offered >= rows:  # enough, unless some could not be stored
                under_way.result()
                if all(writer.full for writer in writers.values()):
                    break
        under_way.result()
    for writer in writers.values():
        demand_some(writer.rows, writer.meta.dtype, offered, len(admissions), ended=True)
        writer.finish()
