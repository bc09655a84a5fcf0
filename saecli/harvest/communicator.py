"""What extraction by several ranks asks of the processes that run it."""

from typing import Protocol, TypeVar

from ..distributed import agreed, gathered, own_rank, processes

Value = TypeVar("Value")


class Communicator(Protocol):
    """The ranks that run one extraction; all come to the same calls in the same order, with values to be pickled."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def all_gather_object(self, value: Value) -> list[Value]:
        """Each rank's value, by rank."""

    def broadcast_object(self, value: Value) -> Value:
        """Rank 0's value."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class JoinedProcesses:
    """The processes that `saecli.distributed.join` has joined; this one alone where it has joined none."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return own_rank()

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return processes()

    def all_gather_object(self, value: Value) -> list[Value]:
        """Each rank's value, by rank."""
        return gathered(value)

    def broadcast_object(self, value: Value) -> Value:
        """Rank 0's value."""
        return agreed(lambda: value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        gathered(None)
