"""The pages. The first: the run, its measures, firing frequencies, a table of all latents. Then those of chosen
latents, several per file.

Shapes: F = d_sae, C chosen latents, N examples, T tokens.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...base.console import Listener
from ...extract.chats import ROLES
from ...measure.cosines import neighbours
from ...measure.latents import NOT_STORED, LatentSurvey, bin_edges
from ...measure.measured import Measured
from ...model.tokenizer import characters
from ...sae.metrics import DENSE_FREQUENCY
from ..measures import frequency_edges, l0_bins
from ..tables import Document

if TYPE_CHECKING:  # transformers takes seconds to import, and stores without tokens need none of it
    from ...model.tokenizer import TokenTexts
    from ...model.unembedding import OutputTokens, Unembedding

FEWEST_ROWS = 10  # of a latent with an interest
L0_BINS = 40


def overview(
    heading: Document, measures: Document, survey: LatentSurvey, notes: Sequence[str]
) -> dict[str, Any]:
    """The first page's content, without the columns of its table that `details` fills.

    `heading` has the entries below the title, `notes` sentences on missing content.
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


def _bins(counts: np.ndarray, edges: np.ndarray) -> dict[str, list[float]]:
    return {"edges": edges.tolist(), "counts": counts.tolist()}


NEIGHBOURS, OUTPUT_TOKENS = 10, 10
PER_FILE = 16  # latents per file of about 60 KB
LEVELS = 1000  # an excerpt's codes are rounded to thousandths of the latent's largest
SNIPPET_BEFORE, SNIPPET_AFTER = 40, 24  # letters about the peak in the table
SHORT = 24  # letters of a token in the table
LISTED_TOKENS = 4


class TokenNumbers:
    """Token ids in brackets, in place of texts where there is no tokenizer."""

    def __getitem__(self, token: int) -> str:
        return f"[{token}]"

    def joined(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.__getitem__, tokens))


class Details:
    """The content of the latents' files, and of their columns in the table."""

    def __init__(
        self,
        run: Measured,
        survey: LatentSurvey,
        chosen: Sequence[int],  # (C,), ascending
        texts: "TokenTexts | TokenNumbers",
        outputs: "tuple[Unembedding, slice] | None",  # with the columns of W_dec that it reads
        places: Document,  # `places_document`
        listener: Listener,
    ) -> None:
        self.survey, self.chosen, self.texts, self.places = survey, chosen, texts, places
        self.histograms = survey.magnitudes.histograms  # on the CPU
        W_dec = run.sae.W_dec
        latents = torch.tensor(chosen, device=W_dec.device)
        with listener.progress("comparing latents", len(chosen), "latents") as show:
            self.neighbours = neighbours(run.sae, latents, NEIGHBOURS, show)
        with listener.progress("counting pairs", len(chosen), "latents") as show:
            self.partners = survey.cofiring.partners(latents, NEIGHBOURS, show)
        self.outputs: OutputTokens | None = None
        if outputs is not None:
            head, columns = outputs
            with listener.progress("reading off output tokens", len(chosen), "latents") as show:
                self.outputs = head.output_tokens(W_dec[latents, columns], OUTPUT_TOKENS, show)
        self.alignment = run.alignment()

    @cached_property
    def _columns(self) -> dict[str, dict[str, Any]]:
        """The columns of `examples` and `samples`, (C, N, ...) each."""
        return {
            "examples": self.survey.examples.of(self.chosen),
            "samples": self.survey.samples.of(self.chosen),
        }

    def _rows(self, group: str, index: int) -> list[dict[str, Any]]:
        """The examples, or samples, of the index-th chosen latent."""
        columns = {name: values[index] for name, values in self._columns[group].items()}
        count = int((columns["rank"] > 0).sum())
        return [{name: values[at] for name, values in columns.items()} for at in range(count)]

    def contents(self, show: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Each file's content in turn; `show` is called with the number of latents done."""
        for begin in range(0, len(self.chosen), PER_FILE):
            end = min(begin + PER_FILE, len(self.chosen))
            strings: dict[str, int] = {}
            pages = [self._page(index, strings) for index in range(begin, end)]
            yield {"latents": pages, "strings": list(strings)}
            show(end)

    def columns(self) -> dict[str, Any]:
        """The table's columns for the chosen latents: interest, tokens at the peaks of examples, a snippet of the best
        example, tokens promoted most; and which latents have a page."""
        chosen = list(self.chosen)
        columns: dict[str, Any] = {"chosen": chosen, "per_file": PER_FILE}
        alike = [0.0] * len(chosen)
        if "token" in self._columns["examples"]:
            examples = [self._rows("examples", index) for index in range(len(chosen))]
            peaks = [
                [self.texts[int(row["token"][row["peak"]])] for row in rows] for rows in examples
            ]
            alike = list(map(agreement, peaks))
            columns["tokens"] = [
                [text for text, _ in Counter(map(_short, texts)).most_common(LISTED_TOKENS)]
                for texts in peaks
            ]
            columns["snippets"] = [self._snippet(rows[0]) if rows else [] for rows in examples]
        firing, sizes = self.survey.firing, self.survey.magnitudes
        figures = (
            values[chosen].tolist() for values in (firing.frequency, sizes.means, sizes.largest)
        )
        columns["interest"] = [
            round(interest(frequency, firing.rows, mean, largest, fraction), 3)
            for frequency, mean, largest, fraction in zip(*figures, alike, strict=True)
        ]
        if self.places:
            names = list(dict.fromkeys(self.places["class"]))
            columns["classes"] = names
            columns["class"] = [names.index(name) for name in self.places["class"]]
            columns["nu"] = self.places["nu_error"]
        if self.outputs is not None:
            columns["promoted"] = [
                [_short(self.texts[token]) for token in tokens[:LISTED_TOKENS]]
                for tokens in self.outputs.promoted.tolist()
            ]
        return columns

    def _page(self, index: int, strings: dict[str, int]) -> dict[str, Any]:
        latent = self.chosen[index]
        histogram = self.histograms[latent]
        present = np.flatnonzero(histogram)
        low, high = (int(present[0]), int(present[-1]) + 1) if len(present) else (0, 0)
        cosines, neighbours = (values[index] for values in self.neighbours)
        phis, partners = (values[index] for values in self.partners)
        together = zip(partners.tolist(), rounded(phis), strict=True)
        scale = float(self.survey.magnitudes.largest[latent]) / LEVELS
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
        if (sums := self.survey.by_role[:, latent]).any():
            page["roles"] = list(zip(ROLES, rounded(sums / sums.sum()), strict=True))
        if self.alignment is not None:
            feature = int(self.alignment.nearest[latent])
            page["feature"] = [feature, *rounded(self.alignment.cosines[latent, [feature]])]
        if self.places:
            names = [place["name"] for place in self.places["places"]]
            fractions, scaling = (self.places[name][latent] for name in ("share", "scaling"))
            page["places"] = list(zip(names, fractions, scaling, strict=True))
        if self.outputs is not None:
            page["logits"] = self.outputs.counts[index].tolist()
            for name in ("promoted", "suppressed"):
                tokens, logits = (
                    getattr(self.outputs, column)[index] for column in (name, f"{name}_logits")
                )
                texts = [self.texts[token] for token in tokens.tolist()]
                page[name] = list(zip(texts, rounded(logits), strict=True))
        return page

    def _example(
        self, row: Mapping[str, Any], scale: float, strings: dict[str, int]
    ) -> dict[str, Any]:
        """One example: its code and row; with tokens also pieces of the excerpt as indices into `strings`, number and
        code, in units of `scale`, of those where it fires."""
        if "token" not in row:
            return {"code": float(row["code"][0]), "row": int(row["number"])}
        length = int((row["token"] >= 0).sum())
        codes = np.rint(row["code"] / scale).astype(int)[:length]
        pieces = characters(self.texts, row["token"][:length].tolist())
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
        """The texts before, at and after an example's peak, cut between words."""
        tokens, peak = row["token"][row["token"] >= 0].tolist(), int(row["peak"])
        parts = tokens[:peak], tokens[peak : peak + 1], tokens[peak + 1 :]
        before, at, after = map(self.texts.joined, parts)
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
