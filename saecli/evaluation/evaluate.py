"""Reconstruction, sparsity and the effect on a language model: what `sae eval` and `sae sparsity` print, and `sae push`
puts on a card.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import Listener, listening
from ..errors import ConfigError
from ..home import Home
from ..metrics import Firing, doubts, firing, reconstruction
from ..store import Rows
from ..wording import counted
from ..worlds.scores import FeatureScores
from .comparing import marked
from .sae_and_rows import Measured, RowsLike, SAELike, all_measured, by_rows, measured

if TYPE_CHECKING:
    from ..harvest import Windows
    from ..language_model import LanguageModel

PICTURED_ROWS = 200
NAMED = 40  # letters of a run's name in that of its picture: a folder's whole path may be too long for a file's name


def sparsity(sae: SAELike = None, data: RowsLike = None, *, split: str = "test", device: str = "auto",
             home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Count how often an SAE's latents fire on rows, as `sae sparsity` does.

    Args:
        sae: as of `evaluate`, which explains the others too.

    Returns:
        What `sae sparsity --json` prints of a run: `run`, `data` and `split`, the measures of `Firing.result`, among
        them `frequency`, the fraction of the rows that each latent fires on, and `dead_fraction`.

    Raises:
        SaeError: as of `evaluate`.
    """
    listener = listening(progress)
    one = measured(Home.at(home), sae, data, split, device, listener)
    return sparsity_document(one, firing(one.sae, one.batches(listener)))


def tallied(everything: Sequence[Measured], pictured: bool, listener: Listener) -> list[Firing]:
    """How often the latents of each SAE fire on its rows; where they are to be pictured, by `draw_sparsity`, with the
    first rows' codes."""
    return [firing(one.sae, one.batches(listener), PICTURED_ROWS if pictured else 0) for one in everything]


def sparsity_document(one: Measured, counts: Firing) -> dict[str, Any]:
    """What `sae sparsity --json` prints of a run."""
    return one.heading | counts.result() | {"dead_fraction": one.subject.dead_fraction}


def draw_sparsity(path: Path, tallies: Mapping[str, Firing]) -> list[Path]:
    """Draw histograms of L0 and of frequencies, and beside them, one a run, the first rows' codes.

    Args:
        path: where the histograms go; the others' names begin as its does.
        tallies: by run, as of `tallied`.

    Returns:
        The pictures' paths.
    """
    from ..plots import firing as histograms  # matplotlib takes a second to import
    from ..plots import patterns

    histograms(path, {name: (one.l0_histogram, one.frequency) for name, one in tallies.items()})
    drawn = [path]
    for name, one in tallies.items():
        which = "-" + re.sub(r"[^\w.-]+", "-", name)[-NAMED:] if len(tallies) > 1 else ""
        picture = path.with_stem(f"{path.stem}-patterns{which}")
        drawn.append(path.with_stem(f"{picture.stem}-{len(drawn)}") if picture in drawn else picture)
        patterns(drawn[-1], one.patterns, name)
    return drawn


TOKENS = 16_384  # that a model is run over where no one says


def evaluate(sae: SAELike = None, data: RowsLike = None, *, split: str = "test", model: str | None = None,
             tokens: int | None = None, device: str = "auto", home: str | Path | None = None,
             progress: bool = False) -> dict[str, Any]:
    """Measure an SAE on rows, as `sae eval` does.

        fvu = E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)

    Args:
        sae: an SAE, a run's name or whatever else `load_sae` takes; None for the newest run.
        data: a store, or its name in the home, of which `split` is taken; rows chosen from one, or rows in memory,
            (N, D), which are all taken; None for the store that the run was trained on, else the newest.
        split: test, the rows held out; train, those trained on; or all.
        model: hub id or folder of the language model that the store's rows came from, to splice the SAE into it.
        tokens: how many of the split's tokens the model is run over; 16,384 by default.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show how far it has come, and what was chosen, on stderr.

    Returns:
        What `sae eval --json` prints of a run: `run`, `data` and `split`, the measures of `Reconstruction.result`,
        `dead_fraction`, on rows made of known features (`sae import synthetic`) those of `FeatureScores.result`, with a
        model those of `splice.effects`, and `unbeaten`, None for a single SAE.

    Raises:
        ConfigError: an argument that cannot work, or that does nothing with the others.
        RunError, FormatError, HubError, StoreError, ModelError: something is missing or cannot be read.
    """
    return compare([sae], data, split=split, model=model, tokens=tokens, device=device, home=home,
                   progress=progress)[0]


def compare(saes: Sequence[SAELike], data: RowsLike = None, *, split: str = "test", model: str | None = None,
            tokens: int | None = None, device: str = "auto", home: str | Path | None = None,
            progress: bool = False) -> list[dict[str, Any]]:
    """Measure several SAEs, and say which of those that share their rows no other beats; see `comparing.unbeaten`.

    Args:
        saes: each as of `evaluate`, which explains the other arguments too.

    Returns:
        What `evaluate` returns, for each SAE in the order given, and `unbeaten` among it; None for one that shares its
        rows with no other.

    Raises:
        SaeError: as of `evaluate`.
    """
    check_tokens_of_model(tokens, model)
    listener = listening(progress)
    everything = all_measured(Home.at(home), saes, data, split, device, listener)
    return marked(evaluated(everything, model, tokens, listener), everything)


def check_tokens_of_model(tokens: int | None, model: str | None) -> None:
    """Refuse a number of tokens that no model is run over; ConfigError where there are tokens and no model, or none at
    all."""
    if tokens is not None and model is None:
        raise ConfigError("tokens", "does nothing without {model}", "leave it out, or name the language model")
    if tokens is not None and tokens < 1:
        raise ConfigError("tokens", "must be at least 1, got {got}", got=tokens)


def evaluated(everything: Sequence[Measured], model: str | None, tokens: int | None,
              listener: Listener) -> list[dict[str, Any]]:
    """What `sae eval` prints of each SAE, `unbeaten` left out.

    Args:
        everything: the SAEs and their rows.
        model: hub id or folder of the language model to splice them into; None to do without.
        tokens: how many of the rows' tokens the model is run over; None for `TOKENS`.
        listener: told how far it has come.

    Raises:
        ConfigError, StoreError, ModelError: the model is missing, or is not that of the rows.
    """
    splices = [] if model is None else _splices(everything, model, listener)
    found = [one.heading | _reconstructed(one, listener) for one in everything]
    if model is None:
        return found
    effects = _effects(everything, splices, tokens or TOKENS, listener)
    return [run | effect for run, effect in zip(found, effects, strict=True)]


def _reconstructed(one: Measured, listener: Listener) -> dict[str, Any]:
    """What `sae eval` prints of an SAE without a model: with what it has found of known features, where its rows are
    made of such."""
    dead = {"dead_fraction": one.subject.dead_fraction}
    alignment = one.alignment()
    if alignment is None:
        return reconstruction(one.sae, one.batches(listener)) | dead
    scores, truth = FeatureScores(alignment, one.sae.W_dec.device), one.of_store.codes(one.batch_rows)
    measures = reconstruction(one.sae, one.batches(listener), watch=lambda z: scores.update(z, next(truth)))
    return measures | dead | scores.result()


def warnings(found: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> list[str]:
    """Sentences on SAEs whose measures are doubtful; see `metrics.doubts`."""
    return [f"{run['run']}: warning: on these {counted(run['rows'], 'row')} {', and '.join(words.values())}"
            for one, run in zip(everything, found, strict=True)
            if (words := doubts(run, one.sae.d_in, one.sae.d_sae))]


@dataclass(frozen=True)
class _Splice:
    """One pass through the model: the places of the SAEs that share their rows, and what they are spliced into."""

    members: list[int]
    model: "LanguageModel"
    rows: Rows
    cutter: "Windows"


def _splices(everything: Sequence[Measured], name: str, listener: Listener) -> list[_Splice]:
    """The passes to make through the model; what cannot work is refused here, before the rows are measured."""
    from ..harvest import Windows
    from ..language_model import LanguageModel, find_model
    from ..splice import check_rows, check_tokens

    groups = by_rows(everything)
    every_rows = [everything[members[0]].of_store for members in groups]
    place = find_model(name)
    for rows in every_rows:
        check_rows(rows, place)
    model = LanguageModel(place, everything[0].sae.W_enc.device, head=True)
    found = []
    for rows, members in zip(every_rows, groups, strict=True):
        source = rows.store.meta.source
        cutter = Windows(model.tokenizer, source["context"])
        check_tokens(rows, model, cutter.prefix)
        if source["model"] != place.identity()["model"]:
            listener.note(f"{rows.store.name} came from {source['model']}, and is run through {name}")
        found.append(_Splice(members, model, rows, cutter))
    return found


def _effects(everything: Sequence[Measured], splices: list[_Splice], tokens: int,
             listener: Listener) -> list[dict[str, Any]]:
    """What each SAE does to the model."""
    from ..splice import effects, stored_windows

    results: list[dict[str, Any]] = [{} for _ in everything]
    for splice in splices:
        model, rows, source = splice.model, splice.rows, splice.rows.store.meta.source
        windows = stored_windows(rows, splice.cutter.prefix, tokens)
        with listener.progress(f"splicing into {model.source.name}", min(tokens, rows.rows), "tokens") as show:
            measures = effects(model, windows, splice.cutter.special, source["layer"], source["site"],
                               [everything[index].sae for index in splice.members], show)
        for index, measure in zip(splice.members, measures, strict=True):
            results[index] = measure
    listener.note("special tokens keep their own activations and are left out of the means")
    return results
