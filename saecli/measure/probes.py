"""Sparse probes on SAEs' latents, and dense ones on activations: logistic regression, cross-validated.

A k-sparse probe takes the k latents whose mean codes differ most between classes in the training part, in units of each
latent's mean magnitude where it fires, as sae-probes does. Features are standardised by the training part, and C is the
best of `CS` by AUC, cross-validated inside it. The labelled texts are the 113 sets of two classes in the package
sae-probes, read from its files: to import it would import TransformerLens and SAELens.

Sources: Gurnee et al., "Finding Neurons in a Haystack: Case Studies with Sparse Probing" (2023), for the choice by mean
difference; Kantamneni et al., "Are Sparse Autoencoders Useful? A Case Study in Sparse Probing" (2025).

Shapes: N texts of a set, T tokens, D = d_in, F = d_sae, P features of a probe.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from ..base.console import Step
from ..base.errors import ConfigError, ModelError
from ..model.language_model import LanguageModel
from ..model.tokenizer import affixes, text_ids
from ..model.windows import pass_tokens, stored_activations
from ..splice.placement import Placement
from ..store.origin import HookPoint
from ..store.values import TextWindow
from .measured import codes_of

PROBE_CONTEXT = 1024  # tokens of a text, as in sae-probes
PROBE_MEASURES = ("accuracy", "auc")
FOLDS, INNER_FOLDS = 5, 3
CS = (1e-4, 1e-2, 1.0, 1e2)  # inverse weights of the squared penalty
PROBE_SEED = 0  # of the folds, and of the choice of texts
LEVEL = 0.95  # of intervals
PACKAGE = "sae_probes"
CATALOGUE = "probing_datasets_MASTER.csv.zst"
BINARY = "Binary Classification"


def probe_sets(
    probed: Sequence[Placement],
    last_tokens: "LastTokens",
    labelled_sets: "Iterable[LabelledSet]",
    k: Sequence[int],
) -> list[dict[str, Any]]:
    """The scores of each set's probes, on each SAE's latents and on activations at each hook point."""
    device = last_tokens.device
    saes_on_device = [each.sae.copy_to(device) for each in probed]
    lines: list[dict[str, Any]] = []
    for labelled in labelled_sets:
        x = last_tokens(labelled.texts)
        for each, sae in zip(probed, saes_on_device, strict=True):
            codes = codes_of(sae, x[each.read])
            latents = most_different(codes, labelled.labels, max(k))
            for count in sorted(k):
                scores = sparse_scores(codes, labelled.labels, count)
                line = _line(labelled, each.name, each.read, count, scores)
                lines.append(line | {"latents": latents[:count]})
        for point, activations in x.items():
            scores = dense_scores(activations.double().numpy(), labelled.labels)
            lines.append(_line(labelled, None, point, None, scores))
    return lines


def probes_document(
    probed: Sequence[Placement], model: str, context: int, rows: int, lines: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": model,
        "context": context,
        "rows": rows,
        "folds": FOLDS,
        "runs": [{"run": each.name, **each.read.to_json()} for each in probed],
        "probes": _over_sets(lines),
        "by_set": lines,
    }


def demand_probed(probed: Sequence[Placement], k: Sequence[int]) -> None:
    """ConfigError for SAEs that cannot be probed together, or by k latents."""
    names = [each.name for each in probed]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"cannot probe {name} twice; leave one out, or save them as runs")
    if not k or min(k) < 1 or len(set(k)) < len(k):
        raise ConfigError(
            f"--k must be different numbers of at least 1, got {', '.join(map(str, k)) or 'none'}"
        )
    if len({each.prepend_bos for each in probed}) > 1:
        raise ConfigError(
            "cannot probe together SAEs with and without special tokens; probe them by separate commands"
        )
    for each in probed:
        if each.sae.widths:
            raise ConfigError(
                f"probing with {each.name} is not defined: expected an SAE or a transcoder, got a "
                "crosscoder, whose codes have no single hook point; name another run"
            )
        if max(k) > each.sae.d_sae:
            raise ConfigError(
                f"--k must be at most {each.sae.d_sae}, the latents of {each.name}, got {max(k)}"
            )


@dataclass(frozen=True)
class LabelledSet:
    """N texts, equally many of each class; `labels` (N,), bool."""

    name: str
    texts: list[str]
    labels: NDArray[np.bool_]


# Of `PROBE_MEASURES`, on each fold, of a probe not fitted to it.
FoldScores = dict[str, NDArray[np.float64]]


def _line(
    labelled: LabelledSet, run: str | None, point: HookPoint, k: int | None, scores: FoldScores
) -> dict[str, Any]:
    line = {
        "set": labelled.name,
        "rows": len(labelled.texts),
        "run": run,
        **point.to_json(),
        "k": k,
    }
    return line | {name: float(values.mean()) for name, values in scores.items()}


def means_and_intervals(
    values: Mapping[str, Sequence[float]],
) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name, each in values.items():
        mean, low, high = mean_and_interval(np.asarray(each))
        means |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return means


def _over_sets(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ("run", "layer", "site", "k")
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    documents = []
    for (run, layer, site, k), group in groups.items():
        values = {name: [line[name] for line in group] for name in PROBE_MEASURES}
        if run is not None:
            dense = groups[None, layer, site, None]
            pairs = zip(group, dense, strict=True)
            values["auc_difference"] = [line["auc"] - other["auc"] for line, other in pairs]
        place = {"run": run, "layer": layer, "site": site, "k": k}
        documents.append({**place, "sets": len(group), **means_and_intervals(values)})
    return documents


def mean_and_interval(
    values: NDArray[np.float64],
) -> tuple[float | None, float | None, float | None]:
    """The mean, None without values, and the ends of its 95% interval by Student's t, None below two."""
    if len(values) < 2:
        return float(values[0]) if len(values) else None, None, None
    mean = float(np.mean(values))
    deviation = np.std(values, ddof=1) / np.sqrt(len(values))
    low, high = student.interval(LEVEL, len(values) - 1, mean, max(deviation, np.finfo(float).tiny))
    return mean, float(low), float(high)


def most_different(codes: csr_array, labels: NDArray[np.bool_], count: int) -> list[int]:
    """The latents whose mean codes, (N, F), differ most between classes, largest first."""
    difference = np.asarray(codes[labels].mean(0) - codes[~labels].mean(0)).ravel()
    fired = np.asarray((codes != 0).sum(0)).ravel()
    magnitude = np.asarray(abs(codes).sum(0), np.float64).ravel() / np.maximum(fired, 1)
    in_units = np.abs(difference, dtype=np.float64) / np.where(magnitude > 0, magnitude, 1)
    return np.argsort(-in_units, kind="stable")[:count].tolist()


def sparse_scores(codes: csr_array, labels: NDArray[np.bool_], count: int) -> FoldScores:
    """Scores of probes on `count` latents, chosen by each training part from codes, (N, F)."""
    features = []
    for train, _ in _folds(FOLDS).split(labels, labels):
        latents = most_different(codes[train], labels[train], count)
        features.append(codes[:, latents].toarray().astype(np.float64))
    return _cross_validated(features, labels)


def dense_scores(x: NDArray[np.float64], labels: NDArray[np.bool_]) -> FoldScores:
    return _cross_validated([x] * FOLDS, labels)  # x: (N, P)


def _cross_validated(
    features: Sequence[NDArray[np.float64]], labels: NDArray[np.bool_]
) -> FoldScores:
    """Scores, given for each fold the features of all rows, (N, P)."""
    probe = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        {"logisticregression__C": CS},
        scoring="roc_auc",
        cv=_folds(INNER_FOLDS),
    )
    accuracy, auc = [], []
    folds = _folds(FOLDS).split(labels, labels)
    for x, (train, test) in zip(features, folds, strict=True):
        values = probe.fit(x[train], labels[train]).decision_function(x[test])
        accuracy.append(np.mean((values > 0) == labels[test]))
        auc.append(roc_auc_score(labels[test], values))
    return {"accuracy": np.array(accuracy), "auc": np.array(auc)}


def _folds(count: int) -> StratifiedKFold:
    return StratifiedKFold(count, shuffle=True, random_state=PROBE_SEED)


class LastTokens:
    """Reads activations at the last token of texts; beyond `context` tokens, with special ones, a text loses its
    beginning, as in sae-probes."""

    def __init__(
        self, model: LanguageModel, points: Sequence[HookPoint], context: int, prepend_bos: bool
    ) -> None:
        self._model, self._points = model, list(points)
        self._affixes = affixes(model.tokenizer, prepend_bos)
        self._room = self._affixes.room(context)
        self._batch_tokens = pass_tokens(model.device)
        self.device = model.device

    def __call__(self, texts: Sequence[str]) -> dict[HookPoint, Tensor]:
        """At each hook point (N, D), float32, on the CPU."""
        windows = [self._window(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda index: -windows[index].length)
        ordered = (windows[index] for index in order)
        batches = stored_activations(self._model, ordered, self._points, self._batch_tokens)
        on_cpu = [[activations.cpu().float() for activations in batch] for batch in batches]
        restored = torch.from_numpy(np.argsort(order))
        of_points = zip(self._points, zip(*on_cpu, strict=True), strict=True)
        x = {point: torch.cat(parts)[restored] for point, parts in of_points}
        if not all(activations.isfinite().all() for activations in x.values()):
            raise ConfigError(
                f"{self._model.source.name} has activations that are not finite; use another --layer or --device"
            )
        return x

    def _window(self, text: str) -> TextWindow:
        encoded, _ = text_ids(self._model.tokenizer, text, self._affixes.prefix)
        if not encoded:
            raise ModelError(
                f"{self._model.source.name} reads no token in the text {text[:40]!r}; leave its set out of --sets"
            )
        before = [*self._affixes.prefix, *encoded[-self._room :]]
        token_ids = np.array([*before, *self._affixes.suffix], np.int64)
        return TextWindow(token_ids, np.arange(len(token_ids)) == len(before) - 1)


class Sets:
    """The sets of the installed package; ModelError without it."""

    def __init__(self) -> None:
        package = find_spec(PACKAGE)
        if package is None or find_spec("zstandard") is None:
            raise ModelError(
                "the labelled sets are missing: run `pip install 'saecli[probes]'`, or for the data alone `pip "
                "install zstandard && pip install --no-deps sae-probes`"
            )
        assert package.submodule_search_locations is not None  # it is a folder
        folder = Path(package.submodule_search_locations[0], "data")
        catalogue = _read(folder / CATALOGUE, ["Data type", "Dataset save name"])
        saved = catalogue["Dataset save name"][catalogue["Data type"] == BINARY]
        self._files = {
            Path(name).name.removesuffix(".csv"): folder / f"{name}.zst" for name in saved
        }
        self.names = list(self._files)

    def chosen(self, words: str | Sequence[str] | None) -> list[str]:
        """The sets that names or patterns match, as one text separated by commas; None for all."""
        if words is None:
            return self.names
        if isinstance(words, str):
            words = [word.strip() for word in words.split(",")]
        chosen: set[str] = set()
        for word in words:
            matching = fnmatch.filter(self.names, word)
            if not matching:
                raise ConfigError(
                    f"--sets must name sets of sae-probes, such as {self.names[0]}, got {word!r}; '*glue*' takes all "
                    "with glue in their names"
                )
            chosen.update(matching)
        return [name for name in self.names if name in chosen]

    def each(self, names: Sequence[str], rows: int, show: Step) -> Iterator[LabelledSet]:
        for done, name in enumerate(names):
            show(done * rows, name)
            yield self.read(name, rows)

    def read(self, name: str, rows: int) -> LabelledSet:
        """`rows` of a set's texts, half of each class, always the same; fewer if it has fewer."""
        table = _read(self._files[name], ["prompt", "target"])
        labels = (table["target"] == table["target"].max()).to_numpy(dtype=bool)
        each = min(rows // 2, labels.sum(), (~labels).sum())
        draw = np.random.default_rng(PROBE_SEED)
        classes = [np.flatnonzero(of_class) for of_class in (~labels, labels)]
        drawn = [draw.permutation(of_class)[:each] for of_class in classes]
        taken = np.sort(np.concatenate(drawn))
        return LabelledSet(name, table["prompt"].iloc[taken].tolist(), labels[taken])


def _read(path: Path, columns: list[str]) -> pandas.DataFrame:
    return pandas.read_csv(path, usecols=columns, dtype=str, keep_default_na=False)
