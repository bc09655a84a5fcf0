"""Blocks through the models, and into several stores in one pass over the text.

Every block is read at all hook points: interrupted stores get the same blocks again, each from its own cursor on.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..base.devices import moved
from ..base.errors import ModelError, StoreError
from ..base.machine import is_out_of_memory
from ..base.processes import writing_thread
from ..model.windows import padded
from ..store.blocks import RowBlock
from ..store.origin import HookPoint
from ..store.values import TextWindow
from ..store.writer import StoreWriter
from .windows import Block, Cursor

if TYPE_CHECKING:
    from ..model.language_model import LanguageModel

SHORTEST = 7 / 8  # of a batch's longest window: a narrower range has less padding, but more passes
NONFINITE_ROWS = 10_000  # if none of the first 10,000 rows can be stored, none will

Item = TypeVar("Item")
Result = TypeVar("Result")
Activations = Mapping[HookPoint, np.ndarray]  # of a block: (R, D) in document order


def read_activations(
    models: "Sequence[LanguageModel]",
    token_ids: Tensor,
    mask: Tensor,
    points: Sequence[HookPoint],
    take: Callable[[Tensor], Result],
) -> list[Result]:
    """`LanguageModel.read` of several models of the same tokens, numbered by a hook point's `model`."""
    results: dict[HookPoint, Result] = {}
    for number, model in enumerate(models):
        if of_model := [point for point in points if point.model == number]:
            results |= zip(of_model, model.read(token_ids, mask, of_model, take), strict=True)
    return [results[point] for point in points]


class Forward:
    """Runs windows in batches of similar length, of at most `tokens` tokens with padding, or one longer window; batches
    that do not fit in memory are halved.

    Rows come in the storage dtype, bfloat16 as its bits in uint16. A row that is not finite at one hook point is NaN at
    all, so that all stores drop it.
    """

    def __init__(
        self,
        models: "Sequence[LanguageModel]",
        dtype: str,
        tokens: int,
        note: Callable[[str], None],
    ) -> None:
        self._models, self._dtype = models, getattr(torch, dtype)
        self._device = models[0].device  # where rows are gathered, also those of others
        self.tokens, self.note = tokens, note

    def __call__(
        self,
        windows: Iterable[TextWindow],
        points: Sequence[HookPoint],
        show: Callable[[int, int], None],
    ) -> Activations:
        """The activations at windows' rows, empty without any; `show` takes each batch's numbers of tokens and rows."""
        stored = [window for window in windows if window.is_row.any()]
        if not stored:
            return {}
        lengths = np.array([window.length for window in stored])
        ends = np.cumsum([window.is_row.sum() for window in stored])
        rows_of = np.split(np.arange(ends[-1]), ends[:-1])
        gathered: list[Tensor] = []
        # Longest first: a lack of memory shows at once.
        order = np.argsort(-lengths, kind="stable")
        while len(order):
            chosen = order[: self._batch_windows(lengths[order])]
            numbers = torch.from_numpy(np.concatenate([rows_of[number] for number in chosen]))
            try:
                parts = self._read([stored[number] for number in chosen], points)
                if not gathered:
                    gathered = [rows.new_empty(int(ends[-1]), rows.shape[1]) for rows in parts]
                for all_rows, rows in zip(gathered, parts, strict=True):
                    all_rows.index_copy_(0, moved(numbers, rows.device), rows)
                fits = True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            if fits:
                order = order[len(chosen) :]
                show(int(lengths[chosen].sum()), len(numbers))
            else:  # outside the except clause, where the error has released the tensors of its frames
                self._halve(len(chosen), int(lengths[chosen[0]]))
        return dict(zip(points, map(_on_host, gathered), strict=True))

    def _batch_windows(self, lengths: np.ndarray) -> int:
        similar = int(np.searchsorted(-lengths, -SHORTEST * lengths[0], side="right"))
        return max(1, min(similar, self.tokens // int(lengths[0])))

    def _read(self, windows: Sequence[TextWindow], points: Sequence[HookPoint]) -> list[Tensor]:
        token_ids, mask, is_row = padded(windows)
        positions = moved(is_row.flatten().nonzero()[:, 0], self._device)

        def take(activations: Tensor) -> Tensor:
            rows = activations.flatten(0, 1).index_select(0, positions.to(activations.device))
            return rows.to(self._device, self._dtype)

        parts = read_activations(self._models, token_ids, mask, points, take)
        if len(parts) > 1:
            finite = torch.stack([rows.isfinite().all(1) for rows in parts]).all(0)
            for rows in parts:
                rows.masked_fill_(~finite[:, None], torch.nan)
        return parts

    def _halve(self, windows: int, longest: int) -> None:
        if windows == 1:
            raise ModelError(
                f"a window of {longest:,} tokens does not fit in the memory of {self._device}; "
                f"lower --context, or use --model-dtype bfloat16"
            )
        self.tokens = windows // 2 * longest
        self.note(
            f"{windows} windows of {longest:,} tokens do not fit in the memory of {self._device}; "
            f"going on with {windows // 2}"
        )
        torch.cuda.empty_cache()  # which does nothing without CUDA


def _on_host(rows: Tensor) -> np.ndarray:
    if rows.device.type == "cuda":  # copying into pinned memory is several times faster
        rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
    rows = rows.cpu()
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()


def ahead(items: Generator[Item, None, None], count: int = 1) -> Generator[Item, None, None]:
    """The items of a generator, made in a thread up to `count` ahead; closing it waits for the item being made."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="sae-ahead")
    under_way = deque(pool.submit(next, items, None) for _ in range(count))
    try:
        while (item := under_way.popleft().result()) is not None:
            under_way.append(pool.submit(next, items, None))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
        items.close()


def check_some_stored(stored: int, dtype: str, offered: int, ended: bool = False) -> None:
    """StoreError if none of `NONFINITE_ROWS` rows, or of a text that has `ended`, could be stored."""
    if stored or offered < (1 if ended else NONFINITE_ROWS):
        return
    raise StoreError(
        f"no row can be stored: none of {offered:,} is finite in {dtype} at every hook point; "
        "try --dtype float32, else check the model's weights"
    )


def fill(
    writers: Mapping[HookPoint, StoreWriter],
    blocks_from: Callable[[Cursor], Generator[Block, None, None]],
    forward: Forward,
    rows: int,
    show: Callable[[int, int], None],
) -> None:
    """Fill stores until each has `rows` rows or the text ends, and finish them; while the model runs, the next block is
    prepared and the last one stored. Hook points of complete stores are read too."""
    points = list(writers)
    cursors = {
        point: Cursor.from_json(writer.cursor)
        for point, writer in writers.items()
        if not writer.meta.complete
    }
    if not cursors:
        return
    offered = 0
    first = min(cursors.values(), key=lambda cursor: cursor.order)

    def needs(point: HookPoint, block: Block) -> bool:
        return not writers[point].full and block.cursor.order >= cursors[point].order

    def store(block: Block, activations: Activations) -> None:
        verdicts = None
        if len(writers) > 1 and activations:  # a row dropped from one store is dropped from all
            admissions = ((point, writer.admission) for point, writer in writers.items())
            of_each = [admission.verdicts(activations[point])[1] for point, admission in admissions]
            verdicts = np.max(of_each, axis=0)
        for point, writer in writers.items():
            if needs(point, block):
                nothing = np.empty((0, writer.meta.d_in), np.float32)
                rows = RowBlock(
                    rows=activations.get(point, nothing),
                    columns={name: block.columns[name] for name in writer.meta.columns},
                    dropped=block.before,
                    windows=block.windows if writer.meta.windows else None,
                )
                writer.append(rows, block.cursor.to_json(), verdicts)
                check_some_stored(writer.rows, writer.meta.dtype, block.offered)

    with closing(ahead(blocks_from(first))) as blocks, writing_thread() as pool:
        under_way: Future[None] = pool.submit(lambda: None)
        for block in blocks:
            offered = block.offered
            activations: Activations = {}
            if any(needs(point, block) for point in writers):
                activations = forward(block.windows.each(), points, show)
            under_way.result()
            under_way = pool.submit(store, block, activations)
            if offered >= rows:  # enough, unless some could not be stored
                under_way.result()
                if all(writer.full for writer in writers.values()):
                    break
        under_way.result()
    for writer in writers.values():
        check_some_stored(writer.rows, writer.meta.dtype, offered, ended=True)
        writer.finish()
