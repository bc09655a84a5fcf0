"""Reconstruction, sparsity and the effect on a language model, for `sae eval`, `sae sparsity` and the cards of hosted
SAEs.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.wording import counted
from ..sae.library import SAELike
from ..sae.metrics import Firing, doubts, firing, reconstruction
from ..store.joined import JoinedRows
from ..store.rows import Rows
from ..train.array_rows import ArrayLike
from .measured import Measured, RowsLike, all_measured, by_rows, measured
from .places import places_document
from .worlds import FeatureScores

if TYPE_CHECKING:
    from ..extract.hook_points import HookPoint
    from ..extract.language_model import LanguageModel
    from ..extract.windows import Windows

PICTURED_ROWS = 200
LIKE_L0 = 1.05  # an L0 up to this factor times another's counts as no larger
ERRORS = {"fvu": 1, "ce_recovered": -1, "kl": 1}  # compared at similar L0; times its sign, less is better
TOKENS = 16_384  # that a model is run over by default


def sparsity(sae: SAELike = None, data: RowsLike = None, *, split: str = "test", device: str = "auto",
             home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Count how often an SAE's latents fire on rows, as `sae sparsity` does.

    Args:
        sae: as of `evaluate`, which explains the others too.

    Returns:
        The document that `sae sparsity --json` prints for a run: `run`, `data` and `split`, the measures of
        `Firing.result`, among them `frequency`, the fraction of the rows on which each latent fires, and
        `dead_fraction`.

    Raises:
        SaeError: as of `evaluate`.
    """
    listener = listening(progress)
    one = measured(Home.at(home), sae, data, split, device, listener)
    return sparsity_document(one, firing(one.sae, one.inputs(listener)), listener)


def tallied(everything: Sequence[Measured], pictured: bool, listener: Listener) -> list[Firing]:
    """`Firing` of each SAE on its rows; with the first rows' codes if they are to be drawn."""
    return [firing(one.sae, one.inputs(listener), PICTURED_ROWS if pictured else 0) for one in everything]


def sparsity_document(one: Measured, counts: Firing, listener: Listener) -> dict[str, Any]:
    """The document that `sae sparsity --json` prints for a run; of a crosscoder with `places_document`."""
    found = one.heading | counts.result() | {"dead_fraction": one.subject.dead_fraction}
    return found | places_document(one, listener)


def evaluate(sae: SAELike = None, data: RowsLike = None, *, target: ArrayLike | str | None = None, split: str = "test",
             model: str | None = None, tokens: int | None = None, device: str = "auto",
             home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Measure an SAE on rows, as `sae eval` does.

        fvu = E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)

    Args:
        sae: an SAE, a run's name or whatever else `load_sae` takes; None for the newest run.
        data: a store, or its name in the home, of which `split` is taken; rows chosen from one, or rows in memory,
            (N, D), which are all taken; None for the store that the run was trained on, else the newest.
        target: what a transcoder predicts from data: a store's name beside another's, or with rows in memory an array,
            (N, E); None for the store that the run was trained on.
        split: test, the rows held out; train, those trained on; or all.
        model: hub id or folder of the language model that the store's rows came from, to splice the SAE into it.
        tokens: number of the split's tokens that the model is run over; 16,384 by default.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress, and the choices made, on stderr.

    Returns:
        The document that `sae eval --json` prints for a run: `run`, `data` and `split`, the measures of
        `Reconstruction.result`, `dead_fraction`, on rows made of known features (`sae import synthetic`) the measures
        of `FeatureScores.result`, with a model those of `splice.effects`, and `unbeaten`, None for a single SAE.

    Raises:
        ConfigError: an argument that cannot work, or that does nothing with the others.
        RunError, FormatError, HubError, StoreError, ModelError: something is missing or cannot be read.
    """
    return compare([sae], data, target=target, split=split, model=model, tokens=tokens, device=device, home=home,
                   progress=progress)[0]


def compare(saes: Sequence[SAELike], data: RowsLike = None, *, target: ArrayLike | str | None = None,
            split: str = "test", model: str | None = None, tokens: int | None = None, device: str = "auto",
            home: str | Path | None = None, progress: bool = False) -> list[dict[str, Any]]:
    """Measure several SAEs, and mark those that no other on the same rows beats; see `unbeaten`.

    Args:
        saes: each as of `evaluate`, which explains the other arguments too.

    Returns:
        The result of `evaluate` for each SAE in the order given; `unbeaten` is None for an SAE alone on its rows.

    Raises:
        SaeError: as of `evaluate`.
    """
    check_tokens_of_model(tokens, model)
    listener = listening(progress)
    everything = all_measured(Home.at(home), saes, data, split, device, listener, target)
    return marked(evaluated(everything, model, tokens, listener), everything)


def marked(found: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> list[dict[str, Any]]:
    """The measures of each SAE with one more, `unbeaten`, among the SAEs on the same rows.

    Args:
        found: the measures of each.
        everything: the SAEs and their rows, in the same order.

    Returns:
        The measures, in the same order; `unbeaten` is None for an SAE alone on its rows.
    """
    marks: list[bool | None] = [None] * len(found)
    for members in by_rows(everything):
        if len(members) > 1:
            for index, mark in zip(members, unbeaten([found[index] for index in members]), strict=True):
                marks[index] = mark
    return [run | {"unbeaten": mark} for run, mark in zip(found, marks, strict=True)]


def unbeaten(runs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """For each of several runs on the same rows, whether no other beats it.

    A run is beaten by one whose L0 is at most `LIKE_L0` times its own, and which is no worse in any of the `ERRORS`
    measured and better in at least one. The condition on errors is a strict partial order, so runs never beat each
    other in a circle, although L0s are compared with a tolerance: at least one is unbeaten.

    Args:
        runs: the measures of each, among them `l0`.

    Returns:
        One bool per run. A run with an error that is not finite beats none, and is not unbeaten.
    """
    errors = [tuple(sign * run[name] for name, sign in ERRORS.items() if name in run) for run in runs]
    finite = [all(map(math.isfinite, error)) for error in errors]

    def beats(other: int, run: int) -> bool:
        return (finite[other] and runs[other]["l0"] <= LIKE_L0 * runs[run]["l0"] and errors[other] != errors[run]
                and all(map(operator.le, errors[other], errors[run])))

    return [finite[run] and not any(beats(other, run) for other in range(len(runs))) for run in range(len(runs))]


def check_tokens_of_model(tokens: int | None, model: str | None) -> None:
    """Refuse a number of tokens without a model, or below 1, by a ConfigError."""
    if tokens is not None and model is None:
        raise ConfigError("--tokens does nothing without --model; leave it out, or name the language model",
                          option="tokens")
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {tokens}", option="tokens")


def check_model(one: Measured, model: str) -> None:
    """Refuse a model that cannot be run over an SAE's rows, by the errors of `splice.check_rows`; loads no weights."""
    from ..extract.model_source import find_model
    from .splice import check_rows

    check_rows(one.of_store, find_model(model))


def evaluated(everything: Sequence[Measured], model: str | None, tokens: int | None,
              listener: Listener) -> list[dict[str, Any]]:
    """The document that `sae eval` prints for each SAE, without `unbeaten`.

    Args:
        everything: the SAEs and their rows.
        model: hub id or folder of the language model to splice them into; None for none.
        tokens: number of the rows' tokens that the model is run over; None for `TOKENS`.
        listener: shows progress.

    Raises:
        ConfigError, StoreError, ModelError: the model is missing, or did not produce the rows.
    """
    splices = [] if model is None else _splices(everything, model, listener)
    found = [one.heading | _reconstructed(one, listener) for one in everything]
    if model is None:
        return found
    effects = _effects(everything, splices, tokens or TOKENS, listener)
    return [run | effect for run, effect in zip(found, effects, strict=True)]


def _reconstructed(one: Measured, listener: Listener) -> dict[str, Any]:
    """The document that `sae eval` prints for an SAE without a model; with `FeatureScores.result` where its rows are
    made of known features."""
    dead = {"dead_fraction": one.subject.dead_fraction}
    alignment = one.alignment()
    if alignment is None:
        return reconstruction(one.sae, one.batches(listener)) | dead
    scores, truth = FeatureScores(alignment, one.sae.W_dec.device), one.of_store.codes(one.batch_rows)
    measures = reconstruction(one.sae, one.batches(listener), watch=lambda z: scores.update(z, next(truth)))
    return measures | dead | scores.result()


def warnings(found: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> list[str]:
    """Warnings about SAEs with doubtful measures; see `metrics.doubts`."""
    return [f"{run['run']}: warning: on these {counted(run['rows'], 'row')} {', and '.join(words.values())}"
            for one, run in zip(everything, found, strict=True)
            if (words := doubts(run, one.sae.d_in, one.sae.d_sae))]


@dataclass(frozen=True)
class _Splice:
    """One pass through the model: the indices of the SAEs on the same rows, and the model, rows and windows."""

    members: list[int]
    model: "LanguageModel"
    rows: Rows
    cutter: "Windows"
    read: "HookPoint"
    written: "HookPoint"


def _splices(everything: Sequence[Measured], name: str, listener: Listener) -> list[_Splice]:
    """The passes to make through the model; errors are raised here, before the rows are measured."""
    from ..extract.hook_points import HookPoint
    from ..extract.language_model import LanguageModel
    from ..extract.model_source import find_model
    from ..extract.windows import Windows
    from .splice import check_rows, check_tokens

    groups = by_rows(everything)
    found_model = find_model(name)
    every_rows, ends = [], []
    for one in (everything[members[0]] for members in groups):
        rows = [one.of_store, *([one.rows.target] if isinstance(one.rows, JoinedRows) and one.rows.target else [])]
        if isinstance(one.rows, JoinedRows) and len(one.rows.inputs) > 1:
            one.demand_reconstruction("the effect on a model")
        for some in rows:
            check_rows(some, found_model)
        every_rows.append(rows[0])
        ends.append([HookPoint(some.store.meta.source["layer"], some.store.meta.source["site"]) for some in rows])
    model = LanguageModel(found_model, everything[0].sae.W_enc.device, head=True)
    found = []
    for rows, members, places in zip(every_rows, groups, ends, strict=True):
        source = rows.store.meta.source
        cutter = Windows(model.tokenizer, source["context"])
        check_tokens(rows, model, cutter.prefix)
        if source["model"] != found_model.identity()["model"]:
            listener.note(f"{rows.store.name} came from {source['model']}, and is run through {name}")
        found.append(_Splice(members, model, rows, cutter, places[0], places[-1]))
    return found


def _effects(everything: Sequence[Measured], splices: list[_Splice], tokens: int,
             listener: Listener) -> list[dict[str, Any]]:
    """The effects of each SAE on the model."""
    from .splice import effects, stored_windows

    results: list[dict[str, Any]] = [{} for _ in everything]
    for splice in splices:
        model, rows = splice.model, splice.rows
        windows = stored_windows(rows, splice.cutter.prefix, tokens)
        with listener.progress(f"splicing into {model.source.name}", min(tokens, rows.rows), "tokens") as show:
            measures = effects(model, windows, splice.cutter.special, splice.read, splice.written,
                               [everything[index].sae for index in splice.members], show)
        for index, measure in zip(splice.members, measures, strict=True):
            results[index] = measure
    listener.note("special tokens (BOS) keep their own activations beside the SAE's, are zero in ce_zero, and are left "
                  "out of the means")
    return results
