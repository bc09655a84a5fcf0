"""The public functions that test claims on latents. As `functions.py`, it imports neither NumPy nor torch."""

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from ..base.console import listening
from ..base.errors import ConfigError
from ..base.files import NonzeroFraction
from ..base.home import Home
from ..base.options import Count, Shown, checked
from ..store.origin import last_layer, place_given
from .arguments import (
    PATH,
    Data,
    Device,
    HomeLike,
    Latents,
    Layer,
    Model,
    Module,
    Progress,
    SAELike,
    Site,
    Target,
    latents_shown,
)


@checked
def contrast(
    sae: SAELike,
    a: Any = None,
    b: Any = None,
    *,
    data: Annotated[
        Data, Shown("A and B are two sources, or chat roles, of this store.", kind=str | None)
    ] = None,
    by: Annotated[
        str | None,
        Shown(
            "With --data, A and B are two values in this column of its dataset.", kind=str | None
        ),
    ] = None,
    pairs: Annotated[
        str | Path | None,
        Shown('A and B are the texts of this file\'s lines, {"a": "...", "b": "..."}.', **PATH),
    ] = None,
    replicate: Annotated[
        SAELike, Shown("Test each latent's nearest in this run of another seed.", kind=str | None)
    ] = None,
    top_k: Annotated[Count, Shown("Test this number of latents.")] = 20,
    model: Model = None,
    tokenizer: Any = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Find latents that tell two sides apart, on documents that did not choose them; CLI equivalent: `sae contrast`.

    Args:
        sae, device, home, progress: as in `evaluate`.
        a, b: stores, or rows of them; with `data` names of its sources or roles, or values in its dataset's column
            `by`; with `pairs` neither.
        model: reads pairs; or a loaded one, with its `tokenizer`.

    Returns:
        sides: of A and B `side`, a name, `documents`, and how many are `held_out`, which all below is of.
        latents: those of the AUC furthest from 1/2 in the other half, in that order: `auc` of documents' mean codes,
            `difference`, A's mean less B's, both with the ends of 95% bootstrap intervals, `_low` and `_high` (of no
            width if all of A's are on one side of all of B's); permutation `p`; `q` by Benjamini and Hochberg; in `a`
            and `b` means of `frequency`, `mean` and `largest` code in a document. `found` counts q up to `fdr`;
            `length` is of documents' numbers of rows instead of codes.
        shuffled: `latents`, `auc`, `p`, `q` of the same procedure with labels shuffled, for each of 20 times.
        replication: by `decoder` and by `codes` the same of each latent's nearest in the other run, its `similarity`,
            and of the latents found, if any, the `fraction` whose nearest is found with the same sign, and that of
            nearest ones `shuffled`.
        notes: a sentence on few documents.

    Cost: encodes all rows, with `replicate` twice by both SAEs.
    """
    from ..base.devices import device_named
    from ..model.language_model import LanguageModel
    from ..model.saes import open_sae
    from ..splice.placement import model_of, placement
    from .contrast import contrast_document
    from .labels import shown_labels
    from .measured import ChosenRows, Measured
    from .read import Reader
    from .sides import read_pairs, sides_by_column, sides_of_pairs, sides_of_stores, sides_within
    from .stability import check_comparable

    given = {"A": a, "B": b, "--data": data, "--by": by}
    unused = [name for name, value in given.items() if value is not None]
    if pairs is not None and unused:
        raise ConfigError(f"{unused[0]} does nothing with --pairs; leave one of them out")
    if pairs is None and model is not None:
        raise ConfigError("--model does nothing without --pairs, which it reads; leave it out")
    if pairs is None and (a is None or b is None):
        raise ConfigError(
            "expected RUN A B, or RUN --pairs FILE, got less; name two stores, or two sources of --data"
        )
    if by is not None and data is None:
        raise ConfigError("--by needs --data, the store whose documents A and B are of; name it")
    listener, at = listening(progress), Home.at(home)
    others = [] if replicate is None else [replicate]
    opened = [open_sae(at, each, listener) for each in (sae, *others)]
    check_comparable([(subject, saved.sae) for subject, saved in opened], "--replicate")

    def runs(rows: Any) -> list[Measured]:
        chosen = ChosenRows(at, rows, "all", device, listener)
        return [chosen.with_opened(*each) for each in opened]

    if pairs is not None:
        probed = [placement(each, None, None, "reading pairs by") for each in opened]
        source = model_of(probed, model, listener, tokenizer=tokenizer)
        points = [point for each in probed for point in each.reads]
        loaded = LanguageModel(source, device_named(device), last=last_layer(points))
        readers = [Reader(each, loaded) for each in probed]
        sides = sides_of_pairs(read_pairs(Path(pairs)), readers, listener)
    elif by is not None:
        sides = sides_by_column(runs(data), (a, b), by, listener)
    elif data is not None:
        sides = sides_within(runs(data), (a, b), listener)
    else:
        sides = sides_of_stores(runs(a), runs(b), listener)
    subject, saved = opened[0]
    labels = shown_labels(subject.folder, saved.sae.d_sae)
    names = {"run": subject.name, "replicate": opened[1][0].name if others else None}
    return {**names, **contrast_document(sides, top_k, labels)}


@checked
def effects(
    sae: SAELike = None,
    data: Data = None,
    *,
    target: Target = None,
    latents: Annotated[
        Latents, latents_shown("Try this latent", "--top-k of those that fire")
    ] = None,
    top_k: Annotated[
        Count, Shown("Without --latent, try this number of latents, spread over frequency.")
    ] = 100,
    documents: Annotated[
        Annotated[int, Ge(2)],
        Shown("Try a latent in this number of held-out documents."),
    ] = 16,
    fdr: Annotated[
        NonzeroFraction, Shown("Of latents said to act, let at most this fraction be false.")
    ] = 0.05,
    model: Model = None,
    tokenizer: Any = None,
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Measure what latents do to a model's predictions, beside other changes of the same norm; CLI equivalent:
    `sae effects`.

    Args:
        sae, data, target, device, home, progress: as in `evaluate`; data are a store of texts.
        model: by default the one that the SAE's file names. Or a loaded model, with its `tokenizer`.
        layer, site, module: of a crosscoder, which of its hook points to change.

    Returns:
        latents: of each `label`, `frequency`, mean `code` where it fires, `tokens` that it promotes, and
            `verdict`, on `kl`; if `removed` and `added` its `kl`, `promoted`, the mean rise of these tokens'
            log-probability, `doses`, the `ratio` of `kl` to each of `floors` and `elsewhere`, all with the ends of
            intervals over documents, `_low` and `_high`; of both p, and q by Benjamini and Hochberg. See `effects.py`.
        effects: the file in the run's folder whose latents are not measured again; None without a folder.

    Cost: 28 changed tokens for each latent and document, and the texts.
    """
    from ..model.choice import at_commit, model_given
    from ..model.saes import open_sae
    from ..splice.placement import model_of
    from ..train.start import fingerprint
    from .effects import effects_lines, measured_outcomes
    from .explain import own_folder
    from .labels import shown_labels
    from .latents import latents_given
    from .measured import ChosenRows
    from .steer import steerable
    from .trials import Trials
    from .verdicts import EFFECTS, add_verdicts

    listener, at = listening(progress), Home.at(home)
    given = at_commit(model_given(model, tokenizer))
    opened = subject, saved = open_sae(at, sae, listener)
    changed = steerable(opened, "add", given, *place_given(layer, site, module))
    chosen = latents_given(latents, saved.sae.d_sae, subject.name)
    source = model_of([changed], given, listener)
    run = ChosenRows(at, data, "test", device, listener, target).with_opened(*opened)
    trials = Trials.of(run, changed.written, source, listener)
    tried = trials.chosen(top_k, documents) if chosen is None else chosen
    folder = own_folder(at, sae, subject)
    path = folder and folder / EFFECTS
    used = (source.spec, changed.written, run.stores.hash, fingerprint(saved.sae), documents)
    outcomes = measured_outcomes(trials, tried, documents, " ".join(map(str, used)), path, listener)
    labels = shown_labels(subject.folder, saved.sae.d_sae)
    lines = effects_lines(trials, outcomes, labels, fdr)
    if path is not None:
        add_verdicts(path, {line["latent"]: line["verdict"] for line in lines})
    return {
        "run": subject.name,
        "data": run.rows.name,
        "model": source.name,
        **changed.origin.to_json(),
        "effects": path and str(path),
        "documents": documents,
        "fdr": fdr,
        "latents": lines,
    }
