"""Reconstruction, sparsity, known features found, and the effect on a language model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from scipy.sparse import csr_array
from torch import Tensor

from ..base.console import Listener
from ..base.errors import ConfigError, ModelError, SaeError, one_line
from ..base.machine import is_out_of_memory
from ..base.words import counted, does_nothing
from ..model.choice import READ, check_rows, source_of, unlike
from ..model.windows import stored_windows
from ..sae.codes import Codes, SparseCodes
from ..sae.metrics import Firing, doubts, firing, reconstruction
from ..splice.placement import placement
from ..store.opening import Joined
from ..store.origin import HookPoint
from ..store.reader import Rows
from ..train.plan import few_documents
from .cosines import Alignment
from .hook_points import hook_points_document
from .labels import shown_labels
from .measured import Measured, by_rows

if TYPE_CHECKING:
    from ..model.source import ModelSource
    from ..splice.passes import Passes

TOGETHER_MEASURES = ("ce_recovered", "kl", "ce_clean", "ce_spliced", "ce_zero", "ce_mean", "tokens")
MAINLY, LEAST_ROWS = 0.9, 10  # see `functions.sparsity`
TOKENS = 16_384  # default number of tokens for CE and KL, of one SAE
LEAST_TOKENS = 4096  # of many
FEW_ROWS = 100  # on fewer, figures change with the rows


def sparsity_document(measured: Measured, counts: Firing, listener: Listener) -> dict[str, Any]:
    document = measured.heading | counts.result()
    document["dead_fraction"] = measured.subject.dead_fraction
    by_source = measured.by_source
    if by_source:
        document["sources"] = _firing_by_source(by_source, counts, listener)
    if labels := shown_labels(measured.subject.folder, measured.sae.d_sae):
        document["labels"] = labels
    return document | hook_points_document(measured, listener)


def _firing_by_source(
    by_source: Mapping[str, Measured], counts: Firing, listener: Listener
) -> list[dict[str, Any]]:
    tallies = [firing(part.sae, part.inputs(listener)) for part in by_source.values()]
    total = sum(tally.frequency for tally in tallies)
    documents = []
    for name, tally in zip(by_source, tallies, strict=True):
        expected_elsewhere = counts.frequency * (counts.rows - tally.rows)
        mainly = (tally.frequency >= MAINLY * total) & (expected_elsewhere >= LEAST_ROWS)
        documents.append({"source": name, **tally.result(), "mainly": int(mainly.sum())})
    return documents


def compare_measured(
    measured_saes: Sequence[Measured],
    model: Any,
    tokens: int | None,
    listener: Listener,
) -> list[dict[str, Any]]:
    """`evaluate_all`, with notes on doubtful measures."""
    documents = evaluate_all(measured_saes, model, tokens, listener)
    note_doubts(documents, measured_saes, listener)
    return documents


def check_tokens(tokens: int | None, model: Any) -> None:
    if tokens is not None and not model:
        raise does_nothing("tokens", "without --model; leave it out, or name the language model")


@contextmanager
def noted(
    what: str, note: Callable[[str], object], can_do_without: bool = True, kind: type = SaeError
) -> Iterator[None]:
    """Turn an error of a kind, or for want of memory, into a note, if one can do without `what`."""
    try:
        yield
    except (SaeError, MemoryError, RuntimeError, OSError) as error:
        if not can_do_without or not (isinstance(error, kind) or is_out_of_memory(error)):
            raise
        note(f"without {what}: {one_line(error)}")


def stored_models(measured: Measured) -> list[str]:
    """The models that rows came from, with revisions; none if a store names none or keeps no tokens."""
    if not measured.rows.inputs:
        return []
    stores = measured.stores.all
    specs = [store.meta.origin.spec for store in stores if store.meta.windows]
    return list(dict.fromkeys(filter(None, specs))) if len(specs) == len(stores) else []


def own_models(measured: Measured, device: torch.device) -> list[str]:
    """`stored_models`; an error unless each is on this machine and fits into a device's memory."""
    from ..model.language_model import check_memory  # transformers takes seconds to import
    from ..model.source import check_downloaded, find_model

    names = stored_models(measured)
    if names and any("loaded" in store.meta.source for store in measured.stores.all):
        raise ModelError(f"{measured.rows.name} came from a loaded model; --model names its file")
    for name in names:
        check_downloaded(name)
        check_memory(find_model(name), device)
    return names


def check_model(measured: Measured, model: Any) -> "list[tuple[Rows, ModelSource]]":
    """The rows of each store, inputs first, and its model, from `model_given`; refuses unfit ones, loads no weights."""
    models = model if isinstance(model, list | tuple) else [model]
    target = [measured.rows.target] if measured.rows.target else []
    stores_rows = [measured.of_store, *measured.rows.inputs[1:], *target]
    recorded = [rows.store.meta.origin.spec for rows in stores_rows]
    wanted = list(dict.fromkeys(recorded))
    sources = [source_of(each, recorded) for each in models]
    by_spec = {source.spec: source for source in sources}
    if len(wanted) > 1 and target:
        measured.demand_reconstruction("the effect on a model")
    if len(sources) != len(wanted) or len(by_spec) < len(sources):
        raise ConfigError(
            f"--model must be given once for each model that {measured.rows.name} came from, "
            f"{' and '.join(map(str, wanted))}, got {' and '.join(source.name for source in sources)}"
        )
    others = [source for spec, source in by_spec.items() if spec not in wanted]
    of_recorded = {}
    for spec in wanted:
        of_recorded[spec] = by_spec.get(str(spec)) or others.pop(0)
    pairs = [(rows, of_recorded[spec]) for rows, spec in zip(stores_rows, recorded, strict=True)]
    for rows, source in pairs:
        check_rows(rows, source)
    return pairs


def evaluate_all(
    measured_saes: Sequence[Measured],
    model: Any,
    tokens: int | None,
    listener: Listener,
) -> list[dict[str, Any]]:
    """See `functions.evaluate`."""
    splices: list[_Splice] = []
    if model is True and not any(map(stored_models, measured_saes)):
        check_tokens(tokens, None)
    if model:  # raises before the rows are measured
        with noted("CE and KL", listener.warn, model is True):
            splices = _splices(measured_saes, model, listener)
    documents = [each.heading | _reconstructed(each, listener) for each in measured_saes]
    for splice in splices:
        with noted("CE and KL", listener.warn, model is True):
            splice.add_effects(documents, tokens, listener)
    entries = list(documents)
    for entry in entries:  # which grows by what is within
        entries += [*entry.get("hook_points", ()), *entry.get("sources", ())]
    if any(entry.get("ce_recovered", 0) is None for entry in entries):
        listener.note(
            "ce_recovered is not defined (-): zeros at the hook point do not clearly raise cross-entropy"
        )
    return documents


@dataclass(frozen=True)
class _Splice:
    """One pass through a model, or several side by side."""

    members: list[int]  # numbers of the SAEs on these rows
    saes: list[Measured]
    models: "list[Passes]"
    reads: tuple[HookPoint, ...]  # where activations are encoded
    writes: tuple[HookPoint, ...]  # where they are replaced; the same unless a transcoder's

    def effects(
        self, tokens: int, listener: Listener, source: int | None = None
    ) -> Iterable[dict[str, Any]]:
        """For each SAE, on all rows, or on one source's of a mixture."""
        from ..splice.effects import ZERO_TOKENS, effects

        rows = self.saes[0].of_store
        total = rows.rows
        if source is not None:
            total = sum(int((part == source).sum()) for part in rows.column("source", READ))
        expected = min(tokens, total)
        together = [self.writes] if len(self.models) == 1 else []
        alone = [(point,) for point in self.writes] if len(self.writes) > 1 else []
        names = " and ".join(passes.model.source.name for passes in self.models)
        with listener.progress(f"splicing into {names}", expected, "tokens") as show:
            by_sae = effects(
                self.models,
                stored_windows(rows, tokens, source),
                self.reads,
                [*together, *alone],
                [each.sae for each in self.saes],
                show,
                ZERO_TOKENS / expected,
            )
        return [self._document(parts) for parts in by_sae]

    def add_effects(
        self, documents: Sequence[dict[str, Any]], tokens: int | None, listener: Listener
    ) -> None:
        # So that several SAEs take about the time of one, but for `LEAST_TOKENS`: a splice costs about as much as the
        # clean pass, which they share.
        wanted = tokens or max(LEAST_TOKENS, 2 * TOKENS // (1 + len(self.members)))
        for index, effect in zip(self.members, self.effects(wanted, listener), strict=True):
            documents[index].update(effect)
        for number, part in enumerate(self.saes[0].by_source.values()):
            effects = self.effects(wanted, listener, part.source)
            for index, effect in zip(self.members, effects, strict=True):
                documents[index]["sources"][number].update(effect)

    def _document(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """The effect of all hook points, if of one model, and of each of several alone."""
        document: dict[str, Any] = {}
        if len(self.models) == 1:
            document, *parts = parts
        if parts:
            document["hook_points"] = [
                {"model": self.models[point.model].model.source.spec, **point.to_json(), **effect}
                for point, effect in zip(self.writes, parts, strict=True)
            ]
        return document


def _splices(measured_saes: Sequence[Measured], model: Any, listener: Listener) -> list[_Splice]:
    """The passes to make; all that cannot work is refused here."""
    from ..model.language_model import LanguageModel  # transformers takes seconds to import
    from ..splice.passes import Passes

    device = measured_saes[0].sae.W_enc.device
    groups = []
    for members in by_rows(measured_saes):
        first = measured_saes[members[0]]
        if own := own_models(first, device) if model is True else model:
            groups.append((members, check_model(first, own)))
    models: dict[str, Passes] = {}
    splices = []
    for members, pairs in groups:
        specs = list(dict.fromkeys(source.spec for _, source in pairs))
        points = []
        for rows, source in pairs:
            if source.spec not in models:
                models[source.spec] = Passes(LanguageModel(source, device, head="any"))
            meta = rows.store.meta
            if reason := unlike(models[source.spec].model, meta):
                listener.warn(f"{rows.name} {reason}")
            points.append(meta.origin.read[0]._replace(model=specs.index(source.spec)))
        reads = writes = tuple(points)
        saes = [measured_saes[index] for index in members]
        if saes[0].rows.target is not None:
            reads, writes = reads[:-1], writes[-1:]
        splices.append(_Splice(members, saes, [models[spec] for spec in specs], reads, writes))
    return splices


def _reconstructed(measured: Measured, listener: Listener) -> dict[str, Any]:
    more: dict[str, Any] = {"dead_fraction": measured.subject.dead_fraction}
    by_source = measured.by_source
    if by_source:
        more["sources"] = [
            {"source": name} | _reconstructed(part, listener) for name, part in by_source.items()
        ]
    sae, batches, alignment = measured.sae, measured.batches(listener), measured.alignment()
    massive = measured.massive if measured.rows.inputs else None
    if alignment is None:
        return reconstruction(sae, batches, massive=massive) | more
    scores = FeatureScores(alignment, sae.W_dec.device)
    truth = measured.of_store.codes(measured.batch_rows)

    def watch(codes: Codes) -> None:
        scores.update(codes, next(truth))

    return reconstruction(sae, batches, watch, massive) | more | scores.result()


class FeatureScores:
    """Each latent as a detector of its nearest feature, counted over batches of rows.

        precision = TP / (TP + FP)    recall = TP / (TP + FN)    F1 = 2 precision recall / (precision + recall)

    of the rows on which the latent fires (its code is not 0) and on which its nearest feature does; 0 where the
    denominator is; then means over all latents, as in `sae_lens.synthetic.evals` 6.54.

    Shapes: B rows, n non-zero codes, F = d_sae, G features.
    """

    def __init__(self, alignment: Alignment, device: torch.device | str = "cpu") -> None:
        self.alignment, self.rows = alignment, 0
        self._nearest = alignment.nearest.to(device)
        latents, features = alignment.cosines.shape
        self._both, self._fired = torch.zeros(2, latents, dtype=torch.int64, device=device)
        self._true = torch.zeros(features, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, z: Codes, truth: csr_array) -> None:
        """Count codes, (B, F), and the true codes of the same rows, (B, G)."""
        active = torch.from_numpy(truth.toarray() != 0).to(self._nearest.device)  # (B, G)
        if isinstance(z, SparseCodes):
            right = active[z.rows, self._nearest[z.indices]] & (z.values != 0)  # (n,)
            self._both.index_add_(0, z.indices, right.long())
        else:
            self._both += ((z.dense() != 0) & active[:, self._nearest]).sum(0)
        self._fired += z.latent_counts()
        self._true += active.sum(0)
        self.rows += truth.shape[0]

    def result(self) -> dict[str, Any]:
        """The measures; `true_l0` is the mean number of features active on a row."""
        both, fired, true = (counts.double() for counts in (self._both, self._fired, self._true))
        precision, recall = both / fired.clamp(min=1), both / true[self._nearest].clamp(min=1)
        both_rates = (precision + recall).clamp(min=torch.finfo(torch.float64).tiny)
        f1 = 2 * precision * recall / both_rates
        return {
            "mcc": self.alignment.mcc(),
            "f1": float(f1.mean()),
            "precision": float(precision.mean()),
            "recall": float(recall.mean()),
            "uniqueness": self.alignment.uniqueness(),
            "true_l0": float(true.sum()) / self.rows,
        }


def note_doubts(
    documents: Sequence[dict[str, Any]], measured_saes: Sequence[Measured], listener: Listener
) -> None:
    """Warn about too few rows or documents, and about doubtful measures; see `metrics.doubts`."""
    for members in by_rows(measured_saes):
        measured_on = measured_saes[members[0]].rows
        few = few_documents(measured_on)
        if few or (measured_on.inputs and measured_on.rows < FEW_ROWS):
            of = f" of {counted(few, 'document')}" if few else ""
            listener.note(
                f"{measured_on.name}: warning: figures on {counted(measured_on.rows, 'row')}{of} are noise; store more"
            )
    for measured, document in zip(measured_saes, documents, strict=True):
        sentences = doubts(document, measured.sae.d_in, measured.sae.d_sae).values()
        if sentences:
            rows = counted(document["rows"], "row")
            listener.note(f"{document['run']}: warning: on these {rows} {', and '.join(sentences)}")


def together(
    measured_saes: Sequence[Measured],
    model: Any,
    tokens: int | None,
    listener: Listener,
) -> dict[str, Any]:
    """Splice SAEs into a model, all at once, on tokens of the first one's rows, which every store must hold.

    Returns `model`, the measures of `splice.effects.effects_together`, and `runs`, each with hook points and errors.
    """
    from ..model.language_model import LanguageModel
    from ..splice.effects import check_together, effects_together
    from ..splice.passes import Passes

    acts = [placement((each.subject, each.saved), None, None) for each in measured_saes]
    check_together(acts)
    sources = [check_model(each, model)[0][1] for each in measured_saes]
    source = sources[0]
    stores = {own.store.path: own.store for each in measured_saes for own in each.rows.inputs}
    Joined(tuple(stores.values())).demand_alike()
    for at in acts:
        at.check(source.d_model, source.layers, source.name)
    passes = Passes(LanguageModel(source, measured_saes[0].sae.W_enc.device, head=True))
    means = [_mean(each) for each in measured_saes]
    rows = measured_saes[0].of_store
    wanted = min(tokens or TOKENS, rows.rows)
    with listener.progress("splicing all at once", wanted, "tokens") as show:
        windows = stored_windows(rows, wanted)
        measures, errors = effects_together(passes, windows, acts, means, show)
    runs = [
        {"run": at.name, **at.origin.to_json(), **own} for at, own in zip(acts, errors, strict=True)
    ]
    return {"model": source.spec, **measures, "runs": runs}


def _mean(measured: Measured) -> Tensor:
    mean = torch.from_numpy(measured.rows.spread().mean)
    return mean[-measured.sae.d_out :].to(measured.sae.W_enc)
