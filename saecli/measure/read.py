"""The latents that fire on a text: on each of its tokens, and over all of it.

A text is cut into windows as by `sae extract`, of at most `CONTEXT` tokens or the model's limit. Special tokens (BOS, a
chat's control tokens) and a window's first token, the attention sink without BOS, get no codes: their activations are
of another size.

Shapes: T tokens of a text, n of them with codes, D = d_in, F = d_sae.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

import numpy as np
import torch
from scipy.sparse import csc_array, csr_array, vstack

from ..base.console import Listener, Silent
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..extract.texts import REPEATED, ROLES, Chats, Conversation, Document
from ..extract.windows import Cutter, Window
from ..model.language_model import LanguageModel
from ..model.tokenizer import TokenTexts, characters
from ..model.windows import stored_activations
from ..sae.formats import SavedSAE
from ..sae.library import Subject
from ..sae.metrics import Firing
from ..splice.passes import CleanPass, Passes
from ..splice.placement import Placement, check_distinct, placement
from ..store.values import TextWindow
from .arguments import Messages
from .attribution import (
    Attribution,
    Question,
    Removal,
    SplicedText,
    value_without,
)
from .labels import shown_labels
from .measured import at_tokens, codes_of, own_codes
from .verdicts import shown_verdicts

CONTEXT = 4096  # most tokens of a window
FREQUENCY_ROWS, SAMPLED_PRODUCTS = 1 << 15, 1 << 34  # of the store: under a second on one core
SAMPLE_WINDOW_BYTES = 1 << 24  # read before the first batch of the sample


@dataclass(frozen=True)
class Reading:
    tokens: np.ndarray  # (T,), of `windows.TOKEN`
    texts: list[str]  # of each token, or of the character that it is a part of
    further: list[bool]  # whether a token continues the character before
    by_token: csr_array  # (T, F)
    begin: int  # of the last window

    @property
    def in_last_window(self) -> np.ndarray:
        """Its tokens with codes, (T,) bool."""
        return ~self.tokens["special"] & (np.arange(len(self.tokens)) >= self.begin)

    @cached_property
    def by_latent(self) -> csc_array:
        return self.by_token.tocsc()

    @cached_property
    def largest(self) -> np.ndarray:
        """Each latent's code of largest size, (F,)."""
        highest, lowest = self.by_latent.max(axis=0), self.by_latent.min(axis=0)
        high, low = highest.toarray().ravel(), lowest.toarray().ravel()
        return np.where(-low > high, low, high)

    def lines(self, top: int) -> list[dict[str, Any]]:
        is_chat = bool(self.tokens["role"].any())
        lines = []
        for position, token in enumerate(self.tokens):
            begin, end = self.by_token.indptr[position : position + 2]
            latents, codes = self.by_token.indices[begin:end], self.by_token.data[begin:end]
            order = np.argsort(-abs(codes), kind="stable")[:top]
            strongest = zip(latents[order].tolist(), codes[order].tolist(), strict=True)
            lines.append(
                {
                    "token_id": int(token["token_id"]),
                    "text": "" if self.further[position] else self.texts[position],
                    "special": bool(token["special"]),
                    "role": ROLES[token["role"]] if is_chat else None,
                    "latents": [{"latent": latent, "code": code} for latent, code in strongest],
                }
            )
        return lines

    def latent(self, latent: int) -> dict[str, Any]:
        begin, end = self.by_latent.indptr[latent : latent + 2]
        positions, codes = self.by_latent.indices[begin:end], self.by_latent.data[begin:end]
        position = int(positions[abs(codes).argmax()]) if len(codes) else None
        return {
            "code": float(self.largest[latent]),
            "position": position,
            "token": None if position is None else self.texts[position],
            "fires_on": len(codes),
            "positions": positions.tolist(),
            "codes": codes.tolist(),
        }

    def difference(self, other: "Reading", latent: int) -> dict[str, Any]:
        here, there = self.latent(latent), other.latent(latent)
        return {"difference": here["code"] - there["code"], "here": here, "there": there}


class Reader:
    def __init__(self, sae_at: Placement, model: LanguageModel) -> None:
        self._model, self._at = model, sae_at
        self.sae = sae_at.sae.copy_to(model.device)
        self._texts = TokenTexts(model.tokenizer)

    @torch.no_grad()
    def read(self, text: str | Messages, name: str, listener: Listener) -> Reading:
        context = min(CONTEXT, self._model.source.positions or CONTEXT)
        control = None if isinstance(text, str) else "drop"
        cutter = Cutter(
            self._model.tokenizer, context, control=control, prepend_bos=self._at.prepend_bos
        )
        cut = list(cutter.cut([Document(0, self._document(text, name), None)]))
        if not cut:
            raise ConfigError(f"{name} must have a token that is not special, got {text!a:.60}")
        if cutter.left_out["repeated_bos"]:
            listener.warn(f"{name} {REPEATED}")
        for window in cut:
            window.tokens["special"][:1] = True
        tokens = np.concatenate([window.tokens for window in cut])
        if len(cut) > 1:
            listener.warn(
                f"{name} has {len(tokens):,} tokens: it is read in {len(cut):,} windows of at most "
                f"{context:,}, each without what is before it"
            )
        pieces = characters(self._texts, tokens["token_id"].tolist())
        texts = [text for text, count in pieces for _ in range(count)]
        further = [place > 0 for _, count in pieces for place in range(count)]
        begin = len(tokens) - len(cut[-1].tokens)
        return Reading(tokens, texts, further, self._codes(cut, ~tokens["special"]), begin)

    def answer(
        self,
        reading: Reading,
        known: "Known",
        question: Question,
        chosen: list[int] | None,
        listener: Listener,
    ) -> "Answer":
        """After the last token with codes; the chosen latents are removed, or the strongest."""
        window, clean = self._asked(reading)
        is_row, metric = reading.in_last_window, question.metric
        text = SplicedText(clean, self.sae, reading.by_token[is_row], metric, question.steps)
        by_token = at_tokens(csr_array(text.attributions().cpu().numpy()), is_row).tocsc()
        strongest = _ordered(abs(by_token.sum(axis=0)), chosen, question.top)
        removals = text.removals(strongest, listener)
        asked, position = metric.texts(self._texts), reading.begin + window.length - 1
        attribution = Attribution(asked, position, text.value, question.steps, by_token, removals)
        return Answer(self._at, known, reading, attribution)

    def answers_with(
        self,
        first: "Answer",
        others: "Sequence[tuple[Placement, Known]]",
        text: str | Messages,
        question: Question,
        listener: Listener,
    ) -> "list[Answer]":
        """This SAE's answer and those of others; the first knows what removal of all their latents does."""
        answers = [first]
        for sae_at, known in others:
            reader = Reader(sae_at, self._model)
            reading = reader.read(text, "the text", Silent(warns=False))
            answers.append(reader.answer(reading, known, question, None, listener))
        window, clean = self._asked(first.reading)
        is_row = torch.from_numpy(window.is_row)[None]
        chosen = [(answer.sae_at, answer.attribution.removed) for answer in answers]
        value = value_without(chosen, clean, is_row, question.metric)
        together = [answer.attribution.removals["together"]["predicted"] for answer in answers]
        jointly = Removal(predicted=sum(together), measured=value - first.attribution.value)
        return [first.with_removal("jointly", jointly), *answers[1:]]

    def _asked(self, reading: Reading) -> tuple[TextWindow, CleanPass]:
        """The last window, to its last token with codes."""
        is_row = reading.in_last_window
        if not is_row.any():
            raise ConfigError(
                "--why needs a token with codes, got a text of special tokens and its first; give a longer one"
            )
        of_window = slice(reading.begin, int(np.flatnonzero(is_row)[-1]) + 1)
        window = TextWindow(reading.tokens["token_id"][of_window], is_row[of_window])
        return window, CleanPass(Passes(self._model), [window], self._at.reads, self._at.writes)

    def _codes(self, windows: Sequence[Window], read: np.ndarray) -> csr_array:
        """(T, F), of the tokens that are `read`, (T,)."""
        stored = [TextWindow(window.token_ids, ~window.tokens["special"]) for window in windows]
        batches = stored_activations(self._model, stored, self._at.reads, 1)
        blocks = [codes_of(self.sae, torch.cat(at_points, dim=1)) for at_points in batches]
        return at_tokens(vstack(blocks, format="csr"), read)

    def _document(self, text: str | Messages, name: str) -> str | Conversation:
        if isinstance(text, str):
            return text
        tokenizer, model = self._model.tokenizer, self._model.source.name
        return Chats(tokenizer, None, model).read({"messages": text}, "messages", name)


def _ordered(sizes: np.ndarray, chosen: list[int] | None, top: int) -> list[int]:
    """The chosen latents, or the `top` largest, by their sizes, (F,), largest first."""
    latents = np.flatnonzero(sizes) if chosen is None else np.array(chosen, int)
    ordered = latents[np.argsort(-sizes[latents], kind="stable")].tolist()
    return ordered[:top] if chosen is None else ordered


@dataclass(frozen=True)
class Known:
    """What is known of latents apart from a text."""

    rows: int | None  # of the store of training; None where that is not here
    frequencies: list[float] | None  # on these rows
    labels: Mapping[int, str]
    verdicts: Mapping[int, str]

    @classmethod
    def of(cls, home: Home, opened: tuple[Subject, SavedSAE], device: str) -> "Known":
        folder, d_sae = opened[0].folder, opened[1].sae.d_sae
        labels, verdicts = shown_labels(folder, d_sae), shown_verdicts(folder)
        counts = Firing(d_sae, device=device_named(device))
        for codes in own_codes(
            home, opened, device, FREQUENCY_ROWS, SAMPLED_PRODUCTS, SAMPLE_WINDOW_BYTES
        ):
            counts.update(codes)
        if not counts.rows:
            return cls(None, None, labels, verdicts)
        return cls(counts.rows, counts.frequency.tolist(), labels, verdicts)

    def latent(self, latent: int) -> dict[str, Any]:
        return {
            "latent": latent,
            "label": self.labels.get(latent),
            "verdict": self.verdicts.get(latent),
            "frequency": None if self.frequencies is None else self.frequencies[latent],
        }


@dataclass(frozen=True)
class Answer:
    """Of one SAE, to a `Question` about a text."""

    sae_at: Placement
    known: Known
    reading: Reading
    attribution: Attribution

    def with_removal(self, name: str, removal: Removal) -> Self:
        removals = self.attribution.removals | {name: removal}
        return replace(self, attribution=replace(self.attribution, removals=removals))

    @property
    def heading(self) -> dict[str, Any]:
        return heading(self.sae_at) | {"store_rows": self.known.rows}

    def latent(self, latent: int) -> dict[str, Any]:
        values = self.known.latent(latent) | self.reading.latent(latent)
        return values | self.attribution.latent(latent, values["positions"])

    def to_json(self) -> dict[str, Any]:
        removals = self.attribution.removals
        latents = [self.latent(key) | {**removals[key]} for key in self.attribution.removed]
        return self.attribution.to_json() | {"latents": latents}


def placed_beside(sae_at: Placement, others: Sequence[tuple[Subject, SavedSAE]]) -> list[Placement]:
    """The placements of further SAEs that are asked about the same windows."""
    if not others:
        return []
    beside = [
        replace(placement(opened, None, None, "--also with"), prepend_bos=sae_at.prepend_bos)
        for opened in others
    ]
    several = [sae_at, *beside]
    for each in several:
        if each.sae.widths:
            raise ConfigError(
                f"cannot use --also with {each.name}, a crosscoder: its codes need the activations at all "
                "its hook points before the first is replaced; read it alone"
            )
    check_distinct(several)
    return beside


def heading(sae_at: Placement) -> dict[str, Any]:
    points = [point.to_json() for point in sae_at.reads]
    return {"run": sae_at.name, **({"inputs": points} if len(points) > 1 else points[0])}


def reading_document(
    sae_at: Placement,
    model: str,
    readings: Sequence[Reading],
    described: list[int] | Literal["listed"] | None,
    top: int,
    known: Known,
    answers: Sequence[Answer] = (),
) -> dict[str, Any]:
    """`answers` are of this SAE, and of others."""
    lines = [reading.lines(top) for reading in readings]
    if described == "listed":
        listed = [of_token["latent"] for line in chain(*lines) for of_token in line["latents"]]
        described = sorted(set(listed))

    here, compare, why = readings[0], None, None
    for there in readings[1:]:
        differing = _ordered(abs(here.largest - there.largest), described, top)
        differences = [
            known.latent(latent) | here.difference(there, latent) for latent in differing
        ]
        compare = {"tokens": lines[1], "latents": differences}
    strongest = _ordered(abs(here.largest), described, top)
    latents = [known.latent(latent) | here.latent(latent) for latent in strongest]
    if answers:
        first = answers[0]
        latents = [first.latent(latent) for latent in strongest]
        of_tokens = first.attribution.by_token.sum(axis=1).tolist()
        for line, value in zip(lines[0], of_tokens, strict=True):
            line["attribution"] = value
        also = [answer.heading | answer.to_json() for answer in answers[1:]]
        why = first.to_json() | {"also": also}
    return {
        **heading(sae_at),
        "model": model,
        "store_rows": known.rows,
        "tokens": lines[0],
        "latents": latents,
        "compare": compare,
        "why": why,
    }
