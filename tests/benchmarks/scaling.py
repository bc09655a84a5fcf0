"""What several processes send each other, against what they compute, and how much faster they are.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/benchmarks/scaling.py [--processes 1,2] [--d-in 512] [--d-sae 2048]
        [--turns 2]

Trains an SAE by PAM-SGD on random rows, and extracts activations of tiny-gemma2, in one process and in several that
torchrun starts on this machine, with one thread each. Rows per second are those of all processes by the processor time
of the first, since machines are shared: its waiting for the others is not in them. They take turns, and the least of
each one's times counts. Memory is the most that the first process took for training. Bytes are those of the tensors
that it hands to torch.distributed. What links then carry depends on the algorithm: a ring all-reduce sends
2 (P - 1) / P times the tensor from each of P processes. Operations are 10 D F a row of an encoder step; topk skips some
of them on a CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from peak import peak_of
from rich.console import Console

from saecli.base import launcher, processes
from saecli.sae.activations import TopK
from saecli.show.tables import table
from saecli.store.reader import ActivationStore
from saecli.store.schema import StoreMeta
from saecli.store.writer import StoreWriter
from saecli.train.loop import Loop, Record, start_training
from saecli.train.options import PamSgd, TrainingConfig
from saecli.train.pam_sgd import PamSgdSolver
from saecli.train.plan import Plan

ROWS, BATCH, SEED = 24_576, 2_048, 0
COUNTED = ("all_reduce", "reduce", "broadcast", "send", "recv")
OUTER = ("begin_pass", "observe", "end_pass")
EXTRACTED = 60_000
EXTRACT = ("extract", "--model", "tiny-gemma2", "--rows", str(EXTRACTED))


class Traffic:
    """Counts the bytes that this process hands to torch.distributed, by what they are for."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.purpose = "other"
        for name in COUNTED:
            setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, call: Any) -> Any:
        def counted(tensor: Any, *words: Any, **named: Any) -> Any:
            self.bytes[self.purpose] += tensor.nbytes
            return call(tensor, *words, **named)

        return counted


def work(home: Path, d_sae: int) -> None:
    """What each process does: train, and tell seconds and bytes of steps and of decoder steps."""
    if launcher.world() > 1:
        processes.join()
    communicator = processes.communicator()
    traffic, seconds, calls = Traffic(), Counter(), Counter()

    def told(purpose: str, method: Any) -> Any:
        def timed(*words: Any, **named: Any) -> Any:
            before, traffic.purpose, started = traffic.purpose, purpose, time.process_time()
            found = method(*words, **named)
            seconds[purpose] += time.process_time() - started
            calls[purpose] += 1
            traffic.purpose = before
            return found

        return timed

    PamSgdSolver.descend = told("step", PamSgdSolver.descend)
    for name in OUTER:
        setattr(PamSgdSolver, name, told("outer", getattr(PamSgdSolver, name)))
    PamSgdSolver._solve = told("solve", PamSgdSolver._solve)
    store = ActivationStore.open(home / "activations" / "rows")
    training = TrainingConfig(d_sae=d_sae, epochs=2, batch_size=BATCH, smoothing=0.0)
    plan = Plan.resolved(training.rows_of(store), None, training, PamSgd(inner_steps=1), TopK(k=32))
    _, memory = peak_of(Loop([start_training(plan, Record(), communicator=communicator)]).train)
    if communicator.is_main:
        print(json.dumps({"seconds": seconds, "calls": calls, "bytes": traffic.bytes, "memory": memory}))
    if communicator.world_size > 1:
        processes.leave()


def work_extract() -> None:
    """What each process does: `sae extract`, by the command line's own arguments; tells the seconds of its pass."""
    from saecli.cli import main as cli
    from saecli.extract import extraction

    seconds = Counter()

    def timed(fill: Any) -> Any:
        def filling(*words: Any, **named: Any) -> None:
            started = time.process_time()
            fill(*words, **named)
            seconds["fill"] += time.process_time() - started

        return filling

    extraction.fill = timed(extraction.fill)
    try:
        cli.main()
    except SystemExit as stop:
        if stop.code:
            raise
    if launcher.rank() == 0:
        print(json.dumps({"seconds": seconds}))


def launched(processes: int, *words: str) -> dict[str, Any]:
    """What this script tells, run by so many processes."""
    prefix = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([sys.executable, *(prefix if processes > 1 else []), __file__, *words], check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_rows(home: Path, d_in: int) -> None:
    """A store of rows of a subspace and noise."""
    rng = np.random.default_rng(SEED)
    rows = rng.normal(size=(ROWS, 64)) @ rng.normal(size=(64, d_in)) + rng.normal(size=(ROWS, d_in))
    meta = StoreMeta({"kind": "array"}, "scaling", "float32", d_in, ROWS)
    with StoreWriter.open(home / "activations" / "rows", meta) as writer:
        writer.append(rows.astype(np.float32), {}, {"row": 0})
        writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", default="1,2", help="how many")
    parser.add_argument("--d-in", type=int, default=512)
    parser.add_argument("--d-sae", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--home", type=Path, help="of a process that this script starts")
    given = parser.parse_args()
    if given.home is not None:
        work(given.home, given.d_sae)
        return
    trained = {int(number): [] for number in given.processes.split(",")}
    extracted = {number: [] for number in trained}
    with tempfile.TemporaryDirectory() as folder:
        make_rows(Path(folder), given.d_in)
        for turn in range(given.turns):
            for number in trained:
                trained[number].append(launched(number, "--home", folder, "--d-sae", str(given.d_sae)))
            for number in extracted:
                extracted[number].append(launched(number, "--home", folder, *EXTRACT, "--name", f"{number}-{turn}"))
    show(given, trained, extracted)


def show(given: argparse.Namespace, trained: dict[int, list[dict]], extracted: dict[int, list[dict]]) -> None:
    """Print the table of what all turns told, by number of processes."""
    lines = []
    for number, found in trained.items():
        seconds = {name: min(one["seconds"][name] / one["calls"][per] for one in found)
                   for name, per in (("step", "step"), ("outer", "solve"), ("solve", "solve"))}
        calls, sent = found[0]["calls"], Counter(found[0]["bytes"])
        rate = EXTRACTED / min(one["seconds"]["fill"] for one in extracted[number])
        lines.append([str(number), BATCH / seconds["step"],
                      sent["step"] / calls["step"] / 1e6,
                      10e-9 * given.d_in * given.d_sae * BATCH, seconds["outer"], seconds["solve"],
                      (sent["outer"] + sent["solve"]) / calls["solve"] / 1e6,
                      min(one["memory"] for one in found) / 2**20, rate])
    columns = ["processes", "rows/s of steps", "MB a step", "Gflop a step", "s a decoder step", "of it solving",
               "MB a decoder step", "MiB a process", "rows/s extracted"]
    title = f"d_in {given.d_in}, d_sae {given.d_sae}, topk 32, batch {BATCH}, float32; processes of one thread"
    Console(width=140).print(table(title, columns, lines))


if __name__ == "__main__":
    if "extract" in sys.argv:
        work_extract()
    else:
        main()
