"""What `sae report` adds to a pass that encodes, and what its pages weigh.

    PYTHONPATH=.:tests python tests/benchmarks/report_pages.py [--d-in 128,2304] [--rows 16384] [--turns 5]

First the pass over rows that finds all latents' strongest texts and counts, beside passes over the same batches that
only encode, and that encode and decode: median seconds, and the median over the turns of the ratio to encoding; the
passes take turns. Memory is what a process of its own took for the pass at most, beyond what it had, over the rows and
over four times as many. Rows, weights and tokens are random, in windows of 128 tokens. relu has half of its codes above
zero at a bias of 0, a few at one of -2.

Then the whole command, in a process of its own, on a store of `tiny-gemma2` and a topk SAE of as many latents, trained
for one epoch: seconds, largest resident memory, and the sizes of `index.html` and of all files. Where playwright and
a Chromium are there, also the seconds that the browser takes to show the first page from disk, to search all latents,
and to open one. `--out DIR` keeps the pages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from browsers import open_browser, why_no_browser
from geometry_scale import random_rows, random_sae
from peak import peak_of

from saecli.activations import Activation, Relu, TopK
from saecli.dictionary import SAE
from saecli.html_report.report import SAMPLES
from saecli.latent_survey import COLUMNS, Examples, at_random, by_size, in_blocks, survey
from saecli.store import ActivationStore, Rows, StoreMeta, StoreWriter, rows_per_shard

CASES: dict[str, tuple[Activation, float]] = {
    "topk 32": (TopK(k=32), 0.0), "relu, half of them": (Relu(), 0.0), "relu, few": (Relu(), -2.0)}
BATCH = 1024
TIMED = """() => {
    const box = document.getElementById("search"), head = document.querySelectorAll("th button")[1];
    const began = performance.now();
    %s;
    document.body.offsetHeight;  // lays the page out
    return performance.now() - began;
}"""


def make_store(folder: Path, rows: int, d_in: int) -> Rows:
    """Random rows in windows of 128 random tokens."""
    rng = np.random.default_rng(0)
    meta = StoreMeta({}, "", "float32", d_in, rows_per_shard(d_in, "float32"), columns=COLUMNS)
    with StoreWriter.open(folder, meta) as writer:
        at = 0
        for block in random_rows(rows, d_in):
            numbers = at + np.arange(len(block))
            writer.append(block, {"document": numbers // 128, "position": 1 + numbers % 128,
                                  "token_id": rng.integers(0, 2048, len(block))}, {"row": at})
            at += len(block)
        writer.finish()
    return ActivationStore.open(folder).split("all")


def passes(sae: SAE, rows: Rows) -> dict[str, Callable[[], object]]:
    """The passes by name, the bare one first."""
    def batches():
        return map(torch.from_numpy, rows.sequential(BATCH))

    @torch.no_grad()
    def encode() -> None:
        for x in batches():
            sae.encode(x)

    @torch.no_grad()
    def decode() -> None:
        for x in batches():
            sae.decode(sae.encode(x))

    return {"encode": encode, "encode, decode": decode,
            "report": lambda: survey(sae, in_blocks(batches(), rows, BATCH), rows.rows, *(
                Examples(range(sae.d_sae), sae.d_sae, count, True, ranking)
                for count, ranking in ((12, by_size), (SAMPLES, at_random))))}


def seconds(work: Callable[[], object]) -> float:
    """Those that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def memory(folder: Path, d_sae: int, case: str, name: str) -> float:
    """MiB that this process takes for a pass."""
    rows = ActivationStore.open(folder).split("all")
    sae = random_sae(CASES[case][0], rows.d_in, d_sae, CASES[case][1])
    return peak_of(passes(sae, rows)[name])[1] / 2**20


def measure_passes(d_in: int, d_sae: int, count: int, turns: int) -> None:
    """Print a table of the passes at one width."""
    print(f"\nd_in {d_in}, d_sae {d_sae}, {count:,} rows\n\n| SAE | pass | seconds | over encoding | MiB | MiB, four "
          f"times the rows |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        stores = [Path(folder) / str(times) for times in (1, 4)]
        rows, _ = (make_store(store, times * count, d_in) for store, times in zip(stores, (1, 4), strict=True))
        for case, (activation, bias) in CASES.items():
            works = passes(random_sae(activation, d_in, d_sae, bias), rows)
            taken = [{name: seconds(work) for name, work in works.items()} for _ in range(turns + 1)][1:]
            for name in works:
                median = np.median([turn[name] for turn in taken])
                ratio = np.median([turn[name] / turn["encode"] for turn in taken])
                with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                    once, fourfold = (pool.apply(memory, (store, d_sae, case, name)) for store in stores)
                print(f"| {case} | {name} | {median:.2f} | {ratio:.2f} | {once:.0f} | {fourfold:.0f} |", flush=True)


def run(home: Path, *words: str) -> tuple[dict, float, float]:
    """A command's JSON, its seconds and the MiB of its largest resident memory."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "saecli", "--home", home, *words, "--json"],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    document = json.load(process.stdout)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return document, time.perf_counter() - started, usage.ru_maxrss / 1024


def measure_browser(index: Path) -> None:
    """Print how long the browser takes."""
    if reason := why_no_browser():
        print(f"browser: {reason}")
        return
    with open_browser() as browser:
        page = browser.new_page()
        started = time.perf_counter()
        page.goto(index.as_uri())
        page.wait_for_selector("tbody tr")
        shown = time.perf_counter() - started
        search = page.evaluate(TIMED % "box.value = 're'; box.dispatchEvent(new Event('input'))")
        sort = page.evaluate(TIMED % "head.click()")
        started = time.perf_counter()
        page.click("tbody tr a")
        page.wait_for_selector(".example")
        print(f"browser: first page after {shown:.2f} s, search {search:.0f} ms, sort {sort:.0f} ms, a latent's page "
              f"after {time.perf_counter() - started:.2f} s")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-in", default="128,2304")
    parser.add_argument("--d-sae", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for d_in in map(int, chosen.d_in.split(",")):
        measure_passes(d_in, chosen.d_sae, chosen.rows, chosen.turns)
    with tempfile.TemporaryDirectory() as folder:
        home, out = Path(folder), chosen.out or Path(folder) / "pages"
        run(home, "extract", "--model", "tiny-gemma2", "--rows", "100000")
        run(home, "train", "--act", "topk", "--k", "32", "--d-sae", str(chosen.d_sae), "--epochs", "1", "--solver",
            "sgd", "--name", "run")
        document, taken, memory = run(home, "report", "run", "--model", "tiny-gemma2", "--out", str(out))
        print(f"\nsae report: {document['measures']['rows']:,} rows, {document['pages']:,} pages in {taken:.0f} s, "
              f"{memory:,.0f} MiB; index.html {document['index_bytes'] / 1e6:.2f} MB, all of {document['files']} files "
              f"{document['bytes'] / 1e6:.1f} MB")
        measure_browser(out / "index.html")


if __name__ == "__main__":
    main()
