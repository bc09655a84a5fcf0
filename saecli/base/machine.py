"""The machine: memory, out-of-memory errors, whether the Hugging Face hub can be reached, and this process's rank, from
the environment that a launcher such as torchrun sets."""

import errno
import os
import resource
from pathlib import Path

from .errors import MachineError

CGROUP = Path("/sys/fs/cgroup")
LEAST_ADDRESS_SPACE = (
    2 << 30
)  # bytes; with less, libraries abort the process while loading, or wait for threads
# Messages on failed allocations by torch on a CPU and on devices, CUDA's libraries, the dynamic linker, and Python if
# a thread has no room for its stack.
REFUSALS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "_ALLOC_FAILED",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
)
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # all needed to join the process group


def world() -> int:
    """The world size; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHED) else 1


def rank() -> int:
    return int(os.environ["RANK"]) if world() > 1 else 0


def local_world() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world() > 1 else 1


def local_rank() -> int:
    """This process's rank among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if world() > 1 else 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means a failed allocation, mostly by its message; illegal accesses do not count."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError | ImportError | OSError) and any(
        word.lower() in words for word in REFUSALS
    )


def demand_address_space() -> None:
    """Raise a MachineError if `ulimit -v` is below `LEAST_ADDRESS_SPACE`, with which libraries cannot be loaded."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise MachineError(
            f"too little address space to load the libraries: expected {LEAST_ADDRESS_SPACE >> 20:,} "
            f"MiB or more, got {limit >> 20:,} MiB; raise the limit with `ulimit -v`"
        )


def available_memory() -> int:
    """Bytes of memory that a process can allocate without swapping, within its container's limit."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (meminfo := Path("/proc/meminfo")).exists():
        fields = dict(
            line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines()
        )
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, int(text) - int(used.read_text(encoding="ascii")))
    return free


def why_unreachable() -> str | None:
    """Why the hub cannot be reached, at once; None if nothing indicates that."""
    import socket  # each of these is slow to import, and most commands do not need them
    import urllib.request
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return None  # a proxy looks names up itself
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return f"no address for {host}"
    return None


def why_refused(repo: str, error: BaseException) -> str | None:
    """Why the hub refuses a gated, private or missing repository, and what to do; None for any other error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the Hugging Face hub has no model repository {repo}, or it is private: check the name; for a "
            f"private one, {LOG_IN}"
        )
    return None
