"""Common to the scripts of this folder: runs by their names, their errors, and tables.

A run is called GROUP-ACT-WAY-VALUE-SEED (see `common.sh`). Errors are the fraction of variance unexplained (FVU) of
held-out rows: the mean squared error relative to predicting the mean.
"""

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from saecli.sae.dictionary import SAE
from saecli.sae.formats import load
from saecli.store.reader import ActivationStore
from saecli.train.runs import read_metrics

WAYS = {
    "sgd": "SGD, tied, as in the paper's code",
    "paper": "PAM-SGD, as in the paper's code",
    "fair": "sgd, the tool's defaults",
    "default": "pam-sgd, the tool's defaults",
}


@dataclass(frozen=True)
class Run:
    """A finished run: the parts of its name, its folder, and its `run.json`."""

    group: str
    act: str
    way: str
    value: float
    seed: int
    folder: Path
    document: Mapping[str, Any]

    @property
    def final(self) -> Mapping[str, float]:
        """The measures that training ended with."""
        return self.document["result"]["final"]

    @cached_property
    def sae(self) -> SAE:
        """The SAE, acting on the store's rows."""
        return load(self.folder).sae

    @property
    def rows(self) -> int:
        """Training rows."""
        return self.document["result"]["rows_train"]

    def curve(self) -> tuple[list[int], list[float]]:
        """Epochs, and the test FVU after each."""
        lines = [line for line in read_metrics(self.folder) if "test_fvu" in line]
        return [line["epoch"] for line in lines], [line["test_fvu"] for line in lines]


def runs_of(out: Path) -> list[Run]:
    """The finished runs below an output folder, by name."""
    found = []
    for path in sorted(out.glob("home/runs/*/run.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["complete"]:
            group, act, way, value, seed = path.parent.name.split("-")
            found.append(Run(group, act, way, float(value), int(seed), path.parent, document))
    return found


def rows_of(
    out: Path, store: str, which: Literal["train", "test"], fraction: float = 1.0
) -> torch.Tensor:
    """A fraction of a store's training rows, or its held-out rows, (N, D), in stored order."""
    split = ActivationStore.open(out / "home" / "activations" / store).split(
        which, fraction=fraction
    )
    return torch.from_numpy(np.concatenate([*split.sequential(4096)]))


Errors = dict[float, list[float]]  # by value, one a seed


def errors(runs: Iterable[Run], key: str = "test_fvu") -> Errors:
    """A measure of some runs by their values, in order."""
    found: Errors = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.value, run.seed)):
        found[run.value].append(run.final[key])
    return dict(found)


def means(found: Errors) -> dict[float, float]:
    """The mean over seeds for each value."""
    return {value: statistics.mean(seeds) for value, seeds in found.items()}


def select(runs: Iterable[Run], **wanted: Any) -> list[Run]:
    """The runs with these parts, such as `group="size", act="topk"`."""
    return [run for run in runs if all(getattr(run, name) == part for name, part in wanted.items())]


def with_base(runs: Sequence[Run], group: str, value: float) -> list[Run]:
    """The runs of a group; under a value that it lacks, the runs of `base`, from which it varies."""
    varied = select(runs, group=group)
    if any(run.value == value for run in varied):
        return varied
    return varied + [replace(run, group=group, value=value) for run in select(runs, group="base")]


def by_rows(runs: Sequence[Run], key: str = "test_fvu") -> Errors:
    """A measure by training rows: of the runs on some of them, and of `base` where none of those had as many."""
    some = [replace(run, value=run.rows) for run in select(runs, group="size")]
    known = {run.rows for run in some}
    base = [replace(run, value=run.rows) for run in select(runs, group="base")]
    return errors([*some, *(run for run in base if run.rows not in known)], key)


def base_settings(runs: Sequence[Run]) -> tuple[int, int, dict[str, str]]:
    """K and the number of latents of the runs that others vary from, and titles of activations."""
    document = select(runs, group="base", act="topk")[0].document
    k = document["activation"]["k"]
    return k, document["training"]["d_sae"], {"topk": f"TopK, K = {k}", "relu": "relu with L1"}


def write_table(out: Path, name: str, runs: Iterable[Run]) -> None:
    """Write the measures of runs as `NAME.csv` and `NAME.json`, one line per run."""
    lines = [
        {
            "group": run.group,
            "act": run.act,
            "way": run.way,
            "value": run.value,
            "seed": run.seed,
            "run": run.folder.name,
            "rows_train": run.document["result"]["rows_train"],
            **{
                key: run.final[key]
                for key in ("train_fvu", "test_fvu", "test_mse", "test_l0", "dead_fraction")
            },
        }
        for run in runs
    ]
    (out / f"{name}.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_series(out: Path, name: str, series: Mapping[str, Sequence[float]]) -> None:
    """Write columns of numbers by their names as `NAME.csv` and `NAME.json`; shorter ones end earlier."""
    (out / f"{name}.json").write_text(json.dumps(series, indent=1) + "\n", encoding="utf-8")
    with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(series), *zip_longest(*series.values())])


def arguments(description: str, **lists: str) -> argparse.Namespace:
    """The options of the scripts that draw: the output folder, the command that filled it, and lists of words, each by
    its name and help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "out", type=Path, help="folder that the runs are in, and figures and tables go to"
    )
    parser.add_argument("--command", default="", help="the command that made them, for the report")
    for name, words in lists.items():
        parser.add_argument(f"--{name}", nargs="+", required=True, help=words)
    return parser.parse_args()
