"""Reconstruction, sparsity, and the effect on a language model."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.console import Listener, listening
from ..base.errors import ConfigError, counted, demand_at_least
from ..base.home import Home
from ..extract.options import HookPoint, at_revisions
from ..extract.splice import (
    READ,
    check_rows,
    largest,
    recorded_revision,
    spec_of,
    stored_windows,
    unfit,
)
from ..sae.dictionary import SAE
from ..sae.library import SAELike
from ..sae.metrics import Firing, doubts, firing, reconstruction
from ..store.reader import Rows
from ..store.split import Which
from ..train.rows import ArrayLike
from .hook_points import places_document
from .measured import Measured, RowsLike, all_measured, by_rows, measured
from .worlds import FeatureScores

if TYPE_CHECKING:
    from ..extract.model_source import ModelSource
    from ..extract.passes import Passes

LIKE_L0 = 1.05  # an L0 up to this factor times another's counts as no larger
ERRORS = {
    "fvu": 1,
    "ce_recovered": -1,
    "kl": 1,
}  # compared at similar L0; times its sign, less is better
MAINLY, LEAST_ROWS = 0.9, 10  # see `sparsity`
TOKENS = 16_384  # default number of tokens for CE and KL, of one SAE
LEAST_TOKENS = 4096  # of many


def sparsity(
    sae: SAELike = None,
    data: RowsLike = None,
    *,
    split: Which = "test",
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Count how often an SAE's latents fire; CLI equivalent: `sae sparsity`. Arguments as in `evaluate`.

    Returns:
        `run`, `data`, `split`, the measures of `Firing.result`, among them `frequency`, the fraction of the rows on
        which each latent fires, `dead_fraction`, for a crosscoder `places_document`, for a mixture of texts
        `sources`: `Firing.result` on the rows of each, `firings`, the fraction of each latent's firings there, and
        `mainly`, the latents with `MAINLY` of them there if sources had equally many rows; without those for which
        equal rates give fewer than `LEAST_ROWS` firings elsewhere.
    """
    listener = listening(progress)
    one = measured(Home.at(home), sae, data, split, device, listener)
    return sparsity_document(one, firing(one.sae, one.inputs(listener)), listener)


def sparsity_document(one: Measured, counts: Firing, listener: Listener) -> dict[str, Any]:
    found = one.heading | counts.result() | {"dead_fraction": one.subject.dead_fraction}
    one.note_absent_sources(listener)
    if parts := one.by_source:
        tallies = [firing(part.sae, part.inputs(listener)) for part in parts.values()]
        total = sum(own.frequency for own in tallies)
        found["sources"] = [
            {
                "source": name,
                **own.result(),
                "mainly": int(
                    (
                        (own.frequency >= MAINLY * total)
                        & (counts.frequency * (counts.rows - own.rows) >= LEAST_ROWS)
                    ).sum()
                ),
                "firings": (own.frequency * own.rows / (counts.frequency * counts.rows))
                .nan_to_num()
                .tolist(),
            }
            for name, own in zip(parts, tallies, strict=True)
        ]
    return found | places_document(one, listener)


def evaluate(
    sae: SAELike = None,
    data: RowsLike = None,
    *,
    target: ArrayLike | str | None = None,
    split: Which = "test",
    model: str | Sequence[str] | None = None,
    model_revision: str | Sequence[str] | None = None,
    tokens: int | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Measure an SAE on rows; CLI equivalent: `sae eval`.

        fvu = E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)

    Args:
        sae: an SAE, a run's name or whatever else `load_sae` takes; None for the newest run.
        data: a store or its name in the home, read at `split`; or rows chosen from a store, or rows in memory (N, D),
            all of which are measured; None for the store that the run was trained on, else the newest.
        target: the targets of a transcoder: a store's name next to another's, or for rows in memory an array (N, E);
            None for the store that the run was trained on.
        split: test, the rows held out; train, those trained on; or all.
        model: hub id, folder or GGUF file of the language model that the store's rows came from, to splice the SAE into
            it; of a crosscoder of several models all of them.
        model_revision: branch, tag or commit of a hub model; None for the one that the rows came from.
        tokens: number of the split's tokens that the model is run over; by default 16,384, less for several SAEs.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress, and the choices made, on stderr.

    Returns:
        `run`, `data`, `split`, the measures of `Reconstruction.result`, `dead_fraction`, on rows made of known
        features (`sae import synthetic`) the measures of `FeatureScores.result`, with a model those in
        `extract.effects.effects`, for a crosscoder as `hook_points` also with each replaced alone, and of several
        models only so; and `unbeaten`, None for a single SAE; for a mixture of texts `sources`, the same measures on
        the rows of each, with a model over as many tokens again.
    """
    return compare(
        [sae],
        data,
        target=target,
        split=split,
        model=model,
        model_revision=model_revision,
        tokens=tokens,
        device=device,
        home=home,
        progress=progress,
    )[0]


def compare(
    saes: Sequence[SAELike | Measured],
    data: RowsLike = None,
    *,
    target: ArrayLike | str | None = None,
    split: Which = "test",
    model: str | Sequence[str] | None = None,
    model_revision: str | Sequence[str] | None = None,
    tokens: int | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> list[dict[str, Any]]:
    """`evaluate` several SAEs, and mark those that no other on the same rows beats; see `unbeaten`.

    Returns:
        The result of `evaluate` for each SAE in the order given; `unbeaten` is None for an SAE alone on its rows.
    """
    check_tokens_of_model(tokens, model)
    models = at_revisions(model, model_revision)
    listener = listening(progress)
    everything = all_measured(Home.at(home), saes, data, split, device, listener, target)
    found = evaluated(everything, models, tokens, listener)
    note_doubts(found, everything, listener)
    marks: list[bool | None] = [None] * len(found)
    for members in by_rows(everything):
        if len(members) > 1:
            for index, mark in zip(
                members, unbeaten([found[index] for index in members]), strict=True
            ):
                marks[index] = mark
    return [run | {"unbeaten": mark} for run, mark in zip(found, marks, strict=True)]


def unbeaten(runs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each of several runs on the same rows, whether no other beats it.

    A run is beaten by one whose L0 is at most `LIKE_L0` times its own, and which is no worse in any of the `ERRORS`
    measured and better in at least one. The condition on errors is a strict partial order, so runs never beat each
    other in a circle, although L0s are compared with a tolerance: at least one is unbeaten. A run with an error that is
    not finite beats none, and is not unbeaten.
    """
    measured = [name for name in ERRORS if all(run.get(name) is not None for run in runs)]
    errors = [tuple(ERRORS[name] * run[name] for name in measured) for run in runs]
    finite = [all(map(math.isfinite, error)) for error in errors]

    def beats(other: int, run: int) -> bool:
        return (
            finite[other]
            and runs[other]["l0"] <= LIKE_L0 * runs[run]["l0"]
            and errors[other] != errors[run]
            and all(map(operator.le, errors[other], errors[run]))
        )

    return [
        finite[run] and not any(beats(other, run) for other in range(len(runs)))
        for run in range(len(runs))
    ]


def check_tokens_of_model(tokens: int | None, model: str | Sequence[str] | None) -> None:
    if tokens is not None and model is None:
        raise ConfigError(
            "--tokens does nothing without --model; leave it out, or name the language model"
        )
    demand_at_least("tokens", tokens)


def check_model(one: Measured, model: str | Sequence[str]) -> "list[tuple[Rows, ModelSource]]":
    """The stores of an SAE's rows, inputs first, and the model of each; refuses models that cannot be run over them,
    before other work: loads no weights."""
    from ..extract.model_source import find_model  # transformers takes seconds to import

    names = [model] if isinstance(model, str) else model
    ends = [one.of_store, *one.rows.inputs[1:], *([one.rows.target] if one.rows.target else [])]
    of_rows = [spec_of(end.store.meta.source) for end in ends]
    wanted = list(dict.fromkeys(of_rows))
    sources = [find_model(name, recorded_revision(name, of_rows)) for name in names]
    given = {source.spec: source for source in sources}
    if len(wanted) > 1 and one.rows.target:
        one.demand_reconstruction("the effect on a model")
    if len(names) != len(wanted) or len(given) < len(names):
        raise ConfigError(
            f"--model must be given once for each model that {one.rows.name} came from, "
            f"{' and '.join(map(str, wanted))}, got {' and '.join(names)}"
        )
    others = iter([source for name, source in given.items() if name not in wanted])
    found = {name: given.get(str(name)) or next(others) for name in wanted}
    pairs = [(end, found[name]) for end, name in zip(ends, of_rows, strict=True)]
    for pair in pairs:
        check_rows(*pair)
    return pairs


def evaluated(
    everything: Sequence[Measured],
    model: str | Sequence[str] | None,
    tokens: int | None,
    listener: Listener,
) -> list[dict[str, Any]]:
    """The results of `evaluate`, without `unbeaten`, for SAEs with their rows."""
    for members in by_rows(everything):
        everything[members[0]].note_absent_sources(listener)
    if model is None:
        return [one.heading | _reconstructed(one, listener) for one in everything]
    passes = splices(everything, model, listener)  # raises before the rows are measured
    found = [one.heading | _reconstructed(one, listener) for one in everything]
    for splice in passes:
        saes = [everything[index].sae for index in splice.members]
        sources = [part.source for part in everything[splice.members[0]].by_source.values()]
        for place, source in enumerate([None, *sources], -1):
            every = splice.effects(saes, tokens or default_tokens(len(saes)), listener, source)
            for index, effect in zip(splice.members, every, strict=True):
                (found[index] if source is None else found[index]["sources"][place]).update(effect)
    if any(run.get("ce_recovered", 0) is None for run in found):
        listener.note(
            "ce_recovered is not defined (-): zeros at the hook point do not raise cross-entropy "
            "clearly, so there is nothing to recover"
        )
    listener.note(
        "special tokens (BOS) keep their own activations in ce_spliced, are zero in ce_zero, and are left "
        "out of the means"
    )
    return found


def default_tokens(saes: int) -> int:
    """So that several SAEs on the same rows take about the time of one, but for `LEAST_TOKENS`: a splice costs about
    as much as the clean pass, which they share."""
    return max(LEAST_TOKENS, 2 * TOKENS // (1 + saes))


@dataclass(frozen=True)
class Splice:
    """One pass through a model, or several side by side."""

    members: list[int]  # indices of the SAEs on these rows
    models: "list[Passes]"
    rows: Rows
    reads: tuple[HookPoint, ...]  # where activations are encoded
    writes: tuple[HookPoint, ...]  # where they are replaced; the same unless a transcoder's

    def effects(
        self, saes: Sequence[SAE], tokens: int, listener: Listener, source: int | None = None
    ) -> list[dict[str, Any]]:
        """The effects on the rows, or on those of one source of a mixture: nothing if it has none."""
        from ..extract.effects import ZERO_TOKENS, effects

        alone = len(self.models) == 1
        windows = stored_windows(self.rows, tokens, source)
        if (first := next(windows, None)) is None:
            return [{}] * len(saes)
        names = " and ".join(one.model.source.name for one in self.models)
        each: list[tuple[HookPoint, ...]] = [
            (point,) for point in self.writes if len(self.writes) > 1
        ]
        rows = self.rows.rows
        if source is not None:
            rows = sum(int((part == source).sum()) for part in self.rows.column("source", READ))
        expected = min(tokens, rows)
        with listener.progress(f"splicing into {names}", expected, "tokens") as show:
            found = effects(
                self.models,
                chain([first], windows),
                self.reads,
                [self.writes] * alone + each,
                saes,
                show,
                ZERO_TOKENS / expected,
            )
        labels = [one.model.source.spec for one in self.models]
        at = [{"model": labels[point.model], **point.place} for (point,) in each]
        return [
            (own[0] if alone else {})
            | (
                {"hook_points": [place | one for place, one in zip(at, own[alone:], strict=True)]}
                if at
                else {}
            )
            for own in found
        ]


def splices(
    everything: Sequence[Measured], name: str | Sequence[str], listener: Listener
) -> list[Splice]:
    """The passes to make through models for SAEs with their rows; all that cannot work is refused here."""
    from ..extract.language_model import LanguageModel  # transformers takes seconds to import
    from ..extract.passes import Passes

    groups = by_rows(everything)
    all_ends = [check_model(everything[members[0]], name) for members in groups]
    device = everything[0].sae.W_enc.device
    models = {
        source.spec: Passes(LanguageModel(source, device, head=True))
        for source in {source.spec: source for ends in all_ends for _, source in ends}.values()
    }
    found = []
    for ends, members in zip(all_ends, groups, strict=True):
        rows, own = ends[0][0], list(dict.fromkeys(source.spec for _, source in ends))
        for end, source in ends:
            if (last := largest(end, "token_id")) >= models[source.spec].model.vocabulary:
                raise unfit(
                    end,
                    source,
                    f"a token {last}, got token ids below {models[source.spec].model.vocabulary}",
                )
            if (recorded := spec_of(end.store.meta.source)) != source.spec:
                listener.note(f"{end.name} came from {recorded}, and is run through {source.spec}")
        places = tuple(
            HookPoint(
                end.store.meta.source["layer"],
                end.store.meta.source["site"],
                own.index(source.spec),
            )
            for end, source in ends
        )
        transcoder = everything[members[0]].rows.target is not None
        found.append(
            Splice(
                members,
                [models[one] for one in own],
                rows,
                places[:-1] if transcoder else places,
                places[-1:] if transcoder else places,
            )
        )
    return found


def _reconstructed(one: Measured, listener: Listener) -> dict[str, Any]:
    dead: dict[str, Any] = {"dead_fraction": one.subject.dead_fraction}
    if sources := [
        {"source": name} | _reconstructed(part, listener) for name, part in one.by_source.items()
    ]:
        dead["sources"] = sources
    alignment = one.alignment()
    if alignment is None:
        return reconstruction(one.sae, one.batches(listener), massive=one.massive) | dead
    scores, truth = (
        FeatureScores(alignment, one.sae.W_dec.device),
        one.of_store.codes(one.batch_rows),
    )
    measures = reconstruction(
        one.sae,
        one.batches(listener),
        watch=lambda z: scores.update(z, next(truth)),
        massive=one.massive,
    )
    return measures | dead | scores.result()


def note_doubts(
    found: Sequence[dict[str, Any]], everything: Sequence[Measured], listener: Listener
) -> None:
    """Warn about SAEs with doubtful measures; see `metrics.doubts`."""
    for one, run in zip(everything, found, strict=True):
        if words := doubts(run, one.sae.d_in, one.sae.d_sae):
            listener.note(
                f"{run['run']}: warning: on these {counted(run['rows'], 'row')} "
                f"{', and '.join(words.values())}"
            )
