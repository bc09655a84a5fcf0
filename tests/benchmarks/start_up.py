"""How long `sae` takes to start.

    PYTHONPATH=. python tests/benchmarks/start_up.py [--runs 21]

Runs help pages, a shell's completion, and `sae list` on an empty home, in turn with `python -c "import typer, rich"`,
each a process of its own, and prints the medians of their processor times, the median of the ratio run by run, and
which heavy modules are loaded when they end.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

BARE = "import typer, rich"
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "sklearn", "scipy", "numpy", "h5py", "rich.console",
         "rich.markdown")


def seconds(command: list[str], asked: dict[str, str]) -> float:
    """Processor time of a process, with these environment variables."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, env={**os.environ, **asked}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loaded(words: list[str], asked: dict[str, str]) -> list[str]:
    """The heavy modules that `sae` has imported when it ends."""
    script = (f"import sys\nfrom saecli.cli.main import main\nsys.argv = ['sae', *{words!r}]\n"
              f"try: main()\nexcept SystemExit: print(*(name for name in {HEAVY!r} if name in sys.modules), "
              "file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **asked}, check=True)
    return done.stderr.split()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    runs = parser.parse_args().runs
    bare = [sys.executable, "-c", BARE]
    print(f"{'command':28} {'seconds':>8} {'bare':>8} {'ratio':>6}  heavy modules (bare: {BARE})")
    completion = {"_SAE_COMPLETE": "complete_bash", "COMP_WORDS": "sae train --so", "COMP_CWORD": "2"}
    with tempfile.TemporaryDirectory() as home:
        cases = [("sae --help", ["--help"], {}), ("sae train --help", ["train", "--help"], {}),
                 ("sae extract --help", ["extract", "--help"], {}), ("completion of train --so", [], completion),
                 ("sae list", ["--home", home, "list"], {})]
        for name, words, asked in cases:
            command = [sys.executable, "-m", "saecli", *words]
            seconds(command, asked), seconds(bare, {})  # once for the page cache
            pairs = [(seconds(command, asked), seconds(bare, {})) for _ in range(runs)]
            ours, theirs = map(statistics.median, zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"{name:28} {ours:8.3f} {theirs:8.3f} {ratio:6.2f}  {', '.join(loaded(words, asked)) or 'none'}",
                  flush=True)


if __name__ == "__main__":
    main()
