"""Tables of the documents that measure returns."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType

from ..base.words import counted, number, printable
from ..measure.controls import CONTROL_MEASURES as CONTROLLED
from ..measure.evaluate import TOGETHER_MEASURES
from ..measure.hook_points import EXCLUSIVE
from ..measure.stability import STABILITY_MEASURES
from ..sae.metrics import DENSE_FREQUENCY
from ..store.origin import point_words
from .tables import METRIC_WORDS, JsonObject, records_table, spelt, table

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
REFITTED = ("fvu", "metric_fvu", "cosine", "l0", "mcc", "f1", "ce_recovered", "kl")
PICTURED_ROWS = 200  # whose codes `sae sparsity --plot` draws
LATENTS_LISTED = 12
VERDICT, UNTRIED = "in the model", "-"  # the column of verdicts by `sae effects`
CHANGED = ("removed", "added")  # latents, by `sae effects`
SETS_LISTED = 20
MATCH_WORDS = {"decoder": "|cosine| of decoder vectors", "codes": "correlation of codes"}


def curve(lines: Sequence[JsonObject], key: str) -> list[tuple[int, float]]:
    """Steps and finite values of a measure, from lines of `metrics.jsonl`."""
    points = [(line["step"], line.get(key)) for line in lines]
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def l0_bins(
    histogram: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts and edges of a histogram of L0, (F + 1,), in at most `most` bins."""
    present = np.flatnonzero(histogram)
    if not len(present):
        return np.zeros(1, int), np.array([-0.5, 0.5])
    low, high = max(0, present[0] - 1), present[-1] + 1  # so that a single value shows as a bar
    step = -(-(high - low + 1) // most)
    edges = np.arange(low, high + step + 1, step) - 0.5
    return np.histogram(np.arange(len(histogram)), edges, weights=histogram)[0], edges


def frequency_edges(*frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Edges of 30 logarithmic bins for non-zero frequencies."""
    positive = np.concatenate([[], *(values[values > 0] for values in frequencies)])
    lowest = positive.min(initial=1.0) if len(positive) else 1e-3
    return np.logspace(math.floor(math.log10(lowest)), 0, 31)


def sparsest_first(runs: Sequence[JsonObject]) -> list[JsonObject]:
    return sorted(runs, key=lambda run: (run["l0"], math.isnan(run["fvu"]), run["fvu"]))


def evaluation_tables(ranked: Sequence[JsonObject], models: Sequence[str]) -> list[RenderableType]:
    """Reconstruction, known features found, and the effect on the language model, where measured."""
    title = "sparsest first" if len(ranked) > 1 else None
    names = [*RECONSTRUCTION]
    if any(run["metric_fvu"] != run["fvu"] for run in ranked):
        names.insert(2, "metric_fvu")
        words = "metric fvu is in the metric of training; the rest is on raw activations"
        title = f"{title}; {words}" if title else words
    shown = [comparison(ranked, names, title)]
    prefixes = [
        prefix | {"run": run["run"]} for run in ranked for prefix in run.get("prefixes", ())
    ]
    if prefixes:
        columns = ("run", "latents", "l0", "fvu")
        shown.append(records_table("by the first latents alone", prefixes, columns))
    if of_worlds := [run for run in ranked if "mcc" in run]:
        title = "known features: f1, precision and recall of latents as detectors of the feature nearest to each"
        shown.append(comparison(of_worlds, FEATURES, title))
    if spliced := [run for run in ranked if "kl" in run]:
        title = f"with the SAE's reconstructions in {models[0]}; in nats per token"
        shown.append(comparison(spliced, (*EFFECT, "rows"), title))
    alone = []
    for name, measures in _by_source(ranked):
        for place in measures.get("hook_points", ()):
            hook_point = f"{place['model']}, {point_words(place['layer'], place['site'])}"
            alone.append(place | {"run": name, "hook_point": hook_point})
    if alone:
        title = "with the crosscoder's reconstruction at one hook point alone; in nats per token"
        shown.append(records_table(title, alone, ("run", "hook_point", *EFFECT)))
    return shown


def together_tables(runs: Sequence[JsonObject], effect: JsonObject) -> list[RenderableType]:
    """The effect of all runs at once, and each run's error."""
    title = f"all {counted(len(runs), 'run')} at once in {effect['model']}; in nats per token"
    meanings = "fvu on held-out rows; of what the model has with the others spliced in; of what it has without any"
    errors = [run | error for run, error in zip(runs, effect["runs"], strict=True)]
    columns = ("run", "l0", "fvu", "fvu_spliced", "fvu_clean")
    return [
        records_table(title, [effect], TOGETHER_MEASURES),
        records_table(meanings, errors, columns),
    ]


def _by_source(runs: Sequence[JsonObject]) -> Iterator[tuple[str, JsonObject]]:
    """Each run's name and measures, then those of its sources."""
    for run in runs:
        yield run["run"], run
        for source in run.get("sources", ()):
            yield f"{run['run']}, {source['source']}", source


def comparison(
    runs: Sequence[JsonObject], columns: Sequence[str], title: str | None = None
) -> RenderableType:
    """A line per run, and one per source of a mixture of texts."""
    lines = []
    by_run: JsonObject = {}
    for name, measures in _by_source(runs):
        if "source" not in measures:
            by_run = measures
        elif columns[0] not in measures:
            continue
        lines.append({**by_run, **measures, "run": name})
    return records_table(title, lines, ("run", *columns))


def extremes(run: JsonObject) -> str:
    """A run's dense latents, its silent ones, and numbers by source."""
    frequency, labels = np.array(run["frequency"]), run.get("labels", {})
    order = np.argsort(-frequency, kind="stable")
    dense = [
        f"{latent} ({frequency[latent]:.0%}{_after_colon(labels.get(latent))})"
        for latent in order.tolist()
        if frequency[latent] > DENSE_FREQUENCY
    ]
    silent = [str(latent) for latent in np.flatnonzero(frequency == 0)]
    rows = f"on these {counted(run['rows'], 'row')}"
    lines = [f"dense {rows}: {_listed(dense)}", f"silent {rows}: {_listed(silent)}"]
    if sources := run.get("sources"):
        mainly = [f"{source['mainly']:,} on {source['source']}" for source in sources]
        lines.append(f"latents that fire mainly on one source: {', '.join(mainly)}")
    return "\n".join(f"{run['run']}: {line}" for line in lines)


def labelled(latent: int | str, label: str | None) -> str:
    return str(latent) if label is None else f"{latent} {label}"


def verdict_words(verdict: str | None) -> str:
    """A verdict of `sae effects` in a table."""
    return UNTRIED if verdict is None else verdict.removesuffix(" of its norm")


def unless_untried(heads: list[str], rows: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """A table whose last column are verdicts, without it if no latent was tried."""
    if any(row[-1] != UNTRIED for row in rows):
        return heads, rows
    return heads[:-1], [row[:-1] for row in rows]


def _after_colon(label: str | None) -> str:
    return "" if label is None else f": {label}"


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - LATENTS_LISTED:,} more" if len(words) > LATENTS_LISTED else ""
    return (", ".join(words[:LATENTS_LISTED]) or "none") + more


LATENT_CLASSES = {  # of a crosscoder's latents, by the heads of their columns
    "only there": "only {}",
    "only by scaling": "only {} by latent scaling",
    "complete shrinkage": "looks only {}: complete shrinkage",
    "latent decoupling": "looks only {}: latent decoupling",
}


def places_table(run: JsonObject) -> RenderableType:
    """A crosscoder's hook points, and a line for each class of latents but shared ones."""
    places, classes, labels = run["places"], run["class"], run.get("labels", {})
    rows = []
    for place in places:
        counts = [classes.count(kind.format(place["name"])) for kind in LATENT_CLASSES.values()]
        rows.append([*(place[name] for name in ("name", "width", "fvu", "exclusive")), *counts])
    exclusive = sum(place["exclusive"] for place in places)
    title = (
        f"{run['run']}: of {len(classes):,} latents {run['shared']:,} are shared by all hook points, "
        f"{exclusive:,} exclusive to one ({EXCLUSIVE:g} of the decoder norm there), "
        f"{len(classes) - run['shared'] - exclusive:,} in between; complete shrinkage and latent decoupling: "
        "apparently exclusive (latent scaling says not)"
    )
    lines = []
    for kind in sorted({*classes} - {"shared", "in between"}):
        latents = [
            f"{latent}{_after_colon(labels.get(latent))}"
            for latent, name in enumerate(classes)
            if name == kind
        ]
        lines.append(f"{run['run']}: {kind}: {_listed(latents)}")
    heads = ["hook point", "width", "fvu", "exclusive", *LATENT_CLASSES]
    return Group(table(title, heads, rows), *lines)


def stability_table(document: JsonObject) -> RenderableType:
    """The pairs of `saecli.stability`; with columns of latents that fire if some are silent."""
    lines = [pair | {"runs": ", ".join(pair["runs"])} for pair in document["pairs"]]
    lines.append({**document, "runs": "all pairs", "metric": None, "latents": None})
    columns = ["runs", "metric", "latents", *STABILITY_MEASURES]
    if any(run["silent"] for run in document["runs"]):
        for line in lines:
            line.update({f"{name}, firing": line["firing"][name] for name in STABILITY_MEASURES})
        columns += [f"{name}, firing" for name in STABILITY_MEASURES]
    title = f"stability; matched: {MATCH_WORDS[document['match_by']]} above {document['match_threshold']:g}"
    return records_table(title, lines, columns)


def probe_tables(document: JsonObject) -> list[RenderableType]:
    """AUC, its difference from the dense probe's, accuracy; for few sets the AUC of each."""
    probes, runs = document["probes"], document["runs"]
    counts = list(dict.fromkeys(line["k"] for line in probes if line["k"] is not None))
    sets = counted(probes[0]["sets"], "set")
    titles = {"auc": "AUC", "auc_difference": "AUC less the dense probe's", "accuracy": "accuracy"}
    shown = []
    for name, title in titles.items():
        columns = counts if name == "auc_difference" else [*counts, None]
        rows = [
            [run["run"], *(_with_interval(probes_of(probes, run, k)[0], name) for k in columns)]
            for run in runs
        ]
        heads = [f"k = {k}" if k else "dense" for k in columns]
        shown.append(table(f"{title}, mean over {sets}", ["run", *heads], rows))
    if len({line["set"] for line in document["by_set"]}) <= SETS_LISTED:
        shown.append(_probes_by_set(document, counts[-1]))
    return shown


def _probes_by_set(document: JsonObject, k: int) -> RenderableType:
    runs = document["runs"]
    places = {(run["layer"], run["site"]): run for run in runs}
    sets: dict[str, list[JsonObject]] = {}
    for line in document["by_set"]:
        sets.setdefault(line["set"], []).append(line)
    rows = []
    for name, lines in sets.items():
        cells = [probes_of(lines, run, k)[0] for run in runs]
        cells += [probes_of(lines, run, None)[0] for run in places.values()]
        rows.append([name, lines[0]["rows"], *(f"{cell['auc']:.3f}" for cell in cells)])
    heads = [f"{run['run']}, k = {k}" for run in runs]
    if len(places) > 1:
        heads += [f"dense, {point_words(*place)}" for place in places]
    else:
        heads.append("dense")
    return table("AUC by set", ["set", "texts", *heads], rows)


def probes_of(lines: Sequence[JsonObject], run: JsonObject, k: int | None) -> list[JsonObject]:
    """The lines of a run's probes; k None: of the dense ones there."""
    wanted = {**run, "k": k} if k is not None else {**run, "run": None, "k": None}
    return [line for line in lines if all(line[key] == value for key, value in wanted.items())]


def _with_interval(line: JsonObject, name: str) -> str:
    """A measure with half its interval's width: 0.712 ± 0.031."""
    if line[name] is None:
        return "-"
    half = "" if line[f"{name}_high"] is None else f" ± {line[f'{name}_high'] - line[name]:.3f}"
    return f"{line[name]:.3f}{half}"


def contrast_tables(document: JsonObject) -> list[RenderableType]:
    """Latents; under them document length, and the AUC furthest from 1/2 with labels shuffled."""
    (a, b), latents, length = document["sides"], document["latents"], document["length"]
    nearest, shuffled = document.get("replication", {}), document["shuffled"]
    rows = []
    for place, line in enumerate(latents):
        fires = [f"{line[side]['frequency']:.2%}" for side in "ab"]
        tests = [f"{line[name]:.4f}" for name in "pq"]
        as_well = "yes" if _distance(line["auc"]) <= _distance(length["auc"]) else "-"
        others = [_nearest_words(each, place) for each in nearest.values()]
        name = labelled(line["latent"], line["label"])
        rows.append([name, *fires, *_effect_words(line), *tests, as_well, *others])
    furthest = 0.5 + np.array([max(map(_distance, each["auc"])) for each in shuffled])
    floor = {"auc": np.median(furthest), "auc_low": furthest.min(), "auc_high": furthest.max()}
    least = [f"{np.median([min(each[name]) for each in shuffled]):.4f}" for name in "pq"]
    blank = ["-"] * (1 + len(nearest))
    rows.append(["document length", "-", "-", *_effect_words(length), "-", "-", *blank])
    rows.append(["labels shuffled", "-", "-", "-", _effect_words(floor)[-1], *least, *blank])
    false = [sum(q <= document["fdr"] for q in each["q"]) for each in shuffled]
    title = (
        f"{document['run']}: {document['found']:,} of {counted(len(latents), 'latent')} tested tell {a['side']} from "
        f"{b['side']} (q up to {document['fdr']:g}; with labels shuffled {np.mean(false):.2g}, at most {max(false)}), "
        f"on {a['held_out']:,} and {counted(b['held_out'], 'document')} that did not choose them"
    )
    heads = [
        "latent",
        f"fires on {a['side']}",
        f"on {b['side']}",
        "difference of mean codes",
        "AUC",
    ]
    heads += ["p", "q", "length does as well", *(f"nearest by {name}" for name in nearest)]
    replicated = [
        f"by {name}, {each['fraction']:.1%} of the latents found replicate in {document['replicate']}; "
        f"{each['shuffled']:.1%} with counterparts shuffled"
        for name, each in nearest.items()
        if document["found"]
    ]
    return [table(title, heads, rows), *replicated]


def _distance(auc: float) -> float:
    return abs(auc - 0.5)


def _effect_words(line: JsonObject) -> list[str]:
    """Difference, if there is one, and AUC, as in 0.251 ± 0.023 and 0.71 [0.68,0.74]."""
    difference = [_with_interval(line, "difference")] if "difference" in line else []
    return [*difference, f"{line['auc']:.2f} [{line['auc_low']:.2f},{line['auc_high']:.2f}]"]


def _nearest_words(nearest: JsonObject, place: int) -> str:
    latent, similarity, auc = (nearest[name][place] for name in ("latents", "similarity", "auc"))
    return f"{latent}, {similarity:.2f}: {auc:.2f}"


def effects_tables(document: JsonObject, top: int) -> list[RenderableType]:
    """The `top` latents by p, removed and added; how many act."""
    latents = sorted(document["latents"], key=lambda line: min(line[name]["p"] for name in CHANGED))
    rows = []
    for line in latents[:top]:
        for name in CHANGED:
            measures = line[name]
            over = [*measures["floors"].values(), measures["elsewhere"]]
            ratios = [
                "{ratio:.2f} [{ratio_low:.2f},{ratio_high:.2f}]".format(**each) for each in over
            ]
            latent = labelled(line["latent"], line["label"])
            tested = [f"{measures['q']:.4f}", verdict_words(line["verdict"])]
            promoted = [f"{measures['promoted']:+.3f}", f"{measures['promoted_q']:.4f}"]
            rows.append([f"{latent}, {name}", measures["kl"], *ratios, *tested, *promoted])
    layer, site = (document.get(f"target_{name}", document[name]) for name in ("layer", "site"))
    title = (
        f"latents of {document['run']} removed where they fire and added where they are silent, in "
        f"{document['model']}, {point_words(layer, site)}: KL of the next token in nats, over that of changes of its "
        "norm; promoted: rise of the log-probability of the tokens that a latent promotes"
    )
    floors = [f"over {name}" for name in (*latents[0][CHANGED[0]]["floors"], "elsewhere")]
    counts = Counter(line["verdict"] for line in latents)
    verdicts = "; ".join(f"{count:,} {verdict}" for verdict, count in counts.most_common())
    note = f"of {counted(len(latents), 'latent')}, at a false discovery rate of {document['fdr']:g}: {verdicts}"
    heads = ["change", "KL", *floors, "q", "verdict", "promoted", "its q"]
    return [table(title, heads, rows), note]


def controls_table(document: JsonObject) -> RenderableType:
    """Measures that no training has are left out."""
    run, lines = document["run"], document["controls"]
    shown = [name for name in CONTROLLED if any(line[name] is not None for line in lines)]
    trainings = [run if line["control"] == "none" else line["control"] for line in lines]
    rows = [line | {"training": name} for line, name in zip(lines, trainings, strict=True)]
    title = f"{run} and its controls, each on its held-out rows; fvu: raw"
    return records_table(title, rows, ["training", *shown])


def refit_table(document: JsonObject) -> RenderableType:
    before, after, final = document["before"], document["after"], document["final"]
    rows = [[*spelt([name]), before[name], after[name]] for name in REFITTED if name in after]
    prefixes = zip(before.get("prefixes", ()), after.get("prefixes", ()), strict=True)
    for old, new in prefixes:
        rows.append([f"fvu of the first {old['latents']:,}", old["fvu"], new["fvu"]])
    target = document["ridge_target"]
    towards = "" if target == "0" else f" towards {target}"
    rows.append([f"ridge{towards}, over the mean Gram diagonal", None, final["relative_alpha"]])
    if towards:
        rows.append([f"factor of {target}", None, final["c"]])
    title = (
        f"{document['run']}: the decoder for {document['rows_train']:,} training rows of {document['data']}, "
        f"on {document['rows_test']:,} held-out rows; ridge: {METRIC_WORDS[document['metric']]}"
    )
    return table(title, ["measure", "before", "after"], rows)


def steering_tables(document: JsonObject) -> list[RenderableType]:
    """A table of latents, and each prompt with both continuations."""
    layer, site = (document.get(f"target_{name}", document[name]) for name in ("layer", "site"))
    title = (
        f"{document['method']} latents of {document['run']} in {document['model']}, "
        f"{point_words(layer, site)}; activations there have a median norm of {number(document['activation_norm'])}"
    )
    columns = {
        "latent": "latent",
        "scale": "scale",
        "prompt_max": "largest code on the prompt",
        "store_max": "on the store",
        "decoder_norm": "decoder norm",
    }
    if document["method"] == "ablate":
        del columns["scale"]
    latents = [
        latent | {"latent": labelled(latent["latent"], latent["label"])}
        for latent in document["latents"]
    ]
    texts = [
        f"\n{printable(f'{name}: {texts[name]}')}"
        for texts in document["continuations"]
        for name in ("prompt", "plain", "steered")
    ]
    return [records_table(title, latents, columns), "".join(texts), *_unchanged(document)]


def _unchanged(document: JsonObject) -> list[str]:
    """If all texts stayed the same: why, and the scale of a large change."""
    if any(texts["plain"] != texts["steered"] for texts in document["continuations"]):
        return []
    strongest = max(document["latents"], key=lambda line: abs(line["scale"]) * line["decoder_norm"])
    full = document["activation_norm"] and strongest["decoder_norm"] / document["activation_norm"]
    if document["method"] == "ablate" or not full:
        why = "these latents do not fire there, or add too little"
        advice = "`sae read` lists the strongest latents of a prompt"
    else:
        size = abs(strongest["scale"]) * full
        why = f"the change of latent {strongest['latent']} has {size:.2g} times the norm of the activations"
        advice = f"--scale {1 / full:.2g} would equal it"
    return [f"\nthe text stayed the same: {why}; {advice}"]


def explanation_tables(document: JsonObject, top: int) -> list[RenderableType]:
    """The first `top` latents with labels and scores, and mean scores."""
    latents, means = document["latents"], document["scores"]
    kind, measures = ("rule", ["texts", "tokens"]) if means else ("given", [])
    rows = []
    shown_first = sorted(latents, key=lambda line: line["label"] is None)[:top]
    for line in shown_first:
        label = line.get(kind, {"label": None, "scores": {}})
        scores = [label["scores"].get(name) for name in measures]
        frequency = line["frequency"] and f"{line['frequency']:.2%}"
        verdict = verdict_words(line["verdict"])
        rows.append([str(line["latent"]), label["label"], frequency, *scores, verdict])
    title = f"{document['run']}: labels"
    if means:
        title += f" by rules, with balanced accuracies on held-out excerpts of {document['data']}"
    unclear = sum(line["label"] is None for line in latents)
    note = (
        f"{counted(len(latents), 'latent')} in {document['labels']}; {unclear:,} of them without a label above "
        "chance, which come last and other commands do not show"
    )
    heads = ["latent", "label", "fires on", *measures, VERDICT]
    shown = [table(title, *unless_untried(heads, rows)), note]
    if means:
        shown.append(_means_table(means, measures))
    if document.get("judged"):
        chosen = {line["latent"] for line in shown_first}
        rows = [
            [str(line["latent"]), line["labels"], line["label"], *line["scores"].values()]
            for line in document["judged"]
            if line["latent"] in chosen
        ]
        measures = [*document["judged"][0]["scores"]]
        title = "balanced accuracies of a language model that is given the label"
        shown += [
            table(title, ["latent", "labels", "label", *measures], rows),
            _means_table(document["judged_scores"], measures),
        ]
    return shown


def _means_table(means: Sequence[JsonObject], measures: Sequence[str]) -> RenderableType:
    """By kind of label; of a judge, also answers that do not count."""
    rows = [
        [
            line["labels"],
            line["latents"],
            *(_with_interval(line, name) for name in measures),
            *([f"{line['nonsense']:,} of {line['answers']:,}"] if "answers" in line else []),
        ]
        for line in means
    ]
    heads = ["labels", "latents", *measures, "no verdicts"]
    return table("mean over latents", heads[: len(rows[0])], rows)
