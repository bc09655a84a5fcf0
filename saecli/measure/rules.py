"""Labels of latents without a language model: the rule on tokens that best tells where a latent fires.

A rule is a kind, such as "after", with values, such as `return`: it matches the tokens that have one of them. Chosen is
the rule of largest balanced accuracy on training tokens,

    BA = 1/2 + sum over the values of (p_v - q_v) / 2

where p_v is the fraction of the firings that have value v, and q_v of the silent tokens: the best values of a kind are
found one by one. Firings weigh by the square of their rank by code, the strongest 1, the median 1/4. Of k firings with
a value, `sqrt(k)`, their standard deviation, do not count. Each further value must add `LEAST_GAIN`; kinds that say
less, or have more values, have a cost.

Shapes: n tokens, V values of a kind, F = d_sae.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas
from scipy.sparse import csc_array, csr_array

from ..base.words import numbers_in_words, printable
from ..model.tokenizer import TokenTexts
from .excerpts import Corpus, Spans
from .labels import balanced_accuracy

LEAST_GAIN = 0.015
WORD_CLASSES = {  # the first that fits
    "digits": r"\d+",
    "words in capitals": r"[A-Z]{2,}",
    "capitalised words": r"[A-Z]\w*",
    "line ends": r"\n+",
    "punctuation": r"[^\w\s]+",
}


class CorpusTokens:
    """Properties of a corpus's tokens, (n,) texts each, empty for nothing."""

    def __init__(self, corpus: Corpus, texts: TokenTexts) -> None:
        self.corpus = corpus
        ids, self._which = np.unique(corpus.tokens, return_inverse=True)
        self._texts = [texts[token] for token in ids.tolist()]
        self.quoted = self.map(_quoted)

    def map(self, function: Callable[[str], str]) -> np.ndarray:
        return np.array([function(text) for text in self._texts], object)[self._which]

    def before(self, step: int = 1) -> np.ndarray:
        """The token `step` before each in its window; negative: after it."""
        windows = self.corpus.windows
        return np.where(np.roll(windows, step) == windows, np.roll(self.quoted, step), "")

    def having(self, values: np.ndarray) -> tuple[csr_array, np.ndarray]:
        """Which rows have which values, (n, V), and the values."""
        numbers, names = pandas.factorize(values)
        having = (self.corpus.positions >= 0) & (values != "")
        offsets = np.append(0, having.cumsum())
        ones = np.ones(offsets[-1], np.float32)
        return csr_array((ones, numbers[having], offsets), shape=(len(values), len(names))), names


def _quoted(text: str) -> str:
    """A token without the spaces around it, line ends as ↵."""
    return f"`{printable(text.strip(' ').replace(chr(10), '↵')) or '␣'}`"


def _class(text: str) -> str:
    word = text.strip(" ")
    return next((name for name, form in WORD_CLASSES.items() if re.fullmatch(form, word)), "")


def _shared(part: slice, spaces: str = "") -> Callable[[CorpusTokens], np.ndarray]:
    """A part of words that begin with these spaces, and have two letters more."""

    def of(text: str) -> str:
        word = text.strip().lower()
        shared = word[part]
        has = text.startswith(spaces) and word.isalpha() and len(word) > len(shared) + 1
        return f"`{shared}`" if has else ""

    return lambda tokens: tokens.map(of)


class RuleKind(NamedTuple):
    words: str  # the label, with the values in it
    values: Callable[[CorpusTokens], np.ndarray]  # of each token, (n,)
    most: int = 5  # values of a rule
    cost: float = 0.0  # in balanced accuracy


RULE_KINDS = (
    RuleKind("{}", lambda tokens: tokens.quoted),
    RuleKind(
        "{} in any case", lambda tokens: tokens.map(lambda text: _quoted(text).casefold()), 5, 0.02
    ),
    *(RuleKind("words that end in {}", _shared(slice(-n, None)), 1, 0.02) for n in (4, 3, 2)),
    *(RuleKind("words that begin with {}", _shared(slice(n), " "), 1, 0.02) for n in (4, 3)),
    RuleKind("{}", lambda tokens: tokens.map(_class), 2),
    RuleKind("after {}", lambda tokens: tokens.before(), 4, 0.01),
    RuleKind("before {}", lambda tokens: tokens.before(-1), 4, 0.015),
    RuleKind("position {}", lambda tokens: tokens.corpus.positions.astype(str).astype(object), 5),
)


@dataclass(frozen=True)
class Rule:
    words: str
    values: tuple[str, ...]
    having: csc_array  # which tokens of the corpus have which values of the kind, (n, V)
    numbers: np.ndarray  # of the rule's values

    @property
    def label(self) -> str:
        values = ", ".join(self.values)
        if self.words.startswith("position"):
            values = numbers_in_words(map(int, self.values))
        return self.words.format(values)

    def matches(self, tokens: np.ndarray) -> np.ndarray:
        """Which tokens, by their indices, it matches, bool."""
        matched = np.zeros(self.having.shape[0], bool)
        for number in self.numbers:
            matched[self.having.indices[slice(*self.having.indptr[number : number + 2])]] = True
        return matched[tokens]


def choose_rules(tokens: CorpusTokens) -> list[Rule | None]:
    """The rule of each latent, None where none is better than chance on training tokens."""
    firings = _Firings.of(tokens.corpus)
    # What each latent's rule adds to a balanced accuracy of 1/2, less its kind's cost; the first of equals is taken.
    F = len(firings.counts)
    best = np.zeros(F)
    rules: list[Rule | None] = [None] * F
    for kind in RULE_KINDS:
        having, names = tokens.having(kind.values(tokens))
        latents, values, gains = firings.gains(having)
        chosen = _largest(latents, gains, kind.most)
        scores = np.bincount(latents[chosen], gains[chosen], F) - kind.cost
        starts = np.searchsorted(latents[chosen], np.arange(F + 1))
        by_value = csc_array(having)
        for latent in np.flatnonzero(scores > best).tolist():
            numbers = values[chosen[starts[latent] : starts[latent + 1]]]
            rules[latent] = Rule(kind.words, tuple(names[numbers]), by_value, numbers)
        best = np.maximum(best, scores)
    return rules


class _Firings(NamedTuple):
    fires: csr_array  # 1 or 0, (F, n)
    weights: csr_array  # of the firings, (F, n)
    counts: np.ndarray  # of firings, (F,)
    silent: np.ndarray  # number of rows without, (F,)

    @classmethod
    def of(cls, corpus: Corpus) -> "_Firings":
        fires = csr_array(corpus.codes.T)[:, : corpus.trained]
        counts, weights = np.diff(fires.indptr), _weighted(fires)
        fires.data[:] = 1
        rows = np.count_nonzero(corpus.positions[: corpus.trained] >= 0)
        return cls(fires, weights, counts, rows - counts)

    def gains(self, having: csr_array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What values add to a balanced accuracy, given the tokens that have them, (n, V): latent, value and gain of
        each pair, by latent."""
        trained = having[: self.fires.shape[1]]
        counts, weighted = csr_array(self.fires @ trained), csr_array(self.weights @ trained)
        counts.sort_indices()
        weighted.sort_indices()
        latents = np.arange(len(self.counts)).repeat(np.diff(counts.indptr))
        recall = (weighted.data - np.sqrt(weighted.data)) / self.counts[latents]
        silent_with_value = trained.sum(0)[counts.indices] - counts.data
        false_alarms = silent_with_value / np.maximum(self.silent[latents], 1)
        gains = np.where(self.silent[latents] > 0, recall - false_alarms, 0) / 2
        return latents, counts.indices, gains


def _largest(latents: np.ndarray, gains: np.ndarray, most: int) -> np.ndarray:
    """The pairs of each latent's rule: those of the largest gains, if large enough."""
    order = np.lexsort((-gains, latents))
    ranks = np.arange(len(order)) - np.searchsorted(latents, latents)
    least = np.where(ranks > 0, LEAST_GAIN, 0)
    return order[(ranks < most) & (gains[order] > least)]


def _weighted(fires: csr_array) -> csr_array:
    """Codes, (F, n), as weights of firings, whose sum is each latent's number of firings."""
    firings = np.diff(fires.indptr)
    latents = np.arange(len(firings)).repeat(firings)
    weights = fires.copy()
    ranks = np.arange(1, len(latents) + 1) - fires.indptr[latents]
    weights.data[np.lexsort((abs(fires.data), latents))] = (ranks / firings[latents]) ** 2
    scale = firings / np.maximum(weights.sum(1), np.finfo(np.float32).tiny)
    weights.data *= scale.repeat(firings).astype(weights.dtype)
    return weights


def score(rule: Rule, corpus: Corpus, latent: int, spans: Spans) -> dict[str, float | None]:
    """A rule's balanced accuracy on a latent's held-out excerpts: of texts, by whether any token matches, and of all
    their tokens; None where there is one class alone."""
    excerpts = np.concatenate([spans[name] for name in ("firing", "silent", "near")])
    if not len(excerpts):
        return {"texts": None, "tokens": None}
    tokens = np.concatenate([np.arange(begin, end) for begin, end in excerpts.tolist()])
    begins = np.append(0, np.diff(excerpts, axis=1).cumsum()[:-1])
    matched, fires = rule.matches(tokens), np.isin(tokens, corpus.fires(latent))
    rows = corpus.positions[tokens] >= 0
    found = np.logical_or.reduceat(matched, begins)
    wanted = np.arange(len(excerpts)) < len(spans["firing"])
    return {
        "texts": balanced_accuracy(found, wanted),
        "tokens": balanced_accuracy(matched[rows], fires[rows]),
    }
