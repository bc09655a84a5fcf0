"""Test error of the solvers at their defaults, on data that needs no network, as a Markdown table.

    PYTHONPATH=. python tests/benchmarks/solvers.py [--rows 40000]

Every cell is one `sae train` with one seed; SGD is run tied and untied, and the better test FVU is shown, which
flatters it. Only the errors are printed: nothing here measures time.
"""

import argparse
import io
import json
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout

from saecli.cli import main

ACTIVATIONS = {"relu, L1": ["--act", "relu"], "topk, K=16": ["--act", "topk", "--k", "16"]}
SGD = {"untied": ["--solver", "sgd"], "tied": ["--solver", "sgd", "--tied"]}
PAM_SGD = ["--solver", "pam-sgd"]
FRACTIONS = ("0.1", "0.3", "1.0")


def sae(home: str, *words: str) -> dict:
    """Run a command in this process and return its JSON document."""
    out, err, kept = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["sae", "--home", home, *words, "--json"]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(err.getvalue()) from stop
    finally:
        sys.argv = kept
    return json.loads(out.getvalue())


def cell(final: dict) -> str:
    return f"{final['test_fvu']:.4f} at {final['l0']:.1f}"


def benchmark(rows: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        stores = {"digits": sae(home, "import", "digits")["name"],
                  "tiny-gemma2": sae(home, "extract", "--model", "tiny-gemma2", "--layer", "2",
                                     "--rows", str(rows))["name"]}
        print("| data | activation | training rows | best SGD: FVU at L0 | PAM-SGD: FVU at L0 |")
        print("|---|---|---|---|---|")
        for data, store in stores.items():
            for act, chosen in ACTIVATIONS.items():
                for fraction in FRACTIONS:
                    shared = ["train", "--data", store, *chosen, "--fraction", fraction]
                    sgd = {name: sae(home, *shared, *words) for name, words in SGD.items()}
                    best = min(sgd, key=lambda name: sgd[name]["final"]["test_fvu"])
                    pam = sae(home, *shared, *PAM_SGD)
                    print(f"| {data} | {act} | {pam['rows_train']:,} | {cell(sgd[best]['final'])} ({best}) | "
                          f"{cell(pam['final'])} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000, help="rows to extract from tiny-gemma2")
    benchmark(parser.parse_args().rows)
