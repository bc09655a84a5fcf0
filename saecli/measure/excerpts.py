"""Excerpts of texts on which a latent fires, and of others, to label it and to score the label.

They come from two samples of a store's documents, of training and of held-out rows: at most `TRAIN_ROWS`, `TEST_ROWS`
and, of each, `MOST_CODES` codes (8 bytes each) or one batch. Cost: encoding them once.

Shapes: n tokens of both samples, W windows, E excerpts, C chosen latents, F = d_sae.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import csc_array, csr_array, vstack

from ..base.console import Listener
from ..model.tokenizer import TokenTexts
from ..store.split import TEST_FRACTION, Which
from .cosines import near_latents
from .latents import CoFiring, ExcerptShape, row_blocks
from .measured import Measured, at_tokens, spread_out

LABEL_EXCERPT = ExcerptShape(32, 23)
TRAIN_ROWS, TEST_ROWS, MOST_CODES = 1 << 17, 1 << 15, 1 << 24
STRONGEST, SAMPLED = 10, 10  # of `shown`
FIRING, SILENT_EXCERPTS, NEAR = 20, 20, 10  # excerpts of each, at most
SEED = 0  # of the choice of latents and of texts
NEAR_LATENTS = 5  # by cosine, and as many by co-firing
TRIES = 10  # random windows looked at for each silent one wanted


@dataclass(frozen=True)
class Excerpt:
    tokens: tuple[str, ...]
    codes: tuple[float, ...]  # 0 where it is silent
    is_row: tuple[bool, ...]  # whether the store has a row of the token; without one it has no code


@dataclass(frozen=True)
class LatentExcerpts:
    latent: int
    # Of training rows: the strongest, then sampled over the range of codes.
    shown: tuple[Excerpt, ...]
    firing: tuple[Excerpt, ...]  # of held-out rows, sampled over the range of codes
    silent: tuple[Excerpt, ...]  # of held-out rows, at random among those where it is silent
    near: tuple[Excerpt, ...]  # of held-out rows where it is silent and a latent near it fires


# The excerpts of a `LatentExcerpts` by name, each the token that it begins at and the one it ends before, (E, 2).
Spans = dict[str, np.ndarray]


@dataclass(frozen=True)
class Corpus:
    """The tokens of both samples, window after window, with all latents' codes."""

    tokens: np.ndarray  # ids, (n,)
    positions: np.ndarray  # in the model's window, (n,); -1 for tokens that are no rows
    starts: np.ndarray  # the first token of each window and the end of the last, (W + 1,)
    trained: int  # tokens of the first sample, of training rows
    codes: csc_array  # (n, F)
    near: dict[int, list[int]]  # of each chosen latent the latents near it, the nearest first

    @cached_property
    def windows(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @cached_property
    def _cells(self) -> np.ndarray:
        """Windows are cut into cells of an excerpt's length; each token's, (n,)."""
        inside = np.arange(len(self.tokens)) - self.starts[self.windows]
        return np.cumsum(inside % LABEL_EXCERPT.length == 0)

    @cached_property
    def _shuffled(self) -> np.ndarray:
        held_out = self.trained + np.flatnonzero(self.positions[self.trained :] >= 0)
        return np.random.default_rng(SEED).permutation(held_out)

    def fires(self, latent: int) -> np.ndarray:
        """The tokens on which a latent fires, ascending."""
        return self.codes.indices[slice(*self.codes.indptr[latent : latent + 2])]

    def peaks(self, latent: int, train: bool) -> np.ndarray:
        """The tokens at which a latent peaks in cells of a sample, the strongest first."""
        tokens, part = self.fires(latent), slice(*self.codes.indptr[latent : latent + 2])
        in_sample = (tokens < self.trained) == train
        tokens, sizes = tokens[in_sample], abs(self.codes.data[part][in_sample])
        order = np.argsort(-sizes, kind="stable")
        _, first = np.unique(self._cells[tokens[order]], return_index=True)
        return tokens[order[np.sort(first)]]

    def around(self, tokens: np.ndarray) -> np.ndarray:
        windows = self.windows[tokens]
        spans = np.stack(
            LABEL_EXCERPT.bounds(tokens, self.starts[windows], self.starts[windows + 1]), axis=1
        )
        _, first = np.unique(spans, axis=0, return_index=True)
        return spans[np.sort(first)]

    def spans(self, latent: int) -> Spans:
        strong = self.peaks(latent, True)
        tries = np.roll(self._shuffled, -latent * TRIES * SILENT_EXCERPTS)[
            : TRIES * SILENT_EXCERPTS
        ]
        near = [self.peaks(other, False) for other in self.near[latent]]
        in_turn = sorted(
            pair for peaks in near for pair in enumerate(spread_out(peaks, NEAR).tolist())
        )
        shown = np.append(strong[:STRONGEST], spread_out(strong[STRONGEST:], SAMPLED))
        near_tokens = np.array([token for _, token in in_turn], int)
        return {
            "shown": self.around(shown),
            "firing": self.around(spread_out(self.peaks(latent, False), FIRING)),
            "silent": self._silent_around(latent, tries)[:SILENT_EXCERPTS],
            "near": self._silent_around(latent, near_tokens)[:NEAR],
        }

    def _silent_around(self, latent: int, tokens: np.ndarray) -> np.ndarray:
        """The excerpts around tokens, (E, 2), in which a latent is silent."""
        spans = self.around(tokens)
        counts = np.searchsorted(self.fires(latent), spans)
        return spans[counts[:, 0] == counts[:, 1]]


def gather(
    run: Measured, latents: Sequence[int] | None, count: int | None, listener: Listener
) -> Corpus:
    """Read and encode both samples of a store that keeps tokens; of the latents given, or all that fire, `count` at
    random are chosen."""
    training = some_rows(run, "train", TRAIN_ROWS)
    cofiring = CoFiring(run.sae.d_sae, training.rows.rows)
    train = list(_sample(training, cofiring, listener))
    test = list(_sample(some_rows(run, "test", TEST_ROWS), None, listener))
    tokens, positions, lengths, codes = zip(*train, *test, strict=True)
    by_latent = vstack(codes, format="csc")
    chosen = np.flatnonzero(np.diff(by_latent.indptr)) if latents is None else np.unique(latents)
    if count is not None and count < len(chosen):
        chosen = np.sort(np.random.default_rng(SEED).choice(chosen, count, replace=False))
    return Corpus(
        np.concatenate(tokens),
        np.concatenate(positions),
        np.concatenate([[0], np.cumsum(np.concatenate(lengths))]),
        sum(len(tokens_of_block) for tokens_of_block, *_ in train),
        by_latent,
        _near(run, chosen, cofiring, listener),
    )


def some_rows(run: Measured, which: Which, rows: int) -> Measured:
    """The run with about this number of a split's rows, of documents drawn by hash."""
    part = min(1.0, rows / max(1, run.store.rows * (TEST_FRACTION if which == "test" else 1)))
    choice = {"test_fraction": part * TEST_FRACTION}
    if which == "train":
        choice = {"fraction": min(part, run.subject.fraction)}
    chosen = run.stores.split(which, seed=run.subject.split_seed, **choice)
    return replace(run, rows=chosen)


@torch.no_grad()
def _sample(
    run: Measured, cofiring: CoFiring | None, listener: Listener
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, csr_array]]:
    """For each block: tokens, positions, (n,), lengths of windows, (W,), and codes, (n, F)."""
    count = 0
    for block in row_blocks(run.inputs(listener), run.of_store, run.batch_rows):
        texts = block.texts
        assert texts is not None and block.columns is not None
        z = run.sae.codes(block.x).dense()
        if cofiring is not None:
            cofiring.update(z)
        of_rows = csr_array(z.float().cpu().numpy())
        positions = np.full(len(texts.token_ids), -1)
        positions[texts.stored] = block.columns[1]
        codes = at_tokens(of_rows, texts.stored)
        yield texts.token_ids, positions, np.diff(texts.starts), codes
        count += of_rows.nnz
        if count > MOST_CODES:
            return


def _near(
    run: Measured, chosen: np.ndarray, cofiring: CoFiring, listener: Listener
) -> dict[int, list[int]]:
    """The latents near chosen ones, (C,), in turn by cosine and by co-firing."""
    latents = torch.from_numpy(chosen).to(run.sae.W_dec.device)
    (cosines, by_cosine), (phi, by_phi) = near_latents(
        run.sae, latents, NEAR_LATENTS, cofiring, listener
    )
    near = torch.stack([by_cosine, by_phi], dim=2).flatten(1)
    is_near = torch.stack([cosines, phi], dim=2).flatten(1) > 0
    rows = zip(chosen.tolist(), near, is_near, strict=True)
    return {latent: list(dict.fromkeys(others[known].tolist())) for latent, others, known in rows}


def excerpts_of(corpus: Corpus, latent: int, texts: TokenTexts) -> LatentExcerpts:
    codes = corpus.codes[:, [latent]].toarray().ravel()

    def read(spans: np.ndarray) -> tuple[Excerpt, ...]:
        return tuple(
            Excerpt(
                tuple(texts[token] for token in corpus.tokens[begin:end].tolist()),
                tuple(codes[begin:end].tolist()),
                tuple((corpus.positions[begin:end] >= 0).tolist()),
            )
            for begin, end in spans.tolist()
        )

    spans = corpus.spans(latent)
    return LatentExcerpts(latent, **{name: read(part) for name, part in spans.items()})
