"""What a report shows of an SAE and its latents: a survey of rows, neighbours of chosen latents, measures.

Shapes: F = d_sae, C chosen latents.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.words import counted
from ..model.choice import source_of, unlike
from ..sae.metrics import DENSE_FREQUENCY, doubts, firing
from ..train.runs import read_metrics
from .cosines import near_latents
from .evaluate import evaluate_all, noted, own_models, stored_models
from .hook_points import hook_points_document
from .labels import shown_labels, shown_scores
from .latents import Examples, LatentSurvey, at_random, row_blocks, survey_latents
from .measured import Measured, held_out
from .verdicts import shown_verdicts

if TYPE_CHECKING:  # transformers takes seconds to import, and stores without tokens need none of it
    from ..model.language_model import LanguageModel
    from ..model.source import ModelSource
    from ..model.tokenizer import TokenTexts
    from ..model.unembedding import OutputTokens, Unembedding

MOST_PAGES = 4096  # latents described by default
SAMPLED_TEXTS = 15  # per latent at random, three for each fifth by strength
REPORTED_NEIGHBOURS, OUTPUT_TOKENS = 10, 10
FEWEST_ROWS = 10  # of a latent with an interest


class TokenNumbers:
    """Token ids in brackets, where there is no tokenizer."""

    def __getitem__(self, token: int) -> str:
        return f"[{token}]"

    def joined(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.__getitem__, tokens))


ShownTexts: TypeAlias = "TokenTexts | TokenNumbers"


@dataclass(frozen=True)
class ReportContext:
    """What all latents of an SAE have in common in reports."""

    run: Measured
    texts: ShownTexts  # of the store's tokens
    unembedding: "tuple[Unembedding, slice] | None"  # and the columns of W_dec that it reads
    places: dict[str, Any]  # `hook_points_document`
    measures: dict[str, Any]  # as of `evaluate`
    notes: list[str]  # sentences on missing parts and doubtful measures

    @classmethod
    def of(cls, run: Measured, model: Any, listener: Listener) -> Self:
        """`model` is from `model_given`, or a language model that is loaded, with its head."""
        notes: list[str] = []
        texts, unembedding = _texts_and_unembedding(run, model, notes)
        places = hook_points_document(run, listener)
        measures = _measures(run, notes, listener)
        return cls(run, texts, unembedding, places, measures, notes)

    @property
    def labels(self) -> dict[int, str]:
        return shown_labels(self.run.subject.folder, self.run.sae.d_sae)

    @property
    def scores(self) -> dict[int, float]:
        """Of labels."""
        return shown_scores(self.run.subject.folder, self.run.sae.d_sae)

    @property
    def verdicts(self) -> dict[int, str]:
        """Of `sae effects`."""
        return shown_verdicts(self.run.subject.folder)

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The lines of the run's `metrics.jsonl`."""
        folder = self.run.subject.folder
        return read_metrics(folder) if folder else []

    def report(self, survey: LatentSurvey, chosen: list[int], listener: Listener) -> "LatentReport":
        """Of chosen latents, ascending, with the survey's examples of them."""
        sae = self.run.sae
        latents = torch.tensor(chosen, device=sae.W_dec.device)
        by_cosine, partners = near_latents(
            sae, latents, REPORTED_NEIGHBOURS, survey.cofiring, listener
        )
        outputs = None
        if self.unembedding is not None:
            head, columns = self.unembedding
            with listener.progress("reading off output tokens", len(chosen), "latents") as show:
                outputs = head.output_tokens(sae.W_dec[latents, columns], OUTPUT_TOKENS, show)
        return LatentReport(self, survey, chosen, by_cosine, partners, outputs)


@dataclass(frozen=True)
class LatentReport:
    context: ReportContext
    survey: LatentSurvey
    chosen: list[int]  # latents with excerpts and what follows, (C,), ascending
    neighbours: tuple[Tensor, Tensor]  # cosines and latents, (C, N)
    partners: tuple[Tensor, Tensor]  # phi and latents, (C, N)
    outputs: "OutputTokens | None"  # that the model predicts by them


def report_latents(
    run: Measured, chosen: list[int], model: Any, examples: int, listener: Listener
) -> LatentReport:
    """Survey an SAE's rows, and gather what is known of its latents; `model` is from `model_given`."""
    d_sae, has_tokens = run.sae.d_sae, run.store.meta.windows
    context = ReportContext.of(run, model, listener)
    survey = survey_latents(
        run.sae,
        row_blocks(run.inputs(listener), run.of_store, run.batch_rows),
        run.of_store.rows,
        Examples(chosen, d_sae, examples, has_tokens),
        Examples(chosen, d_sae, SAMPLED_TEXTS, has_tokens, at_random),
    )
    if len(chosen) < d_sae:
        context.notes.append(f"{len(chosen):,} of {d_sae:,} latents have pages of their own")
    return context.report(survey, chosen, listener)


def most_frequent(run: Measured, count: int, listener: Listener) -> list[int]:
    """The `count` latents that fire most often, ascending; excerpts of all may not fit in memory."""
    if run.sae.d_sae <= count:
        return [*range(run.sae.d_sae)]
    frequency = firing(run.sae, run.inputs(listener)).frequency
    return sorted(frequency.argsort(descending=True, stable=True)[:count].tolist())


def _texts_and_unembedding(
    run: Measured, model: Any, notes: list[str]
) -> "tuple[ShownTexts, tuple[Unembedding, slice] | None]":
    """The texts of a store's tokens, by default of the model that it names; its unembedding, and the columns of W_dec
    at its last hook point."""
    store, stored_model = run.store, run.store.meta.origin.spec
    has_tokens, is_default = store.meta.windows, isinstance(model, bool | None)
    if not has_tokens:
        notes.append(
            f"{store.name} keeps no tokens, so examples are numbers of its rows, counted from 0"
        )
    elif stored_model is None and is_default:
        notes.append(
            f"{store.name} does not say which model its tokens are of, so they are shown as numbers; --model names it"
        )
    if not is_default:
        return _of_model(run, model, notes)
    missing: list[str] = []
    if model and stored_models(run):
        with noted("the language model", missing.append):
            return _of_model(run, own_models(run, run.sae.W_enc.device)[-1], notes)
    texts: ShownTexts = TokenNumbers()
    if has_tokens and stored_model:
        # transformers takes seconds to import.
        from ..model.language_model import load_tokenizer
        from ..model.source import find_model
        from ..model.tokenizer import TokenTexts

        with noted("the texts of tokens", missing.append):
            texts = TokenTexts(load_tokenizer(find_model(stored_model)))
    notes += missing[:1]
    return texts, None


def _of_model(
    run: Measured, model: "str | ModelSource | LanguageModel", notes: list[str]
) -> "tuple[TokenTexts, tuple[Unembedding, slice] | None]":
    from ..model.language_model import LanguageModel, load_tokenizer
    from ..model.tokenizer import TokenTexts
    from ..model.unembedding import Unembedding

    predicted = [run.rows.target] if run.rows.target else run.rows.inputs
    recorded = [rows.store.meta.origin.spec for rows in predicted]
    place = model.source if isinstance(model, LanguageModel) else source_of(model, recorded)
    last_of = {spec: number for number, spec in enumerate(recorded)}
    if len(last_of) > 1 and place.spec not in last_of:
        raise ConfigError(
            f"--model must be a model that the rows of {run.subject.name} came from, "
            f"{' or '.join(map(str, last_of))}, got {place.name}"
        )
    last = last_of.get(place.spec, -1)
    columns = run.sae.hook_columns[last]
    width = columns.stop - columns.start
    meta = predicted[last].store.meta
    point = meta.origin.read[0]
    if not point.has_model_width:
        notes.append(
            f"{point.site} is not in the residual stream, so no tokens are listed that a latent promotes"
        )
        return TokenTexts(load_tokenizer(place)), None
    if place.d_model != width:
        raise ConfigError(
            f"{run.subject.name} cannot be read through {place.name}: expected a model of width {width}, got "
            f"{place.d_model}; name the model that the rows came from"
        )
    loaded = model
    if not isinstance(loaded, LanguageModel):
        loaded = LanguageModel(place, run.sae.W_enc.device, head=True)
    reason = unlike(loaded, meta)
    if reason:
        notes.append(f"{predicted[last].name} {reason}")
    return TokenTexts(loaded.tokenizer), (Unembedding(loaded), columns)


def _measures(run: Measured, notes: list[str], listener: Listener) -> dict[str, Any]:
    """Those of `sae eval` on held-out rows, or on those shown if none are held out."""
    holds_out = run.store.split("train", seed=run.subject.split_seed).rows < run.store.rows
    (measures,) = evaluate_all([held_out(run) if holds_out else run], None, None, listener)
    if not holds_out:
        notes.append(
            f"{run.store.name} holds out no rows, so FVU, L0 and cosine are of {run.split} rows"
        )
    if massive := doubts(measures, run.sae.d_in, run.sae.d_sae).get("massive"):
        rows = counted(measures["rows"], "held-out row" if holds_out else "row")
        notes.append(f"of {rows}, {massive}")
    return measures


def peak_agreement(peaks: Iterable[str]) -> float:
    """The fraction of pairs of texts that peak at the same token, but for case and spaces; 0 for fewer than two."""
    counts = Counter(token.strip().casefold() for token in peaks).values()
    texts = sum(counts)
    if texts < 2:
        return 0.0
    return sum(count * (count - 1) for count in counts) / (texts * (texts - 1))


def interest(frequency: float, rows: int, mean: float, largest: float, alike: float) -> float:
    """A figure in [0, 1] to sort latents by: `(1 - mean / largest) (1 + peak_agreement) / 2` of codes' sizes; 0 for a
    latent that fires on more than a fraction `DENSE_FREQUENCY` of the rows, or on fewer than `FEWEST_ROWS`."""
    if frequency > DENSE_FREQUENCY or round(frequency * rows) < FEWEST_ROWS:
        return 0.0
    return (1 - mean / largest) * (1 + alike) / 2
