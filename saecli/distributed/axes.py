"""What the processes of a training share, as a grid: rows along one axis, latents along the other.

    latents_axis     --->
    rows_axis   |    process 0   process 1      a part of every batch each, and of the latents each
                v    process 2   process 3

Processes along the axis of rows hold the same latents and take other rows of every batch. Those along the axis of
latents take the same rows, each for latents of its own: weights, codes, and columns of the Gram matrix. Unless
`share_latents` says otherwise all processes share rows, and each has all latents.

Along an axis of one place every method gives back what it was given. All processes along an axis must come to the same
calls in the same order. Tensors on a CPU go by gloo, those on a GPU by NCCL. Where a process has ended, the calls of
the others raise `PeerError`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from .processes import own_rank, processes, reaching

_grid: list["Axis"] = []  # that of rows and that of latents, once latents are shared
_groups: dict[tuple[int, ...], Any] = {}  # torch.distributed's, by their processes; one held to the end may abort there


@dataclass(frozen=True)
class Axis:
    """The processes that share something with this one.

    Args:
        ranks: their numbers among all, in order.
    """

    ranks: tuple[int, ...]

    @property
    def group(self) -> Any:
        """What torch.distributed knows them by; None for all processes."""
        return _groups.get(self.ranks)

    @property
    def size(self) -> int:
        """How many there are, this one included."""
        return len(self.ranks)

    @property
    def place(self) -> int:
        """The number of this process among them, from 0."""
        return self.ranks.index(own_rank())

    @property
    def is_first(self) -> bool:
        """Whether this is the one that has what there is one of."""
        return self.place == 0

    def add_up(self, tensor: Tensor) -> Tensor:
        """Put the sum over all into a contiguous tensor, on each of them; returns it."""
        if self.size > 1:
            with reaching():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def add_up_on_first(self, tensor: Tensor) -> Tensor:
        """Put the sum over all into a contiguous tensor of the first; on the others zero. Returns it."""
        if self.size > 1:
            with reaching():
                dist.reduce(tensor, self.ranks[0], group=self.group)
            if not self.is_first:
                tensor.zero_()
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        """Put the least value of all into each entry of a contiguous tensor; returns it."""
        if self.size > 1:
            with reaching():
                dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.group)
        return tensor

    def each(self, number: int) -> list[int]:
        """Every process' number, by place."""
        return [int(one) for one in self.everyones(torch.tensor(number))]

    def any(self, mask: Tensor) -> bool:
        """Whether any entry holds, on any of them."""
        return bool(self.add_up(mask.any().to(torch.int32)))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of all entries, of which each has as many."""
        return tensor.mean() if self.size == 1 else self.add_up(tensor.sum()) / (tensor.numel() * self.size)

    def norm(self, tensor: Tensor) -> Tensor:
        """The norm of all entries."""
        own = tensor.norm()
        return own if self.size == 1 else self.add_up(own.square()).sqrt()

    def from_place(self, tensor: Tensor, place: int = 0) -> Tensor:
        """Put the values of the process at a place, the first, into a contiguous tensor of all others; returns it."""
        if self.size > 1:
            with reaching():
                dist.broadcast(tensor, self.ranks[place], group=self.group)
        return tensor

    def on_first(self, rows: Tensor) -> Tensor:
        """All rows, (n, ...), one process' after the other's, on the first; the others get back their own."""
        if self.size == 1:
            return rows
        counts = self.each(len(rows))
        with reaching():
            if not self.is_first:
                if len(rows):
                    dist.send(rows.contiguous(), self.ranks[0], group=self.group)
                return rows
            parts = [rows]
            for other in range(1, self.size):
                part = rows.new_empty(counts[other], *rows.shape[1:])
                if len(part):
                    dist.recv(part, self.ranks[other], group=self.group)
                parts.append(part)
        return torch.cat(parts)

    def everyones(self, tensor: Tensor) -> list[Tensor]:
        """All processes' tensors, of one shape, by place, on each of them."""
        if self.size == 1 or not tensor.numel():
            return [tensor] * self.size
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with reaching():
            dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def side_by_side(self, columns: Tensor) -> Tensor:
        """All processes' columns, (n, m) of each, next to each other, (n, m P), on each of them."""
        return columns if self.size == 1 else torch.cat(self.everyones(columns), -1)

    def exchanged(self, parts: Tensor) -> Tensor:
        """What each of the others has for this one, (P, ...), given what this one has for each of them, (P, ...)."""
        if self.size == 1:
            return parts
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        with reaching():
            dist.all_to_all_single(found, parts.contiguous(), group=self.group)
        return found


def alone() -> Axis:
    """This process, sharing nothing."""
    return Axis((own_rank(),))


def everyone() -> Axis:
    """All processes of this command."""
    return Axis(tuple(range(processes())))


def rows_axis() -> Axis:
    """Those that hold the latents which this one holds, and take other rows."""
    return _grid[0] if _grid else everyone()


def latents_axis() -> Axis:
    """Those that take the rows which this one takes, and hold other latents."""
    return _grid[1] if _grid else alone()


def share_latents(places: int) -> None:
    """Lay out all processes as a grid, so many places wide along the axis of latents.

    Raises:
        ConfigError: the processes do not come to whole rows of the grid.
    """
    world = processes()
    if world % places:
        raise ConfigError("latent_shards", "must divide the number of processes, {world}, got {places}", "start the "
                          "command by `torchrun --nproc-per-node {places} -m saecli`, or leave the option out",
                          world=world, places=places)
    _grid.clear()
    if places == 1:
        return
    lines = torch.arange(world).view(-1, places)
    for sharing in (lines.T, lines):
        axes = [Axis(tuple(ranks)) for ranks in sharing.tolist()]
        for axis in axes:  # all processes make all groups, in the same order: torch.distributed asks for it
            if 1 < axis.size < world:
                with reaching():
                    group = dist.new_group(list(axis.ranks))
                if own_rank() in axis.ranks:
                    _groups[axis.ranks] = group
        _grid.append(next(axis for axis in axes if own_rank() in axis.ranks))


def leave() -> None:
    """Leave the others, all of which come to this: not where one failed, as it would wait for those that are gone."""
    _grid.clear()
    _groups.clear()
    dist.destroy_process_group()
