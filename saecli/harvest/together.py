"""Filling stores by several processes, which take turns at the blocks of a text.

All of them cut the text into the same blocks, and a block's rows do not depend on who computes them. In a turn each
process runs the model over one block, and then all store what they got (see `SharedWriter`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..errors import StoreError
from ..language_model import Place
from ..store import SOURCE_CHANGED, SharedWriter
from .ahead import Ahead
from .blocks import Block, Cursor
from .forward import Forward, Found
from .stores import demand_some, parts_of


class SharedTarget:
    """A store that several processes fill.

    Args:
        place: what it holds.
        writer: writes this process' part of it.
    """

    def __init__(self, place: Place, writer: SharedWriter) -> None:
        self.place, self.writer = place, writer
        self._first, cursor = writer.start
        self.cursor = Cursor.from_json(cursor)
        self._met: int | None = None  # number of the latest block

    @property
    def rows(self) -> int:
        """Rows stored by all processes."""
        return self.writer.rows

    @property
    def bytes(self) -> int:
        """Bytes of these rows."""
        return self.rows * self.writer.meta.row_bytes

    def meet(self, block: Block) -> int | None:
        """Told of every block in order: the block's number in the store, where rows of it are missing."""
        if self._met is not None:
            self._met += 1
        elif block.cursor.place == self.cursor.place:
            self._met = self._first
        return self._met if self._met is not None and self.writer.missing(self._met) else None

    def finish(self) -> None:
        """Say that the text has ended, or no more is wanted; see `SharedWriter.finish`.

        Raises:
            StoreError: also where the text did not come to what is stored of it.
        """
        if self._met is None and self.cursor != Cursor():
            raise StoreError(f"cannot go on with {self.writer.path}: expected the text to come to document "
                             f"{self.cursor.spot.document:,}, got one that ends before; {SOURCE_CHANGED}")
        self.writer.finish()


class Turn(NamedTuple):
    """A block that one of the processes takes in a turn, and its number in each store; None where it is not wanted."""

    block: Block
    numbers: list[int | None]


def fill_together(targets: Sequence[SharedTarget], blocks: Iterator[Block], forward: Forward, rows: int,
                  show: Callable[[float, float], None], rank: int, ranks: int) -> None:
    """Fill stores, until all are full or the text ends; all processes come to it with the same blocks.

    Args:
        targets: the stores.
        blocks: those from the first of their cursors on.
        forward: gives a block's rows.
        rows: how many each store wants.
        show: told after each batch about how many tokens and rows all processes had.
        rank: the number of this process.
        ranks: how many there are.
    """
    turns: list[Turn] = []
    with Ahead(blocks) as stream, ThreadPoolExecutor(1, thread_name_prefix="sae-write") as pool:
        under_way: Future[None] = pool.submit(lambda: None)

        def take() -> None:
            nonlocal under_way
            own = turns[rank] if rank < len(turns) else None
            found = _run(own, targets, forward, turns, show) if own else []
            under_way.result()
            under_way = pool.submit(_store, targets, own, found, turns[-1].block.offered)
            turns.clear()

        for block in chain(stream, [None]):
            alone = any(target.writer.waits for target in targets)
            spare = block is not None and block.cursor.offered >= rows
            if turns and (block is None or alone or spare or len(turns) == ranks):
                take()
                if alone:
                    under_way.result()
            if spare:  # wanted only where some could not be stored, which all know once the turn has ended
                under_way.result()
            if block is None or (spare and all(target.writer.full for target in targets)):
                break
            numbers = [target.meet(block) for target in targets]
            if any(number is not None for number in numbers):
                turns.append(Turn(block, numbers))
        under_way.result()


def _run(own: Turn, targets: Sequence[SharedTarget], forward: Forward, turns: Sequence[Turn],
         show: Callable[[float, float], None]) -> list[Found]:
    """What this process' block gives at the places that want it; the others are taken to be as far with theirs."""
    if not len(own.block.lengths):
        return []
    places = [target.place for target, number in zip(targets, own.numbers, strict=True) if number is not None]
    share = sum(turn.block.lengths.sum() for turn in turns) / own.block.lengths.sum()
    return forward(own.block, places, lambda tokens, rows: show(share * tokens, share * rows))


def _store(targets: Sequence[SharedTarget], own: Turn | None, found: Sequence[Found], offered: int) -> None:
    """End a turn, in every store: the one order in which all processes talk to each other."""
    results = iter(found)
    for index, target in enumerate(targets):
        number = own and own.numbers[index]
        if own and number is not None:
            parts = parts_of(own.block, next(results, None), target.writer.meta.d_in)
            target.writer.hold(number, own.block.cursor.to_json(), *parts)
        target.writer.store()
        demand_some(target.rows, offered, target.writer.meta.dtype)


def mend_together(target: SharedTarget, blocks_from: Callable[[Cursor], Iterator[Block]], forward: Forward) -> None:
    """Write the damaged shards of a store anew.

    Args:
        target: the store.
        blocks_from: gives the blocks of the text from a cursor on.
        forward: gives a block's rows.
    """
    def produce(cursor: dict) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        block = next(blocks_from(Cursor.from_json(cursor)))
        (found,) = forward(block, [target.place], lambda tokens, rows: None)
        return parts_of(block, found, target.writer.meta.d_in)

    target.writer.mend(produce)
