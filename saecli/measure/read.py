"""The latents that fire on a text: on each of its tokens, and over all of it.

A text is cut into windows as by `sae extract`, of at most `CONTEXT` tokens or the model's limit. Special tokens (BOS, a
chat's control tokens) and a window's first token, the attention sink without BOS, get no codes: their activations are
of another size.

Shapes: T tokens of a text, n of them with codes, D = d_in, F = d_sae.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csc_array, csr_array, vstack

from ..base.console import Listener
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
from ..splice.placement import Placement
from ..store.values import TextWindow
from .arguments import Messages
from .attribution import Attribution, Metric, SplicedText
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

    def attribution(
        self,
        reading: Reading,
        metric: Metric,
        steps: int,
        chosen: list[int] | None,
        top: int,
        listener: Listener,
    ) -> Attribution:
        """After the last token with codes; the chosen latents are removed, or the `top` strongest."""
        is_row = reading.in_last_window
        if not is_row.any():
            raise ConfigError(
                "--why needs a token with codes, got a text of special tokens and its first; give a longer one"
            )
        position = int(np.flatnonzero(is_row)[-1])
        of_window = slice(reading.begin, position + 1)
        window = TextWindow(reading.tokens["token_id"][of_window], is_row[of_window])
        clean = CleanPass(Passes(self._model), [window], self._at.reads, self._at.writes)
        text = SplicedText(clean, self.sae, reading.by_token[is_row], metric, steps)
        by_token = at_tokens(csr_array(text.attributions().cpu().numpy()), is_row).tocsc()
        removals = text.removals(_ordered(abs(by_token.sum(axis=0)), chosen, top), listener)
        asked = metric.texts(self._texts)
        return Attribution(asked, position, text.value, steps, by_token, removals)

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


def reading_document(
    sae_at: Placement,
    model: str,
    readings: Sequence[Reading],
    described: list[int] | Literal["listed"] | None,
    top: int,
    known: Known,
    attribution: Attribution | None = None,
) -> dict[str, Any]:
    lines = [reading.lines(top) for reading in readings]
    if described == "listed":
        listed = [of_token["latent"] for line in chain(*lines) for of_token in line["latents"]]
        described = sorted(set(listed))

    def in_text(latent: int) -> dict[str, Any]:
        values = known.latent(latent) | here.latent(latent)
        if attribution is None:
            return values
        return values | attribution.latent(latent, values["positions"])

    here, compare, why = readings[0], None, None
    for there in readings[1:]:
        differing = _ordered(abs(here.largest - there.largest), described, top)
        differences = [
            known.latent(latent) | here.difference(there, latent) for latent in differing
        ]
        compare = {"tokens": lines[1], "latents": differences}
    if attribution is not None:
        for line, value in zip(lines[0], attribution.by_token.sum(axis=1).tolist(), strict=True):
            line["attribution"] = value
        removals = attribution.removals.items()
        removed = [in_text(key) | {**each} for key, each in removals if isinstance(key, int)]
        why = attribution.to_json() | {"latents": removed}
    strongest = _ordered(abs(here.largest), described, top)
    points = [point.to_json() for point in sae_at.reads]
    return {
        "run": sae_at.name,
        "model": model,
        **({"inputs": points} if len(points) > 1 else points[0]),
        "store_rows": known.rows,
        "tokens": lines[0],
        "latents": [in_text(latent) for latent in strongest],
        "compare": compare,
        "why": why,
    }
