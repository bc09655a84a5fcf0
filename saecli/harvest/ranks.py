"""Which rank stores which documents, and how many rows of them: document i is rank i mod world_size's."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ..distributed import Communicator
from ..texts import Document
from .token_windows import Windows

COUNTED = 4096  # documents between two exchanges of their rows


class Quota(NamedTuple):
    """What one rank stores.

    Args:
        rank: its number.
        world_size: how many ranks there are.
        rows: rows of its documents, from the first of them on.
    """

    rank: int
    world_size: int
    rows: int

    def documents(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Those of some documents that are this rank's."""
        return (document for document in documents if document.number % self.world_size == self.rank)


def rows_by_rank(documents: Iterable[Document], windows: Windows, rows: int, communicator: Communicator,
                 show: Callable[[float], None]) -> list[int]:
    """How many rows each rank stores, so that all together store those that one process would.

    Each rank tokenizes its own documents and counts their rows, until all of them have enough. No rank needs to know
    later how far another has come.

    Args:
        documents: all of the text, in every rank.
        windows: cuts them; counts the documents that it leaves out.
        rows: how many are wanted.
        communicator: the ranks.
        show: told how many rows have been counted.

    Returns:
        The numbers of rows by rank; fewer than are wanted in all where the text ends before.
    """
    world_size, waiting = communicator.world_size, iter(documents)
    found, left = [0] * world_size, rows
    while some := list(islice(waiting, COUNTED)):
        own = [(document.number, windows.rows(document)) for document in some
               if document.number % world_size == communicator.rank]
        for number, count in sorted(one for every in communicator.all_gather_object(own) for one in every):
            taken = min(count, left)
            found[number % world_size] += taken
            left -= taken
        show(rows - left)
        if not left:
            break
    return found
