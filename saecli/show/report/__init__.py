"""A report on an SAE's latents as HTML pages: `pages.py` fills them.

`index.html` holds style, script and the overview. The latents' pages are in `latents/00000.js` and on, several latents
per file, each a call of the script's function `saeLatents`: a page opened from disk may run scripts next to it, but not
read files.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.console import Listener, listening
from ...base.documents import read_run
from ...base.errors import ConfigError, ModelError, counted, demand_at_least
from ...base.files import folder_appearing_whole, is_free, storable
from ...base.home import RUN_MARKER, Home
from ...extract.options import COLUMNS, at_revision
from ...extract.splice import recorded_revision, spec_of
from ...measure.blocks import in_blocks
from ...measure.evaluate import evaluate_all
from ...measure.hook_points import places_document
from ...measure.latents import Examples, Survey, at_random, neighbours, survey
from ...measure.measured import Measured, RowsLike, held_out, open_measured
from ...sae.library import SAELike
from ...sae.metrics import doubts
from ...store.split import Which
from ...train.files import read_metrics
from .pages import Details, TokenNumbers, neuronpedia_url, overview

if TYPE_CHECKING:
    from ...extract.tokens import OutputTokens, TokenTexts, Unembedding

    Tokens = TokenTexts | TokenNumbers

INDEX, DETAILS = "index.html", "latents"
MADE_HERE = '<meta name="generator" content="sae report">'
HEAD_BYTES = 4096  # of a page, in which this stands
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
            (temporary / DETAILS / f"{number:05}.js").write_text(
                f"saeLatents({number},{as_script(content)});\n", encoding="utf-8"
            )
        style, template, *scripts = (
            (files(__package__) / "assets" / name).read_text(encoding="utf-8")
            for name in ("style.css", INDEX, *SCRIPTS)
        )
        parts = {
            "title": html.escape(title),
            "style": style,
            "script": "\n".join(scripts),
            "data": as_script(overview),
        }
        # In one pass, so that nothing in a part is taken for a mark.
        page = re.sub(r"\{\{ (\w+) \}\}", lambda mark: parts[mark[1]], template)
        (temporary / INDEX).write_text(page, encoding="utf-8")


def _words(
    one: Measured, model: str | None, has_tokens: bool
) -> "tuple[Tokens, Unembedding | None, list[str]]":
    """The texts of a store's tokens, by the tokenizer of a given model, or of the model that the store names; the
    model's unembedding if given; and sentences on missing content."""
    store = one.store
    named = spec_of(store.meta.source)
    notes = (
        []
        if has_tokens
        else [f"{store.name} keeps no tokens, so examples are numbers of its rows, counted from 0"]
    )
    if model is None and not (has_tokens and named):
        if has_tokens:
            notes.append(
                f"{store.name} does not say which model its tokens are of, so they are shown as numbers; "
                "--model names it"
            )
        return TokenNumbers(), None, notes
    from ...extract.language_model import (
        LanguageModel,
        load_tokenizer,
    )  # transformers takes seconds to import
    from ...extract.model_source import find_model
    from ...extract.tokens import TokenTexts, Unembedding

    if model is None:
        try:
            return TokenTexts(load_tokenizer(find_model(str(named)))), None, notes
        except ModelError as error:
            return TokenNumbers(), None, [*notes, f"no tokenizer ({error}): showing token ids"]
    place = find_model(model, recorded_revision(model, [named]))
    width = one.sae.W_dec[:1, one.sae.places[-1]].shape[1]
    if place.d_model != width:
        raise ConfigError(
            f"{one.subject.name} cannot be read through {model}: expected a model of width {width}, got "
            f"{place.d_model}; name the model that the rows came from"
        )
    if named is not None and named != place.spec:
        notes.append(f"{store.name} came from {named}, and is read through {place.spec}")
    loaded = LanguageModel(place, one.sae.W_enc.device, head=True)
    unembedding = Unembedding(loaded)
    return TokenTexts(loaded.tokenizer), unembedding, notes


MOST_PAGES = 4096  # written by default
MOST_EXAMPLES = 100  # texts per latent
NEIGHBOURS, OUTPUT_TOKENS = 10, 10
SAMPLES = 15  # texts per latent chosen at random, three for each fifth by strength


def report(
    sae: SAELike,
    out: str | Path,
    data: RowsLike = None,
    *,
    target: str | None = None,
    split: Which = "all",
    latents: str | Sequence[int] | None = None,
    top: int | None = None,
    model: str | None = None,
    model_revision: str | None = None,
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
        latents: those with a page of their own: `all`, numbers, or a text such as `0,5,10-19`; None for the `top` most
            frequent, by default 4,096.
        model: hub id, folder or GGUF file of the rows' language model, to show the tokens that each latent promotes.
        model_revision: its branch, tag or commit on the hub; None for the one that the rows came from.
        examples: strongest texts per latent, 1 to 100.
        neuronpedia: Neuronpedia's name of the SAE, `MODEL/SOURCE`, to link to its pages; None to look it up.
        overwrite: whether an earlier report in `out` is replaced, once the new one is whole.
    """
    folder, listener = Path(out), listening(progress)
    _check_out(folder, overwrite)
    neuronpedia_url("", neuronpedia)
    if latents is not None and top is not None:
        raise ConfigError("cannot use both --latents and --top; leave one of them out")
    demand_at_least("top", top)
    if model is None and model_revision is not None:
        raise ConfigError("--model-revision does nothing without --model; leave it out")
    if not 1 <= examples <= MOST_EXAMPLES:
        raise ConfigError(f"--examples must be from 1 to {MOST_EXAMPLES}, got {examples}")
    one = open_measured(Home.at(home), sae, data, split, device, listener, target)
    chosen = None if latents is None else _numbers(latents, one)
    d_sae, has_tokens = one.sae.d_sae, set(COLUMNS) <= set(one.store.meta.columns)
    texts, unembedding, notes = _words(
        one, model and at_revision(model, model_revision), has_tokens
    )
    gathered = (
        Examples(chosen or range(d_sae), d_sae, examples, has_tokens),
        Examples(chosen or range(d_sae), d_sae, SAMPLES, has_tokens, at_random),
    )
    found = survey(
        one.sae,
        in_blocks(one.inputs(listener), one.of_store, one.batch_rows),
        one.of_store.rows,
        *gathered,
    )
    if chosen is None:
        chosen = sorted(
            found.firing.frequency.argsort(descending=True, stable=True)[
                : top or MOST_PAGES
            ].tolist()
        )
    places = places_document(one, listener)
    details = _details(one, found, chosen, texts, unembedding, places, listener)
    holds_out = one.store.split("train", seed=one.subject.split_seed).rows < one.store.rows
    (measures,) = evaluate_all([held_out(one) if holds_out else one], None, None, listener)
    if not holds_out:
        notes.append(
            f"{one.store.name} holds out no rows, so FVU, L0 and cosine are of {one.split} rows"
        )
    if massive := doubts(measures, one.sae.d_in, d_sae).get("massive"):
        notes.append(f"of {counted(measures['rows'], 'held-out row')}, {massive}")
    if len(chosen) < d_sae:
        notes.append(f"{len(chosen):,} of {d_sae:,} latents have pages of their own")
    curves = [] if one.subject.folder is None else read_metrics(one.subject.folder)
    content = overview(
        _heading(one, neuronpedia), measures, found, curves, _facts(one, places), notes
    )
    content["latents"] |= details.columns()
    with listener.progress("writing", len(chosen), "latents") as show:
        write_pages(
            folder, f"{one.subject.name}: latents", content, details.contents(show), overwrite
        )
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        **one.heading,
        "path": str(folder),
        "index": str(folder / INDEX),
        "latents": d_sae,
        "pages": len(chosen),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "index_bytes": (folder / INDEX).stat().st_size,
        "measures": content["measures"],
        "firing": content["firing"],
        "notes": notes,
    }


def _check_out(folder: Path, overwrite: bool) -> None:
    """Refuse a folder in use, unless it holds a report alone that may be replaced."""
    if is_free(folder):
        return
    if not _is_report(folder):
        got, remedy = "one in use", "name another"
    elif not overwrite:
        got, remedy = "an earlier report", "name another, or replace it by --overwrite"
    else:
        return
    raise ConfigError(
        f"cannot write to {folder}: expected an empty or a new folder, got {got}; {remedy}"
    )


def _is_report(folder: Path) -> bool:
    """Whether a folder holds what `write_pages` wrote, and nothing else."""
    index = folder / INDEX
    if not index.is_file() or {path.name for path in folder.iterdir()} != {INDEX, DETAILS}:
        return False
    with index.open("rb") as page:
        if MADE_HERE.encode() not in page.read(HEAD_BYTES):
            return False
    return all(re.fullmatch(r"\d{5}\.js", path.name) for path in (folder / DETAILS).iterdir())


def _numbers(chosen: str | Sequence[int], one: Measured) -> list[int]:
    """The chosen latents, ascending; see `report`."""
    d_sae, text = one.sae.d_sae, chosen if isinstance(chosen, str) else ",".join(map(str, chosen))
    if text == "all":
        return list(range(d_sae))
    found: set[int] = set()
    for word in text.split(","):
        ends = [end.strip() for end in word.split("-")]
        if (
            len(ends) > 2
            or not all(end.isdecimal() for end in ends)
            or int(ends[0]) > int(ends[-1])
        ):
            raise ConfigError(
                f"--latents must be all, or numbers and ranges such as 0,5,10-19, got {text!r}"
            )
        if int(ends[-1]) >= d_sae:
            raise ConfigError(
                f"--latents names latent {ends[-1]}, but {one.subject.name} has {d_sae:,}, counted from "
                "0; choose lower numbers"
            )
        found.update(range(int(ends[0]), int(ends[-1]) + 1))
    return sorted(found)


def _details(
    one: Measured,
    found: Survey,
    chosen: list[int],
    texts: "Tokens",
    unembedding: "Unembedding | None",
    places: Mapping[str, Any],
    listener: Listener,
) -> Details:
    W_dec, numbers = one.sae.W_dec, torch.tensor(chosen, device=one.sae.W_dec.device)
    with listener.progress("comparing latents", len(chosen), "latents") as show:
        near = neighbours(W_dec, numbers, NEIGHBOURS, show)
    with listener.progress("counting pairs", len(chosen), "latents") as show:
        partners = found.cofiring.partners(numbers, NEIGHBOURS, show)
    outputs: OutputTokens | None = None
    if unembedding is not None:
        with listener.progress("reading off output tokens", len(chosen), "latents") as show:
            last = W_dec[:, one.sae.places[-1]]  # of a crosscoder, at its last hook point
            outputs = unembedding.output_tokens(last[numbers], OUTPUT_TOKENS, show)
    features = None
    if (alignment := one.alignment()) is not None:
        nearest = alignment.nearest[chosen]
        features = nearest, alignment.cosines[chosen, nearest]
    return Details(found, chosen, near, partners, texts, outputs, features, places)


def _heading(one: Measured, neuronpedia: str | None) -> dict[str, Any]:
    sae, source = one.sae, one.saved.origin | one.store.meta.source
    if inputs := one.stores.origin.get("inputs"):  # of a crosscoder, in the place of the first's
        source = {
            "model": " + ".join(
                f"{each['site']} of layer {each['layer']} of "
                + Path(each.get("model", source.get("model"))).name
                for each in inputs
            )
        }
    return {
        **one.heading,
        "neuronpedia": neuronpedia_url(one.subject.name, neuronpedia),
        "activation": sae.activation.name,
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        **{
            name: source[name]
            for name in ("model", "layer", "site")
            if source.get(name) is not None
        },
    }


def _facts(one: Measured, places: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Settings by section and name."""
    store, folder, activation = one.store, one.subject.folder, one.sae.activation
    found: dict[str, Mapping[str, Any]] = {
        "activation": {"name": activation.name, **activation.to_json()}
    }
    if folder is not None and (folder / RUN_MARKER).is_file():
        run = read_run(folder / RUN_MARKER).settings
        found |= {
            "training": run["training"],
            "solver": run["solver"],
            "at the end of training": (run.get("result") or {}).get("final", {}),
        }
    shape = {"name": store.name, "rows": store.rows, "d_in": store.d_in, "dtype": store.dtype}
    if places:
        found["places"] = {
            "latents shared by all": places["shared"],
            **{
                place["name"]: f"FVU {place['fvu']:.4g}, {place['exclusive']} latents of its own"
                for place in places["places"]
            },
        }
    return found | {"store": shape | store.meta.source}
