"""Labels of latents, scored on held-out texts, also shuffled among latents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.files import demand_place, expanded
from ..base.home import ASSETS, Home
from ..model.language_model import load_tokenizer
from ..model.source import find_model
from ..model.tokenizer import TokenTexts
from ..sae.library import SAELike, Subject
from ..sae.metrics import DENSE_FREQUENCY
from .excerpts import Corpus, LatentExcerpts, excerpts_of, gather
from .judge import ANSWER_COUNTS, ANSWERS, JUDGED_LABELS, JUDGED_SCORES, Endpoint, Server, judge
from .labels import LABELS, Label, Labels, add_labels, derange, others_labels, read_labels, shown
from .measured import Measured
from .probes import means_and_intervals
from .rules import CorpusTokens, Rule, choose_rules, score
from .verdicts import shown_verdicts

RULE_SCORES = ("texts", "tokens")
Scores = dict[str, float | None]


def take_labels(subject: Subject, labels: Path, path: Path, d_sae: int) -> dict[str, Any]:
    given = others_labels(labels, d_sae)
    everything = add_labels(path, "given", given, d_sae)
    return {
        "run": subject.name,
        "data": None,
        "labels": str(path),
        "latents": _lines(subject, dict.fromkeys(sorted(given)), everything),
        "scores": [],
    }


def label_latents(
    run: Measured,
    chosen: list[int] | None,
    count: int | None,
    path: Path,
    server: Server,
    listener: Listener,
) -> dict[str, Any]:
    texts, d_sae = texts_of(run), run.sae.d_sae
    corpus = gather(run, chosen, count, listener)
    firings, rows = np.diff(corpus.codes.indptr), np.count_nonzero(corpus.positions >= 0)
    frequencies = {latent: float(firings[latent] / rows) for latent in corpus.near}
    rules = choose_rules(CorpusTokens(corpus, texts))
    ruled = {latent: rule for latent, rule in enumerate(rules) if rule and latent in corpus.near}
    scores, floor = _scores(corpus, ruled, listener)
    labels = {}
    for latent, rule in ruled.items():
        is_dense = firings[latent] > DENSE_FREQUENCY * rows
        name = f"dense: {rule.label}" if is_dense else rule.label
        labels[latent] = Label(name, scores[latent])
    everything = add_labels(path, "rule", labels, d_sae)
    by_judge = {}
    if server.endpoint is not None:
        excerpts = [excerpts_of(corpus, latent, texts) for latent in corpus.near]
        labels_by_rule = {latent: rule.label for latent, rule in labels.items()}
        endpoint = Endpoint(server, path.with_name(ANSWERS), listener)
        by_judge = _judged(endpoint, excerpts, labels_by_rule)
        of_model = (line for line in by_judge["judged"] if line["labels"] == "model")
        by_model = {line["latent"]: Label(line["label"], line["scores"]) for line in of_model}
        everything = add_labels(path, "model", by_model, d_sae)
    return {
        "run": run.subject.name,
        "data": run.rows.name,
        "labels": str(path),
        "latents": _lines(run.subject, frequencies, everything),
        "scores": [_means("rule", scores), _means("rule, shuffled", floor)],
        **by_judge,
    }


def _scores(
    corpus: Corpus, rules: Mapping[int, Rule], listener: Listener
) -> tuple[dict[int, Scores], dict[int, Scores]]:
    others, scores, floor = derange(rules), {}, {}
    with listener.progress("scoring", len(rules), "latents") as show:
        for done, (latent, rule) in enumerate(rules.items()):
            show(done)
            spans = corpus.spans(latent)
            scores[latent] = score(rule, corpus, latent, spans)
            if latent in others:
                floor[latent] = score(others[latent], corpus, latent, spans)
    return scores, floor


def _judged(
    endpoint: Endpoint, excerpts: Sequence[LatentExcerpts], rules: Mapping[int, str]
) -> dict[str, Any]:
    work = partial(judge, excerpts, rules)
    plan = endpoint.planned(work)
    endpoint.listener.note(
        "{requests:,} requests, {kept:,} of them answered already; the others: about {tokens_read:,} tokens to read, "
        "at most {tokens_written:,} to write".format(**plan)
    )
    judged = [] if endpoint.server.dry_run else work(endpoint.ask)
    means = []
    for kind in JUDGED_LABELS if judged else ():
        lines = [line for line in judged if line["labels"] == kind]
        counts = {name: sum(line[name] for line in lines) for name in ANSWER_COUNTS}
        scores = {line["latent"]: line["scores"] for line in lines}
        means.append(_means(kind, scores, JUDGED_SCORES) | counts)
    return {"plan": plan, "judged": judged, "judged_scores": means}


def own_folder(home: Home, sae: SAELike, subject: Subject) -> Path | None:
    """The folder in which files on an SAE are kept; None for one in memory, on the hub or bundled."""
    own = sae is None or str(sae) in home.runs or Path(str(sae)).expanduser().is_dir()
    folder = subject.folder
    if not own or folder is None or not folder.is_dir() or folder.is_relative_to(ASSETS):
        return None
    return folder


def file_of_labels(
    home: Home, sae: SAELike, subject: Subject, out: str | Path | None, d_sae: int
) -> Path:
    """The file for labels; ConfigError where it cannot be written, FormatError for a damaged one."""
    own = own_folder(home, sae, subject)
    if out is not None:
        path = expanded(out)
    elif own is not None:
        path = own / LABELS
    else:
        raise ConfigError(
            f"--out is needed: {subject.name} has no folder of its own to hold labels"
        )
    demand_place(path, "name another file with --out")
    read_labels(path, d_sae)
    return path


def texts_of(run: Measured) -> TokenTexts:
    """ConfigError for a store that keeps no tokens, or names no model."""
    model, lacks = run.store.meta.origin.spec, ""
    if not run.store.meta.windows:
        lacks = "keeps no tokens"
    elif model is None:
        lacks = "does not say which model its tokens are of"
    if lacks:
        raise ConfigError(
            f"{run.store.name} {lacks}: expected a store as of `sae extract`; name another with --data"
        )
    return TokenTexts(load_tokenizer(find_model(str(model))))


def _lines(
    subject: Subject, frequencies: Mapping[int, float | None], labels: Labels
) -> list[dict[str, Any]]:
    verdicts, lines = shown_verdicts(subject.folder), []
    for latent, frequency in frequencies.items():
        of_latent = labels.get(latent, {})
        line = {"latent": latent, "frequency": frequency, "label": shown(of_latent)}
        kinds = {str(kind): asdict(label) for kind, label in of_latent.items()}
        lines.append(line | {"verdict": verdicts.get(latent)} | kinds)
    return lines


def _means(
    name: str, scores: Mapping[int, Scores], measures: Iterable[str] = RULE_SCORES
) -> dict[str, Any]:
    values = {measure: [each[measure] for each in scores.values()] for measure in measures}
    known = {
        measure: [value for value in each if value is not None] for measure, each in values.items()
    }
    return {"labels": name, "latents": len(scores)} | means_and_intervals(known)
