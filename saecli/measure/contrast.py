"""Latents that tell two sides apart, on documents that did not choose them.

Half of the documents, by hash, chooses the latents whose mean code has the AUC furthest from 1/2. All else is of the
other half, beside the same procedure with labels shuffled among documents.

Shapes: N documents, F = d_sae, C latents tested.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.stats import false_discovery_control
from torch.nn.functional import normalize

from ..base.errors import ConfigError
from ..sae.codes import Codes
from ..store.split import is_test
from .cosines import code_correlations
from .sides import Documents, Integers, Sides, read_documents
from .stability import decoders_in_one_metric
from .two_samples import Labels, TwoSamples, Values, auc, centred_ranks, mean_difference

FDR = 0.05  # of the latents found
SHUFFLES, SHUFFLING_SEED = 20, 1
FEW, FEWEST = 20, 2  # documents of a side that are held out
RANKED = 1 << 24  # numbers at a time


class Trial(NamedTuple):
    """Latents with their AUC on held-out documents, p, and q by Benjamini and Hochberg, (C,) each."""

    latents: Integers
    auc: Values
    p: Values
    q: Values

    @classmethod
    def of(cls, samples: TwoSamples, codes: csc_array, latents: Integers) -> "Trial":
        values = codes[:, latents].toarray()
        p = samples.p_values(values)
        return cls(latents, auc(*samples.split(values)), p, false_discovery_control(p))

    @property
    def found(self) -> Labels:
        return self.q <= FDR

    @property
    def effects(self) -> Values:
        """AUC less 1/2 of the latents found, else 0."""
        return np.where(self.found, self.auc - 0.5, 0)

    def to_json(self) -> dict[str, Any]:
        return {name: values.tolist() for name, values in self._asdict().items()}


def contrast_document(sides: Sides, top_k: int, labels: Mapping[int, str]) -> dict[str, Any]:
    documents = read_documents(sides)
    is_held_out = _is_held_out(documents.numbers)
    halves = documents.chosen(~is_held_out), documents.chosen(is_held_out)
    counts = [(int(half.samples.is_a.sum()), int((~half.samples.is_a).sum())) for half in halves]
    if min(*counts[0], *counts[1]) < FEWEST:
        raise ConfigError(
            f"cannot contrast {' and '.join(sides.names)}: expected {FEWEST} documents of each in both halves, got "
            f"{counts[0]} and {counts[1]}; give more documents"
        )
    trial, *shuffled = _trials(*halves, top_k)
    held_out = halves[1]
    (length,) = _measures(held_out.samples, held_out.lengths[:, None])
    document = {
        "sides": [
            {"side": name, "documents": sum(each), "held_out": each[1]}
            for name, each in zip(sides.names, zip(*counts, strict=True), strict=True)
        ],
        "paired": sides.paired,
        "fdr": FDR,
        "found": int(trial.found.sum()),
        "latents": _lines(held_out, trial, labels),
        "length": length,
        "shuffled": [each.to_json() for each in shuffled],
        "notes": _notes(sides.names, *counts[1]),
    }
    if len(sides.saes) > 1:
        document["replication"] = _replication(sides, held_out, trial)
    return document


def _is_held_out(documents: Integers) -> Labels:
    return is_test(documents, test_fraction=0.5)


def _trials(discovery: Documents, held_out: Documents, top_k: int) -> list[Trial]:
    """By the true labels, and by `SHUFFLES` shuffled ones."""
    rng = np.random.default_rng(SHUFFLING_SEED)
    labels, held_out_labels = (
        np.vstack([half.samples.is_a, half.samples.shuffled(SHUFFLES, rng)])
        for half in (discovery, held_out)
    )
    codes = discovery.codes[0]["mean"]
    blocks = np.array_split(np.arange(codes.shape[1]), 1 + len(labels.T) * codes.shape[1] // RANKED)
    effects = np.hstack([labels @ centred_ranks(codes[:, block].toarray()) for block in blocks])
    trials = []
    for effect, is_a in zip(effects, held_out_labels, strict=True):
        latents = np.argsort(-np.abs(effect), kind="stable")[:top_k]
        samples = replace(held_out.samples, is_a=is_a)
        trials.append(Trial.of(samples, held_out.codes[0]["mean"], latents))
    return trials


def _measures(samples: TwoSamples, values: Values) -> list[dict[str, float]]:
    """Difference of means and AUC of each column, (N, C), with the ends of their intervals."""
    columns: dict[str, Values] = {}
    for name, statistic in (("difference", mean_difference), ("auc", auc)):
        ends = samples.interval(statistic, values)
        columns[name] = statistic(*samples.split(values))
        columns |= {f"{name}_low": ends.low, f"{name}_high": ends.high}
    lines = np.stack([*columns.values()], axis=1).tolist()
    return [dict(zip(columns, line, strict=True)) for line in lines]


def _lines(held_out: Documents, trial: Trial, labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """A line for each latent, in the order of the half that chose them."""
    samples, codes = held_out.samples, held_out.codes[0]
    values = {name: each[:, trial.latents].toarray() for name, each in codes.items()}
    lines: list[dict[str, Any]] = []
    for place, measures in enumerate(_measures(samples, values["mean"])):
        latent, _, p, q = (each[place].item() for each in trial)
        line = {"latent": latent, "label": labels.get(latent), **measures, "p": p, "q": q}
        for side, is_of_side in (("a", samples.is_a), ("b", ~samples.is_a)):
            means = {name: each[is_of_side, place].mean() for name, each in values.items()}
            line[side] = {name: mean.item() for name, mean in means.items()}
        lines.append(line)
    return lines


def _notes(names: tuple[str, str], of_a: int, of_b: int) -> list[str]:
    if min(of_a, of_b) >= FEW:
        return []
    half = 1.96 * ((of_a + of_b + 1) / (12 * of_a * of_b)) ** 0.5
    return [
        f"few documents: with {of_a} of {names[0]} and {of_b} of {names[1]} held out, 95% of AUCs are 0.5 ± {half:.2f} "
        f"without any difference, and intervals are as wide; to rank latents, give at least {FEW} a side"
    ]


@torch.no_grad()
def _replication(sides: Sides, held_out: Documents, trial: Trial) -> dict[str, Any]:
    """The trial of each latent's nearest in the second SAE, by decoder and by codes; the fraction of those found whose
    nearest is found with the same sign, and with counterparts shuffled among latents."""
    chosen = torch.from_numpy(trial.latents)
    decoders, _ = decoders_in_one_metric(*sides.saes)
    w, v = (normalize(each.double().cpu()) for each in decoders)
    similarities = {
        "decoder": (w[chosen] @ v.T).abs().numpy(),
        "codes": code_correlations(_held_out_codes(sides, chosen)),
    }
    document, found = {}, int(trial.found.sum())
    for name, similarity in similarities.items():
        nearest = Trial.of(held_out.samples, held_out.codes[1]["mean"], similarity.argmax(1))
        counterparts = {"fraction": nearest.effects, "shuffled": np.roll(nearest.effects, 1)}
        fractions = {
            key: int((effects * trial.effects > 0).sum()) / found if found else None
            for key, effects in counterparts.items()
        }
        largest = similarity.max(1).tolist()
        document[name] = {**fractions, "similarity": largest, **nearest.to_json()}
    return document


def _held_out_codes(sides: Sides, chosen: torch.Tensor) -> Iterator[tuple[Codes, Codes]]:
    """Of the chosen latents of the first SAE, and all of the second."""
    for rows in sides.rows():
        kept = torch.from_numpy(_is_held_out(rows.documents))
        z, w = (codes.dense().cpu()[kept] for codes in rows.codes)
        yield Codes(z[:, chosen]), Codes(w)
