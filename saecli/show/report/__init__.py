"""A report on an SAE's latents as HTML pages: `pages.py` fills them with what `measure.report` finds.

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
from typing import Any

from ...base.console import Listener, listening
from ...base.errors import ConfigError
from ...base.files import folder_appearing_whole, folder_bytes, is_free, storable
from ...base.home import Home
from ...base.words import demand_at_least
from ...measure.latents import chosen_latents
from ...measure.measured import ChosenRows, RowsLike
from ...measure.report import MOST_PAGES, most_frequent, report_latents
from ...model.choice import ModelLike, model_given
from ...sae.library import SAELike
from ...store.split import Which
from .pages import LatentPages, overview

MOST_EXAMPLES = 100  # texts per latent
INDEX, DETAILS = "index.html", "latents"
NEURONPEDIA_NAME = r"[\w.-]+/[\w.-]+"
REPORT_SCRIPTS = ("dom.js", "charts.js", "table.js", "texts.js", "latent.js", "main.js")
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
    """Write `overview` and `LatentPages.files` to a folder, new or empty unless `overwrite`, which appears whole."""
    with folder_appearing_whole(folder, overwrite) as temporary:
        (temporary / DETAILS).mkdir()
        for number, content in enumerate(details):
            script = f"saeLatents({number},{as_script(content)});\n"
            (temporary / DETAILS / f"{number:05}.js").write_text(script, encoding="utf-8")
        page = page_of("report", title, REPORT_SCRIPTS, overview)
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
    _demand_sound(folder, latents, count, examples, neuronpedia, overwrite)
    run = ChosenRows(Home.at(home), data, split, device, listener, target).with_sae(sae)
    d_sae, name = run.sae.d_sae, run.subject.name
    if latents is not None:
        chosen = sorted(chosen_latents(latents, d_sae, name))
    else:
        chosen = most_frequent(run, count or MOST_PAGES, listener)
    found = report_latents(run, chosen, model_given(model, tokenizer), examples, listener)
    pages = LatentPages(found)
    content = overview(found, pages, neuronpedia)
    with listener.progress("writing", len(chosen), "latents") as show:
        write_pages(folder, f"{name}: latents", content, pages.files(show), overwrite)
    return {
        **run.heading,
        "path": str(folder),
        "index": str(folder / INDEX),
        "latents": d_sae,
        "pages": len(chosen),
        "files": sum(path.is_file() for path in folder.rglob("*")),
        "bytes": folder_bytes(folder),
        "index_bytes": (folder / INDEX).stat().st_size,
        "measures": found.measures,
        "firing": content["firing"],
        "notes": found.notes,
    }


def _demand_sound(
    folder: Path,
    latents: int | Sequence[int] | None,
    count: int | None,
    examples: int,
    neuronpedia: str | None,
    overwrite: bool,
) -> None:
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
