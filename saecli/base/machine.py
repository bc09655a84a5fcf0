"""The machine: its memory, and errors of full memory and full disks."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUP, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# By the controllers of a hierarchy: its folder, files of limit and use, and what begins the sizes of its page cache.
CGROUP_FILES = {
    "": ("", "memory.max", "memory.current", "(?:in)?"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?"),
}
MEMINFO = Path("/proc/meminfo")
# Messages on failed allocations by torch on a CPU and on devices, and by CUDA's libraries.
REFUSALS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "_ALLOC_FAILED",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means a failed allocation, mostly by its message; illegal accesses do not count."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    is_refused = any(words.lower() in str(error).lower() for words in REFUSALS)
    return isinstance(error, RuntimeError | OSError) and is_refused


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def available_memory() -> int:
    """Bytes that a process can allocate without swapping, within the limits of its control groups."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMINFO.exists():
        sizes = dict(
            re.findall("^([A-Za-z]+): +([0-9]+)", MEMINFO.read_text("ascii"), re.MULTILINE)
        )
        # Kernels before 3.14, and Windows' first subsystem, do not say what is available.
        names = ["MemAvailable"] if "MemAvailable" in sizes else ["MemFree", "Cached"]
        free = sum(int(sizes.get(name, 0)) for name in names) * 1024
    return min([free, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Bytes left below the memory limits of this process's control groups, of versions 1 and 2, and of those around
    them. Page cache, which stores fill, does not count as used."""
    groups = OWN_CGROUP.read_text(encoding="utf-8") if OWN_CGROUP.exists() else ""
    for controllers, path in re.findall("^[0-9]+:(.*?):/(.*)$", groups, re.MULTILINE):
        version = CGROUP_FILES.get("memory" if "memory" in controllers.split(",") else controllers)
        if version is None:
            continue
        folder, most, now, cache = version
        innermost = CGROUP / folder / path
        for group in (innermost, *innermost.parents):
            with suppress(OSError, ValueError):  # no such group, or no limit: "max"
                limit = int((group / most).read_text(encoding="ascii"))
                used = int((group / now).read_text(encoding="ascii"))
                stat = (group / "memory.stat").read_text(encoding="ascii")
                cached = re.findall(f"^{cache}active_file ([0-9]+)", stat, re.MULTILINE)
                yield max(0, limit - used + sum(map(int, cached)))
