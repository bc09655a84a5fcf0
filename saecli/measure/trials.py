"""Latents of an SAE tried in a model: changes at held-out tokens, and what they do to its predictions.

With W_i the decoder vector of latent i at a hook point and z_i its code, activations become

    removed    x - dose z_i W_i            at a token of each document where the latent fires
    added      x + dose mean(z_i) W_i      at one where it is silent; the mean is of codes where it fires

The reconstruction error stays. Floors are other changes of the norm of dose 1 at the same token:

    random          directions drawn in the rows' covariance
    other latent    decoder vectors of the latents nearest in frequency
    error           what the SAE does not reconstruct of that token
    wrong sign      the same change, times -1

Outcomes are KL, and the log-probability of the tokens that a latent promotes: those with the largest

    mean over J other tokens of d log p / d dose     dose 0

Shapes: N held-out rows, L latents, n documents of each, C changes, E the width at the hook point, P tokens promoted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csc_array
from torch import Tensor
from torch.nn.functional import normalize

from ..base.console import Listener
from ..model.choice import check_rows, unlike
from ..model.language_model import LanguageModel
from ..model.source import ModelSource
from ..splice.copies import effects_at_copies, longest_window, slopes_at_copies
from ..splice.passes import Passes
from ..store.origin import HookPoint
from .excerpts import some_rows
from .measured import Measured, codes_of, spread_out
from .two_samples import Values

SIGNS = {"removed": -1, "added": 1}  # of the change, by condition
DOSES, OWN = (0.5, 1.0, 2.0, 4.0), 1  # the first changes; which of them is of dose 1
DRAWN = {"random": slice(4, 8), "other latent": slice(8, 12)}  # changes in several directions
FLOORS = DRAWN | {"error": slice(12, 13), "wrong sign": slice(13, 14)}
DIRECTIONS, CHANGES = 4, 14
ROWS, COVARIANCE_ROWS, CONTEXT = 1 << 15, 1 << 12, 128  # rows read, sampled; tokens of a window
PROMOTED, SAMPLED = 10, 16  # P; J
SEED = 0

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Trials:
    """Held-out rows at the first tokens of windows, with codes."""

    passes: Passes
    point: HookPoint
    decoder: Tensor  # at the hook point, (F, E)
    y: Tensor  # activations there, (N, E)
    error: Tensor  # of their reconstruction, (N, E)
    codes: csc_array  # (N, F)
    documents: Integers  # (N,), from 0
    windows: Integers  # (N,), from 0
    places: Integers  # in the window, (N,)
    token_ids: list[Integers]  # of each window

    @classmethod
    @torch.no_grad()
    def of(cls, run: Measured, point: HookPoint, source: ModelSource, listener: Listener) -> Self:
        """ConfigError or StoreError if rows or the model do not fit."""
        run, sae = some_rows(run, "test", ROWS), run.sae
        number = run.saved.origin.read.index(point) if sae.widths else 0
        stored, columns = run.rows.inputs[number], sae.hook_columns[number]
        check_rows(stored, source)
        passes = Passes(LanguageModel(source, sae.W_enc.device, head=True, dtype="float32"))
        if reason := unlike(passes.model, stored.store.meta):
            listener.warn(f"{stored.name} {reason}")
        windows = [*stored.windows()]
        in_windows = [np.flatnonzero(window.is_row) for window in windows]
        numbers = np.repeat(np.arange(len(windows)), [len(each) for each in in_windows])
        places = np.concatenate(in_windows)
        kept = np.flatnonzero(places < longest_window(passes, CONTEXT))
        documents = np.concatenate([*stored.column("document", ROWS)])[kept]
        rows = torch.cat([*run.batches(listener)])[torch.from_numpy(kept)]
        x, y = rows[:, : sae.d_in], rows[:, -sae.d_out :][:, columns].float().cpu()
        return cls(
            passes,
            point,
            sae.W_dec[:, columns].float().cpu(),
            y,
            y - sae(x)[:, columns].float().cpu(),
            csc_array(codes_of(sae, x)),
            np.unique(documents, return_inverse=True)[1],
            numbers[kept],
            places[kept],
            [window.token_ids for window in windows],
        )

    @cached_property
    def frequency(self) -> Values:
        return np.diff(self.codes.indptr) / len(self.y)

    def _codes(self, latent: int) -> Tensor:
        """(N,)."""
        return torch.from_numpy(self.codes[:, [latent]].toarray()[:, 0])

    def code(self, latent: int) -> float:
        """The mean where it fires."""
        return float(self._codes(latent).sum() / (self.frequency[latent] * len(self.y)))

    def chosen(self, top_k: int, documents: int) -> list[int]:
        """`top_k` of the latents that can be tried in this number of documents, spread over frequency."""
        order = np.argsort(self.frequency, kind="stable").tolist()
        usable = [each for each in order if self.rows_of(each, documents).shape[1] == documents]
        return spread_out(np.array(usable, int), top_k).tolist()

    @cached_property
    def _orders(self) -> tuple[Integers, Integers]:
        """Of rows, (N,), and of documents: random, the same for all latents."""
        draw = np.random.default_rng(SEED)
        return draw.permutation(len(self.y)), draw.permutation(self.documents.max() + 1)

    def rows_of(self, latent: int, count: int) -> Integers:
        """In at most `count` documents, the same first for all latents, so that they share windows: a row where a
        latent fires, and one where it is silent, (2, n)."""
        shuffled, documents = self._orders
        fires = self._codes(latent).numpy() != 0
        found = np.full((2, len(documents)), -1)
        for of_document, mask in zip(found, (fires, ~fires), strict=True):
            rows = shuffled[mask[shuffled]]
            of_document[self.documents[rows]] = rows
        both = documents[(found[:, documents] >= 0).all(0)]
        return found[:, both[:count]]

    def changes(self, latent: int, rows: Integers) -> Tensor:
        """(2, C, n, E), at rows of `rows_of`."""
        draw = torch.Generator().manual_seed(latent)
        sample = self.y[:: -(-len(self.y) // COVARIANCE_ROWS)]
        random = torch.randn(DIRECTIONS, len(sample), generator=draw) @ (sample - sample.mean(0))
        distance = np.abs(self.frequency - self.frequency[latent])
        distance[latent] = np.inf
        similar = np.argsort(distance, kind="stable")[:DIRECTIONS]
        drawn = torch.cat([random, self.decoder[similar]])[:, None].expand(-1, rows.shape[1], -1)
        sizes = self._codes(latent)[rows[0]], torch.full(rows.shape[1:], self.code(latent))
        changes = []
        for sign, size, at in zip(SIGNS.values(), sizes, rows, strict=True):
            own = sign * size[:, None] * self.decoder[latent]
            directions = torch.cat([drawn, self.error[at][None]])
            floors = sign * own.norm(dim=1, keepdim=True) * normalize(directions, dim=2)
            doses = torch.tensor(DOSES)[:, None, None] * own
            changes.append(torch.cat([doses, floors, -own[None]]))
        return torch.stack(changes)

    @cached_property
    def sampled(self) -> Integers:
        """A row of each of the documents that are tried last, (J,)."""
        shuffled, documents = self._orders
        first = [np.flatnonzero(self.documents[shuffled] == each)[0] for each in documents]
        return shuffled[first[-SAMPLED:]]

    def promoted(self, latents: Sequence[int], advance: Callable[[int], object]) -> Tensor:
        """Ids of the tokens that latents promote, (L, P); `advance` takes the number of changes of each pass."""
        directions = torch.stack([self.code(each) * self.decoder[each] for each in latents])
        slopes = torch.zeros(len(latents), self.passes.model.vocabulary)
        for row in self.sampled:
            place = int(self.places[row])
            token_ids = torch.from_numpy(self.token_ids[self.windows[row]][: place + 1])
            at = torch.full((len(latents),), place)
            slopes += slopes_at_copies(self.passes, self.point, token_ids, at, directions)
            advance(2 * len(latents))
        return slopes[:, : len(self.passes.model.tokenizer)].topk(PROMOTED).indices

    def outcomes(
        self,
        latents: Sequence[int],
        rows: Integers,
        promoted: Tensor,
        advance: Callable[[int], object],
    ) -> Values:
        """KL of changes at rows of `rows_of`, (L, 2, n), and the rise of the mean log-probability of `promoted` tokens,
        (2, L, 2, C, n); `advance` takes the number of changes of each pass."""
        each = zip(latents, rows, strict=True)
        vectors = torch.stack([self.changes(latent, at) for latent, at in each])
        shape = vectors.shape[:4]
        vectors = vectors.flatten(0, 3)
        followed = promoted.repeat_interleave(shape[1:].numel(), 0)
        at_rows = np.broadcast_to(rows[:, :, None], shape).ravel()
        values = np.empty((2, len(vectors)))
        for window in np.unique(self.windows[at_rows]):
            chosen = np.flatnonzero(self.windows[at_rows] == window)
            places = torch.from_numpy(self.places[at_rows[chosen]])
            token_ids = torch.from_numpy(self.token_ids[window][: places.max() + 1])
            changes = token_ids, places, vectors[chosen], followed[chosen]
            values[:, chosen] = effects_at_copies(self.passes, self.point, *changes)
            advance(len(chosen))
        return values.reshape(2, *shape)
