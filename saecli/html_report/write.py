"""Pages as files: data made safe inside scripts, and a folder that appears whole.

`index.html` holds style, script and the overview. The latents' pages lie in `latents/00000.js` and on, some latents a
file, each a call of the function `saeLatents` that the script defines: a browser that opens a page from disk may run
scripts beside it, while it refuses to read files.
"""

import html
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import folder_appearing_whole, storable

INDEX, DETAILS = "index.html", "latents"
SCRIPTS = ("dom.js", "charts.js", "table.js", "latent.js", "main.js")
# What could end a script or begin a comment in it, and what older browsers take for the end of a line.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def as_script(document: Any) -> str:
    """A document as JSON that is a JavaScript expression too, and safe inside a script element of a page."""
    text = json.dumps(storable(document), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: UNSAFE[match[0]], text)


def write_pages(folder: Path, title: str, overview: dict[str, Any], details: Iterable[dict[str, Any]]) -> None:
    """Write a report; the folder appears whole or not at all.

    Args:
        folder: does not exist yet, or is empty; its parents are made.
        title: what the browser shows as the page's name.
        overview: what the first page tells; see `overview.overview`.
        details: of some latents each; see `details.Details`.
    """
    with folder_appearing_whole(folder) as temporary:
        (temporary / DETAILS).mkdir()
        for number, content in enumerate(details):
            (temporary / DETAILS / f"{number:05}.js").write_text(f"saeLatents({number},{as_script(content)});\n",
                                                                 encoding="utf-8")
        (temporary / INDEX).write_text(_index(title, overview), encoding="utf-8")


def _index(title: str, overview: dict[str, Any]) -> str:
    assets = files(__package__) / "assets"
    parts = {"title": html.escape(title), "style": (assets / "style.css").read_text(encoding="utf-8"),
             "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
             "data": as_script(overview)}
    template = (assets / "index.html").read_text(encoding="utf-8")
    # In one go, so that nothing in a part is taken for a mark.
    return re.sub(r"\{\{ (\w+) \}\}", lambda mark: parts[mark[1]], template)
