"""Tables of the documents that measure returns."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType

from ..base.errors import counted, number, printable
from ..measure.controls import MEASURES as CONTROLLED
from ..measure.evaluate import ERRORS, LIKE_L0
from ..measure.hook_points import EXCLUSIVE
from ..measure.stability import MEASURES as STABILITY
from ..sae.metrics import DENSE_FREQUENCY
from .tables import table

# The most important first: a narrow terminal moves the last ones below.
RECONSTRUCTION = (
    "l0",
    "fvu",
    "explained_variance",
    "mse",
    "cosine",
    "l1",
    "silent_fraction",
    "dead_fraction",
    "rows",
    "split",
    "data",
)
EFFECT = ("ce_recovered", "kl", "ce_clean", "ce_spliced", "ce_zero", "tokens")
FEATURES = ("mcc", "f1", "precision", "recall", "uniqueness", "true_l0")
SPARSITY = ("l0", "l0_std", "density", "silent", "dense", "dead_fraction", "rows", "split", "data")
REFITTED = ("fvu", "cosine", "l0", "mcc", "f1", "ce_recovered", "kl")
LATENTS_LISTED = 12
SETS_LISTED = 20


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """The steps and finite values of a measure, from the lines of `metrics.jsonl`."""
    return [
        (line["step"], line[key])
        for line in lines
        if line.get(key) is not None and math.isfinite(line[key])
    ]


def l0_bins(
    histogram: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts and edges of a histogram of L0, (F + 1,), regrouped into at most `most` bins over its range."""
    present = np.flatnonzero(histogram)
    if not len(present):
        return np.zeros(1, int), np.array([-0.5, 0.5])
    low, high = (
        max(0, present[0] - 1),
        present[-1] + 1,
    )  # a margin, so that a single value still shows as a bar
    step = -(-(high - low + 1) // most)
    edges = np.arange(low, high + step + 1, step) - 0.5
    return np.histogram(np.arange(len(histogram)), edges, weights=histogram)[0], edges


def frequency_edges(*frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges of 30 logarithmic bins for the latents' non-zero firing frequencies."""
    lowest = min((some[some > 0].min() for some in frequencies if (some > 0).any()), default=1e-3)
    return np.logspace(math.floor(math.log10(lowest)), 0, 31)


def sparsest_first(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measures of runs by L0, of equal ones by FVU."""
    return sorted(runs, key=lambda run: (run["l0"], math.isnan(run["fvu"]), run["fvu"]))


def evaluation_tables(
    ranked: Sequence[dict[str, Any]], models: Sequence[str]
) -> list[RenderableType]:
    """The tables of `sae eval`: reconstruction, known features found, and the effect on the language model, if any."""
    order = "sparsest first" if len(ranked) > 1 else None
    compared = any(run["unbeaten"] is not None for run in ranked)
    shown = [
        comparison(ranked, RECONSTRUCTION, f"{order}; {meaning(ranked[0])}" if compared else order)
    ]
    if nested := [
        [run["run"], prefix["latents"], prefix["l0"], prefix["fvu"]]
        for run in ranked
        for prefix in run.get("prefixes", ())
    ]:
        shown.append(table("by the first latents alone", ["run", "latents", "l0", "fvu"], nested))
    if of_worlds := [run for run in ranked if "mcc" in run]:
        shown.append(
            comparison(
                of_worlds,
                FEATURES,
                "known features: f1, precision and recall of latents as detectors "
                "of the feature nearest to each",
            )
        )
    if spliced := [run for run in ranked if "kl" in run]:
        shown.append(
            comparison(
                spliced,
                (*EFFECT, "rows"),
                f"with the SAE's reconstructions in {models[0]}; in nats a token",
            )
        )
    if each := [
        [
            run["run"] + (f", {part['source']}" if "source" in part else ""),
            f"{one['model']}, layer {one['layer']}, {one['site']}",
            *(one[name] for name in EFFECT),
        ]
        for run in ranked
        for part in (run, *run.get("sources", ()))
        for one in part.get("hook_points", ())
    ]:
        shown.append(
            table(
                "with the crosscoder's reconstruction at one hook point alone; in nats a token",
                ["run", "hook point", *(name.replace("_", " ") for name in EFFECT)],
                each,
            )
        )
    return shown


def comparison(
    runs: Sequence[dict[str, Any]], columns: Sequence[str], title: str | None = None
) -> RenderableType:
    """A table with some of the runs' measures as columns, one line per run, and after it one per source of a mixture of
    texts; unbeaten ones are marked."""
    lines = [
        {
            **run,
            **one,
            "run": f"{run['run']}, {one['source']}"
            if one
            else run["run"] + " *" * bool(run.get("unbeaten")),
        }
        for run in runs
        for one in ({}, *run.get("sources", ()))
        if not one or columns[0] in one
    ]
    rows = [[line["run"], *(line[column] for column in columns)] for line in lines]
    return table(title, ["run", *(column.replace("_", " ") for column in columns)], rows)


def meaning(run: Mapping[str, Any]) -> str:
    """A sentence on the mark of an unbeaten run."""
    *others, last = [name.replace("_", " ") for name in ERRORS if run.get(name) is not None]
    errors = f"{', '.join(others)} or {last}" if others else last
    return f"unbeaten (*): every other run on the same rows with at most {LIKE_L0:g} times its l0 is worse in {errors}"


def flat(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run's measures as a line of a table: `l0_first_N` and `fvu_first_N` of prefixes, `l0_on_NAME` of sources."""
    line = dict(run)
    for one in line.pop("sources", ()):
        line |= {
            f"{name}_on_{one['source']}": one[name]
            for name in ("rows", "l0", "fvu", "ce_recovered", "kl")
            if name in one
        }
    for prefix in line.pop("prefixes", ()):
        line |= {f"{name}_first_{prefix['latents']}": prefix[name] for name in ("l0", "fvu")}
    for place, one in enumerate(line.pop("hook_points", ())):
        line |= {f"{name}_at_{place}": one[name] for name in EFFECT[:-1]}
    return line


def read_measures(path: Path) -> list[dict[str, Any]]:
    """The file that `sae eval --csv` wrote, a mapping per run: names as text, `unbeaten` as bool, all else as float."""
    kinds: dict[str, Callable[[str], Any]] = {
        "run": str,
        "data": str,
        "split": str,
        "unbeaten": "True".__eq__,
    }
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {
                name: kinds.get(name, lambda word: float(word or "nan"))(word)
                for name, word in line.items()
            }
            for line in csv.DictReader(file)
        ]


def extremes(run: dict[str, Any]) -> str:
    """Lines that list a run's dense latents, the most frequent first, its silent ones, and numbers by source."""
    frequency, rows = run["frequency"], f"on these {counted(run['rows'], 'row')}"
    dense = sorted(
        (i for i, f in enumerate(frequency) if f > DENSE_FREQUENCY), key=lambda i: -frequency[i]
    )
    silent = [i for i, f in enumerate(frequency) if f == 0]
    mainly = [f"{one['mainly']:,} on {one['source']}" for one in run.get("sources", ())]
    return (
        f"{run['run']}: dense {rows}: {_listed([f'{i} ({frequency[i]:.0%})' for i in dense])}\n"
        f"{run['run']}: silent {rows}: {_listed([str(i) for i in silent])}"
        + f"\n{run['run']}: latents that fire mainly on one source: {', '.join(mainly)}"
        * bool(mainly)
    )


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - LATENTS_LISTED:,} more" if len(words) > LATENTS_LISTED else ""
    return (", ".join(words[:LATENTS_LISTED]) or "none") + more


def places_table(run: Mapping[str, Any]) -> RenderableType:
    """The table of a crosscoder's hook points, and a line that lists the latents of each class but shared ones."""
    places, of_class = run["places"], run["class"]
    kinds = (
        "only {}",
        "only {} by latent scaling",
        "looks only {}: complete shrinkage",
        "looks only {}: latent decoupling",
    )
    rows = [
        [
            place["name"],
            place["width"],
            place["fvu"],
            place["exclusive"],
            *(of_class.count(kind.format(place["name"])) for kind in kinds),
        ]
        for place in places
    ]
    exclusive = sum(place["exclusive"] for place in places)
    title = (
        f"{run['run']}: of {len(of_class):,} latents {run['shared']:,} are shared by all hook points, "
        f"{exclusive:,} exclusive to one ({EXCLUSIVE:g} of the decoder norm there), "
        f"{len(of_class) - run['shared'] - exclusive:,} in between; latent scaling may find an exclusive one "
        "elsewhere too, in the error (complete shrinkage) or in other latents (latent decoupling), and one in "
        "between or shared only there"
    )
    lines = [
        f"{run['run']}: {kind}: {_listed([str(i) for i, own in enumerate(of_class) if own == kind])}"
        for kind in sorted({*of_class} - {"shared", "in between"})
    ]
    return Group(
        table(
            title,
            [
                "hook point",
                "width",
                "fvu",
                "exclusive",
                "only there",
                "only by scaling",
                "complete shrinkage",
                "latent decoupling",
            ],
            rows,
        ),
        *lines,
    )


def stability_table(document: Mapping[str, Any]) -> RenderableType:
    """The pairs of `saecli.stability`; measures of latents that fire are columns of their own if some are silent."""
    silent = any(run["silent"] for run in document["runs"])
    lines = [
        *({"name": ", ".join(pair["runs"]), **pair} for pair in document["pairs"]),
        {"name": "all pairs", "latents": None, **document},
    ]
    names = [name.replace("_", " ") for name in STABILITY]
    return table(
        f"stability; matched: |cosine| of decoder vectors above {document['match_threshold']:g}",
        ["runs", "latents", *names, *(f"{name}, firing" for name in names if silent)],
        [
            [
                line["name"],
                line["latents"],
                *(line[name] for name in STABILITY),
                *(line["firing"][name] for name in STABILITY if silent),
            ]
            for line in lines
        ],
    )


def probe_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """The tables of `sae probe`: AUC, its difference from the dense probe's, accuracy; for few sets the AUC of each."""
    probes, runs = document["probes"], document["runs"]
    counts = list(dict.fromkeys(one["k"] for one in probes if one["k"] is not None))
    sets = counted(probes[0]["sets"], "set")
    shown = []
    for name, title in (
        ("auc", "AUC"),
        ("auc_difference", "AUC less the dense probe's"),
        ("accuracy", "accuracy"),
    ):
        columns = [*counts, *[None] * (name != "auc_difference")]
        rows = [
            [run["run"], *(_with_interval(probe_of(probes, run, k), name) for k in columns)]
            for run in runs
        ]
        heads = [f"k = {k}" if k else "dense" for k in columns]
        shown.append(table(f"{title}, mean over {sets}", ["run", *heads], rows))
    names = list(dict.fromkeys(line["set"] for line in document["by_set"]))
    if len(names) > SETS_LISTED:
        return shown
    k = counts[-1]
    places = {(run["layer"], run["site"]): run for run in runs}
    rows = []
    for name in names:
        lines = [line for line in document["by_set"] if line["set"] == name]
        cells = [
            *(probe_of(lines, run, k) for run in runs),
            *(probe_of(lines, run, None) for run in places.values()),
        ]
        rows.append([name, lines[0]["rows"], *(_with_interval(cell, "auc") for cell in cells)])
    heads = [
        f"dense, layer {layer}, {site}" if len(places) > 1 else "dense" for layer, site in places
    ]
    by_set = table(
        "AUC by set", ["set", "texts", *(f"{run['run']}, k = {k}" for run in runs), *heads], rows
    )
    return [*shown, by_set]


def probe_of(
    lines: Sequence[Mapping[str, Any]], run: Mapping[str, Any], k: int | None
) -> Mapping[str, Any]:
    """The line of a run's probe; k None: the dense one at its hook point."""
    wanted = {**run, "k": k} if k is not None else {**run, "run": None, "k": None}
    return next(line for line in lines if all(line[key] == value for key, value in wanted.items()))


def _with_interval(line: Mapping[str, Any], name: str) -> str:
    """A measure with half its interval's width: 0.712 ± 0.031."""
    half = "" if line[f"{name}_high"] is None else f" ± {line[f'{name}_high'] - line[name]:.3f}"
    return f"{line[name]:.3f}{half}"


def controls_table(document: Mapping[str, Any]) -> RenderableType:
    """The table of `sae controls`; measures that no training has are left out."""
    lines = document["controls"]
    shown = [name for name in CONTROLLED if any(line[name] is not None for line in lines)]
    rows = [
        [
            document["run"] if line["control"] == "none" else line["control"],
            *(line[name] for name in shown),
        ]
        for line in lines
    ]
    return table(
        f"{document['run']} and its controls, each on its held-out rows",
        ["training", *(name.replace("_", " ") for name in shown)],
        rows,
    )


def refit_table(document: Mapping[str, Any]) -> RenderableType:
    """The measures of a refitted SAE before and after, on the held-out rows."""
    before, after = document["before"], document["after"]
    rows = [
        [name.replace("_", " "), before[name], after[name]] for name in REFITTED if name in after
    ]
    rows += [
        [f"fvu of the first {first['latents']:,}", first["fvu"], then["fvu"]]
        for first, then in zip(before.get("prefixes", ()), after.get("prefixes", ()), strict=True)
    ]
    final = document["final"]
    rows += [
        [
            "ridge towards the old decoder, over the mean Gram diagonal",
            None,
            final["relative_alpha"],
        ],
        ["effective degrees of freedom", None, final["dof"]],
        ["factor of the old decoder", None, final["c"]],
    ]
    return table(
        f"{document['run']}: the decoder for {document['rows_train']:,} training rows of {document['data']}, "
        f"on {document['rows_test']:,} held-out rows",
        ["measure", "before", "after"],
        rows,
    )


def steering_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """The output of `sae steer`: a table of latents, and each prompt with both continuations, a line each."""
    layer, site = (document.get(f"target_{name}", document[name]) for name in ("layer", "site"))
    scaled = document["method"] != "ablate"
    title = (
        f"{document['method']} latents of {document['run']} in {document['model']}, layer {layer}, "
        f"{site}; activations there have a median norm of {number(document['activation_norm'])}"
    )
    rows = [
        [
            str(one["latent"]),
            *[one["scale"]] * scaled,
            one["prompt_max"],
            one["store_max"],
            one["decoder_norm"],
        ]
        for one in document["latents"]
    ]
    heads = ["largest code on the prompt", "on the store", "decoder norm"]
    shown = table(title, ["latent", *["scale"] * scaled, *heads], rows)
    texts = [
        f"\n{printable(f'{name}: {one[name]}')}"
        for one in document["continuations"]
        for name in ("prompt", "plain", "steered")
    ]
    return [shown, "".join(texts)]
