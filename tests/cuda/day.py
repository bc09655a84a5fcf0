"""The parts of `run.sh`, each in a process of its own, so that one that fails or hangs spares the others."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
PARTS = {  # the module of each, and the most seconds that it may take
    "machine": ("speeds", 120),
    "correctness": ("checks", 300),
    "repeats": ("checks", 90),
    "processes": ("checks", 120),
    "steps": ("speeds", 240),
    "rows": ("speeds", 120),
    "decoder": ("speeds", 240),
    "extraction": ("speeds", 300),
}
ALL_SECONDS = 1440


@dataclass(frozen=True)
class Day:
    """Where and how large; `folder` is for what a part writes."""

    device: str  # cuda or cpu
    folder: Path

    @property
    def full(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.device == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.full:
            import torch

            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], times: int = 5) -> float:
        """Mean seconds of an action, after one other."""
        action()
        self.wait()
        began = time.perf_counter()
        for _ in range(times):
            action()
        self.wait()
        return (time.perf_counter() - began) / times

    def peak(self) -> float:
        """The most memory that torch has held on the device so far, GiB; 0 on a CPU."""
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if self.full else 0.0


def run_part(name: str, day: Day) -> Figures:
    """What a part finds; its error if it fails."""
    try:
        return getattr(importlib.import_module(PARTS[name][0]), name)(day)
    except Exception as error:  # stands in the table, next to what the other parts find
        traceback.print_exc()
        return {"FAILED": f"{type(error).__name__}: {error}"[:500]}


def in_process(name: str, day: Day, limit: float) -> Figures:
    """A part in a process of its own, with its seconds."""
    began, found = time.perf_counter(), day.folder / f"{name}.json"
    command = [sys.executable, __file__, "--part", name, "--device", day.device]
    command += ["--out", str(day.folder)]
    part = subprocess.Popen(command, start_new_session=True)
    try:
        part.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGKILL)
        part.wait()
        return {"FAILED": f"took longer than {limit:.0f} s"}
    figures = (
        json.loads(found.read_text(encoding="utf-8"))
        if found.exists()
        else {"FAILED": f"its process ended with status {part.returncode}"}
    )
    found.unlink(missing_ok=True)
    return figures | {"seconds": round(time.perf_counter() - began, 1)}


def table(found: dict[str, Figures]) -> str:
    """A line for each figure, in Markdown."""

    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return str(value).replace("|", "\\|").replace("\n", " ")

    lines = ["| part | what | figure |", "|---|---|---|"]
    lines += [
        f"| {part} | {what} | {shown(value)} |"
        for part, figures in found.items()
        for what, value in figures.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all parts, or one, and write what they find."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    day = Day(chosen.device, chosen.out.resolve())
    if chosen.part:
        figures = run_part(chosen.part, day)
        (day.folder / f"{chosen.part}.json").write_text(json.dumps(figures), encoding="utf-8")
        return
    began, found = time.monotonic(), {}
    for name, (_, limit) in PARTS.items():
        found[name] = in_process(
            name, day, max(1, min(limit, ALL_SECONDS - (time.monotonic() - began)))
        )
        print(f"{name}: {found[name]}", flush=True)
        (day.folder / "cuda.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        (day.folder / "cuda.md").write_text(table(found), encoding="utf-8")
    sys.exit(any("FAILED" in figures for figures in found.values()))


if __name__ == "__main__":
    main()
