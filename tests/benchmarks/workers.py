"""Runs in worker processes of one thread each, and the file that keeps what they found."""

import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Key = tuple[str, ...]


class Log:
    """`runs.jsonl`: what is there is read, what comes is appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[Key, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # a kill cut it short; its run is missing, then
                continue
            self.results[tuple(entry["words"])] = entry["result"]
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def add(self, key: Key, result: dict[str, Any]) -> None:
        self.results[key] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"words": key, "result": result}) + "\n")


def workers(jobs: int) -> ProcessPoolExecutor:
    """Processes of one thread each, which end with this one."""
    os.environ["OMP_NUM_THREADS"] = "1"  # spawned workers read it when they load torch
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_die_with_parent)


def _die_with_parent() -> None:
    """Leave it to the parent to stop, and stop with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
