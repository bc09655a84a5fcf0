"""A report on an SAE's latents as HTML pages.

`index.html` holds style, script and the overview; `latents/00000.js` and on the latents' pages, each file a call of the
script's function `saeLatents`: a page opened from disk may run scripts next to it, but not read files.

Shapes: F = d_sae, C chosen latents, N examples, T tokens.
"""

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from torch import Tensor

from ...base.console import Listener
from ...base.errors import ConfigError
from ...base.files import folder_appearing_whole, folder_bytes, is_free, to_json
from ...extract.texts import ROLES
from ...measure.latents import NOT_STORED, LatentSurvey, bin_edges
from ...measure.measured import Measured
from ...measure.report import (
    FEWEST_ROWS,
    LatentReport,
    ReportContext,
    interest,
    peak_agreement,
)
from ...model.tokenizer import characters
from ...sae.metrics import DENSE_FREQUENCY
from ...store.origin import without_folders
from ..measures import curve, frequency_edges, l0_bins

INDEX, DETAILS = "index.html", "latents"
NEURONPEDIA_NAME = r"[\w.-]+/[\w.-]+"
LATENT_SCRIPTS = ("dom.js", "charts.js", "table.js", "texts.js", "latent.js", "latents.js")
REPORT_SCRIPTS = (*LATENT_SCRIPTS, "report.js")
# Could end a script or begin a comment in it; the last two are line ends to older browsers.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
L0_BINS = 40
PER_FILE = 16  # latents per file of about 60 KB
LEVELS = 1000  # an excerpt's codes are rounded to thousandths of the latent's largest
SNIPPET_BEFORE, SNIPPET_AFTER = 40, 24  # letters about the peak in the table
SHORT = 24  # letters of a token in the table
LISTED_TOKENS = 4


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
        policy="default-src 'none'; script-src 'unsafe-inline' 'self' file:; style-src 'unsafe-inline'; img-src data:",
        style=f"<style>\n{style_sheet()}\n</style>",
        script=f"<script>\n{script_of(scripts)}\n</script>",
        data=as_script(data),
    )


def live_page(command: str, title: str) -> str:
    """A page whose style and script the server has, and whose answers."""
    return Template(_asset(INDEX)).substitute(
        command=command,
        title=html.escape(title),
        policy="default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'",
        style='<link rel="stylesheet" href="style.css">',
        script='<script src="app.js"></script>',
        data=as_script(None),
    )


def script_of(scripts: Iterable[str]) -> str:
    inner = "\n".join(map(_asset, scripts))
    return f'"use strict";\n(() => {{\n{inner}\n}})();'


def style_sheet() -> str:
    return _asset("style.css")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def write_report(
    found: LatentReport, folder: Path, neuronpedia: str | None, overwrite: bool, listener: Listener
) -> dict[str, Any]:
    run, count = found.context.run, len(found.chosen)
    pages = LatentPages(found)
    content = overview(found.context, found.survey, pages.columns(), neuronpedia)
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
        "measures": found.context.measures,
        "firing": content["firing"],
        "notes": found.context.notes,
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


def overview(
    context: ReportContext,
    survey: LatentSurvey,
    columns: dict[str, Any],
    neuronpedia: str | None = None,
) -> dict[str, Any]:
    """The first page's content; `columns` are the table's, `neuronpedia` is the SAE's name there."""
    d_sae = context.run.sae.d_sae
    firing = survey.firing.result()
    frequency = np.array(firing.pop("frequency"))
    latents = {
        "frequency": rounded(frequency),
        "mean": rounded(survey.magnitudes.means),
        "largest": rounded(survey.magnitudes.largest),
        **columns,
    }
    known: dict[str, dict[int, Any]] = {
        "label": context.labels,
        "score": context.scores,
        "verdict": context.verdicts,
    }
    for name, of_latents in known.items():
        if of_latents:
            latents[name] = [of_latents.get(latent) for latent in range(d_sae)]
    return {
        "heading": _heading(context.run, neuronpedia),
        "measures": context.measures,
        "firing": firing,
        "notes": context.notes,
        "dense": DENSE_FREQUENCY,
        "fewest": FEWEST_ROWS,
        "l0": _bins(*l0_bins(survey.firing.l0_histogram.numpy(), L0_BINS)),
        "frequency": _bins(*np.histogram(frequency[frequency > 0], frequency_edges(frequency))),
        "edges": bin_edges().tolist(),
        "latents": latents,
        "training": {  # FVU by step
            name: [point for point in curve(context.logged, f"{of}_fvu") if point[1] > 0]
            for name, of in (("batches", "batch"), ("held_out", "test"))
        },
    }


def _heading(run: Measured, neuronpedia: str | None) -> dict[str, Any]:
    sae, stored = run.sae, run.stores.origin
    source = run.saved.origin.to_json() | run.store.meta.origin.to_json()
    if len(stored.read) > 1:  # of a crosscoder, in the place of the first's
        names = [
            f"{point} of {Path(stored.models[point.model].name).name}" for point in stored.read
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


def rounded(values: np.ndarray | Tensor) -> list[float]:
    """Numbers to four significant digits, which keeps files small."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def _bins(counts: np.ndarray, edges: np.ndarray) -> dict[str, list[float]]:
    return {"edges": edges.tolist(), "counts": counts.tolist()}


class LatentPages:
    """The content of the latents' files, and of their columns in the table."""

    def __init__(self, report: LatentReport) -> None:
        context = report.context
        self._report, self._texts, self._places = report, context.texts, context.places
        self._histograms = report.survey.magnitudes.histograms  # on the CPU
        self._alignment = context.run.alignment()

    @cached_property
    def _columns(self) -> dict[str, dict[str, Any]]:
        survey, chosen = self._report.survey, self._report.chosen
        return {"examples": survey.examples.of(chosen), "samples": survey.samples.of(chosen)}

    def _rows(self, group: str, index: int) -> list[dict[str, Any]]:
        columns = {name: values[index] for name, values in self._columns[group].items()}
        count = int((columns["rank"] > 0).sum())
        return [{name: values[at] for name, values in columns.items()} for at in range(count)]

    def files(self, show: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Each file's content in turn; `show` is called with the number of latents done."""
        for begin in range(0, len(self._report.chosen), PER_FILE):
            end = min(begin + PER_FILE, len(self._report.chosen))
            strings: dict[str, int] = {}
            pages = [self._page(index, strings) for index in range(begin, end)]
            yield {"latents": pages, "strings": list(strings)}
            show(end)

    def columns(self) -> dict[str, Any]:
        """For the chosen latents: interest, tokens at the peaks of examples, a snippet of the best, tokens promoted."""
        chosen = list(self._report.chosen)
        columns: dict[str, Any] = {"chosen": chosen, "per_file": PER_FILE}
        alike = [0.0] * len(chosen)
        if "token" in self._columns["examples"]:
            examples = [self._rows("examples", index) for index in range(len(chosen))]
            peaks = [
                [self._texts[int(row["token"][row["peak"]])] for row in rows] for rows in examples
            ]
            alike = list(map(peak_agreement, peaks))
            columns["tokens"] = [
                [text for text, _ in Counter(map(_short, texts)).most_common(LISTED_TOKENS)]
                for texts in peaks
            ]
            columns["snippets"] = [self._snippet(rows[0]) if rows else [] for rows in examples]
        firing, sizes = self._report.survey.firing, self._report.survey.magnitudes
        figures = (
            values[chosen].tolist() for values in (firing.frequency, sizes.means, sizes.largest)
        )
        columns["interest"] = [
            round(interest(frequency, firing.rows, mean, largest, fraction), 3)
            for frequency, mean, largest, fraction in zip(*figures, alike, strict=True)
        ]
        if self._places:
            names = list(dict.fromkeys(self._places["class"]))
            columns["classes"] = names
            columns["class"] = [names.index(name) for name in self._places["class"]]
            columns["nu"] = self._places["nu_error"]
        if self._report.outputs is not None:
            columns["promoted"] = [
                [_short(self._texts[token]) for token in tokens[:LISTED_TOKENS]]
                for tokens in self._report.outputs.promoted.tolist()
            ]
        return columns

    def _page(self, index: int, strings: dict[str, int]) -> dict[str, Any]:
        latent = self._report.chosen[index]
        histogram = self._histograms[latent]
        present = np.flatnonzero(histogram)
        low, high = (int(present[0]), int(present[-1]) + 1) if len(present) else (0, 0)
        cosines, neighbours = (values[index] for values in self._report.neighbours)
        phis, partners = (values[index] for values in self._report.partners)
        together = zip(partners.tolist(), rounded(phis), strict=True)
        scale = float(self._report.survey.magnitudes.largest[latent]) / LEVELS
        page = {
            "latent": latent,
            "low": low,
            "counts": histogram[low:high].tolist(),
            "neighbours": list(zip(neighbours.tolist(), rounded(cosines), strict=True)),
            "together": [(partner, phi) for partner, phi in together if phi],
            "scale": scale,
        }
        for group in self._columns:
            rows = self._rows(group, index)
            page[group] = [self._example(row, scale, strings) for row in rows]
        if (sums := self._report.survey.by_role[:, latent]).any():
            page["roles"] = list(zip(ROLES, rounded(sums / sums.sum()), strict=True))
        if self._alignment is not None:
            feature = int(self._alignment.nearest[latent])
            page["feature"] = [feature, *rounded(self._alignment.cosines[latent, [feature]])]
        if self._places:
            names = [place["name"] for place in self._places["places"]]
            fractions, scaling = (self._places[name][latent] for name in ("share", "scaling"))
            page["places"] = list(zip(names, fractions, scaling, strict=True))
        if self._report.outputs is not None:
            page["logits"] = self._report.outputs.counts[index].tolist()
            for name in ("promoted", "suppressed"):
                tokens, logits = (
                    getattr(self._report.outputs, column)[index]
                    for column in (name, f"{name}_logits")
                )
                texts = [self._texts[token] for token in tokens.tolist()]
                page[name] = list(zip(texts, rounded(logits), strict=True))
        return page

    def _example(
        self, row: Mapping[str, Any], scale: float, strings: dict[str, int]
    ) -> dict[str, Any]:
        """Code and row; with tokens also pieces of the excerpt as indices into `strings`, number and code, in units of
        `scale`, of those where it fires."""
        if "token" not in row:
            return {"code": float(row["code"][0]), "row": int(row["number"])}
        length = int((row["token"] >= 0).sum())
        codes = np.rint(row["code"] / scale).astype(int)[:length]
        pieces = characters(self._texts, row["token"][:length].tolist())
        begins = np.cumsum([0, *(count for _, count in pieces[:-1])])
        shown = [max(part.tolist(), key=abs) for part in np.split(codes, begins[1:])]
        roles = row["role"][begins].astype(int) if "role" in row else np.empty(0, int)
        changes = [
            [at, "not stored" if roles[at] == NOT_STORED else ROLES[roles[at]]]
            for at in np.flatnonzero(np.diff(roles, prepend=-1)).tolist()
        ]
        return {
            "code": float(row["code"][row["peak"]]),
            "row": int(row["number"]),
            "document": int(row["document"]),
            "position": int(row["position"]),
            "peak": int(np.searchsorted(begins, row["peak"], side="right")) - 1,
            "fires": [number for at, code in enumerate(shown) if code for number in (at, code)],
            "tokens": [strings.setdefault(text, len(strings)) for text, _ in pieces],
            "roles": changes,
        }

    def _snippet(self, row: Mapping[str, Any]) -> list[str]:
        tokens, peak = row["token"][row["token"] >= 0].tolist(), int(row["peak"])
        parts = tokens[:peak], tokens[peak : peak + 1], tokens[peak + 1 :]
        before, at, after = map(self._texts.joined, parts)
        backwards = _shortened(before[::-1], SNIPPET_BEFORE)
        return [backwards[::-1], _short(at), _shortened(after, SNIPPET_AFTER)]


def _shortened(text: str, length: int) -> str:
    """A text's first letters, to the end of a word if one ends there."""
    if len(text) <= length:
        return text
    words = re.match(r"(?s).*(?=\s)", text[: length + 1])
    return f"{words[0] if words and words[0].strip() else text[:length]}…"


def _short(text: str) -> str:
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"
