"""A report on an SAE's latents as HTML pages: `pages.py` fills them.

`index.html` holds style, script and the overview. The latents' pages are in `latents/00000.js` and on, several latents
per file, each a call of the script's function `saeLatents`: a page opened from disk may run scripts next to it, but not
read files.
"""

import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ...base.console import Listener, listening
from ...base.errors import ConfigError
from ...base.files import folder_appearing_whole, folder_bytes, is_free, storable
from ...base.home import Home
from ...base.words import counted, demand_at_least
from ...measure.evaluate import evaluate_all, noted, own_models, stored_models
from ...measure.hook_points import places_document
from ...measure.labels import shown_labels
from ...measure.latents import Examples, at_random, chosen_latents, row_blocks, survey_latents
from ...measure.measured import ChosenRows, Measured, RowsLike, held_out
from ...model.choice import ModelLike, model_given, source_of, spec_of, unlike
from ...sae.library import SAELike
from ...sae.metrics import doubts, firing
from ...store.origin import HookPoint, point_words, without_folders
from ...store.split import Which
from ...train.runs import read_metrics
from ..measures import curve
from .pages import Details, TokenNumbers, overview

if TYPE_CHECKING:
    from ...model.source import ModelSource
    from ...model.tokenizer import TokenTexts
    from ...model.unembedding import Unembedding

    Tokens = TokenTexts | TokenNumbers

INDEX, DETAILS = "index.html", "latents"
NEURONPEDIA_NAME = r"[\w.-]+/[\w.-]+"
SCRIPTS = ("dom.js", "charts.js", "table.js", "texts.js", "latent.js", "main.js")
# Could end a script or begin a comment in it; the last two are line ends to older browsers.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_script(document: Any) -> str:
    """A document as JSON that is also a JavaScript expression, safe inside a script element."""
    text = json.dumps(
        storable(document), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return re.sub("[<>&\u2028\u2029]", lambda match: UNSAFE[match[0]], text)


def write_pages(
    folder: Path,
    title: str,
    overview: dict[str, Any],
    details: Iterable[dict[str, Any]],
    overwrite: bool = False,
) -> None:
    """Write `overview` and `Details.contents` to a folder, new or empty unless `overwrite`, which appears whole."""
    with folder_appearing_whole(folder, overwrite) as temporary:
        (temporary / DETAILS).mkdir()
        for number, content in enumerate(details):
            script = f"saeLatents({number},{as_script(content)});\n"
            (temporary / DETAILS / f"{number:05}.js").write_text(script, encoding="utf-8")
        page = page_of("report", title, SCRIPTS, overview)
        (temporary / INDEX).write_text(page, encoding="utf-8")


def page_of(command: str, title: str, scripts: Iterable[str], data: Any) -> str:
    """A page of a command with everything in it: the reports' style, scripts of theirs, and the data that they draw."""
    return Template(_asset(INDEX)).substitute(
        command=command,
        title=html.escape(title),
        style=_asset("style.css"),
        script="\n".join(map(_asset, scripts)),
        data=as_script(data),
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _texts_and_outputs(
    run: Measured, model: Any, has_tokens: bool, notes: list[str]
) -> "tuple[Tokens, tuple[Unembedding, slice] | None]":
    """The texts of a store's tokens, by the tokenizer of a model, by default of the one that the store names; and the
    model's unembedding, with the columns of W_dec at its last hook point; notes gets sentences on missing parts."""
    store, stored_model = run.store, spec_of(run.store.meta.source)
    if not has_tokens:
        notes.append(
            f"{store.name} keeps no tokens, so examples are numbers of its rows, counted from 0"
        )
    elif stored_model is None and isinstance(model, bool | None):
        notes.append(
            f"{store.name} does not say which model its tokens are of, so they are shown as numbers; "
            "--model names it"
        )
    if not isinstance(model, bool | None):
        return _of_model(run, model, notes)
    missing: list[str] = []
    if model and stored_models(run):
        with noted("the language model", missing.append):
            return _of_model(run, own_models(run, run.sae.W_enc.device)[-1], notes)
    texts: Tokens = TokenNumbers()
    if has_tokens and stored_model:
        # transformers takes seconds to import.
        from ...model.language_model import load_tokenizer
        from ...model.source import find_model
        from ...model.tokenizer import TokenTexts

        with noted("the texts of tokens", missing.append):
            texts = TokenTexts(load_tokenizer(find_model(stored_model)))
    notes += missing[:1]
    return texts, None


def _of_model(
    run: Measured, model: "str | ModelSource", notes: list[str]
) -> "tuple[TokenTexts, tuple[Unembedding, slice] | None]":
    from ...model.language_model import LanguageModel, load_tokenizer
    from ...model.tokenizer import TokenTexts
    from ...model.unembedding import Unembedding

    predicted = [run.rows.target] if run.rows.target else run.rows.inputs
    recorded = [spec_of(rows.store.meta.source) for rows in predicted]
    place = source_of(model, recorded)
    last_of = {spec: number for number, spec in enumerate(recorded)}
    if len(last_of) > 1 and place.spec not in last_of:
        raise ConfigError(
            f"--model must be a model that the rows of {run.subject.name} came from, "
            f"{' or '.join(map(str, last_of))}, got {place.name}"
        )
    last = last_of.get(place.spec, -1)
    columns = run.sae.hook_columns[last]
    width = columns.stop - columns.start
    source = predicted[last].store.meta.source
    point = HookPoint(None, source.get("site", "resid_post"))
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
    loaded = LanguageModel(place, run.sae.W_enc.device, head=True)
    reason = unlike(loaded, source)
    if reason:
        notes.append(f"{predicted[last].name} {reason}")
    return TokenTexts(loaded.tokenizer), (Unembedding(loaded), columns)


MOST_PAGES = 4096  # written by default
MOST_EXAMPLES = 100  # texts per latent
SAMPLES = 15  # texts per latent chosen at random, three for each fifth by strength


def report(
    sae: SAELike,
    out: str | Path,
    data: RowsLike = None,
    *,
    target: str | None = None,
    split: Which = "all",
    latents: int | Sequence[int] | None = None,
    count: int | None = None,
    model: ModelLike | bool | None = True,
    tokenizer: Any = None,
    examples: int = 12,
    neuronpedia: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    home: str | Path | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Write pages to look at an SAE's latents in a browser, from disk. CLI equivalent: `sae report`.

    Args:
        sae, data, target, device, home, progress: as in `evaluate`; data are a store or rows of one.
        out: folder to write, new or empty; it appears whole or not at all.
        split: rows that the latents are shown on.
        latents: those with a page of their own; None for the `count` most frequent, by default 4,096.
        model: hub id, also ID@REVISION, folder or GGUF file of the rows' language model, to show the tokens that each
            latent promotes. Or a loaded model, with its `tokenizer`. True: the one that the store names, with a note
            where it is not on this machine or does not fit into memory; None or False: without.
        examples: strongest texts per latent, 1 to 100.
        neuronpedia: Neuronpedia's name of the SAE, `MODEL/SOURCE`, to link to its pages.
        overwrite: whether a folder `out` with an index.html is replaced, once the new one is whole.
    """
    folder, listener = Path(out), listening(progress)
    if not is_free(folder) and not (overwrite and (folder / INDEX).is_file()):
        raise ConfigError(
            f"cannot write to {folder}: expected an empty or a new folder; name another, or replace an "
            "earlier report by --overwrite"
        )
    if neuronpedia is not None and not re.fullmatch(NEURONPEDIA_NAME, neuronpedia, re.ASCII):
        raise ConfigError(
            "--neuronpedia must be MODEL/SOURCE such as gemma-2-2b/20-gemmascope-res-16k, got "
            f"{neuronpedia!r}"
        )
    if latents is not None and count is not None:
        raise ConfigError("cannot use both --latent and --latents; leave one of them out")
    demand_at_least("latents", count)
    if not 1 <= examples <= MOST_EXAMPLES:
        raise ConfigError(f"--examples must be from 1 to {MOST_EXAMPLES}, got {examples}")
    run = ChosenRows(Home.at(home), data, split, device, listener, target).with_sae(sae)
    d_sae, has_tokens = run.sae.d_sae, run.store.meta.windows
    chosen = None if latents is None else sorted(chosen_latents(latents, d_sae, run.subject.name))
    if chosen is None:
        most = count or MOST_PAGES
        chosen = [*range(d_sae)]
        if d_sae > most:  # excerpts of all would not fit in memory
            frequency = firing(run.sae, run.inputs(listener)).frequency
            by_frequency = frequency.argsort(descending=True, stable=True)
            chosen = sorted(by_frequency[:most].tolist())
    notes: list[str] = []
    given = model_given(model, tokenizer)
    texts, outputs = _texts_and_outputs(run, given, has_tokens, notes)
    result = survey_latents(
        run.sae,
        row_blocks(run.inputs(listener), run.of_store, run.batch_rows),
        run.of_store.rows,
        Examples(chosen, d_sae, examples, has_tokens),
        Examples(chosen, d_sae, SAMPLES, has_tokens, at_random),
    )
    places = places_document(run, listener)
    details = Details(run, result, chosen, texts, outputs, places, listener)
    measures = _measures(run, notes, listener)
    if len(chosen) < d_sae:
        notes.append(f"{len(chosen):,} of {d_sae:,} latents have pages of their own")
    content = overview(_heading(run, neuronpedia), measures, result, notes)
    content["latents"] |= details.columns()
    logged = read_metrics(run.subject.folder) if run.subject.folder else []
    content["training"] = {  # FVU by step
        name: [point for point in curve(logged, f"{of}_fvu") if point[1] > 0]
        for name, of in (("batches", "batch"), ("held_out", "test"))
    }
    if labels := shown_labels(run.subject.folder, d_sae):
        content["latents"]["label"] = [labels.get(latent) for latent in range(d_sae)]
    with listener.progress("writing", len(chosen), "latents") as show:
        contents = details.contents(show)
        write_pages(folder, f"{run.subject.name}: latents", content, contents, overwrite)
    return {
        **run.heading,
        "path": str(folder),
        "index": str(folder / INDEX),
        "latents": d_sae,
        "pages": len(chosen),
        "files": sum(path.is_file() for path in folder.rglob("*")),
        "bytes": folder_bytes(folder),
        "index_bytes": (folder / INDEX).stat().st_size,
        "measures": content["measures"],
        "firing": content["firing"],
        "notes": notes,
    }


def _measures(run: Measured, notes: list[str], listener: Listener) -> dict[str, Any]:
    """The measures of `sae eval` on held-out rows, or on those shown if none are held out; notes gets doubts."""
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


def _heading(run: Measured, neuronpedia: str | None) -> dict[str, Any]:
    sae, source = run.sae, run.saved.origin | run.store.meta.source
    if inputs := run.stores.origin.get("inputs"):  # of a crosscoder, in the place of the first's
        names = [
            f"{point_words(place.get('layer'), place['site'])} of "
            + Path(place.get("model", source.get("model"))).name
            for place in inputs
        ]
        source = {"model": " + ".join(names)}
    hook_point = {name: without_folders(source.get(name)) for name in ("model", "layer", "site")}
    return {
        **run.heading,
        "neuronpedia": neuronpedia and f"https://www.neuronpedia.org/{neuronpedia}",
        "activation": sae.activation.name,
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        **{name: value for name, value in hook_point.items() if value is not None},
    }
