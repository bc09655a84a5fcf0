"""Sparse probes on SAEs' latents, and dense ones on activations: logistic regression, cross-validated.

A k-sparse probe takes the k latents whose mean codes differ most between the classes of the training part, in units of
each latent's mean magnitude where it fires, as sae-probes does: no latent is chosen for the scale of its codes. Probes
are standardised by their training part, and C is the best of `CS` by AUC, cross-validated inside it.

The labelled texts are the 113 sets of two classes in the package sae-probes. They are read from its files: to import it
would import TransformerLens and SAELens, which its data do not need.

Sources: Gurnee et al., "Finding Neurons in a Haystack: Case Studies with Sparse Probing" (2023), for the choice by mean
difference; Kantamneni et al., "Are Sparse Autoencoders Useful? A Case Study in Sparse Probing" (2025).

Shapes: N texts of a set, T tokens, D = d_in, F = d_sae, P features of a probe.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError, ModelError, demand_at_least, did_you_mean, one_line
from ..base.files import NotAFile, regular
from ..base.home import Home
from ..extract.forward import batch_tokens
from ..extract.language_model import LanguageModel
from ..extract.options import HookPoint
from ..extract.special import affixes
from ..extract.splice import Hooked, StoredWindow, hooked, model_of, stored_activations
from ..sae.dictionary import SAE
from ..sae.library import SAELike, open_sae
from .measured import BATCH_CODES

COUNTS = (1, 2, 5, 16)  # latents of a probe
ROWS, LEAST_ROWS = 200, 20  # texts of a set
CONTEXT = 1024  # tokens of a text, as in sae-probes
MEASURES = ("accuracy", "auc")
FOLDS, INNER_FOLDS = 5, 3
CS = (1e-4, 1e-2, 1.0, 1e2)  # inverse weights of the squared penalty
SEED = 0  # of the folds, and of the choice of texts
LEVEL = 0.95  # of intervals
PACKAGE, CATALOGUE, BINARY = (
    "sae_probes",
    "probing_datasets_MASTER.csv.zst",
    "Binary Classification",
)
LONGEST = 1 << 24  # characters of a text
REMEDY = "install sae-probes again"


def probe(
    saes: SAELike | Sequence[SAELike] = None,
    *,
    model: str | None = None,
    model_revision: str | None = None,
    layer: int | None = None,
    site: str | None = None,
    sets: str | Sequence[str] | None = None,
    rows: int = ROWS,
    k: Sequence[int] = COUNTS,
    context: int | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Fit and measure sparse probes on SAEs' latents, and dense ones on activations; CLI equivalent: `sae probe`.

    Args:
        saes: one or several, as in `evaluate`.
        model: hub id, folder or GGUF file; None for the language model whose activations the SAEs were trained on.
        model_revision: its branch, tag or commit on the hub; None for the one that the SAEs' files name.
        layer, site: the hook point that the SAEs read, if their files do not say.
        sets: names of the sets of sae-probes, their numbers, or patterns; as one text, separated by commas; None for
            all 113.
        rows: texts per set, half of each class, at least 20.
        k: numbers of latents of a probe.
        context: tokens read of a text, its last ones; None for 1,024, or the model's positions.
        device, home, progress: as in `evaluate`.

    Returns:
        model, context, rows, folds: as used.
        runs: for each SAE `run`, `layer` and `site`.
        probes: for each SAE and `k`, then for each hook point the dense probe, with `run` and `k` None: `accuracy` and
            `auc`, means over sets, and the ends of their 95% intervals, `accuracy_low` to `auc_high`; for an SAE
            `auc_difference` and its ends, the mean over sets of the AUC less the dense probe's. Ends are None for
            a single set.
        by_set: the same for each set, with its name, `set`, and `rows`, and intervals by folds; for an SAE also
            `latents`, with the largest mean difference over all rows.
    """
    listener = listening(progress)
    demand_at_least("rows", rows, LEAST_ROWS)
    demand_at_least("context", context)
    several: Sequence[Any] = saes if isinstance(saes, list | tuple) else [saes]
    everything = [
        hooked(open_sae(Home.at(home), sae, listener), layer, site) for sae in several or [None]
    ]
    _check(everything, k)
    source, labelled = model_of(everything, model, model_revision, listener), Sets()
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
                lines += [
                    _line(one_set, one.name, one.read, count, score) | {"latents": latents[:count]}
                    for count, score in sparse_scores(codes, one_set.labels, sorted(k)).items()
                ]
            lines += [
                _line(
                    one_set,
                    None,
                    place,
                    None,
                    dense_score(x[place].double().numpy(), one_set.labels),
                )
                for place in places
            ]
    return {
        "model": source.name,
        "context": context,
        "rows": rows,
        "folds": FOLDS,
        "runs": [{"run": one.name, **one.read.place} for one in everything],
        "probes": _over_sets(lines),
        "by_set": lines,
    }


def _check(everything: Sequence[Hooked], k: Sequence[int]) -> None:
    names = [one.name for one in everything]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"cannot probe {twice} twice: expected SAEs of different names; leave one out, or save "
            "them as runs"
        )
    if not k or min(k) < 1 or len(set(k)) < len(k):
        raise ConfigError(
            f"--k must be different numbers of at least 1, got {', '.join(map(str, k)) or 'none'}"
        )
    for one in everything:
        if one.sae.widths:
            raise ConfigError(
                f"probing with {one.name} is not defined: expected an SAE or a transcoder, got a "
                "crosscoder, whose codes have no single hook point to compare by a dense probe; name "
                "another run"
            )
        if max(k) > one.sae.d_sae:
            raise ConfigError(
                f"--k must be at most the number of latents, {one.sae.d_sae} of {one.name}, got {max(k)}"
            )


@dataclass(frozen=True)
class LabelledSet:
    """N texts of two classes, equally many of each: `labels` (N,), bool."""

    name: str
    texts: list[str]
    labels: NDArray[np.bool_]


Score = dict[
    str, NDArray[np.float64]
]  # of `MEASURES`: on each fold, (folds,), of a probe not fitted to it


def _line(
    one_set: LabelledSet, run: str | None, place: HookPoint, k: int | None, score: Score
) -> dict[str, Any]:
    line = {"set": one_set.name, "rows": len(one_set.texts), "run": run, **place.place, "k": k}
    return line | _measures(score, overlap=1 / (FOLDS - 1))


def _measures(
    values: Mapping[str, Sequence[float] | NDArray[np.float64]], overlap: float = 0.0
) -> dict[str, float | None]:
    """The mean of each measure's values, and the ends of its interval; see `mean_and_interval`."""
    found: dict[str, float | None] = {}
    for name, each in values.items():
        found |= zip(
            (name, f"{name}_low", f"{name}_high"),
            mean_and_interval(np.asarray(each), overlap),
            strict=True,
        )
    return found


def _over_sets(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ("run", "layer", "site", "k")
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    found = []
    for (run, layer, site, k), own in groups.items():
        values = {name: [line[name] for line in own] for name in MEASURES}
        if run is not None:
            dense = groups[None, layer, site, None]
            values["auc_difference"] = [
                line["auc"] - other["auc"] for line, other in zip(own, dense, strict=True)
            ]
        found.append(
            {
                "run": run,
                "layer": layer,
                "site": site,
                "k": k,
                "sets": len(own),
                **_measures(values),
            }
        )
    return found


def mean_and_interval(
    values: NDArray[np.float64], overlap: float = 0.0
) -> tuple[float, float | None, float | None]:
    """The mean, and the ends of its 95% interval by Student's t; None for a single value.

    Scores of folds depend on each other, since their training parts overlap. With `overlap`, test rows over training
    rows of a fold, the variance of their mean is `(1/n + overlap) s^2` (Nadeau and Bengio, "Inference for the
    Generalization Error", 2003).
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = float(
        student.ppf((1 + LEVEL) / 2, len(values) - 1)
        * np.std(values, ddof=1)
        * np.sqrt(1 / len(values) + overlap)
    )
    return mean, mean - half, mean + half


def most_different(codes: csr_matrix, labels: NDArray[np.bool_], count: int) -> list[int]:
    """The latents whose mean codes, (N, F), differ most between classes, the most different first."""
    difference = np.asarray(
        codes[labels].mean(0) - codes[~labels].mean(0), dtype=np.float64
    ).ravel()
    fired = np.asarray((codes != 0).sum(0)).ravel()
    magnitude = np.asarray(abs(codes).sum(0), dtype=np.float64).ravel() / np.maximum(fired, 1)
    size = np.abs(difference) / np.where(magnitude > 0, magnitude, 1)
    return np.argsort(-size, kind="stable")[:count].tolist()


def sparse_scores(
    codes: csr_matrix, labels: NDArray[np.bool_], counts: Sequence[int]
) -> dict[int, Score]:
    """The scores of k-sparse probes on codes, (N, F), for each k of `counts`."""
    best = [
        most_different(codes[train], labels[train], max(counts))
        for train, _ in _folds(labels, FOLDS)
    ]
    return {
        count: _score(
            [codes[:, latents[:count]].toarray().astype(np.float64) for latents in best], labels
        )
        for count in counts
    }


def dense_score(x: NDArray[np.float64], labels: NDArray[np.bool_]) -> Score:
    """The score of a probe on all of x, (N, P)."""
    return _score([x] * FOLDS, labels)


def _score(features: Sequence[NDArray[np.float64]], labels: NDArray[np.bool_]) -> Score:
    """Cross-validated, given the features of all rows, (N, P), for each fold."""
    found = []
    for x, (train, test) in zip(features, _folds(labels, FOLDS), strict=True):
        inner = _folds(labels[train], INNER_FOLDS)
        aucs = [
            np.mean(
                [
                    roc_auc_score(
                        labels[train[held]], _fitted(x, labels, train[kept], train[held], C)
                    )
                    for kept, held in inner
                ]
            )
            for C in CS
        ]
        values = _fitted(
            x, labels, train, test, CS[int(np.argmax(aucs))]
        )  # of equal ones the strongest penalty
        found.append((((values > 0) == labels[test]).mean(), roc_auc_score(labels[test], values)))
    return dict(zip(MEASURES, np.array(found).T, strict=True))


def _folds(
    labels: NDArray[np.bool_], count: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The row numbers of each fold's training and test part, with equal fractions of both classes."""
    return list(StratifiedKFold(count, shuffle=True, random_state=SEED).split(labels, labels))


def _fitted(
    x: NDArray[np.float64],
    labels: NDArray[np.bool_],
    train: NDArray[np.int64],
    test: NDArray[np.int64],
    C: float,
) -> NDArray[np.float64]:
    """The decision values of the test rows."""
    mean, spread = x[train].mean(0), x[train].std(0)
    spread = np.where(spread > 0, spread, 1)
    fitted = LogisticRegression(C=C, max_iter=1000).fit((x[train] - mean) / spread, labels[train])
    return fitted.decision_function((x[test] - mean) / spread)


class LastTokens:
    """Reads activations at the last token of texts; one of more than `context` tokens, with the special ones before
    it, loses its beginning, as in sae-probes."""

    def __init__(self, model: LanguageModel, places: Sequence[HookPoint], context: int) -> None:
        self._model, self._places = model, list(places)
        self._ends = affixes(model.tokenizer)
        self._room = self._ends.room(context)
        self._tokens = batch_tokens(model, "auto", context, self._places)

    def __call__(self, texts: Sequence[str]) -> dict[HookPoint, Tensor]:
        """The activations at each hook point, (N, D), float32, on the CPU."""
        windows = [self._window(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda index: -windows[index].length)
        back = torch.from_numpy(np.argsort(order))
        batches = stored_activations(
            self._model, (windows[index] for index in order), self._places, self._tokens
        )
        parts = zip(*([part.cpu().float() for part in batch] for batch in batches), strict=True)
        result = {
            place: torch.cat(rows)[back] for place, rows in zip(self._places, parts, strict=True)
        }
        for place, x in result.items():
            if not x.isfinite().all():
                raise ConfigError(
                    f"{self._model.source.name} has activations at layer {place.layer}, {place.site}, "
                    "that are not finite; name another --layer, or run it on a --device with another "
                    "precision"
                )
        return result

    def _window(self, text: str) -> StoredWindow:
        """A text's last tokens, of which only the last is read."""
        token_ids = self._model.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        if not token_ids:
            raise ModelError(
                f"{self._model.source.name} reads no token in the text {text[:40]!r}: expected at least "
                "one; use another model, or leave its set out of --sets"
            )
        before = [*self._ends.prefix, *token_ids[-self._room :]]
        whole = np.array([*before, *self._ends.suffix], np.int64)
        return StoredWindow(whole, np.arange(len(whole)) == len(before) - 1)


def codes_of(sae: SAE, x: Tensor) -> csr_matrix:
    """The codes of rows, (N, D), as a sparse matrix, (N, F)."""
    parts = x.split(max(1, BATCH_CODES // sae.d_sae))
    return vstack(
        [csr_matrix(sae.encode(part.to(sae.W_enc)).cpu().numpy()) for part in parts], format="csr"
    )


class Sets:
    """The sets of the installed package; `names` in its order. ModelError if it is not installed or is damaged."""

    def __init__(self) -> None:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations or find_spec("zstandard") is None:
            raise ModelError(
                "the labelled sets are missing: expected the packages sae-probes and zstandard, got "
                f"{'only the first' if spec else 'none'}; run `pip install 'saecli[probes]'`, or for the "
                "data alone `pip install zstandard && pip install --no-deps sae-probes`"
            )
        folder = Path(spec.submodule_search_locations[0]) / "data"
        saved = [
            line["Dataset save name"]
            for line in _lines(folder / CATALOGUE, ("Data type", "Dataset save name"))
            if line["Data type"] == BINARY
        ]
        self._files = {
            Path(name).name.removesuffix(".csv"): folder / f"{name}.zst" for name in saved
        }
        self.names = list(self._files)

    def chosen(self, words: str | Sequence[str] | None) -> list[str]:
        """The sets that words match: names (87_glue_cola), their numbers or names alone (87, glue_cola), or patterns
        (*emotion*); as one text, separated by commas; None for all."""
        if words is None:
            return self.names
        found = set()
        for word in (
            [word.strip() for word in words.split(",")] if isinstance(words, str) else words
        ):
            matching = {
                name
                for name in self.names
                if word == name.partition("_")[0]
                or fnmatchcase(name, word)
                or fnmatchcase(_alone(name), word)
            }
            if not matching:
                advice = did_you_mean(word, [*self.names, *map(_alone, self.names)]) or (
                    f"there are {', '.join(self.names[:3])} and more; '*glue*' chooses all with glue in their names"
                )
                raise ConfigError(f"--sets must name sets of sae-probes, got {word!r}; {advice}")
            found |= matching
        return [name for name in self.names if name in found]

    def read(self, name: str, rows: int) -> LabelledSet:
        """A set's texts: `rows`, half of each class, always the same ones; fewer if it has fewer."""
        path = self._files[name]
        lines = list(_lines(path, ("prompt", "target")))
        classes = sorted({line["target"] for line in lines})
        if len(classes) != 2:
            raise ModelError(
                f"{path} is damaged: expected targets of two classes, got {len(classes)}; {REMEDY}"
            )
        labels = np.array([line["target"] == classes[1] for line in lines])
        each = min(rows // 2, labels.sum(), (~labels).sum())
        draw = np.random.default_rng(SEED)
        taken = np.sort(
            np.concatenate(
                [
                    draw.permutation(np.flatnonzero(of_class))[:each]
                    for of_class in (~labels, labels)
                ]
            )
        )
        return LabelledSet(name, [lines[index]["prompt"] for index in taken], labels[taken])


def _alone(name: str) -> str:
    return name.partition("_")[2]


def _lines(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """The lines of a compressed table."""
    import zstandard  # only this reads such files

    before = csv.field_size_limit(LONGEST)
    try:
        stream = zstandard.ZstdDecompressor().decompressobj()
        text = stream.decompress(regular(path).read_bytes()).decode()
        if not stream.eof:
            raise ModelError(
                f"{path} is cut off: expected {len(text):,} bytes and more of text; {REMEDY}"
            )
        yield from (
            {name: line[name] for name in columns}
            for line in csv.DictReader(StringIO(text, newline=""))
        )
    except (
        FileNotFoundError,
        NotAFile,
        UnicodeDecodeError,
        csv.Error,
        KeyError,
        zstandard.ZstdError,
    ) as error:
        raise ModelError(
            f"cannot read {path}: expected a table of {' and '.join(columns)}, got {one_line(error)}; "
            f"{REMEDY}"
        ) from error
    finally:
        csv.field_size_limit(before)
