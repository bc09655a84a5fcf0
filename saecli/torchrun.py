"""What a launcher such as torchrun says of the processes that it started, by their environment; needs no torch."""

import os

KNOWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by which processes find each other


def world() -> int:
    """How many processes run this command together; 1 where no launcher started it."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in KNOWN) else 1


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def local_world() -> int:
    """How many of them run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


def local_rank() -> int:
    """The number of this process among those of this machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", 0)) if world() > 1 else 0
