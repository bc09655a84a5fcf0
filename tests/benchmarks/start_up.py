"""How long `sae` takes to start.

    PYTHONPATH=. python tests/benchmarks/start_up.py [--runs 21]

Runs help pages, a shell's completion, and `sae list` on an empty home, in turn with `python -c "import typer, rich"`
and with the import of what rich draws a page with, each a process of its own, and prints the medians of their processor
times, the medians of the ratios run by run, and which heavy modules are loaded when they end. Python keeps the compiled
modules, as it does where the package is installed.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

BARE = "import typer, rich"
DRAWING = BARE + ", rich.console, rich.table, rich.panel"
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "sklearn", "scipy", "numpy", "h5py", "rich.console",
         "rich.markdown")


def seconds(command: list[str], asked: dict[str, str]) -> float:
    """Processor time of a process, with these environment variables."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, **asked, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
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
    imports = [[sys.executable, "-c", script] for script in (BARE, DRAWING)]
    print(f"{'command':28} {'seconds':>8} {'bare':>8} {'ratio':>6} {'drawing':>8} {'ratio':>6}  heavy modules "
          f"(bare: {BARE})")
    completion = {"_SAE_COMPLETE": "complete_bash", "COMP_WORDS": "sae train --so", "COMP_CWORD": "2"}
    with tempfile.TemporaryDirectory() as home:
        cases = [("sae --help", ["--help"], {}), ("sae train --help", ["train", "--help"], {}),
                 ("sae extract --help", ["extract", "--help"], {}), ("completion of train --so", [], completion),
                 ("sae list", ["--home", home, "list"], {})]
        for name, words, asked in cases:
            command = [sys.executable, "-m", "saecli", *words]
            times = [[seconds(command, asked), *(seconds(script, {}) for script in imports)]
                     for _ in range(runs + 1)][1:]  # the first compiles, and fills the page cache
            ours, bare, drawing = map(statistics.median, zip(*times, strict=True))
            ratios = [statistics.median(one[0] / one[which] for one in times) for which in (1, 2)]
            print(f"{name:28} {ours:8.3f} {bare:8.3f} {ratios[0]:6.2f} {drawing:8.3f} {ratios[1]:6.2f}  "
                  f"{', '.join(loaded(words, asked)) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
