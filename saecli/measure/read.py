"""The latents that fire on a text: on each of its tokens, and over all of it.

A text is cut into windows as `sae extract` cuts documents, of at most `CONTEXT` tokens or the model's limit. Special
tokens (BOS, a chat's control tokens) and the first token of a window, the attention sink where there is no BOS, have
activations of another size: they get no codes.

Shapes: T tokens of a text, n of them with codes, D = d_in, F = d_sae.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csc_array, csr_array, vstack

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.words import demand_at_least, demand_text, unknown_choice
from ..extract.chats import REPEATED, ROLES, Chats, Conversation
from ..extract.texts import Document
from ..extract.windows import Cutter, Window
from ..model.choice import ModelLike
from ..model.language_model import LanguageModel
from ..model.saes import open_sae
from ..model.tokenizer import TokenTexts, characters
from ..model.windows import stored_activations
from ..sae.library import SAELike
from ..sae.metrics import Firing
from ..splice.hooked import Hooked, hooked, model_of
from ..store.origin import last_layer, place_given
from ..store.values import TextWindow
from .labels import shown_labels
from .latents import chosen_latents
from .measured import at_tokens, codes_of, own_codes

Messages = Sequence[Mapping[str, Any]]  # of a chat, each with role and content
CONTEXT = 4096  # most tokens of a window
TOP = 10
SAMPLED_ROWS, SAMPLED_PRODUCTS = 1 << 15, 1 << 34  # of the store: under a second on one core
WINDOW_BYTES = 1 << 24  # read before the first batch of the sample


@dataclass(frozen=True)
class _Reading:
    """A text's tokens and their codes."""

    tokens: np.ndarray  # (T,), of `windows.TOKEN`
    texts: list[str]  # of each token, or of the character that it is a part of
    further: list[bool]  # whether a token continues the character before
    by_token: csr_array  # (T, F)

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
        """Each token with its strongest latents."""
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
        """A latent's largest code, and all that are not zero."""
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

    def difference(self, other: "_Reading", latent: int) -> dict[str, Any]:
        here, there = self.latent(latent), other.latent(latent)
        return {"difference": here["code"] - there["code"], "here": here, "there": there}


class _Reader:
    def __init__(self, sae_at: Hooked, model: LanguageModel) -> None:
        self._model, self._points, self._prepend_bos = model, sae_at.reads, sae_at.prepend_bos
        self._sae = sae_at.sae.copy_to(model.device)
        self._texts = TokenTexts(model.tokenizer)

    @torch.no_grad()
    def read(self, text: str | Messages, name: str, listener: Listener) -> _Reading:
        context = min(CONTEXT, self._model.source.positions or CONTEXT)
        control = None if isinstance(text, str) else "drop"
        cutter = Cutter(
            self._model.tokenizer, context, control=control, prepend_bos=self._prepend_bos
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
        return _Reading(tokens, texts, further, self._codes(cut, ~tokens["special"]))

    def _codes(self, windows: Sequence[Window], read: np.ndarray) -> csr_array:
        """The codes of the tokens that are `read`, (T,), as (T, F)."""
        stored = [TextWindow(window.token_ids, ~window.tokens["special"]) for window in windows]
        batches = stored_activations(self._model, stored, self._points, 1)
        blocks = [codes_of(self._sae, torch.cat(at_points, dim=1)) for at_points in batches]
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


def read(
    sae: SAELike,
    text: str | Messages,
    model: ModelLike | None = None,
    *,
    tokenizer: Any = None,
    compare: str | Messages | None = None,
    latents: int | Sequence[int] | str | None = None,
    top: int = TOP,
    layer: int | None = None,
    site: str | None = None,
    module: str | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """The latents of an SAE that fire on a text. CLI equivalent: `sae read`.

    Args:
        sae, device, home, progress: as in `evaluate`.
        text: a text, or the messages of a chat, each with role and content, for the tokenizer's chat template.
        model: hub id, folder or GGUF file; by default the model that the SAE's file names. Or a loaded model, with its
            `tokenizer`.
        compare: another such text.
        latents: those to describe; `listed`: all that are among the `top` of a token; by default the `top` strongest.
        layer, site, or module: the hook point, if the SAE's file has none.

    Returns:
        The hook point. `tokens`, each with its text (a character of several tokens stands at the first), whether it is
        special, in a chat its role, and its `top` strongest latents with codes. `latents`, the strongest first: each
        with its largest `code`, `position` and `token` there, the number of tokens that it `fires_on`, its `codes` at
        these `positions`, its `frequency` on `store_rows` rows of the store that the SAE was trained on, None where
        that is not here, and its `label` in the run's `labels.json`, if any. With `compare`: its `tokens`, and
        `latents` by `difference`, the largest code `here` less the largest `there`, in the other text.
    """
    demand_at_least("top", top)
    texts = {"the text": text} | ({} if compare is None else {"--compare": compare})
    for name, words in texts.items():
        demand_text(name, words)
    if isinstance(latents, str) and latents != "listed":
        raise unknown_choice("latents", latents, ["listed"])
    listener, home = listening(progress), Home.at(home)
    opened = open_sae(home, sae, listener)
    sae_at = hooked(opened, *place_given(layer, site, module), "reading a prompt by")
    chosen = None
    if not isinstance(latents, str | None):
        chosen = chosen_latents(latents, sae_at.sae.d_sae, sae_at.name)
    labels = shown_labels(opened[0].folder, sae_at.sae.d_sae)
    source = model_of([sae_at], model, listener, tokenizer=tokenizer)
    loaded = LanguageModel(source, device_named(device), last=last_layer(sae_at.reads))
    reader = _Reader(sae_at, loaded)
    readings = [reader.read(words, name, listener) for name, words in texts.items()]
    lines = [reading.lines(top) for reading in readings]
    if latents == "listed":
        named = {one["latent"] for of_text in lines for line in of_text for one in line["latents"]}
        chosen = sorted(named)
    counts = Firing(sae_at.sae.d_sae, device=device_named(device))
    for codes in own_codes(home, opened, device, SAMPLED_ROWS, SAMPLED_PRODUCTS, WINDOW_BYTES):
        counts.update(codes)
    frequencies = counts.frequency.tolist() if counts.rows else None

    def known(latent: int) -> dict[str, Any]:
        frequency = None if frequencies is None else frequencies[latent]
        return {"latent": latent, "label": labels.get(latent), "frequency": frequency}

    here = readings[0]
    points = [point.to_json() for point in sae_at.reads]
    document = {
        "run": sae_at.name,
        "model": source.name,
        **({"inputs": points} if len(points) > 1 else points[0]),
        "store_rows": counts.rows or None,
        "tokens": lines[0],
        "latents": [
            known(latent) | here.latent(latent)
            for latent in _ordered(abs(here.largest), chosen, top)
        ],
        "compare": None,
    }
    if compare is not None:
        there = readings[1]
        differing = _ordered(abs(here.largest - there.largest), chosen, top)
        differences = [known(latent) | here.difference(there, latent) for latent in differing]
        document["compare"] = {"tokens": lines[1], "latents": differences}
    return document
