"""A report on an SAE's latents as HTML pages, filled by `pages.py`.

`index.html` holds style, script and the overview; `latents/00000.js` and on the latents' pages, each file a call of the
script's function `saeLatents`: a page opened from disk may run scripts next to it, but not read files.
"""

import html
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ...base.console import Listener
from ...base.errors import ConfigError
from ...base.files import folder_appearing_whole, folder_bytes, is_free, to_json
from ...measure.report import LatentReport
from .pages import LatentPages, overview

INDEX, DETAILS = "index.html", "latents"
NEURONPEDIA_NAME = r"[\w.-]+/[\w.-]+"
REPORT_SCRIPTS = ("dom.js", "charts.js", "table.js", "texts.js", "latent.js", "main.js")
# Could end a script or begin a comment in it; the last two are line ends to older browsers.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_script(document: Any) -> str:
    """A document as JSON that is also a JavaScript expression, safe inside a script element."""
    text = to_json(document, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: UNSAFE[match[0]], text)


def write_pages(
    folder: Path,
    title: str,
    overview: dict[str, Any],
    details: Iterable[dict[str, Any]],
    overwrite: bool = False,
) -> None:
    """Write a folder, new or empty unless `overwrite`, which appears whole."""
    with folder_appearing_whole(folder, overwrite) as temporary:
        (temporary / DETAILS).mkdir()
        for number, content in enumerate(details):
            script = f"saeLatents({number},{as_script(content)});\n"
            (temporary / DETAILS / f"{number:05}.js").write_text(script, encoding="utf-8")
        page = page_of("report", title, REPORT_SCRIPTS, overview)
        (temporary / INDEX).write_text(page, encoding="utf-8")


def page_of(command: str, title: str, scripts: Iterable[str], data: Any) -> str:
    """A page of a command with everything in it: style, scripts, and the data that they draw."""
    return Template(_asset(INDEX)).substitute(
        command=command,
        title=html.escape(title),
        style=_asset("style.css"),
        script="\n".join(map(_asset, scripts)),
        data=as_script(data),
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def write_report(
    found: LatentReport, folder: Path, neuronpedia: str | None, overwrite: bool, listener: Listener
) -> dict[str, Any]:
    run, count = found.run, len(found.chosen)
    pages = LatentPages(found)
    content = overview(found, pages, neuronpedia)
    with listener.progress("writing", count, "latents") as show:
        title = f"{run.subject.name}: latents"
        write_pages(folder, title, content, pages.files(show), overwrite)
    return {
        **run.heading,
        "path": str(folder),
        "index": str(folder / INDEX),
        "latents": run.sae.d_sae,
        "pages": count,
        "files": sum(path.is_file() for path in folder.rglob("*")),
        "bytes": folder_bytes(folder),
        "index_bytes": (folder / INDEX).stat().st_size,
        "measures": found.measures,
        "firing": content["firing"],
        "notes": found.notes,
    }


def demand_sound(folder: Path, neuronpedia: str | None, overwrite: bool) -> None:
    """ConfigError for a folder that holds anything but a report to overwrite, or a name that is none."""
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
