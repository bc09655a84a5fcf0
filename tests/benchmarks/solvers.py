"""Test error of the solvers at their defaults, on data that needs no network, as a Markdown table.

    PYTHONPATH=. python tests/benchmarks/solvers.py [--rows 40000]

Every cell is one `sae train` with one seed; SGD is run tied and untied, and the better test FVU is shown, which
flatters it. The column between shows what PAM-SGD's last step alone is worth: its decoder step done once on the
finished SGD run, whose codes it leaves as they are. Only errors are printed: nothing here measures time.
"""

import argparse
import io
import json
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from saecli.cli import main
from saecli.formats import load_native
from saecli.metrics import reconstruction
from saecli.ridge import Moments, Terms, choose_alpha, solve
from saecli.store import ActivationStore, Rows

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


def gathered(rows: Rows) -> torch.Tensor:
    """All rows of a split, (N, D)."""
    return torch.cat([torch.from_numpy(batch.copy()) for batch in rows.sequential(4096)])


@torch.no_grad()
def with_decoder_step(home: str, run: dict, fraction: float) -> dict:
    """The test measures of a run whose decoder is solved for once, its ridge chosen by leave-one-out."""
    store = ActivationStore.open(Path(home) / "activations" / run["data"])
    train, test = (gathered(store.split(part, fraction=share)) for part, share in (("train", fraction), ("test", 1.0)))
    sae = load_native(Path(run["path"])).sae
    z, x = sae.encode(train).double(), train.double()
    moments = Moments(sae.d_in, sae.d_sae)
    moments.add(z, x)
    zeros = torch.zeros(sae.d_sae, sae.d_in, dtype=torch.float64)
    terms = Terms(0.0, 0.0, 0.0, 0.0, sae.W_enc.T, zeros, zeros[0], zeros[:, 0])
    sample = slice(None, None, -(-len(x) // 4096))
    decoder = solve(moments, replace(terms, alpha=choose_alpha(moments, terms, z[sample], x[sample], None)))
    found = reconstruction(replace(sae, W_dec=decoder.W.float(), b_dec=decoder.b.float()), [test])
    return {"test_fvu": found["fvu"], "l0": found["l0"]}


def cell(final: dict) -> str:
    return f"{final['test_fvu']:.4f} at {final['l0']:.1f}"


def benchmark(rows: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        stores = {"digits": sae(home, "import", "digits")["name"],
                  "tiny-gemma2": sae(home, "extract", "--model", "tiny-gemma2", "--layer", "2",
                                     "--rows", str(rows))["name"]}
        print("| data | activation | training rows | best SGD: FVU at L0 | and one decoder step | PAM-SGD: FVU at L0 |")
        print("|---|---|---|---|---|---|")
        for data, store in stores.items():
            for act, chosen in ACTIVATIONS.items():
                for fraction in FRACTIONS:
                    shared = ["train", "--data", store, *chosen, "--fraction", fraction]
                    sgd = {name: sae(home, *shared, *words) for name, words in SGD.items()}
                    best = min(sgd, key=lambda name: sgd[name]["final"]["test_fvu"])
                    pam = sae(home, *shared, *PAM_SGD)
                    print(f"| {data} | {act} | {pam['rows_train']:,} | {cell(sgd[best]['final'])} ({best}) | "
                          f"{cell(with_decoder_step(home, sgd[best], float(fraction)))} | {cell(pam['final'])} |",
                          flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000, help="rows to extract from tiny-gemma2")
    benchmark(parser.parse_args().rows)
