"""Few colours for many cells, so that neighbours differ."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def touching(labels: NDArray[np.int64]) -> list[list[int]]:
    """The cells that each cell touches in a picture.

    Args:
        labels: the cell of each pixel, (P, P), numbered from 0.

    Returns:
        Neighbours' numbers, a list for each cell.
    """
    pairs = np.concatenate([np.stack([a.ravel(), b.ravel()], 1)
                            for a, b in ((labels[1:], labels[:-1]), (labels[:, 1:], labels[:, :-1]))])
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    neighbours: list[list[int]] = [[] for _ in range(int(labels.max()) + 1)]
    for a, b in pairs.tolist():
        neighbours[a].append(b)
        neighbours[b].append(a)
    return neighbours


def colouring(neighbours: Sequence[Sequence[int]], colours: int) -> NDArray[np.int64]:
    """Give each cell one of a few colours so that neighbours differ where it can be done.

    Greedy, cells of many neighbours first; a cell whose neighbours use every colour takes the rarest among them.

    Args:
        neighbours: numbers of the cells that each cell touches, C lists.
        colours: how many there are.

    Returns:
        A colour for each cell, (C,).
    """
    chosen = np.full(len(neighbours), -1)
    for cell in sorted(range(len(neighbours)), key=lambda cell: -len(neighbours[cell])):
        around = chosen[neighbours[cell]]
        used = np.bincount(around[around >= 0], minlength=colours)
        # Ties go round the colours, or most cells would get the first.
        chosen[cell] = min(range(colours), key=lambda c: (used[c], (c - cell) % colours))
    return chosen
