"""What one process holds of the batches that all processes of a training take together.

Shapes: B rows in a batch, b of them here, D = d_in.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Portion:
    """Some rows of a batch; all of them where there is one process.

    Args:
        x: the rows, (b, D).
        size: B.
        places: their numbers within the batch, ascending, (b,), on the CPU; None for all.
    """

    x: Tensor
    size: int
    places: Tensor | None = None

    def numbers(self) -> Tensor:
        """Their numbers within the batch, (b,), on the CPU."""
        return torch.arange(self.size) if self.places is None else self.places

    def first(self, count: int) -> "Portion":
        """What it holds of the first rows of the batch, so many at most."""
        own = min(count, self.size) if self.places is None else int((self.places < count).sum())
        return Portion(self.x[:own], min(count, self.size), None if self.places is None else self.places[:own])


def as_portion(batch: Tensor | Portion) -> Portion:
    """A batch as a portion; a tensor is a whole one."""
    return batch if isinstance(batch, Portion) else Portion(batch, len(batch))


def portions_of(batches: Iterable[Tensor | Portion]) -> Iterator[Portion]:
    """Batches as portions."""
    return map(as_portion, batches)


def joined(portions: Sequence[Portion]) -> Portion:
    """Batches one after the other as one batch."""
    x, size = torch.cat([portion.x for portion in portions]), sum(portion.size for portion in portions)
    if all(portion.places is None for portion in portions):
        return Portion(x, size)
    places, before = [], 0
    for portion in portions:
        places.append(portion.numbers() + before)
        before += portion.size
    return Portion(x, size, torch.cat(places))


def mixed(whole: Portion, order: Tensor, size: int) -> Iterator[Portion]:
    """A batch's rows in another order, (B,), in batches of `size`; each process keeps the rows that it has."""
    if whole.places is None:
        yield from portions_of(whole.x[order.to(whole.x.device)].split(size))
        return
    here = torch.full((whole.size,), -1)
    here[whole.places] = torch.arange(len(whole.places))
    for some in order.split(size):
        own = here[some]
        places = (own >= 0).nonzero()[:, 0]
        yield Portion(whole.x[own[places].to(whole.x.device)], len(some), places)
