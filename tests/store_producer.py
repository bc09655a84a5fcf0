"""A producer of blocks to write to a store, as a process to kill.

Run as a script it reads one JSON object a line, forks a child, and prints how the child ended. The child writes the
store at "path" from where it stands, with "ranks" as four ranks do, or runs `sae` with the arguments "words" after
"imports". It kills itself at the "kill_at"-th thing that it does to a file there (or block that it begins), finds files
limited to "file_bytes", or notes in the folder "cuts" what power cuts would leave of the folder two above the store.
"""

import contextlib
import importlib
import io
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from power_cut import Disk
from storing import make_meta

from saecli.base.errors import StoreError
from saecli.cli import main as cli
from saecli.cli.main import load_command
from saecli.store.blocks import RowBlock, Windows
from saecli.store.writer import StoreWriter, ranked_store

BLOCKS = 60
D_IN = 24
MULTIPLE = 1.3
SIZES = {"shard_rows": 90, "chunk_rows": 16, "max_norm_multiple": MULTIPLE}
META = make_meta(D_IN, "bfloat16", columns=("document", "position"), windows=True, **SIZES)
HERE = Path(__file__).parent


def blocks(since: dict | None) -> Iterator[tuple[dict, RowBlock]]:
    """Blocks of 0 to 40 rows, some not finite, with what was dropped, and windows, by the block's number alone."""
    for number in range(since["block"] if since else 0, BLOCKS):
        rng = np.random.default_rng(number)
        count = int(rng.integers(0, 40)) if number % 7 else 0
        rows = rng.standard_normal((count, D_IN), np.float32)
        rows[rng.random(count) < 0.1, 3] = np.nan
        columns = {"document": np.full(count, number), "position": np.arange(count)}
        dropped = {"special": rng.integers(0, count + 1, rng.integers(0, 3))}
        yield {"block": number}, RowBlock(rows, columns, dropped, windows_of(count, number))


def windows_of(rows: int, number: int) -> Windows:
    """Windows of up to 60 tokens, of which about three in four are rows."""
    rng = np.random.default_rng((number, 1))
    stored = np.zeros(rows + rows // 3, bool)
    stored[rng.choice(len(stored), rows, replace=False)] = True
    edges = np.unique([0, len(stored), *rng.integers(0, len(stored) + 1, rng.integers(0, 9))])
    return Windows.of(np.diff(edges), rng.integers(0, 1000, len(stored)), stored)


def write(path: Path, limit: int | None = None) -> None:
    """Write the store, from its beginning or from where it was interrupted."""
    with StoreWriter.open(path, META, limit=limit) as writer:
        for cursor, block in blocks(writer.cursor):
            if writer.full:
                break
            sys.audit("store_producer.block")
            writer.append(block, cursor)
        writer.finish()


RANK_META = make_meta(3, shard_rows=7, chunk_rows=4, columns=("document",))
RANK_ROWS = [45, 23, 0, 31]  # of each rank


def write_ranks(path: Path, stop: int | None = None) -> None:
    """Write a store of four ranks, one after the other; a row holds its document's number, a block five."""
    ranks = len(RANK_ROWS)
    with ranked_store(path, replace(RANK_META, ranks=ranks)):
        for rank, limit in enumerate(RANK_ROWS):
            with StoreWriter.open(path, RANK_META, limit=limit, rank=rank) as writer:
                number = writer.cursor["block"] if writer.cursor else 0
                while not writer.full and (stop is None or number < stop):
                    documents = rank + ranks * (5 * number + np.arange(5))
                    rows = documents[:, None] * np.array([1, 0, 0], np.float32)
                    dropped = {"special": np.zeros(2, int)}
                    block = RowBlock(rows, {"document": documents}, dropped)
                    writer.append(block, {"block": number})
                    number += 1
                if stop is None:
                    writer.finish()


class Producer:
    """A process of this script."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )

    def __call__(self, path: Path, **order) -> tuple[int, str]:
        """Write the store once; returns the exit status, negative for a signal, and the error if one was said."""
        print(json.dumps({"path": str(path), **order}), file=self._process.stdin, flush=True)
        error = ""
        while "exit" not in (answer := json.loads(self._process.stdout.readline())):
            error = answer["error"]
        return answer["exit"], error

    def close(self) -> None:
        self._process.communicate()


def _child(order: dict) -> None:
    if order.get("file_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"], resource.RLIM_INFINITY))
    if order.get("kill_at"):
        events, root = itertools.count(1), str(Path(order["path"]).parent)
        watched = {"os.fsync", "fcntl.flock", "store_producer.block"}
        if order.get("words"):
            root = str(Path(order["path"]).parents[1])

        def hook(event: str, arguments: tuple) -> None:
            on_files = event in ("open", "os.rename", "os.remove", "os.mkdir")
            inside = on_files and str(arguments[0]).startswith(root)
            if (inside or event in watched) and next(events) == order["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        fsync = os.fsync
        os.fsync = lambda descriptor: (hook("os.fsync", ()), fsync(descriptor))[1]
    if order.get("cuts"):
        disk = Disk(Path(order["path"]).parents[1], Path(order["cuts"]))
    try:
        if order.get("words"):
            _command(["sae", "--home", str(Path(order["path"]).parents[1]), *order["words"]])
        elif order.get("ranks"):
            write_ranks(Path(order["path"]))
        else:
            write(Path(order["path"]), order.get("limit"))
        if order.get("cuts"):
            disk.cut(last=True)
    except StoreError as error:
        print(json.dumps({"error": str(error)}), flush=True)


def _command(words: list[str]) -> None:
    sys.argv = words
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as end:
            if not end.code:
                return
    print(json.dumps({"error": said.getvalue()}), flush=True)


def main() -> None:
    """Serve orders until the input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("words"):
            load_command(order["words"][0])
            for module in order["imports"]:
                importlib.import_module(module)  # once, and not by every child
        child = os.fork()
        if not child:
            _child(order)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
