"""What the machine has: memory, a disk, the network; errors of full memory and full disks, and of endpoints that are
silent."""

import errno
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .errors import one_line

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
CONNECT_SECONDS, ANSWER_SECONDS = 3, 10
ANSWER_HOLDS = 60  # seconds
# When endpoints were asked, and why they were silent.
_answers: dict[str, tuple[float, str | None]] = {}
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


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


def why_unreachable() -> str | None:
    """Why the hub cannot be reached, within seconds; None if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint, now = constants.ENDPOINT, time.monotonic()
    asked, answer = _answers.get(endpoint, (-math.inf, None))
    if now - asked > ANSWER_HOLDS:
        answer = why_silent(endpoint, ANSWER_SECONDS)
        _answers[endpoint] = now, answer
    return answer


def why_silent(endpoint: str, seconds: float) -> str | None:
    """None if it answers. In a thread, since nothing limits the time to look up a name."""
    import socket  # each of these is slow to import, and most commands do not need them
    import urllib.request
    from threading import Thread
    from urllib.parse import urlsplit

    import requests

    url = urlsplit(endpoint)
    host, port = url.hostname, url.port or (80 if url.scheme == "http" else 443)
    answers: list[str | None] = []

    def ask() -> None:
        try:
            if not urllib.request.getproxies():  # a proxy looks names up and connects by itself
                socket.create_connection((host, port), CONNECT_SECONDS).close()
            requests.head(endpoint, timeout=seconds)
            answers.append(None)
        except socket.gaierror:
            answers.append(f"no address for {host}")
        except OSError as error:
            answers.append(f"no connection to {host}, port {port}: {one_line(error)}")

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer from {host} within {seconds} s"


def why_refused(repo: str, error: BaseException) -> str | None:
    """Why the hub refuses a gated, private or missing repository, and what to do; None for any other error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hugging Face hub has no model repository {repo}, or it is private: check the name, or {LOG_IN}"
    return None


def is_passing(error: BaseException | None) -> bool:
    """Whether the network or a busy hub caused an error, not the request."""
    from huggingface_hub.errors import HTTPError
    from requests.exceptions import ChunkedEncodingError, Timeout
    from requests.exceptions import ConnectionError as RefusedError
    from requests.exceptions import HTTPError as StatusError

    of_requests = StatusError | RefusedError | Timeout | ChunkedEncodingError
    status = getattr(getattr(error, "response", None), "status_code", 503)
    is_of_network = isinstance(error, HTTPError | ConnectionError | TimeoutError | of_requests)
    return is_of_network and (status in (408, 425, 429) or status >= 500)
