"""Rank and world size from the environment that a launcher such as torchrun sets; needs no torch."""

import os

KNOWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # all needed to join the process group


def world() -> int:
    """The world size; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in KNOWN) else 1


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def local_world() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


def local_rank() -> int:
    """This process's rank among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if world() > 1 else 0
