"""What `sae read` shows of `measure.read`'s document: tables, a text coloured by a latent, a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from ..base.errors import counted, number, printable
from ..base.files import appearing_whole
from .report import page_of
from .tables import table

SCRIPTS = ("dom.js", "prompt.js")
TOKENS_LISTED, TOKEN_WIDTH = 200, 18
PALE, HOT, COLD = (255, 244, 214), (240, 160, 0), (88, 180, 232)  # as in the pages


def _alone(text: str) -> str:
    """A token that stands alone: spaces at its ends and letters that are not printable can be seen."""
    inner = text.strip(" ")
    spaces = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    if not inner:
        return "␣" * len(text) or "·"  # a further part of the character before
    return "␣" * spaces[0] + printable(inner) + "␣" * spaces[1]


def _at(document: Mapping[str, Any]) -> str:
    points = document.get("inputs", [document])
    return " and ".join(f"layer {point['layer']}, {point['site']}" for point in points)


def _heading(document: Mapping[str, Any]) -> str:
    tokens = document["tokens"]
    left_out = sum(token["special"] for token in tokens)
    return (
        f"{document['run']} in {document['model']}, {_at(document)}: {counted(len(tokens), 'token')}, "
        f"{left_out:,} without codes (special, or the first of a window)"
    )


def _frequency(latent: Mapping[str, Any], rows: int | None) -> str | None:
    frequency = latent["frequency"]
    if frequency is None or rows is None:
        return None
    return f"{100 * frequency:.2g}%" if frequency else f"< {100 / rows:.1g}%"


def _code(code: float) -> str:
    return f"{code:.3g}"


def prompt_tables(document: Mapping[str, Any]) -> list[RenderableType]:
    """Each token's strongest latents, a line each; then those of the whole text, or that differ most between two."""
    shown: list[RenderableType] = [
        Text(_heading(document), style="bold"),
        _TokenLines(document["tokens"]),
        "",
    ]
    if document["compare"] is None:
        return [*shown, _strongest(document)]
    return [*shown, _differences(document)]


@dataclass(frozen=True)
class _TokenLines:
    """A line for each token, with its latents and their codes in brackets, as many as fit."""

    tokens: Sequence[Mapping[str, Any]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for position, token in enumerate(self.tokens[:TOKENS_LISTED]):
            line = f"{position:>5}  {set_cell_size(_alone(token['text']), TOKEN_WIDTH)}"
            for entry in token["latents"]:
                entry_words = f"  {entry['latent']} ({_code(entry['code'])})"
                if cell_len(line + entry_words) > options.max_width:
                    break
                line += entry_words
            special = token["special"]
            yield Text(f"{line}  special" if special else line, style="dim" if special else "")
        if (more := len(self.tokens) - TOKENS_LISTED) > 0:
            yield Text(f"and {counted(more, 'more token')}: see --html FILE, or --json")


def _strongest(document: Mapping[str, Any]) -> RenderableType:
    title, rows = "strongest latents", []
    if document["store_rows"] is not None:
        title += f"; firing frequency on {counted(document['store_rows'], 'row')} of the store"
    for latent in document["latents"]:
        where = [_place(latent), latent["position"], latent["fires_on"]]
        rows.append([latent["code"], *where, _frequency(latent, document["store_rows"])])
    heads = ["largest code", "at", "position", "tokens", "in the store"]
    return _by_latent(title, heads, document["latents"], rows)


def _differences(document: Mapping[str, Any]) -> RenderableType:
    rows, latents = [], document["compare"]["latents"]
    for latent in latents:
        here, there = latent["here"], latent["there"]
        codes = [latent["difference"], here["code"], _place(here), there["code"], _place(there)]
        rows.append([*codes, _frequency(latent, document["store_rows"])])
    heads = ["difference", "largest code", "at", "with --compare", "at", "in the store"]
    title = "latents whose largest codes differ most between the two texts"
    return _by_latent(title, heads, latents, rows)


def _place(part: Mapping[str, Any]) -> str:
    return "-" if part["token"] is None else _alone(part["token"])


def _by_latent(
    title: str,
    heads: Sequence[str],
    latents: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[Any]],
) -> RenderableType:
    """A table with a row for each latent, after its number its label if one of them has any."""
    lines = [[str(latent["latent"]), *row] for latent, row in zip(latents, rows, strict=True)]
    if not any(latent["label"] for latent in latents):
        return table(title, ["latent", *heads], lines)
    for latent, line in zip(latents, lines, strict=True):
        line.insert(1, latent["label"] or "-")
    return table(title, ["latent", "label", *heads], lines)


def coloured(document: Mapping[str, Any]) -> list[RenderableType]:
    """Each text with the tokens on which the first latent fires coloured by its code."""
    (latent,) = document["latents"][:1]
    texts = [(document["tokens"], latent)]
    if document["compare"] is not None:
        texts.append((document["compare"]["tokens"], document["compare"]["latents"][0]["there"]))
    largest = max(abs(part["code"]) for _, part in texts)
    shown: list[RenderableType] = [Text(_heading(document), style="bold")]
    for tokens, part in texts:
        codes = dict(zip(part["positions"], part["codes"], strict=True))
        fires = "does not fire"
        if codes:
            fires = (
                f"fires on {counted(len(codes), 'token')}, its largest code {number(part['code'])} at "
                f"{_alone(part['token'])} ({part['position']})"
            )
        shown += [f"\nlatent {latent['latent']} {fires}", ColouredText(tokens, codes, largest)]
    return shown


@dataclass(frozen=True)
class ColouredText:
    """A text, each token's background by its code; without colours, its code beside it in brackets."""

    tokens: Sequence[Mapping[str, Any]]
    codes: Mapping[int, float]  # by position
    largest: float  # of full colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = console.color_system is None or console.no_color
        yield Text.assemble(*self._parts(plain), overflow="fold")

    def _parts(self, plain: bool) -> Iterator[tuple[str, str | Style]]:
        for position, token in enumerate(self.tokens):
            code = self.codes.get(position, 0.0)
            lines = token["text"].split("\n")
            words = "↵\n".join(map(printable, lines))
            if not code:
                yield words, "dim" if token["special"] else ""
            elif plain:
                yield f"[{words}|{_code(code)}]", ""
            else:
                yield words or "·", self._style(code)

    def _style(self, code: float) -> Style:
        fraction = min(1.0, abs(code) / self.largest)
        hot = HOT if code > 0 else COLD
        mixed = (low + fraction * (high - low) for low, high in zip(PALE, hot, strict=True))
        return Style(color="black", bgcolor=Color.from_rgb(*mixed))


def write_prompt_page(path: Path, document: Mapping[str, Any]) -> None:
    """A page of a document whose latents are those listed, or chosen; it holds all that it shows."""
    with appearing_whole(path) as temporary:
        title = f"{document['run']}: a prompt"
        temporary.write_text(page_of("read", title, SCRIPTS, page_data(document)), encoding="utf-8")


def page_data(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's script draws: texts, a list of tokens each, and latents, with a part for each text."""
    texts, latents = [document["tokens"]], []
    compared = document["compare"]
    if compared is None:
        listed = [(latent, [latent]) for latent in document["latents"]]
    else:
        texts.append(compared["tokens"])
        listed = [(latent, [latent["here"], latent["there"]]) for latent in compared["latents"]]
    for latent, parts in listed:
        line = {name: latent[name] for name in ("latent", "label")}
        line["store"] = _frequency(latent, document["store_rows"])
        line["parts"] = [
            {
                **{name: part[name] for name in ("position", "token", "fires_on")},
                "code": float(_code(part["code"])),
                "fires": [
                    [position, float(_code(code))]
                    for position, code in zip(part["positions"], part["codes"], strict=True)
                ],
            }
            for part in parts
        ]
        latents.append(line)
    return {
        "heading": [document["model"], _at(document)],
        "run": document["run"],
        "store_rows": document["store_rows"],
        "texts": [[_page_token(token) for token in tokens] for tokens in texts],
        "latents": latents,
    }


def _page_token(token: Mapping[str, Any]) -> list[Any]:
    entries = [[entry["latent"], float(_code(entry["code"]))] for entry in token["latents"]]
    return [token["text"], token["special"], token["role"], entries]
