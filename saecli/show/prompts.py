"""What `sae read` shows of `measure.read`'s document: tables, a text coloured by a latent, why a token, a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from ..base.files import appearing_whole
from ..base.words import counted, number, printable
from ..store.origin import point_words, without_folders
from .measures import UNTRIED, VERDICT, labelled, unless_untried, verdict_words
from .report import page_of
from .tables import JsonObject, table

READING_SCRIPTS = ("dom.js", "reading.js", "read.js")
TOKENS_LISTED, PEAKS_LISTED, TOKEN_WIDTH = 200, 10, 18
PALE, HOT, COLD = (255, 244, 214), (240, 160, 0), (88, 180, 232)  # as in the pages


def write_prompt_page(path: Path, document: JsonObject) -> None:
    shown = {**document, "model": without_folders(document["model"])}
    page = page_of("read", f"{document['run']}: a prompt", READING_SCRIPTS, shown)
    with appearing_whole(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def prompt_tables(document: JsonObject) -> list[RenderableType]:
    """Each token's strongest latents; then the whole text's, or the ones that differ most between two."""
    tokens, rows, part = document["tokens"], document["store_rows"], document["compare"]
    lines = [_token_line(position, token) for position, token in enumerate(tokens[:TOKENS_LISTED])]
    if (more := len(tokens) - TOKENS_LISTED) > 0:
        lines.append(Text(f"and {counted(more, 'more token')}: see --html FILE, or --json"))
    title, heads = "strongest latents", ["largest code", "at", "position", "tokens"]
    if part is not None:
        title = "latents whose largest codes differ most between the two texts"
        heads = ["difference", "largest code", "at", "with --compare", "at"]
    cells = []
    for latent in (part or document)["latents"]:
        name = labelled(latent["latent"], latent["label"])
        frequency = _percent(latent["frequency"], rows)
        cells.append([name, *_cells(latent), frequency, verdict_words(latent["verdict"])])
    in_store = "in the store" if rows is None else f"in {rows:,} rows of the store"
    heads = ["latent", *heads, in_store, VERDICT]
    return [_heading(document), *lines, "", table(title, *unless_untried(heads, cells))]


def _cells(latent: JsonObject) -> list[Any]:
    if "difference" not in latent:
        return [latent["code"], _token(latent), latent["position"], latent["fires_on"]]
    here, there = latent["here"], latent["there"]
    return [latent["difference"], here["code"], _token(here), there["code"], _token(there)]


def _heading(document: JsonObject) -> Text:
    special = sum(token["special"] for token in document["tokens"])
    words = (
        f"{document['run']} in {document['model']}, {_places(document)}: "
        f"{counted(len(document['tokens']), 'token')}, {special:,} without codes (special, or the first)"
    )
    return Text(words, style="bold")


def _places(document: JsonObject) -> str:
    points = document.get("inputs", [document])
    return " and ".join(point_words(point["layer"], point["site"]) for point in points)


def _token_line(position: int, token: JsonObject) -> Text:
    latents = [f"{entry['latent']} ({entry['code']:.3g})" for entry in token["latents"]]
    words = "  ".join(["special"] if token["special"] else latents)
    line = f"{position:>5}  {set_cell_size(_alone(token['text']), TOKEN_WIDTH)}  {words}"
    return Text(line, style="dim" if token["special"] else "", no_wrap=True)


def _alone(text: str) -> str:
    """A token alone: spaces at its ends and unprintable letters can be seen."""
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or "·"  # a further part of the character before
    before, after = text.split(inner)
    return "␣" * len(before) + printable(inner) + "␣" * len(after)


def _token(part: JsonObject) -> str:
    return "-" if part["token"] is None else _alone(part["token"])


def _percent(frequency: float | None, rows: int | None) -> str:
    if frequency is None or rows is None:
        return "-"
    return f"{100 * frequency:.2g}%" if frequency else f"< {100 / rows:.1g}%"


def coloured(document: JsonObject) -> list[RenderableType]:
    latent = document["latents"][0]
    texts = [(document["tokens"], latent)]
    if document["compare"] is not None:
        texts.append((document["compare"]["tokens"], document["compare"]["latents"][0]["there"]))
    largest = max(abs(part["code"]) for _, part in texts)
    shown: list[RenderableType] = [_heading(document)]
    for tokens, part in texts:
        codes = dict(zip(part["positions"], part["codes"], strict=True))
        strongest = sorted(codes, key=lambda position: -abs(codes[position]))[:PEAKS_LISTED]
        peaks = [f"{_alone(tokens[at]['text'])} ({codes[at]:.3g})" for at in strongest]
        words = [f"latent {latent['latent']} fires on {counted(len(codes), 'token')}", *peaks]
        shown += [Text("\n" + ", ".join(words)), ColouredText(tokens, codes, largest)]
    return shown


def why_tables(document: JsonObject) -> list[RenderableType]:
    """The text coloured by attribution to all latents; then each removal, predicted and measured, of each SAE."""
    why, tokens = document["why"], document["tokens"]
    values = {at: token["attribution"] for at, token in enumerate(tokens) if token["attribution"]}
    largest = max((abs(value) for value in values.values()), default=1.0)
    shown: list[RenderableType] = [
        _heading(document),
        Text(f"{_asked(why, tokens)}{_attributed(why)}"),
        Text("\nattributed to all latents, by token:"),
        ColouredText(tokens, values, largest),
        "",
        _removals(document | why, tokens),
    ]
    for other in why["also"]:
        by = Text(f"{other['run']}, {_places(other)}: {_attributed(other)}", style="bold")
        shown += ["", by, _removals(other, tokens)]
    if why["also"]:
        jointly = why["removed"]["jointly"]
        changes = (
            f"predicted {number(jointly['predicted'])}, measured {number(jointly['measured'])}"
        )
        shown += ["", Text(f"without the latents of all these tables at once: {changes}")]
    return shown


def _removals(answer: JsonObject, tokens: Sequence[JsonObject]) -> RenderableType:
    lines = []
    for latent in answer["latents"]:
        name = labelled(latent["latent"], latent["label"])
        frequency = _percent(latent["frequency"], answer["store_rows"])
        verdict = verdict_words(latent["verdict"])
        changes = [latent["predicted"], latent["measured"]]
        lines.append([name, *changes, _most_at(latent, tokens), frequency, verdict])
    names = {
        "together": f"these {len(lines)} together",
        "all": "all latents",
        "error": "reconstruction error",
    }
    for name, words in names.items():
        part = answer["removed"][name]
        lines.append([words, part["predicted"], part["measured"], "-", "-", UNTRIED])
    steps = counted(answer["steps"], "step")
    title = f"its change without a latent: predicted ({steps}), and measured by removal"
    heads = ["removed", "predicted", "measured", "most at", "in the store", VERDICT]
    return table(title, *unless_untried(heads, lines))


def _asked(why: JsonObject, tokens: Sequence[JsonObject]) -> str:
    asked = f"log p({_alone(why['token'])})"
    if why["against"] is not None:
        asked += f" - log p({_alone(why['against'])})"
    return f"{asked} after {_alone(tokens[why['position']]['text'])} is {number(why['value'])}: "


def _attributed(answer: JsonObject) -> str:
    parts = answer["attributed"]
    return (
        f"{number(parts['latents'])} attributed to latents, {number(parts['error'])} to the reconstruction error, "
        f"{number(parts['rest'])} to the rest: bias, special tokens, curvature"
    )


def _most_at(latent: JsonObject, tokens: Sequence[JsonObject]) -> str:
    if not latent["positions"]:
        return "-"
    sizes = [abs(value) for value in latent["attributions"]]
    return _alone(tokens[latent["positions"][sizes.index(max(sizes))]]["text"])


@dataclass(frozen=True)
class ColouredText:
    """Each token's background by its code, or attribution; without colours, the number after it."""

    tokens: Sequence[JsonObject]
    codes: Mapping[int, float]  # by position
    largest: float  # of full colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble(*self._parts(console.color_system is None or console.no_color))

    def _parts(self, plain: bool) -> Iterator[tuple[str, str | Style]]:
        for position, token in enumerate(self.tokens):
            code = self.codes.get(position)
            lines = [printable(line) for line in token["text"].split("\n")]
            if code is None:
                yield "↵\n".join(lines), "dim" if token["special"] else ""
            elif plain:
                yield f"[{'↵'.join(lines) or '·'}|{code:.3g}]" + "\n" * (len(lines) - 1), ""
            else:
                yield "↵\n".join(lines) or "·", self._style(code)

    def _style(self, code: float) -> Style:
        full = HOT if code > 0 else COLD
        fraction = abs(code) / self.largest
        mixed = (low + fraction * (high - low) for low, high in zip(PALE, full, strict=True))
        return Style(color="black", bgcolor=Color.from_rgb(*mixed))
