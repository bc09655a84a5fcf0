"""What the machine has left, and whether it has run out."""

import errno
import os
import resource
from pathlib import Path

from .errors import MachineError

CGROUP = Path("/sys/fs/cgroup")
LEAST_ADDRESS_SPACE = 2 << 30  # bytes; with less, libraries abort the process as they are loaded, or wait for threads
# What an allocation that failed is called by torch on a CPU and on devices, by CUDA's libraries, by the loader of
# libraries, and by Python where a thread finds no room for its stack.
REFUSALS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "_ALLOC_FAILED",
            "bad_alloc", "failed to map segment", "can't start new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused; mostly its words alone tell.

    An access to memory that is not there, as CUDA's "an illegal memory access was encountered", is another thing.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError | ImportError | OSError) and any(word.lower() in words for word in REFUSALS)


def demand_address_space() -> None:
    """Refuse to begin where libraries cannot be loaded; MachineError where `ulimit -v` leaves less than
    `LEAST_ADDRESS_SPACE`."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise MachineError(f"too little address space to load the libraries: expected {LEAST_ADDRESS_SPACE >> 20:,} "
                           f"MiB or more, got {limit >> 20:,} MiB; raise the limit with `ulimit -v`")


def available_memory() -> int:
    """Bytes of memory that a process can still take without swapping, its container's limit respected."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, int(text) - int(used.read_text(encoding="ascii")))
    return free
