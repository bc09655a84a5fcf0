"""`sae probe`, and the same from Python: probes on latents of several SAEs, and on the activations that they encode.

Shapes: N texts of a set, D = d_in, F = d_sae.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..extract.hook_points import HookPoint
from ..extract.language_model import LanguageModel
from ..sae.library import SAELike
from .placing import Placed, model_of, placed
from .probe_sets import LabelledSet, Sets
from .probed_rows import CONTEXT, LastTokens, codes_of
from .probes import FOLDS, Score, dense_score, mean_and_interval, most_different, sparse_scores

COUNTS = (1, 2, 5, 16)  # latents of a probe
ROWS, LEAST_ROWS = 200, 20  # texts of a set
MEASURES = ("accuracy", "auc")


def probe(saes: SAELike | Sequence[SAELike] = None, *, model: str | None = None, layer: int | None = None,
          site: str | None = None, sets: str | Sequence[str] | None = None, rows: int = ROWS,
          k: Sequence[int] = COUNTS, context: int | None = None, device: str = "auto",
          home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Fit and measure sparse probes on SAEs' latents, and dense ones on activations, as `sae probe` does.

    Args:
        saes: a run's name or whatever else `load_sae` takes, or several; None for the newest run.
        model: hub id or folder of the language model; None for the one whose activations the SAEs were trained on.
        layer: the block that the SAEs read, from 0, if their files do not say.
        site: where in the block, if their files do not say.
        sets: names of the sets of sae-probes, their numbers, or patterns; as one text, separated by commas; None for
            all 113.
        rows: texts per set, half of each class, at least 20.
        k: numbers of latents of a probe.
        context: tokens of a text that are read, its last ones; None for 1,024, or the model's positions.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress, and the choices made, on stderr.

    Returns:
        model, context, rows, folds: as used.
        runs: of each SAE `run`, `layer` and `site`.
        probes: of each SAE and `k`, and at last of each place with `run` and `k` None for its dense probe: `accuracy`
            and `auc`, the mean over sets, and the ends of their 95% intervals, `accuracy_low` to `auc_high`; of an
            SAE `auc_difference` and its ends, the mean over sets of the AUC less that of the dense probe. Ends are
            None for a single set.
        by_set: the same of each set, with its name, `set`, and `rows`, and intervals by folds; of an SAE also
            `latents`, those of the largest mean difference over all rows.

    Raises:
        ConfigError: an argument that cannot work, such as a crosscoder, or a set of an unknown name.
        ModelError: the model, or the package sae-probes, is missing.
        RunError, FormatError, HubError: an SAE is missing or cannot be read.
    """
    several = list(saes) if isinstance(saes, list | tuple) else [saes]
    return probed(Home.at(home), several, model, layer, site, sets, rows, k, context, device, listening(progress))


def probed(home: Home, saes: Sequence[SAELike], model: str | None, layer: int | None, site: str | None,
           sets: str | Sequence[str] | None, rows: int, k: Sequence[int], context: int | None, device: str,
           listener: Listener) -> dict[str, Any]:
    """The document that `sae probe --json` prints; arguments as of `probe`."""
    if rows < LEAST_ROWS:
        raise ConfigError(f"--rows must be at least {LEAST_ROWS}, got {rows}", option="rows")
    if context is not None and context < 1:
        raise ConfigError(f"--context must be at least 1, got {context}", option="context")
    everything = [placed(home, sae, layer, site, "probing", listener) for sae in saes or [None]]
    _check(everything, k)
    k = sorted(k)
    source = model_of(everything, model, listener)
    labelled = Sets()
    names = labelled.chosen(sets)
    context = context or min(CONTEXT, source.positions or CONTEXT)
    source.check_context(context)
    places = list(dict.fromkeys(one.read for one in everything))
    loaded = LanguageModel(source, device_named(device), last=max(place.layer for place in places))
    read = LastTokens(loaded, places, context)
    ready = [(one, one.sae.copy_to(loaded.device)) for one in everything]
    lines: list[dict[str, Any]] = []
    with listener.progress("probing", len(names) * rows, "texts") as show:
        for done, name in enumerate(names):
            show(done * rows, name)
            one_set = labelled.read(name, rows)
            x = read(one_set.texts)
            for one, sae in ready:
                codes = codes_of(sae, x[one.read])
                latents = most_different(codes, one_set.labels, max(k))
                lines += [_line(one_set, one.subject.name, one.read, count, score) | {"latents": latents[:count]}
                          for count, score in sparse_scores(codes, one_set.labels, k).items()]
            lines += [_line(one_set, None, place, None, dense_score(x[place].double().numpy(), one_set.labels))
                      for place in places]
    runs = [{"run": one.subject.name, **one.read._asdict()} for one in everything]
    return {"model": source.name, "context": context, "rows": rows, "folds": FOLDS, "runs": runs,
            "probes": _over_sets(lines), "by_set": lines}


def _check(everything: Sequence[Placed], k: Sequence[int]) -> None:
    """Refuse SAEs of the same name, and numbers of latents that a probe cannot have, by a ConfigError."""
    names = [one.subject.name for one in everything]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"cannot probe {twice} twice: expected SAEs of different names; leave one out, or save "
                          "them as runs")
    if not k or min(k) < 1 or len(set(k)) < len(k):
        raise ConfigError(f"--k must be different numbers of at least 1, got {', '.join(map(str, k)) or 'none'}",
                          option="k")
    for one in everything:
        if max(k) > one.sae.d_sae:
            raise ConfigError(f"--k must be at most the number of latents, {one.sae.d_sae} of {one.subject.name}, "
                              f"got {max(k)}", option="k")


def _line(one_set: LabelledSet, run: str | None, place: HookPoint, k: int | None, score: Score) -> dict[str, Any]:
    """A probe's measures on a set."""
    line = {"set": one_set.name, "rows": len(one_set.texts), "run": run, **place._asdict(), "k": k}
    return line | _measures({name: getattr(score, name) for name in MEASURES})


def _measures(values: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The mean of each measure's values, and the ends of its interval."""
    found: dict[str, float | None] = {}
    for name, each in values.items():
        found |= zip((name, f"{name}_low", f"{name}_high"), mean_and_interval(np.asarray(each)), strict=True)
    return found


def _over_sets(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The measures of each probe over sets, of an SAE with the difference from the dense probe at its place."""
    keys = ("run", "layer", "site", "k")
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    found = []
    for (run, layer, site, k), own in groups.items():
        values = {name: [line[name] for line in own] for name in MEASURES}
        if run is not None:
            dense = groups[None, layer, site, None]
            values["auc_difference"] = [line["auc"] - other["auc"] for line, other in zip(own, dense, strict=True)]
        found.append({"run": run, "layer": layer, "site": site, "k": k, "sets": len(own), **_measures(values)})
    return found


