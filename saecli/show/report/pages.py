"""The pages. The first: the run, learning curves, firing frequencies, a table of all latents; and links to Neuronpedia.

`assets/neuronpedia.json` lists repositories on the hub: Neuronpedia's name for their SAEs, with {layer} and {width} for
parts of the folder's name; a pattern of the folders' names; and, where a repository has several SAEs of one layer and
width, the average L0 of the one that Neuronpedia shows. Then those of chosen latents, several per file.

Shapes: F = d_sae, C chosen latents, N examples, T tokens.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...base.errors import ConfigError
from ...extract.chats import ROLES
from ...measure.latents import NOT_STORED, Partners, Survey, bin_edges
from ...sae.hub import Address
from ...sae.metrics import DENSE_FREQUENCY
from ..measures import curve, frequency_edges, l0_bins

if TYPE_CHECKING:  # transformers takes seconds to import, and stores without tokens need none of it
    from ...extract.tokens import OutputTokens, TokenTexts

FEWEST_ROWS = 10  # of a latent with an interest
SITE = "https://www.neuronpedia.org/"
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
POINTS = 400  # points of a curve, about its width in pixels
L0_BINS = 40
CURVES = {
    "loss": (("batch_fvu", "training batches, averaged"), ("test_fvu", "held-out rows")),
    "l0": (("batch_l0", "training batches, averaged"), ("test_l0", "held-out rows")),
}


def overview(
    heading: Mapping[str, Any],
    measures: Mapping[str, Any],
    survey: Survey,
    curves: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The first page's content, without the columns of its table that `details` fills.

    `heading` has the entries below the title, `curves` the lines of `metrics.jsonl`, `facts` settings by section and
    name, `notes` sentences on missing content.
    """
    firing = survey.firing.result()
    frequency = np.array(firing.pop("frequency"))
    return {
        "heading": dict(heading),
        "measures": dict(measures),
        "firing": firing,
        "notes": list(notes),
        "dense": DENSE_FREQUENCY,
        "fewest": FEWEST_ROWS,
        "facts": {
            section: {name: _word(value) for name, value in settings.items()}
            for section, settings in facts.items()
        },
        "curves": {
            name: [{"name": label, "points": _thinned(curve(curves, key))} for key, label in pair]
            for name, pair in CURVES.items()
        },
        "l0": _bins(*l0_bins(survey.firing.l0_histogram.numpy(), L0_BINS)),
        "frequency": _bins(*np.histogram(frequency[frequency > 0], frequency_edges(frequency))),
        "edges": bin_edges().tolist(),
        "latents": {
            "frequency": rounded(frequency),
            "mean": rounded(survey.magnitudes.means),
            "largest": rounded(survey.magnitudes.largest),
        },
    }


def rounded(values: np.ndarray | Tensor) -> list[float]:
    """Numbers to four significant digits, which keeps files small."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_word, value))
    if isinstance(value, dict):  # a model, a source of text, a hook point
        return " ".join(
            _word(part) for part in value.values() if isinstance(part, str | float | int)
        )
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """About `POINTS` of the points, including the last."""
    return points[:: -max(1, math.ceil(len(points) / POINTS))][::-1]


def _bins(counts: np.ndarray, edges: np.ndarray) -> dict[str, list[float]]:
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def neuronpedia_url(name: str, source: str | None = None) -> str | None:
    """The address below which Neuronpedia has a page for each latent of an SAE, given its address on the hub, or
    Neuronpedia's own name of it, `MODEL/SOURCE`, such as `gemma-2-2b/20-gemmascope-res-16k`; None if there is none."""
    if source is None:
        source = _known(name)
    elif not _SOURCE.fullmatch(source):
        raise ConfigError(
            "--neuronpedia must be MODEL/SOURCE such as gemma-2-2b/20-gemmascope-res-16k, got "
            f"{source!r}"
        )
    return None if source is None else f"{SITE}{source}"


def _known(name: str) -> str | None:
    address = Address.parse(name)
    if address is None:
        return None
    table = (files(__package__) / "assets" / "neuronpedia.json").read_text(encoding="utf-8")
    for entry in json.loads(table):
        if entry["repo"] == address.repo and (
            found := re.fullmatch(entry["folder"], address.folder)
        ):
            parts = found.groupdict()
            shown = entry.get("l0", {}).get(parts.get("width"))
            if "l0" not in entry or (shown and shown.get(parts["layer"]) == int(parts["l0"])):
                return entry["source"].format_map(parts)
    return None


PER_FILE = 16  # latents per file of about 60 KB
LEVELS = 1000  # an excerpt's codes are rounded to thousandths of the latent's largest
SNIPPET_BEFORE, SNIPPET_AFTER = 40, 24  # letters about the peak in the table
SHORT = 24  # letters of a token in the table
LISTED_TOKENS = 4
BROKEN = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character
LONGEST_CHARACTER = 4  # bytes, so at most 4 tokens


class TokenNumbers:
    """Token ids in brackets, in place of texts where there is no tokenizer."""

    def __getitem__(self, token: int) -> str:
        return f"[{token}]"

    def joined(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.__getitem__, tokens))


@dataclass(frozen=True)
class Details:
    """The content of the latents' files, and of their columns in the table."""

    survey: Survey
    chosen: Sequence[int]  # (C,), ascending
    neighbours: tuple[Tensor, Tensor]  # cosines and latents, (C, n) each
    partners: Partners
    texts: "TokenTexts | TokenNumbers"
    outputs: "OutputTokens | None"
    features: (
        tuple[Tensor, Tensor] | None
    )  # the known feature nearest to each latent, and its cosine, (C,) each
    places: Mapping[str, Any]  # `places_document`

    @cached_property
    def _found(self) -> dict[str, dict[str, Any]]:
        return {
            "examples": self.survey.examples.of(self.chosen),
            "samples": self.survey.samples.of(self.chosen),
        }

    def contents(self, show: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Each file's content in turn; `show` is called with the number of latents done."""
        for begin in range(0, len(self.chosen), PER_FILE):
            places = range(begin, min(begin + PER_FILE, len(self.chosen)))
            strings: dict[str, int] = {}
            yield {
                "latents": [self._latent(place, strings) for place in places],
                "strings": list(strings),
            }
            show(places.stop)

    def columns(self) -> dict[str, Any]:
        """The table's columns for the chosen latents: interest, tokens at the peaks of examples, a snippet of the best
        example, tokens promoted most; and which latents have a page."""
        chosen = list(self.chosen)
        columns: dict[str, Any] = {"chosen": chosen, "per_file": PER_FILE}
        alike = [0.0] * len(chosen)
        if "token" in self._found["examples"]:
            peaks = [self._peaks(place) for place in range(len(chosen))]
            alike = list(map(agreement, peaks))
            columns["tokens"] = [
                [text for text, _ in Counter(map(_short, own)).most_common(LISTED_TOKENS)]
                for own in peaks
            ]
            columns["snippets"] = [self._snippet(place) for place in range(len(chosen))]
        firing, sizes = self.survey.firing, self.survey.magnitudes
        figures = (
            values[chosen].tolist() for values in (firing.frequency, sizes.means, sizes.largest)
        )
        columns["interest"] = [
            round(interest(frequency, firing.rows, mean, largest, own), 3)
            for frequency, mean, largest, own in zip(*figures, alike, strict=True)
        ]
        if self.places:
            names = list(dict.fromkeys(self.places["class"]))
            columns |= {
                "classes": names,
                "class": [names.index(own) for own in self.places["class"]],
                "nu": self.places["nu_error"],
            }
        if (outputs := self.outputs) is not None:
            columns["promoted"] = [
                [_short(self.texts[token]) for token in tokens[:LISTED_TOKENS]]
                for tokens in outputs.promoted.tolist()
            ]
        return columns

    def _latent(self, place: int, strings: dict[str, int]) -> dict[str, Any]:
        latent = self.chosen[place]
        histogram = self.survey.magnitudes.histograms[latent]
        present = np.flatnonzero(histogram)
        low, high = (int(present[0]), int(present[-1]) + 1) if len(present) else (0, 0)
        cosines, others = self.neighbours
        phi, partners = (values[place] for values in self.partners)
        scale = float(self.survey.magnitudes.largest[latent]) / LEVELS
        page = {
            "latent": latent,
            "low": low,
            "counts": histogram[low:high].tolist(),
            "neighbours": list(zip(others[place].tolist(), rounded(cosines[place]), strict=True)),
            "together": [
                one for one in zip(partners.tolist(), rounded(phi), strict=True) if one[1]
            ],
            "scale": scale,
        }
        for group, found in self._found.items():
            page[group] = [
                self._example(
                    {name: values[place, which] for name, values in found.items()}, scale, strings
                )
                for which in range(int((found["rank"][place] > 0).sum()))
            ]
        if (sums := self.survey.by_role[:, latent]).any():
            page["roles"] = list(zip(ROLES, rounded(sums / sums.sum()), strict=True))
        if self.features is not None:
            feature, cosine = (values[place] for values in self.features)
            page["feature"] = [int(feature), float(f"{cosine:.4g}")]
        if by_place := self.places:
            page["places"] = [
                [one["name"], share, scaling]
                for one, share, scaling in zip(
                    by_place["places"],
                    by_place["share"][latent],
                    by_place["scaling"][latent],
                    strict=True,
                )
            ]
        if (outputs := self.outputs) is not None:
            page["logits"] = outputs.counts[place].tolist()
            for name, tokens, logits in (
                ("promoted", outputs.promoted, outputs.promoted_logits),
                ("suppressed", outputs.suppressed, outputs.suppressed_logits),
            ):
                page[name] = [
                    [self.texts[token], logit]
                    for token, logit in zip(
                        tokens[place].tolist(), rounded(logits[place]), strict=True
                    )
                ]
        return page

    def _example(
        self, own: Mapping[str, Any], scale: float, strings: dict[str, int]
    ) -> dict[str, Any]:
        """One example: its code and row; with tokens also pieces of the excerpt as indices into `strings`, number and
        code, in units of `scale`, of those where it fires, and the pieces that follow missing rows."""
        codes = np.rint(own["code"] / scale).astype(int)
        if "token" not in own:
            return {"code": float(own["code"][0]), "row": int(own["number"])}
        length = int((own["token"] >= 0).sum())
        pieces = self._pieces(own["token"][:length].tolist())
        begins = np.cumsum([0, *(count for _, count in pieces[:-1])])
        peak = int(np.searchsorted(begins, own["peak"], side="right")) - 1
        roles = own["role"][begins].astype(int) if "role" in own else np.empty(0, int)
        changes = [
            [place, "not stored" if roles[place] == NOT_STORED else ROLES[roles[place]]]
            for place in np.flatnonzero(np.diff(roles, prepend=-1)).tolist()
        ]
        shown = codes[:length].tolist()
        if len(pieces) < length:
            shown = [max(part.tolist(), key=abs) for part in np.split(codes[:length], begins[1:])]
        return {
            "code": float(own["code"][own["peak"]]),
            "row": int(own["number"]),
            "document": int(own["document"]),
            "position": int(own["position"]),
            "peak": peak,
            "fires": [
                number for place, code in enumerate(shown) if code for number in (place, code)
            ],
            "tokens": [strings.setdefault(text, len(strings)) for text, _ in pieces],
            "gaps": np.flatnonzero(own["gap"][begins]).tolist(),
            "roles": changes,
        }

    def _pieces(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """An excerpt's pieces of text, and the number of tokens in each: one, unless a character spans several."""
        groups: list[list[int]] = []
        broken = False  # whether the last group may go on
        for token in tokens:
            part = BROKEN in self.texts[token]
            if part and broken:
                groups[-1].append(token)
            else:
                groups.append([token])
            broken = (
                part
                and len(groups[-1]) < LONGEST_CHARACTER
                and BROKEN in self.texts.joined(groups[-1])
            )
        return [
            (self.texts[one[0]] if len(one) == 1 else self.texts.joined(one), len(one))
            for one in groups
        ]

    def _peaks(self, place: int) -> list[str]:
        """The texts at the peaks of a latent's examples."""
        found = self._found["examples"]
        there = int((found["rank"][place] > 0).sum())
        return [
            self.texts[int(tokens[peak])]
            for tokens, peak in zip(
                found["token"][place, :there], found["peak"][place, :there], strict=True
            )
        ]

    def _snippet(self, place: int) -> list[str]:
        """The texts before, at and after the best example's peak, cut between words; none without an example."""
        found = self._found["examples"]
        if not found["rank"][place, 0]:
            return []
        tokens, peak = found["token"][place, 0].tolist(), int(found["peak"][place, 0])
        end = tokens.index(-1) if -1 in tokens else len(tokens)
        parts = tokens[:peak], tokens[peak : peak + 1], tokens[peak + 1 : end]
        before, at, after = map(self.texts.joined, parts)
        return [
            _shortened(before[::-1], SNIPPET_BEFORE)[::-1],
            _short(at),
            _shortened(after, SNIPPET_AFTER),
        ]


def _shortened(text: str, length: int) -> str:
    """A text's first letters, to the end of a word if one ends there."""
    if len(text) <= length:
        return text
    words = re.match(r"(?s).*(?=\s)", text[: length + 1])
    return f"{words[0] if words and words[0].strip() else text[:length]}…"


def _short(text: str) -> str:
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def agreement(peaks: Iterable[str]) -> float:
    """The fraction of pairs of texts that peak at the same token, in [0, 1], given the peaks' tokens; 0 for fewer than
    two texts. Case and spaces around a token do not count."""
    counts = Counter(token.strip().casefold() for token in peaks).values()
    texts = sum(counts)
    return (
        sum(count * (count - 1) for count in counts) / (texts * (texts - 1)) if texts > 1 else 0.0
    )


def interest(frequency: float, rows: int, mean: float, largest: float, alike: float) -> float:
    """A figure in [0, 1] to sort latents by: `(1 - mean / largest) (1 + agreement) / 2` of the codes' sizes; 0 for a
    latent that fires on more than a fraction `DENSE_FREQUENCY` of the rows, or on fewer than `FEWEST_ROWS`."""
    if frequency > DENSE_FREQUENCY or round(frequency * rows) < FEWEST_ROWS:
        return 0.0
    return (1 - mean / largest) * (1 + alike) / 2
