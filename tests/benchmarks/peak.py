"""The memory that something takes at most, for benchmarks; Linux only."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def peak_of(action: Callable[[], Result]) -> tuple[Result, int]:
    """What an action gives, and the bytes that this process took for it at most, beyond those it had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is forgotten
    before = _memory("VmRSS")
    result = action()
    return result, _memory("VmHWM") - before


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
