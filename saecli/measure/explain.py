"""Labels of an SAE's latents, scored on held-out texts, also with the labels shuffled among latents."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.files import demand_place
from ..base.home import Home
from ..base.options import demand_known, options_of
from ..base.words import demand_at_least, flag_of
from ..model.language_model import load_tokenizer
from ..model.saes import open_sae
from ..model.source import find_model
from ..model.tokenizer import TokenTexts
from ..sae.library import SAELike, Subject
from ..sae.metrics import DENSE_FREQUENCY
from .endpoint import ANSWERS, Endpoint, Server
from .excerpts import Corpus, LatentExcerpts, excerpts_of, gather
from .judge import ANSWER_COUNTS, JUDGED_LABELS, JUDGED_SCORES, judge
from .labels import LABELS, Label, Labels, add_labels, derange, others_labels, read_labels, shown
from .latents import chosen_latents
from .measured import ChosenRows, Measured, RowsLike
from .probes import means_and_intervals
from .rules import CorpusTokens, Rule, choose_rules, score

RULE_SCORES = ("texts", "tokens")
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
    **options: Any,
) -> dict[str, Any]:
    """Label latents by rules on tokens, or a language model too, and score the labels; CLI equivalent: `sae explain`.

    Args:
        sae, data, target, device, home, progress: as in `evaluate`; data are a store of texts.
        latents: those to label; by default all that fire on the rows read.
        count: label only this number of them, drawn at random.
        labels: take other people's labels, from this file or folder of files, see `others_labels`, and make none.
        out: the file to add the labels to, by default `labels.json` in the SAE's folder.
        **options: `endpoint`, the URL of a server whose `model_name` labels latents and judges labels; `concurrency`,
            `max_tokens`, `dry_run`; see `endpoint.Server`.

    Returns:
        The run, the store, and `labels`, the file. `latents`, each with its `frequency` on the rows read, the `label`
        that is shown, None without one, and by kind the label and `scores` in the file. `scores`, a line for the rules
        and one for the same rules shuffled among latents: for texts and tokens the mean balanced accuracy over
        `latents`, and its 95% interval. With an endpoint: `plan`, see `Endpoint.planned`; `judged`, a line for each
        latent and kind of label, see `judge`; and in `judged_scores` means over latents, as in `scores`.
    """
    demand_known("explain", options, options_of(Server), "explain")
    server = Server(**options)
    demand_at_least("count", count)
    making = {"data": data, "target": target, "latent": latents, "latents": count} | options
    idle = [name for name, value in making.items() if value is not None]
    if labels is not None and idle:
        raise ConfigError(
            f"{flag_of(idle[0])} does nothing with --labels, which makes no labels; leave one of them out"
        )
    listener, home = listening(progress), Home.at(home)
    opened = open_sae(home, sae, listener)
    subject, d_sae = opened[0], opened[1].sae.d_sae
    chosen = None if latents is None else chosen_latents(latents, d_sae, subject.name)
    path = _place(home, sae, subject, out)
    read_labels(path, d_sae)  # refuses a damaged file before any work
    if labels is not None:
        given = others_labels(Path(labels), d_sae)
        everything = add_labels(path, "given", given, d_sae)
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
    rules = choose_rules(CorpusTokens(corpus, texts))
    ruled = {latent: rule for latent, rule in enumerate(rules) if rule and latent in corpus.near}
    scores, floor = _scores(corpus, ruled, listener)
    found = {}
    for latent, rule in ruled.items():
        dense = firings[latent] > DENSE_FREQUENCY * rows
        found[latent] = Label(f"dense: {rule.label}" if dense else rule.label, scores[latent])
    everything = add_labels(path, "rule", found, d_sae)
    by_judge = {}
    if server.endpoint is not None:
        excerpts = [excerpts_of(corpus, latent, texts) for latent in corpus.near]
        labels_by_rule = {latent: rule.label for latent, rule in found.items()}
        endpoint = Endpoint(server, path.with_name(ANSWERS), listener)
        by_judge = _judged(endpoint, excerpts, labels_by_rule)
        by_model = [line for line in by_judge["judged"] if line["labels"] == "model"]
        own = {line["latent"]: Label(line["label"], line["scores"]) for line in by_model}
        everything = add_labels(path, "model", own, d_sae)
    return {
        "run": subject.name,
        "data": run.rows.name,
        "labels": str(path),
        "latents": [
            _line(latent, float(firings[latent] / rows), everything) for latent in corpus.near
        ],
        "scores": [_means("rule", scores), _means("rule, shuffled", floor)],
        **by_judge,
    }


def _scores(
    corpus: Corpus, rules: Mapping[int, Rule], listener: Listener
) -> tuple[dict[int, Scores], dict[int, Scores]]:
    """The scores of each latent's rule, and of another latent's."""
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
    """What `explain` returns of the labels and scores by a language model."""
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


def _place(home: Home, sae: SAELike, subject: Subject, out: str | Path | None) -> Path:
    """The file for labels; ConfigError where it cannot be written."""
    own = sae is None or str(sae) in home.runs or Path(str(sae)).expanduser().is_dir()
    if out is None and not (own and subject.folder is not None and subject.folder.is_dir()):
        raise ConfigError(
            f"--out is needed: {subject.name} has no folder of its own to hold labels"
        )
    path = subject.path / LABELS if out is None else Path(out)
    demand_place(path, "name another file with --out")
    return path


def texts_of(run: Measured) -> TokenTexts:
    """The texts of the store's tokens; ConfigError if it keeps none, or names no model."""
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


def _line(latent: int, frequency: float | None, labels: Labels) -> dict[str, Any]:
    of_latent = labels.get(latent, {})
    kinds = {str(kind): asdict(label) for kind, label in of_latent.items()}
    return {"latent": latent, "frequency": frequency, "label": shown(of_latent), **kinds}


def _means(
    name: str, scores: Mapping[int, Scores], measures: Iterable[str] = RULE_SCORES
) -> dict[str, Any]:
    """The mean scores over latents that have them, with intervals."""
    values = {measure: [each[measure] for each in scores.values()] for measure in measures}
    known = {
        measure: [value for value in each if value is not None] for measure, each in values.items()
    }
    return {"labels": name, "latents": len(scores)} | means_and_intervals(known)
