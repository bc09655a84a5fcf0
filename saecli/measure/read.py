"""The latents that fire on a text: on each of its tokens, and over all of it.

A text is read as `sae extract` reads documents: with the special tokens of the model's windows around it, cut into
windows of at most `CONTEXT` tokens. Special tokens (BOS, a chat's control tokens) and the first token of a window, the
attention sink where there is no BOS, have activations of another kind and size: they have no codes here.

Shapes: T tokens of a text, n of them with codes, D = d_in, F = d_sae.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csc_array, csr_array
from torch import Tensor

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.documents import read_json
from ..base.errors import ConfigError, FormatError, ModelError, demand_at_least
from ..base.home import Home
from ..extract.language_model import LanguageModel
from ..extract.splice import Hooked, StoredWindow, hooked, model_of, stored_activations
from ..extract.texts import Document
from ..extract.tokenizer import ROLES, Chats, TokenTexts, characters
from ..extract.windows import Window, Windows
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject, open_sae
from ..sae.metrics import Firing
from ..store.reader import JoinedRows, Rows
from .measured import BATCH_CODES, own_rows

Messages = Sequence[Mapping[str, Any]]  # of a chat, each with role and content
CONTEXT = 4096  # most tokens of a window, or the model's limit if lower
TOP = 10
SAMPLED_ROWS, SAMPLED_PRODUCTS = 1 << 15, 1 << 34  # at most: under a second on one core
WINDOW_BYTES = 1 << 24  # read before the first batch of the sample
LABELS = "labels.json"


@dataclass(frozen=True)
class _Reading:
    """A text's tokens, in order, and their codes."""

    windows: list[Window]
    read: np.ndarray  # (T,) bool, which tokens have codes
    characters: list[tuple[str, int]]  # pieces of text, and how many tokens each has
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

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token, or of the character that it is a part of."""
        return [text for text, count in self.characters for _ in range(count)]

    def tokens(self, top: int) -> list[dict[str, Any]]:
        """Each token with its strongest latents."""
        columns = np.concatenate([window.tokens for window in self.windows])
        texts = [part for text, count in self.characters for part in [text, *[""] * (count - 1)]]
        lines = []
        for position, text in enumerate(texts):
            line = {"token_id": int(columns["token_id"][position]), "text": text}
            line["special"] = not self.read[position]
            line["role"] = ROLES[columns["role"][position]]
            line["latents"] = self._strongest(position, top)
            lines.append(line)
        return lines

    def _strongest(self, position: int, top: int) -> list[dict[str, Any]]:
        begin, end = self.by_token.indptr[position : position + 2]
        codes = self.by_token.data[begin:end]
        order = np.argsort(-abs(codes), kind="stable")[:top]
        latents = self.by_token.indices[begin:end][order].tolist()
        strongest = zip(latents, codes[order].tolist(), strict=True)
        return [{"latent": latent, "code": code} for latent, code in strongest]

    def latent(self, latent: int) -> dict[str, Any]:
        """The tokens on which a latent fires, with its codes, and the largest."""
        begin, end = self.by_latent.indptr[latent : latent + 2]
        positions, codes = self.by_latent.indices[begin:end], self.by_latent.data[begin:end]
        largest = int(abs(codes).argmax()) if len(codes) else None
        position = None if largest is None else int(positions[largest])
        return {
            "code": 0.0 if largest is None else float(codes[largest]),
            "position": position,
            "token": None if position is None else self.pieces[position],
            "fires_on": len(codes),
            "positions": positions.tolist(),
            "codes": codes.tolist(),
        }


class _Reader:
    """A loaded model with an SAE, which reads texts."""

    def __init__(self, opened: tuple[Subject, SavedSAE], sae_at: Hooked, model: LanguageModel):
        self.model, self.points = model, sae_at.reads
        self.sae = sae_at.sae.copy_to(model.device)
        self.prepend_bos = opened[1].origin.get("prepend_bos") is not False
        self.texts = TokenTexts(model.tokenizer)
        self.context = min(CONTEXT, model.source.positions or CONTEXT)

    @torch.no_grad()
    def read(self, text: str | Messages, name: str, listener: Listener) -> _Reading:
        windows = self._windows(text, name)
        token_ids = np.concatenate([window.token_ids for window in windows])
        if len(windows) > 1:
            listener.note(
                f"{name} has {len(token_ids):,} tokens, read in {len(windows):,} windows of at most "
                f"{self.context:,}: a token sees those before it in its window"
            )
        read = []
        for window in windows:
            has_codes = ~window.tokens["special"]
            has_codes[:1] = False
            read.append(has_codes)
        stored = [
            StoredWindow(window.token_ids, has_codes)
            for window, has_codes in zip(windows, read, strict=True)
        ]
        points = list(dict.fromkeys(self.points))
        parts = []
        for activations in stored_activations(self.model, stored, points, 1):
            at_points = dict(zip(points, activations, strict=True))
            parts.append(torch.cat([at_points[point] for point in self.points], dim=1))
        every_read = np.concatenate(read)
        codes = _sparse_codes(self.sae, torch.cat(parts), every_read)
        return _Reading(windows, every_read, characters(self.texts, token_ids.tolist()), codes)

    def _windows(self, text: str | Messages, name: str) -> list[Window]:
        tokenizer, is_text = self.model.tokenizer, isinstance(text, str)
        document: Any = text
        if not is_text:
            if getattr(tokenizer, "chat_template", None) is None:
                raise ModelError(
                    f"the tokenizer of {self.model.source.name} has no chat template; expected one, to "
                    "render messages by; give a text, or a model that was trained on chats"
                )
            chats = Chats(tokenizer, None, self.model.source.name)
            document = chats.read({"messages": text}, "messages", name)
        words = str(document)
        if not words.strip() or words != words.encode(errors="ignore").decode():
            raise ConfigError(
                f"{name} must be a text in UTF-8 that is not blank, got {words!a:.60}"
            )
        cut = Windows(
            tokenizer,
            self.context,
            control=None if is_text else "drop",
            prepend_bos=self.prepend_bos,
        ).cut([Document(0, document, None)])
        windows = list(cut)
        if not windows:
            raise ConfigError(
                f"{name} has no token for {self.model.source.name}; give another text"
            )
        return windows


def _sparse_codes(sae: SAE, x: Tensor, read: np.ndarray) -> csr_array:
    """The codes of activations, (n, D), at the tokens that are `read`, (T, F)."""
    block_rows = max(16, BATCH_CODES // sae.d_sae)
    blocks = [csr_array(sae.encode(part).float().cpu().numpy()) for part in x.split(block_rows)]
    counts = np.zeros(len(read), np.int64)
    counts[read] = np.concatenate([np.diff(block.indptr) for block in blocks])
    values = np.concatenate([block.data for block in blocks])
    latents = np.concatenate([block.indices for block in blocks])
    offsets = np.concatenate([[0], counts.cumsum()])
    return csr_array((values, latents, offsets), shape=(len(read), sae.d_sae))


@torch.no_grad()
def _firing_on_store(home: Home, opened: tuple[Subject, SavedSAE], device: str) -> Firing | None:
    """Firing frequencies on rows, from random chunks, of the store that an SAE was trained on; None without it.

    Cost: at most `SAMPLED_PRODUCTS` multiplications, or one batch.
    """
    measured = own_rows(home, opened, device)
    if measured is None:
        return None
    sae, rows = measured.sae, measured.rows
    assert isinstance(rows, Rows | JoinedRows)
    most = min(SAMPLED_ROWS, SAMPLED_PRODUCTS // (sae.d_in * sae.d_sae))
    firing = Firing(sae.d_sae, device=sae.W_enc.device)
    sampled = rows.batches(measured.batch_rows, seed=0, epoch=0, window_bytes=WINDOW_BYTES)
    for batch in sampled:
        firing.update(sae.codes(torch.from_numpy(batch[:, : sae.d_in]).to(sae.W_enc)))
        if firing.rows >= most:
            break
    return firing


def _labels(folder: Path | None) -> dict[int, str]:
    """The labels of latents in a run's folder, `{"12": "a label"}` in `labels.json`; none without the file."""
    if folder is None or not (folder / LABELS).is_file():
        return {}
    try:
        return read_json(folder / LABELS, dict[int, str])
    except (OSError, ValueError) as error:
        raise FormatError(
            f"cannot read {folder / LABELS}: {error}; correct it, or remove it to go on without labels"
        ) from error


def _chosen(latents: int | Sequence[int], sae_at: Hooked) -> list[int]:
    numbers, last = np.ravel(latents), sae_at.sae.d_sae - 1
    whole = numbers.size and numbers.dtype.kind in "iu"
    if not whole or numbers.min() < 0 or numbers.max() > last:
        raise ConfigError(
            f"--latent must be from 0 to {last}, the last of {sae_at.name}, got {latents}"
        )
    return numbers.tolist()


def read(
    sae: SAELike,
    text: str | Messages,
    model: str | None = None,
    *,
    compare: str | Messages | None = None,
    latents: int | Sequence[int] | str | None = None,
    top: int = TOP,
    layer: int | None = None,
    site: str | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """The latents of an SAE that fire on a text. CLI equivalent: `sae read`.

    Args:
        sae, device, home, progress: as in `evaluate`.
        text: a text, or the messages of a chat, each with role and content, for the tokenizer's chat template.
        model: hub id, folder or GGUF file; by default the model that the SAE's file names.
        compare: another such text.
        latents: those to describe; `listed`: all that are among the `top` of a token; by default the strongest.
        layer, site: the hook point, if the SAE's file has none.

    Returns:
        The hook point. `tokens`, each with its text (a character of several tokens stands at the first), whether it is
        special, its role in a chat, and its `top` strongest latents with codes. `latents`, the strongest first: each
        with its largest `code`, `position` and `token` there, the number of tokens that it `fires_on`, its `codes` at
        these `positions`, its `frequency` on `store_rows` rows of the store that the SAE was trained on, None where
        that is not here, and its `label` in the run's `labels.json`, if any. With `compare`: its `tokens`, and
        `latents` by `difference`, the largest code `here` less the largest `there`, in the other text.
    """
    demand_at_least("top", top)
    listener, home = listening(progress), Home.at(home)
    opened = open_sae(home, sae, listener)
    sae_at = hooked(opened, layer, site, "reading a prompt by")
    if isinstance(latents, str) and latents != "listed":
        raise ConfigError(f"latents must be numbers or 'listed', got {latents!r}")
    chosen = None if latents is None or isinstance(latents, str) else _chosen(latents, sae_at)
    labels = _labels(opened[0].folder)
    source = model_of([sae_at], model, None, listener)
    firing = _firing_on_store(home, opened, device)
    last = max(point.layer for point in sae_at.reads)
    reader = _Reader(opened, sae_at, LanguageModel(source, device_named(device), last=last))
    readings = [reader.read(text, "the text", listener)]
    if compare is not None:
        readings.append(reader.read(compare, "--compare", listener))
    tokens = [reading.tokens(top) for reading in readings]
    if latents == "listed":
        lists = [token["latents"] for of_text in tokens for token in of_text]
        chosen = sorted({entry["latent"] for entries in lists for entry in entries})

    def strongest(sizes: np.ndarray) -> list[int]:
        numbers = np.flatnonzero(sizes) if chosen is None else np.array(chosen, int)
        ordered = numbers[np.argsort(-sizes[numbers], kind="stable")].tolist()
        return ordered[:top] if chosen is None else ordered

    frequencies = None if firing is None else firing.frequency.tolist()

    def about(latent: int) -> dict[str, Any]:
        frequency = None if frequencies is None else frequencies[latent]
        return {"latent": latent, "frequency": frequency, "label": labels.get(latent)}

    first, several = readings[0], len(sae_at.reads) > 1
    document = {
        "run": sae_at.name,
        "model": source.name,
        **({"inputs": [at.place for at in sae_at.reads]} if several else sae_at.read.place),
        "store_rows": None if firing is None else firing.rows,
        "tokens": tokens[0],
        "latents": [
            about(latent) | first.latent(latent) for latent in strongest(abs(first.largest))
        ],
        "compare": None,
    }
    if compare is not None:
        other, lines = readings[1], []
        for latent in strongest(abs(first.largest - other.largest)):
            here, there = first.latent(latent), other.latent(latent)
            difference = {"difference": here["code"] - there["code"]}
            lines.append(about(latent) | difference | {"here": here, "there": there})
        document["compare"] = {"tokens": tokens[1], "latents": lines}
    return document
