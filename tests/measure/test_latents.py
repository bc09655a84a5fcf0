"""What is gathered of latents in one pass, against brute force in numpy."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from storing import make_store, memory_folder, window_starts

from saecli.base.errors import MachineError
from saecli.measure import latents as surveyed
from saecli.measure.cosines import neighbours
from saecli.measure.latents import (
    EXCERPT,
    LEAST_TOGETHER,
    CoFiring,
    Examples,
    Magnitudes,
    SurveyBlock,
    WindowTokens,
    at_random,
    bin_edges,
    row_blocks,
)
from saecli.sae.activations import Relu
from saecli.sae.codes import SparseCodes, where
from saecli.sae.dictionary import SAE
from saecli.store.split import is_test

F, COUNT = 9, 4
COLUMNS = ("document", "position", "token_id")


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens and codes for them; some windows read like others."""

    codes: np.ndarray
    columns: np.ndarray
    starts: np.ndarray

    @classmethod
    def random(cls, seed: int, signed: bool = False) -> "Corpus":
        rng = np.random.default_rng(seed)
        lengths = rng.choice([1, 2, 20, 47, 48, 49, 90], 60)
        rows = int(lengths.sum())
        codes = np.round(4 * rng.normal(size=(rows, F))) / 4  # many are equal
        codes = codes if signed else np.maximum(codes - 0.5, 0)
        documents = np.repeat(np.arange(60) // 2, lengths)
        positions = np.concatenate([1 + np.arange(length) for length in lengths])
        # Few letters, so that short windows repeat; every third window is a run of one of them.
        tokens = np.concatenate(
            [np.full(n, 7) if i % 3 == 0 else rng.integers(0, 5, n) for i, n in enumerate(lengths)]
        )
        return cls(
            codes.astype(np.float32),
            np.stack([documents, positions, tokens]),
            np.concatenate([[0], np.cumsum(lengths)]),
        )

    def blocks(self, rng: np.random.Generator) -> list[slice]:
        """Stretches of whole windows."""
        cuts = np.sort(rng.choice(np.arange(1, 60), 12, replace=False))
        return [slice(self.starts[a], self.starts[b]) for a, b in pairwise([0, *cuts, 60])]

    def best(self, latent: int) -> list[dict]:
        """The examples of a latent by looking at every window, in float64."""
        examples = []
        for begin, end in pairwise(self.starts):
            sizes = np.abs(self.codes[begin:end, latent].astype(np.float64))
            row = begin + int(np.argmax(sizes))
            first = max(begin, min(row - EXCERPT.before, end - EXCERPT.length))
            last = min(end, first + EXCERPT.length)
            if sizes.max() > 0:
                example = {
                    "rank": sizes.max(),
                    "number": row,
                    "token": tuple(self.columns[2, first:last]),
                    "code": tuple(self.codes[first:last, latent]),
                    "peak": row - first,
                    "document": self.columns[0, row],
                    "position": self.columns[1, row],
                }
                examples.append(example)
        of_text = {}
        for example in sorted(examples, key=lambda example: (-example["rank"], example["number"])):
            of_text.setdefault(example["token"], example)
        return list(of_text.values())[:COUNT]


def filled(
    examples: Examples, codes: np.ndarray, columns: np.ndarray | None, parts: list[slice]
) -> Examples:
    """Examples that have taken in codes by parts."""
    for part in parts:
        numbers = np.arange(part.start, part.stop)
        block = SurveyBlock(torch.empty(len(numbers), 2), numbers)
        if columns is not None:
            documents, positions, token_ids = columns[:, part]
            starts = np.array([0, *window_starts(documents, positions), len(numbers)])
            texts = WindowTokens(token_ids, starts, np.ones(len(numbers), bool))
            block = replace(block, texts=texts, columns=columns[:2, part])
        examples.update(torch.from_numpy(codes[part]), block)
    return examples


def check(found: dict[str, np.ndarray], place: int, expected: list[dict]) -> None:
    assert int((found["rank"][place] > 0).sum()) == len(expected)
    for which, example in enumerate(expected):
        for name in ("rank", "number", "peak", "document", "position"):
            assert found[name][place, which] == example[name], name
        length = len(example["token"])
        assert tuple(found["token"][place, which][:length]) == example["token"]
        assert tuple(found["code"][place, which][:length]) == example["code"]
        assert (found["token"][place, which][length:] == -1).all()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_examples_are_those_that_looking_at_every_window_finds(seed: int, signed: bool):
    corpus = Corpus.random(seed, signed)
    for chosen, few in ((range(F), [2, 8]), ([1, 5, 7], [5])):
        blocks = corpus.blocks(np.random.default_rng(seed))
        examples = filled(Examples(chosen, F, COUNT, True), corpus.codes, corpus.columns, blocks)
        for latents in (chosen, few):
            for place, latent in enumerate(latents):
                check(examples.of(latents), place, corpus.best(latent))


def test_examples_without_tokens_are_rows_of_the_largest_codes():
    codes = np.random.default_rng(0).normal(size=(500, F)).astype(np.float32)
    parts = [slice(0, 7), slice(7, 300), slice(300, 500)]
    found = filled(Examples(range(F), F, COUNT, False), codes, None, parts).of(range(F))
    order = np.argsort(-np.abs(codes), axis=0)[:COUNT].T
    assert (found["number"] == order).all()
    assert (found["code"][..., 0] == np.take_along_axis(codes.T, order, 1)).all()


def test_random_examples_do_not_depend_on_batches():
    corpus = Corpus.random(0, signed=True)
    rng = np.random.default_rng(1)
    first, second = (
        filled(examples, corpus.codes, corpus.columns, corpus.blocks(rng)).of(range(F))
        for examples in (Examples(range(F), F, COUNT, True, at_random) for _ in range(2))
    )
    for name, values in first.items():
        assert (values == second[name]).all(), name
    for latent, numbers in enumerate(first["number"]):
        assert (corpus.codes[numbers, latent] != 0).all()
        windows = np.searchsorted(corpus.starts, numbers, side="right")
        assert len(set(windows)) == COUNT
        for which, row in enumerate(numbers):
            begin = row - first["peak"][latent, which]
            length = (first["token"][latent, which] >= 0).sum()
            rows = slice(begin, begin + length)
            assert (first["token"][latent, which, :length] == corpus.columns[2, rows]).all()
            assert (first["code"][latent, which, :length] == corpus.codes[rows, latent]).all()


def test_random_examples_are_spread_evenly_over_rows_and_sizes():
    rng = np.random.default_rng(0)
    rows, latents, count = 20_000, 60, 40
    codes = rng.exponential(size=(rows, latents)) * (rng.random((rows, latents)) < 0.3)
    codes = codes.astype(np.float32)
    samples = Examples(range(latents), latents, count, False, at_random)
    parts = [slice(0, 7000), slice(7000, rows)]
    found = filled(samples, codes, None, parts).of(range(latents))
    assert (found["rank"] > 0).all()
    numbers = found["number"]
    ranks = []
    for of_latent, sampled in zip(codes.T, found["code"][..., 0], strict=True):
        sizes = np.sort(of_latent[of_latent > 0])
        ranks.append(np.searchsorted(sizes, sampled) / len(sizes))
    for uniform in (numbers.ravel() / rows, np.concatenate(ranks), numbers[:, :5].ravel() / rows):
        distance = np.abs(np.sort(uniform) - np.arange(len(uniform)) / len(uniform)).max()
        assert distance < 1.95 / np.sqrt(len(uniform))  # Kolmogorov and Smirnov's bound at 0.1%
    shared = numbers.size - len(np.unique(numbers))
    independent = (latents * count) ** 2 / (2 * rows)  # of independent draws
    assert shared < 3 * independent


@pytest.mark.parametrize(("density", "most"), [(0.03, 0), (0.03, 1), (0.6, 1 / 64)])
def test_partners_are_the_highest_correlations_of_firing(density, most, monkeypatch):
    """`most`: density up to which products are sparse."""
    monkeypatch.setattr(surveyed, "MOST_FIRING", most)
    rng = np.random.default_rng(0)
    rows, latents = 2500, 30
    fires = rng.random((rows, latents)) < density
    fires[:, 5] = fires[:, 4] & (rng.random(rows) < 0.9)
    fires[:, 6], fires[:, 7] = True, False  # correlated with none
    fires[:, 8], fires[:, 9] = False, False
    fires[[3, 800], 8] = fires[[3, 800], 9] = True  # together, but on two rows only
    gathered = CoFiring(latents, rows)
    for part in np.split(fires, [1, 900, 901]):
        gathered.update(torch.from_numpy(-part.astype(np.float32)))
    told = []
    chosen = torch.tensor([4, 6, 7, 8, 29])
    phis, partners = gathered.partners(chosen, 10, told.append)
    both = fires.T.astype(int) @ fires
    with np.errstate(divide="ignore", invalid="ignore"):
        phi = np.nan_to_num(np.corrcoef(fires.T.astype(float)))
    phi[both < LEAST_TOGETHER] = 0
    np.fill_diagonal(phi, 0)
    for place, latent in enumerate(chosen.tolist()):
        order = np.argsort(-phi[latent], kind="stable")[:10]
        highest = np.maximum(phi[latent, order], 0)
        assert phis[place].numpy() == pytest.approx(highest, abs=1e-5)
        there = phis[place] > 1e-4
        others = partners[place][there].numpy()
        assert phi[latent, others] == pytest.approx(phis[place][there].numpy(), abs=1e-5)
    assert partners[0, 0] == 5
    assert told == [5]


def test_examples_that_do_not_fit_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(surveyed, "available_memory", lambda: 10_000_000)
    Examples(range(900), 900, 25, True)
    said = r"examples of 1,100 latents do not fit: expected 11.7 MB of free memory, got 10 MB; ask for fewer"
    with pytest.raises(MachineError, match=said):
        Examples(range(1100), 1100, 25, True)


def test_cofiring_of_many_rows_looks_at_evenly_spaced_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(surveyed, "COFIRING_ROWS", 40)
    rows = 350  # every 9th
    fires = np.random.default_rng(0).random((rows, 12)) < 0.5
    gathered, alone = CoFiring(12, rows), CoFiring(12, 39)
    for part in np.split(fires, [1, 2, 60, 345]):
        gathered.update(torch.from_numpy(part.astype(np.float32)))
    alone.update(torch.from_numpy(fires[::9].astype(np.float32)))
    partners, expected = (
        cofiring.partners(torch.arange(12), 3, lambda done: None) for cofiring in (gathered, alone)
    )
    for one, other in zip(partners, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", ["all", "test"])
@pytest.mark.parametrize("batch_rows", [16, 1000])
def test_blocks_hold_whole_windows_and_every_row_with_its_number(which: str, batch_rows: int):
    corpus = Corpus.random(3)
    rows = np.random.default_rng(0).normal(size=(len(corpus.codes), 4)).astype(np.float32)
    with memory_folder() as folder:
        columns = dict(zip(COLUMNS, corpus.columns, strict=True))
        shards = {"shard_rows": 500, "chunk_rows": 64, "windows": True}
        chosen = make_store(folder / "store", rows, columns=columns, **shards).split(which)
        batches = map(torch.from_numpy, chosen.sequential(batch_rows))
        kept = np.flatnonzero(is_test(corpus.columns[0]) | (which == "all"))
        blocks = [
            (block.x.clone(), block.numbers, block.columns, block.starts)
            for block in row_blocks(batches, chosen, batch_rows)
        ]
    x, numbers, columns, starts = zip(*blocks, strict=True)
    assert (np.concatenate(numbers) == kept).all()
    assert (torch.cat(x).numpy() == rows[kept]).all()
    assert (np.concatenate(columns, axis=1) == corpus.columns[:2, kept]).all()
    begun = [int(own[start]) for own, of in zip(numbers, starts, strict=True) for start in of[:-1]]
    assert begun == [start for start in corpus.starts[:-1] if start in set(kept)]
    assert len(blocks) > 1 or batch_rows > len(kept)


@pytest.mark.parametrize("share", [0.02, 0.7], ids=["sparse", "dense"])
def test_magnitudes_are_numpys_histogram_mean_and_maximum(share: float):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(700, 30)) * 10.0 ** rng.uniform(-9, 9, (700, 30))
    codes = (codes * (rng.random((700, 30)) < share)).astype(np.float32)
    codes[:, 4] = 0
    magnitudes = Magnitudes(30)
    for part in torch.from_numpy(codes).split(300):
        found = where(part, part != 0)
        assert isinstance(found, SparseCodes) == (share < 0.1)
        magnitudes.update(found)
    edges = bin_edges()
    for latent in range(30):
        sizes = np.abs(codes[:, latent][codes[:, latent] != 0]).astype(np.float64)
        expected, _ = np.histogram(np.clip(sizes, edges[0], np.nextafter(edges[-1], 0)), edges)
        assert (magnitudes.histograms[latent] == expected).all()
        assert magnitudes.means[latent] == pytest.approx(sizes.mean() if len(sizes) else 0)
        assert magnitudes.largest[latent] == (sizes.max() if len(sizes) else 0)


def test_neighbours_are_the_largest_cosines_but_a_latents_own():
    W_dec = np.random.default_rng(0).normal(size=(40, 6))
    W_dec[7] = 0
    unit = W_dec / np.maximum(np.linalg.norm(W_dec, axis=1, keepdims=True), 1e-300)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    told, rows = [], torch.from_numpy(W_dec)
    sae = SAE(rows.T, torch.zeros(40), rows, torch.zeros(6).double(), Relu())
    values, latents = neighbours(sae, torch.tensor([3, 7, 39]), 5, told.append)
    order = np.argsort(-cosines[[3, 39]], axis=1)[:, :5]
    assert (latents[[0, 2]].numpy() == order).all()
    assert values[[0, 2]].numpy() == pytest.approx(np.take_along_axis(cosines[[3, 39]], order, 1))
    assert (values[1] == 0).all()
    assert told == [3]
