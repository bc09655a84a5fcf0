"""Stability: latents matched one to one between SAEs that differ in seed.

Shapes: R runs, F = latents of the first SAE of a pair, G = of the second, M = min(F, G).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from ..base.console import Listener, Silent, listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.words import unknown_choice
from ..sae.dictionary import SAE, Dictionary
from ..sae.library import SAELike, Subject
from ..sae.metrics import firing
from ..store.reader import in_words
from ..store.split import Which
from .cosines import best_pairs, code_correlations
from .measured import ChosenRows, Measured, RowsLike

MATCH_THRESHOLD = 0.7  # of Paulo and Belrose
MatchBy = Literal["decoder", "codes"]
SIMILARITIES: dict[str, str] = {"decoder": "cosine", "codes": "correlation"}
STABILITY_MEASURES = ("pw_mcc", "matched_fraction")
ALIKE = 0.2  # relative difference of scales up to which two runs share a metric


def stability(
    saes: Sequence[SAELike],
    data: RowsLike = None,
    *,
    match_threshold: float = MATCH_THRESHOLD,
    match_by: MatchBy = "decoder",
    split: Which = "test",
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Measure how far SAEs that differ in seed learn the same latents; CLI equivalent: `sae eval --stability`.

        PW-MCC = mean over pairs of SAEs of  1/M max over one-to-one p of sum_m |cos(w_m, v_p(m))|

    where w and v are the decoder vectors of a pair, in the metric of training if they share it, else of raw rows.
    By codes, their correlation over the rows is in place of `|cos|`. A latent is matched if its similarity to its
    counterpart, if any, is above the threshold. There is no correction for chance: random vectors have a PW-MCC of 0.14
    at d_in 768 and 16,384 latents, of 0.44 at 64 and 4,096.

    Args:
        saes: two or more, of one d_in, one d_out and the same store or stores.
        match_threshold: a `|cosine|` or correlation, in [0, 1).
        match_by: decoder, or codes, on the rows of the first SAE of a pair.
        data, split, device, home, progress: as in `evaluate`; the rows decide which latents fire.

    Returns:
        pw_mcc, matched_fraction: means over the pairs.
        firing: the same for pairs of latents that both fire, None without any.
        pairs: each with its `runs`, `metric`, "training" or "raw", None by codes, number of `latents` matched, both
            measures, the same `firing`, and `counterparts`, a latent of the second or None for each of the first.
        runs: each with `run`, `d_sae`, number of `silent` latents, and per latent `cosine`, or `correlation`, the
            mean over its counterparts, `match_fraction`, of the other SAEs, and `frequency`.

    Cost: R (R - 1) / 2 assignments, see `best_pairs`; a pass over the rows for each SAE, by codes also for each pair.

    Sources: Song et al., "Position: Mechanistic Interpretability Should Prioritize Feature Consistency in SAEs",
    arXiv:2505.20254 (PW-MCC); Paulo and Belrose, "Sparse Autoencoders Trained on the Same Data Learn Different
    Features", arXiv:2501.16615 (the threshold).
    """
    demand_several(len(saes))
    listener = listening(progress)
    measured = ChosenRows(Home.at(home), data, split, device, listener).with_all(saes)
    return stability_of(measured, listener, match_threshold, match_by)


def stability_of(
    measured: Sequence[Measured],
    listener: Listener,
    match_threshold: float = MATCH_THRESHOLD,
    match_by: MatchBy = "decoder",
) -> dict[str, Any]:
    if match_by not in SIMILARITIES:
        raise unknown_choice("match_by", match_by, SIMILARITIES)
    if not 0 <= match_threshold < 1:
        raise ConfigError(f"match_threshold must be in [0, 1), got {match_threshold}")
    check_comparable([(each.subject, each.sae) for each in measured])
    frequencies = [firing(each.sae, each.inputs(listener)).frequency.numpy() for each in measured]
    return _document(measured, match_by, frequencies, match_threshold, listener)


def demand_several(saes: int) -> None:
    if saes < 2:
        raise ConfigError(
            f"--stability compares runs that differ in seed: expected two or more, got {saes or 'none'}; "
            "name them; `sae train --seed 1` trains another"
        )


def check_comparable(saes: Sequence[tuple[Subject, SAE]], option: str = "--stability") -> None:
    """ConfigError for SAEs that differ in widths or stores, or have weights that are not finite."""
    first, first_sae = saes[0]
    for subject, sae in saes:
        if (sae.d_in, sae.d_out) != (first_sae.d_in, first_sae.d_out):
            raise ConfigError(
                f"{option} compares runs of one d_in and one d_out: expected {first_sae.d_in} and {first_sae.d_out} "
                f"as {first.name} has, got {sae.d_in} and {sae.d_out} of {subject.name}; name runs of the same rows"
            )
        if not (sae.W_enc.isfinite().all() and sae.W_dec.isfinite().all()):
            raise ConfigError(
                f"{option} cannot match the latents of {subject.name}: expected finite weights, got a NaN or "
                "infinity; leave it out, or train it again"
            )
    stores = sorted({in_words(each.inputs, each.target) for each, _ in saes if each.inputs})
    if len(stores) > 1:
        raise ConfigError(
            f"{option} compares runs of the same data, got runs trained on {' and '.join(stores)}; name runs of one"
        )


def _document(
    measured: Sequence[Measured],
    match_by: MatchBy,
    frequencies: Sequence[NDArray[np.float64]],
    threshold: float,
    listener: Listener,
) -> dict[str, Any]:
    names = [each.subject.name for each in measured]
    index_pairs = list(combinations(range(len(names)), 2))
    # With counterparts.
    similarities = [np.full((len(names), len(each)), np.nan) for each in frequencies]
    pairs: list[dict[str, Any]] = []
    with listener.progress("matching latents", len(index_pairs), "pairs") as show:
        for i, j in index_pairs:
            first, second = measured[i], measured[j].sae
            is_by_codes = match_by == "codes"
            match = matching_by_codes(first, second) if is_by_codes else matching(first.sae, second)
            similarities[i][j, match.first] = similarities[j][i, match.second] = match.similarity
            fire = (frequencies[i][match.first] > 0) & (frequencies[j][match.second] > 0)
            counterparts = dict(zip(match.first.tolist(), match.second.tolist(), strict=True))
            pairs.append(
                {
                    "runs": [names[i], names[j]],
                    "metric": match.metric,
                    **_measures(match.similarity, threshold),
                    "firing": _measures(match.similarity[fire], threshold),
                    "counterparts": [
                        counterparts.get(latent) for latent in range(len(frequencies[i]))
                    ],
                }
            )
            show(len(pairs))
    runs = [
        {"run": name, **_run_document(each, SIMILARITIES[match_by], threshold, frequency)}
        for name, each, frequency in zip(names, similarities, frequencies, strict=True)
    ]
    return {
        "match_by": match_by,
        "match_threshold": threshold,
        **_means(pairs),
        "firing": _means([pair["firing"] for pair in pairs]),
        "pairs": pairs,
        "runs": runs,
    }


def _run_document(
    similarities: NDArray[np.float64], name: str, threshold: float, frequency: NDArray[np.float64]
) -> dict[str, Any]:
    """A run's entry, given the similarity of each latent to its counterpart in each run, (R, F), NaN without."""
    sums, counts = np.nansum(similarities, axis=0), np.isfinite(similarities).sum(0)
    of_latents = zip(sums.tolist(), counts.tolist(), strict=True)
    return {
        "d_sae": similarities.shape[1],
        "silent": int((frequency == 0).sum()),
        name: [total / count if count else None for total, count in of_latents],
        "match_fraction": ((similarities > threshold).sum(0) / (len(similarities) - 1)).tolist(),
        "frequency": frequency.tolist(),
    }


def _measures(similarity: NDArray[np.float64], threshold: float) -> dict[str, Any]:
    return {
        "latents": len(similarity),
        "pw_mcc": float(similarity.mean()) if len(similarity) else None,
        "matched_fraction": float((similarity > threshold).mean()) if len(similarity) else None,
    }


def _means(pairs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in STABILITY_MEASURES:
        values = [pair[name] for pair in pairs if pair[name] is not None]
        means[name] = float(np.mean(values)) if values else None
    return means


@dataclass(frozen=True)
class Matching:
    first: NDArray[np.int64]  # latents of the first SAE, ascending, (M,)
    second: NDArray[np.int64]  # their counterparts, latents of the second SAE, (M,)
    similarity: NDArray[np.float64]  # `|cosine|` of decoder vectors, or correlation, (M,)
    metric: str | None  # that the decoder vectors are in


@torch.no_grad()
def matching(first: Dictionary, second: Dictionary) -> Matching:
    """Match the latents of two SAEs of one d_in, on one device, by `best_pairs` of decoder vectors."""
    decoders, metric = decoders_in_one_metric(first, second)
    latents = best_pairs(*decoders)
    w, v = (
        normalize(W_dec[torch.from_numpy(chosen).to(W_dec.device)].double())
        for W_dec, chosen in zip(decoders, latents, strict=True)
    )
    cosine = (w * v).sum(1).abs().clamp(max=1).cpu().numpy()
    return Matching(*latents, cosine, metric)


def decoders_in_one_metric(first: Dictionary, second: Dictionary) -> tuple[list[Tensor], str]:
    """Decoder vectors, (F, D) and (G, D), in the metric of training if both share it, else raw; and its name."""
    metric = first.normalisation.to(torch.float64)
    other = second.normalisation.target_scale.double()
    if not torch.allclose(metric.target_scale, other, rtol=ALIKE):
        metric = replace(metric, scale=torch.ones_like(metric.scale))
    return [sae.decoder() / metric.target_scale for sae in (first, second)], metric.metric


@torch.no_grad()
def matching_by_codes(first: Measured, second: Dictionary) -> Matching:
    """Match the latents of two SAEs to maximise the sum of the correlations of their codes on the rows of the first."""
    from scipy.optimize import linear_sum_assignment  # takes a fifth of a second to import

    batches = first.inputs(Silent())
    correlations = code_correlations((first.sae.codes(x), second.codes(x)) for x in batches)
    first_latents, second_latents = linear_sum_assignment(correlations, maximize=True)
    matched = correlations[first_latents, second_latents]
    return Matching(first_latents, second_latents, matched, None)
