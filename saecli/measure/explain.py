"""Labels of an SAE's latents, with scores on held-out texts beside those of the same labels shuffled among latents."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.errors import ConfigError, demand_at_least
from ..base.files import check_place
from ..base.home import Home
from ..extract.language_model import load_tokenizer
from ..extract.model_source import find_model
from ..extract.options import COLUMNS
from ..extract.splice import spec_of
from ..extract.tokenizer import TokenTexts
from ..sae.library import SAELike, Subject, open_sae
from ..sae.metrics import DENSE_FREQUENCY
from .excerpts import SEED, Corpus, gather
from .labels import LABELS, Label, Labels, add_labels, others_labels, read_labels, shown
from .measured import ChosenRows, Measured, RowsLike
from .probes import mean_and_interval
from .rules import Rule, Tokens, choose_rules, score

SCORES = ("texts", "tokens")
Scores = dict[str, float | None]


def explain(
    sae: SAELike,
    data: RowsLike = None,
    *,
    target: str | None = None,
    latents: int | Sequence[int] | None = None,
    count: int | None = None,
    labels: str | Path | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Label an SAE's latents by rules on tokens, and score the labels. CLI equivalent: `sae explain`.

    Args:
        sae, data, target, device, home, progress: as in `evaluate`; data are a store of texts.
        latents: those to label; by default all that fire on the rows read.
        count: label only this number of them, drawn at random.
        labels: take those of others instead, from this file or folder of files; see `others_labels`.
        out: the file to add the labels to, by default `labels.json` in the SAE's folder.

    Returns:
        The run, the store, and `labels`, the file. `latents`, each with its `frequency` on the rows read, the `label`
        that is shown, None without one, and by kind the label and `scores` in the file. `scores`, a line for the rules
        and one for the same rules shuffled among latents: for texts and tokens the mean balanced accuracy over
        `latents`, and its 95% interval.
    """
    demand_at_least("count", count)
    listener, home = listening(progress), Home.at(home)
    opened = open_sae(home, sae, listener)
    subject, d_sae = opened[0], opened[1].sae.d_sae
    chosen = None if latents is None else np.unique(np.ravel(latents))
    if chosen is not None and not (len(chosen) and chosen[0] >= 0 and chosen[-1] < d_sae):
        last = f"{d_sae - 1}, the last of {subject.name}"
        raise ConfigError(f"--latent must be from 0 to {last}, got {latents}")
    path = _place(home, sae, subject, out)
    if labels is not None:
        if data is not None or latents is not None or count is not None:
            raise ConfigError(
                "--labels takes all labels of a file; leave --data, --latent and --latents out"
            )
        given = others_labels(Path(labels), d_sae)
        everything = add_labels(path, "given", given)
        return {
            "run": subject.name,
            "data": None,
            "labels": str(path),
            "latents": [_line(latent, None, everything) for latent in sorted(given)],
            "scores": [],
        }
    run = ChosenRows(home, data, "all", device, listener, target).with_opened(*opened)
    texts = texts_of(run)
    corpus = gather(run, chosen, count, listener)
    firings, rows = np.diff(corpus.codes.indptr), np.count_nonzero(corpus.positions >= 0)
    rules = choose_rules(Tokens(corpus, texts))
    ruled = {latent: rule for latent, rule in enumerate(rules) if rule and latent in corpus.near}
    scores, shuffled = _scores(corpus, ruled, listener)
    found = {}
    for latent, rule in ruled.items():
        dense = firings[latent] > DENSE_FREQUENCY * rows
        found[latent] = Label(f"dense: {rule.label}" if dense else rule.label, scores[latent])
    everything = add_labels(path, "rule", found)
    return {
        "run": subject.name,
        "data": run.rows.name,
        "labels": str(path),
        "latents": [
            _line(latent, float(firings[latent] / rows), everything) for latent in corpus.near
        ],
        "scores": [_means("rule", scores), _means("rule, shuffled", shuffled)],
    }


def _scores(
    corpus: Corpus, rules: Mapping[int, Rule], listener: Listener
) -> tuple[dict[int, Scores], dict[int, Scores]]:
    """The scores of each latent's rule, and of another latent's."""
    order = np.random.default_rng(SEED).permutation(list(rules)).tolist()
    scores, shuffled = {}, {}
    with listener.progress("scoring", len(rules), "latents") as show:
        for done, (latent, other) in enumerate(zip(order, np.roll(order, 1).tolist(), strict=True)):
            show(done)
            spans = corpus.spans(latent)
            scores[latent] = score(rules[latent], corpus, latent, spans)
            if other != latent:
                shuffled[latent] = score(rules[other], corpus, latent, spans)
    return scores, shuffled


def _place(home: Home, sae: SAELike, subject: Subject, out: str | Path | None) -> Path:
    """The file for labels; ConfigError where it cannot be written."""
    own = sae is None or str(sae) in home.runs.names() or Path(str(sae)).expanduser().is_dir()
    if out is None and not (own and subject.folder is not None and subject.folder.is_dir()):
        raise ConfigError(
            f"--out is needed: {subject.name} has no folder of its own to hold labels"
        )
    path = subject.path / LABELS if out is None else Path(out)
    try:
        check_place(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; name another file with --out"
        ) from error
    read_labels(path)  # refuses a damaged file before any work
    return path


def texts_of(run: Measured) -> TokenTexts:
    """The texts of the store's tokens; ConfigError if it keeps none, or names no model."""
    model, lacks = spec_of(run.store.meta.source), ""
    if not set(COLUMNS) <= set(run.store.meta.columns):
        lacks = "keeps no tokens"
    elif model is None:
        lacks = "does not say which model its tokens are of"
    if lacks:
        raise ConfigError(
            f"{run.store.name} {lacks}: expected a store as of `sae extract`; name another with --data"
        )
    return TokenTexts(load_tokenizer(find_model(str(model))))


def _line(latent: int, frequency: float | None, labels: Labels) -> dict[str, Any]:
    of_latent = labels.get(latent, {})
    kinds = {str(kind): asdict(label) for kind, label in of_latent.items()}
    return {"latent": latent, "frequency": frequency, "label": shown(of_latent), **kinds}


def _means(name: str, scores: Mapping[int, Scores]) -> dict[str, Any]:
    """The mean scores over latents that have them, with intervals."""
    line: dict[str, Any] = {"labels": name, "latents": len(scores)}
    for measure in SCORES:
        values = [each[measure] for each in scores.values() if each[measure] is not None]
        interval = mean_and_interval(np.array(values, float)) if values else (None, None, None)
        line |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), interval, strict=True))
    return line
