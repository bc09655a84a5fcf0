"""How long `sae` takes to start.

    PYTHONPATH=. python tests/benchmarks/start_up.py [--runs 21]

Runs `sae --help`, and `sae list` on an empty home, in turn with `python -c "import typer, rich"`, each a process of its
own, and prints the medians of their wall times, the median of the ratio run by run, and which heavy modules are loaded
when they end.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

BARE = "import typer, rich"
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "sklearn", "scipy", "numpy", "h5py", "rich.console",
         "rich.markdown")


def seconds(command: list[str]) -> float:
    """Wall time of a process."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def loaded(words: list[str]) -> list[str]:
    """The heavy modules that `sae` has imported when it ends."""
    script = (f"import sys\nfrom saecli.cli import main\nsys.argv = ['sae', *{words!r}]\n"
              f"try: main()\nexcept SystemExit: print(*(name for name in {HEAVY!r} if name in sys.modules), "
              "file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          check=True)
    return done.stderr.split()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    bare = [sys.executable, "-c", BARE]
    print(f"{'command':12} {'seconds':>8} {'bare':>8} {'ratio':>6}  heavy modules (bare: {BARE})")
    with tempfile.TemporaryDirectory() as home:
        for name, words in (("sae --help", ["--help"]), ("sae list", ["--home", home, "list"])):
            command = [sys.executable, "-m", "saecli", *words]
            seconds(command), seconds(bare)  # once for the page cache
            pairs = [(seconds(command), seconds(bare)) for _ in range(runs)]
            ours, theirs = map(statistics.median, zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"{name:12} {ours:8.3f} {theirs:8.3f} {ratio:6.2f}  {', '.join(loaded(words)) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
